"""Kernels that are compiled on other threads. Compilation itself needs a GPU: see tests/gpu."""

import pytest
import triton
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from common.kernels.background_compilation import compiled_in_background


def kernel_body(x_ptr):
    pass


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that is not interpreted, and (warmup, asynchronous) of each of its launches."""
    launches = []

    def run(self, *args, grid, warmup, **named):
        launches.append((warmup, _async_compile.active_mode.get() is not None))

    monkeypatch.setattr(JITFunction, "run", run)
    return JITFunction(kernel_body), launches


def test_kernels_are_compiled_before_and_launched_in_the_block(kernel):
    function, launches = kernel
    with compiled_in_background(lambda: function[(1,)](0)):
        function[(1,)](0)
    function[(1,)](0)
    assert launches == [(True, True), (False, True), (False, False)]


def test_launches_are_restored_after_an_error(kernel):
    function, launches = kernel

    def fail():
        raise ValueError

    with pytest.raises(ValueError), compiled_in_background(fail):
        pass
    function[(1,)](0)
    assert launches == [(False, False)]


def test_a_failed_compilation_does_not_end_the_block():
    def compile_():
        raise triton.CompilationError(None, None, "no such instruction")

    with compiled_in_background(lambda: None):
        mode = _async_compile.active_mode.get()
        future = mode.submit("key", compile_, lambda kernel: None)
    with pytest.raises(triton.CompilationError):
        future.result()
