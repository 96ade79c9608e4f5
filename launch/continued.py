"""`--continue RUN`: the request for a single run with the seed of RUN."""

from __future__ import annotations

from common.errors import ConfigError
from common.terminal import print_stderr
from common.training.continuation import newest, require_same
from launch.job import Job
from launch.series import Request


def continued(job: Job, request: Request) -> Request:
    """Raises ConfigError where there is no checkpoint of this benchmark, seed and config, WeightsError where its facts are damaged."""
    assert job.continues is not None
    if request.goal != 1 or request.max_failures or request.resume:
        why = "it is one run, with the seed of the one before; a series needs its own random seed for each run"
        raise ConfigError("--continue is for a single run", why, "leave out NEXP, --max-failures and --resume")
    folder, facts = newest(job.continues)
    seed = facts["seed"] if request.seed is None else request.seed
    require_same(folder, facts, job.benchmark, seed, job.config)
    print_stderr(f"NOTE       continues {folder} after {facts['samples']:,} samples: not for submission")
    return Request(1, 0, seed)
