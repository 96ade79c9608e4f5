"""Timing of whole steps with other settings of streams, queues and channels.

Command: `throughput settings --steps N`. The benefit of a setting depends on how much communication
overlaps with compute, so only a bench of all GPUs can tell. No shipped config sets any of these. A
line that is faster by more than 1 % in two separate sittings belongs in [env] of the GPU's config.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from common.sharding.zero import STREAM_PRIORITY

UNSET: Mapping[str, str] = {}
# HIP's default is 4 queues. AMD's MLPerf configs set 2, which may put compute and RCCL into one
# queue. On MI355X, 8 queues were 7.5 % faster than 4 on one revision of a training and equal on
# another (pytorch/torchtitan#4032).
QUEUES: tuple[Mapping[str, str], ...] = tuple(
    {"GPU_MAX_HW_QUEUES": count} for count in ("2", "4", "8")
)
PRIORITY: Mapping[str, str] = {STREAM_PRIORITY: "-1"}
# RCCL's default on gfx950 is 112 channels. NCCL_MIN_CTAS=32 therefore changes nothing, and
# NCCL_MAX_NCHANNELS=32 is the cap (ROCm/rccl#1596). ROCm's documentation sets 112 on an MI300X.
# That occupies 112 of 304 compute units and replaces RCCL's own choice.
CHANNELS: tuple[Mapping[str, str], ...] = (
    {"NCCL_MAX_NCHANNELS": "32"},
    {"NCCL_MIN_NCHANNELS": "112"},
)


def candidates(is_rocm: bool) -> list[Mapping[str, str]]:
    """Return the environments to time, the shipped one first.

    Each changes one thing, except that queues are timed with and without priority.
    """
    if not is_rocm:
        return [UNSET, PRIORITY, {"NCCL_MAX_NCHANNELS": "16"}]
    return [UNSET, *QUEUES, PRIORITY, *({**queues, **PRIORITY} for queues in QUEUES), *CHANNELS]


def lines(benchmark: str, steps: int, is_rocm: bool) -> Iterator[str]:
    """Yield one line per candidate: tokens/s/GPU of a bench, or the error that ended it."""
    yield f"{benchmark}: bench of {steps} steps, with other settings of the environment"
    tried = {name for candidate in candidates(is_rocm) for name in candidate}
    base = {name: value for name, value in os.environ.items() if name not in tried}
    for candidate in candidates(is_rocm):
        command = [sys.executable, "-m", "launch", benchmark, "bench", "--steps", str(steps)]
        done = subprocess.run(command, env={**base, **candidate}, capture_output=True, text=True)
        rate = re.search(r"^BENCH .*?([\d,.]+) tok/s/", done.stdout, re.MULTILINE)
        error = next(
            (line for line in done.stderr.splitlines() if line.startswith("error")), "no BENCH line"
        )
        outcome = f"fails: exit code {done.returncode}, {error}"
        if rate and done.returncode == 0:
            outcome = f"{rate[1]:>9} tok/s/GPU"
        names = ", ".join(f"{name}={value}" for name, value in candidate.items())
        yield f"  {outcome}  {names or 'unset  shipped'}"
