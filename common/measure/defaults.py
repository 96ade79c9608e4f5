"""Default numbers of steps of `bench` and `profile`. Standard library only."""

from __future__ import annotations

STEPS = 10  # default of --steps for `bench`
PROFILED_STEPS = 2  # default of --steps for `profile`
WARMUP = 3  # default of --warmup
