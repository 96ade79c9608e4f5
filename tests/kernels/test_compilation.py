"""Compile every Triton kernel, with its shipped settings, for each GPU architecture on a CPU."""

import ast
import inspect
import json
from pathlib import Path

import pytest
from compiling import OTHER_TRITONS, SPILLING_BY_DEFAULT, TARGETS, compiled_forms, kernel_modules
from made_once import made_once

from common.benchmarks import names
from common.gpu_kinds import KINDS
from common.kernels.architecture import Tile
from common.kernels.quantize import STORE
from common.paths import ROOT

SPILLS_ON_PURPOSE = "_spilling_kernel"  # of compiling.py; it proves that spills are detected


def triton_functions(path: Path) -> list[str]:
    """Return the names of the functions of a file that have the decorator triton.jit."""
    names_found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any("triton.jit" in decorator for decorator in decorators):
            names_found.append(node.name)
    return names_found


def kernels() -> dict[str, str]:
    """Return the name of each Triton kernel of common/kernels -> its module."""
    return {
        name: module.__name__
        for module in kernel_modules()
        for name in triton_functions(Path(module.__file__))
        if name.endswith("_kernel")
    }


# Compiled in the default tests: the architectures of AMD and of our measurements, in a few forms in
# which each argument has each of its values. The slow tests compile all forms for all of them.
DEFAULT_TARGETS = ("gfx942", "gfx950", "sm_90")


@pytest.fixture(
    scope="module",
    params=[
        *((arch, False) for arch in DEFAULT_TARGETS),
        *(pytest.param((arch, True), marks=pytest.mark.slow) for arch in TARGETS),
    ],
    ids=lambda param: f"{param[0]}-every" if param[1] else param[0],
)
def arch_and_every(request):
    return request.param


@pytest.fixture(scope="module")
def arch(arch_and_every):
    return arch_and_every[0]


@pytest.fixture(scope="module")
def forms(arch_and_every, tmp_path_factory):
    """Compile the forms in the first of pytest's processes that asks (half a minute of a core).

    Triton's cache makes a second run short.
    """
    arch, every = arch_and_every
    name = f"forms_{arch}_{every}"
    folder = made_once(
        tmp_path_factory,
        name,
        lambda folder: (folder / name).write_text(json.dumps(compiled_forms(arch, every))),
    )
    return json.loads((folder / name).read_text())


def check(arch, forms):
    """Raise AssertionError unless every kernel was compiled, without spills and within the shared
    memory of `arch`.
    """
    forms = [form for form in forms if form["kernel"] != SPILLS_ON_PURPOSE]
    assert {form["kernel"] for form in forms} == kernels().keys(), (
        "a kernel that tests/helpers/shipped_launches.py does not launch"
    )
    wrong = [form for form in forms if form["spills"] or form["shared"] > TARGETS[arch][3]]
    assert not wrong, "\n".join(
        f"{form['kernel']}: {form['spills']} spilled, {form['shared']} bytes shared: {form['form']}"
        for form in wrong
    )


def test_every_kernel_compiles_without_spills_and_within_the_shared_memory(arch, forms):
    check(arch, forms)


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHER_TRITONS)
@pytest.mark.parametrize("arch", [arch for arch in TARGETS if arch.startswith("gfx")])
def test_every_kernel_compiles_for_amd_with_other_versions_of_triton(version, arch):
    check(arch, compiled_forms(arch, every=True, triton=version))


@pytest.mark.parametrize(
    "arch_and_every",
    [
        *((arch, False) for arch in SPILLING_BY_DEFAULT),
        *(pytest.param((arch, True), marks=pytest.mark.slow) for arch in TARGETS),
    ],
    indirect=True,
)
def test_a_kernel_that_spills_is_found(forms):
    assert [form["spills"] > 0 for form in forms if form["kernel"] == SPILLS_ON_PURPOSE] == [True]


@pytest.mark.parametrize(
    "arch_and_every",
    [("gfx950", False), pytest.param(("gfx950", True), marks=pytest.mark.slow)],
    indirect=True,
)
def test_no_loop_is_pipelined_by_default(arch, forms):
    """Triton 3.7 and 3.8 miscompile such loops.

    The single stage of the settings (below) applies only to loops that name a number.
    """
    assert not [form["kernel"] for form in forms if form["pipelined"]]


def test_cross_entropy_reads_and_writes_16_bytes_at_a_time(forms):
    """Its speed is that of memory.

    Forward: eight columns per thread and tile row; backward: two times eight.
    """
    found = {(form["kernel"], *form["wide"]) for form in forms if "cross_entropy" in form["kernel"]}
    assert found == {
        ("_cross_entropy_forward_kernel", 8, 0),
        ("_cross_entropy_backward_kernel", 2, 2),
    }


def test_a_recorded_amax_is_compared_with_that_of_all_programs(arch, forms):
    """A stale amax in the cache of a compute unit would make most programs issue an atomic."""
    casts = [form for form in forms if form["kernel"] == "_quantize_kernel"]
    recording = [form for form in casts if f"'MODE': {STORE.value}" not in form["form"]]
    assert len(recording) > 2 and all(form["amax_loads"] == 1 for form in recording)
    assert not any(form["amax_loads"] for form in casts if form not in recording)


def test_both_layouts_come_from_one_tile_on_amd_alone(arch, forms):
    both = {form["kernel"] for form in forms if "'columnwise_ptr': '*fp8" in form["form"]}
    assert len(both) == (5 if arch.startswith("gfx") else 0)


def test_adamw_exchanges_nothing_between_threads(forms):
    """The store of the bf16 copy must not change the layout of the fp32 ones."""
    assert {form["shared"] for form in forms if form["kernel"] == "_adamw_kernel"} == {0}


def test_kernels_are_compiled_for_every_gpu_kind():
    assert {kind.arch for kind in KINDS.values()} <= TARGETS.keys()


def test_every_kernel_has_settings_by_architecture():
    modules = {module.__name__: module for module in kernel_modules()}
    for kernel, name in kernels().items():
        settings = getattr(
            modules[name], kernel.removeprefix("_").removesuffix("_kernel") + "_settings"
        )
        others = {parameter: 128 for parameter in list(inspect.signature(settings).parameters)[1:]}
        for arch in (*TARGETS, "sm_120", "gfx90a"):
            assert isinstance(settings(arch, **others), Tile), f"{kernel} on {arch}"
        for arch in ("gfx950", "gfx90a", "gfx1250"):
            assert settings(arch, **others).stages == 1, (
                f"{kernel} on {arch}: Triton 3.7 and 3.8 get pipelined loops on gfx950 wrong"
            )


def test_triton_kernels_are_in_common_kernels_alone():
    elsewhere = {
        path
        for folder in ("common", "throughput", *names())
        for path in (ROOT / folder).rglob("*.py")
    }
    elsewhere -= set((ROOT / "common/kernels").iterdir())
    assert len(elsewhere) > 20 and not [
        path for path in elsewhere if "triton.jit" in path.read_text()
    ]
