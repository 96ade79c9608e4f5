"""Compile Triton kernels on several threads while the process does something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

THREADS = 8


@contextmanager
def compiled_in_background(launch_all: Callable[[], None]) -> Iterator[None]:
    """Start to compile all kernels that `launch_all` launches. None of them runs.

    In the block, the launch of a kernel that is still being compiled waits for it. If a compilation
    failed, the launch raises its error. At its end the block waits for all compilations.
    """
    with (
        ThreadPoolExecutor(THREADS) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        with _launches_only_compile():
            launch_all()
        yield


@contextmanager
def _launches_only_compile() -> Iterator[None]:
    """Let `kernel[grid](...)` compile the kernel without running it."""
    launch = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **named)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch
