"""The target of a search: a job whose config `tune` varies, with its workload."""

from __future__ import annotations

from dataclasses import dataclass

from common.estimate.workload import Workload, benchmark_workload
from launch.job import Job


@dataclass(frozen=True)
class Target:
    """A job, its workload, and the model that each measurement trains.

    `model`: options of common.measure.bench, such as ("--model", "qwen3-8b"), if the model or its
    sequence length is not the benchmark's.
    """

    job: Job
    work: Workload
    model: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: Job) -> Target:
        """Return the target that the benchmark's rules describe."""
        return cls(job, benchmark_workload(job.benchmark, job.config))
