"""Compile every Triton kernel of common/kernels for a GPU that this machine need not have.

    python tests/helpers/compiling.py gfx942|gfx950|sm_89|... [every]

Prints one JSON object per compiled form of a kernel: of all forms with `every`, of a few otherwise,
in which each argument has each of its values.

The public functions are called on meta tensors with the sizes of both benchmarks
(shipped_launches.py). A recorder replaces each kernel and takes the types, the constants and the
number of warps from the launch. This runs in a process of its own, because the process of the tests
may run Triton's interpreter, which cannot compile.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from common.data.preparation import locked
from common.paths import ROOT

# triton-VERSION.txt: the hashes of the wheels of each of OTHER_TRITONS.
HASHES = ROOT / "tests/kernels"
# Besides the Triton that torch brings: those in ROCm's images with torch 2.10 and of ROCm 10, and
# the newest.
OTHER_TRITONS = ("3.6.0", "3.8.0", "3.9.0")
# architecture -> (backend, its name there, threads of a warp, shared memory of one block in bytes).
# Sources: CUDA C programming guide, AMD CDNA3 and CDNA4 ISA guides.
TARGETS: dict[str, tuple[str, str | int, int, int]] = {
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
    "gfx950": ("hip", "gfx950", 64, 160 << 10),
    "sm_89": ("cuda", 89, 32, 99 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "sm_100": ("cuda", 100, 32, 227 << 10),
    "sm_103": ("cuda", 103, 32, 227 << 10),
}
# Compile a kernel that spills by default too: one architecture of each function of `spills`.
SPILLING_BY_DEFAULT = ("gfx942", "sm_90")


def compiled_forms(arch: str, every: bool, triton: str = "") -> list[dict[str, Any]]:
    """Run this file in a process without the interpreter and return what it printed, one entry per
    form of a kernel.

    `every`: compile all forms, not only the few that `covering` returns. `triton`: one of
    OTHER_TRITONS (default: the installed one).
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [ROOT, ROOT / "tests/helpers"]
    if triton:
        folders.insert(0, other_triton(triton))
    environment["PYTHONPATH"] = ":".join(map(str, folders))
    command = [sys.executable, __file__, arch, "every" if every else "covering", triton]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def other_triton(version: str) -> Path:
    """Return a folder with this version of Triton, installed at the first call into the user's
    cache by its hashes.

    Raises AssertionError if pip cannot install it, e.g. without a network.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(caches) / "mlperf-llama-training"
    folder = cache / f"triton-{version}-{sys.implementation.cache_tag}"
    with locked(cache / f"{folder.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as unfinished:
                uv = shutil.which("uv")
                if uv:  # its environments have no pip
                    command = [uv, "pip", "install", "--python", sys.executable]
                else:
                    command = [sys.executable, "-m", "pip", "install"]
                command += [
                    "--require-hashes",
                    "--no-deps",
                    "--only-binary=:all:",
                    "--target",
                    f"{unfinished}/triton",
                ]
                command += ["-r", str(HASHES / f"triton-{version}.txt")]
                done = subprocess.run(command, capture_output=True, text=True, timeout=600)
                assert done.returncode == 0, (
                    f"triton {version} could not be installed:\n{done.stderr[-3000:]}"
                )
                Path(unfinished, "triton").rename(folder)
    return folder


def kernel_modules() -> list[ModuleType]:
    """Import and return all modules of common/kernels except `quack_epilogues`."""
    import common.kernels

    return [
        importlib.import_module(f"common.kernels.{found.name}")
        for found in pkgutil.iter_modules(common.kernels.__path__)
        if found.name != "quack_epilogues"  # imports an optional package, has no Triton kernel
    ]


@dataclass(frozen=True)
class Form:
    """One form of a kernel for Triton: argument types, constants, attributes and options."""

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list]
    options: dict[str, int]

    def values(self) -> set[str]:
        """Return the value of each argument and option, by which a kernel can branch."""
        parts = (self.signature, self.constants, self.attributes, self.options)
        return {f"{index} {item}" for index, part in enumerate(parts) for item in part.items()}


def covering(forms: list[Form]) -> list[Form]:
    """Return a few of the forms in which each argument and option has each of its values."""
    chosen: list[Form] = []
    left = set().union(*(form.values() for form in forms))
    while left:
        chosen.append(max(forms, key=lambda form: len(form.values() & left)))
        left -= chosen[-1].values()
    return chosen


class Recorder:
    """Replacement of a Triton kernel that records the forms of its launches instead of running.

    `name`: of the kernel in the JSON objects of its forms.
    """

    def __init__(self, arch: str, kernel: Any, name: str = ""):
        self.arch = arch
        self.kernel = kernel
        self.forms: list[Form] = []
        self.name = name or kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, num_warps: int, waves_per_eu: int = 0, **named: Any) -> None:
        signature, constants, attributes = {}, {}, {}
        arguments = self.kernel.signature.bind(*args, **named).arguments
        for index, parameter in enumerate(self.kernel.params):
            value = arguments[parameter.name]
            kind, constant, attribute = specialization(value, parameter.is_constexpr, self.arch)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = constant
            elif attribute:
                attributes[(index,)] = attribute
        options = {"num_warps": num_warps}
        if waves_per_eu:
            options["waves_per_eu"] = waves_per_eu
        form = Form(signature, constants, attributes, options)
        if form not in self.forms:
            self.forms.append(form)

    def compiled(self, form: Form) -> dict[str, Any]:
        """Compile one form. Return its JSON object.

        `shared`: bytes of shared memory. `spills`, `wide`, `amax_loads`: see the functions of these
        names. `pipelined`: see `is_pipelined`; only on gfx950.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        backend, name, width, _ = TARGETS[self.arch]
        constants = {
            (self.kernel.arg_names.index(parameter),): value
            for parameter, value in form.constants.items()
        }
        source = ASTSource(self.kernel, form.signature, constexprs=constants, attrs=form.attributes)
        target = GPUTarget(backend, name, width)
        made = triton.compile(source, target=target, options=form.options)
        return {
            "kernel": self.name,
            "form": f"{form.signature} {form.constants}",
            "shared": made.metadata.shared,
            "spills": spills(made.asm, backend),
            "wide": wide_accesses(made.asm, backend),
            "amax_loads": amax_loads(made.asm, backend),
            "pipelined": self.arch == "gfx950" and self.is_pipelined(source, made, form.options),
        }

    def is_pipelined(self, source: Any, made: Any, options: dict) -> bool:
        """Return whether a loop has more than one stage by Triton's default.

        On AMD these are loops with a product and without a number of stages of their own.
        """
        import triton
        from triton.backends.amd.compiler import HIPBackend
        from triton.backends.compiler import GPUTarget

        if "scf.for" not in made.asm["ttir"]:
            return False  # no loop, so a second compilation would differ in nothing

        def stop(module: Any, *_: Any) -> None:
            raise _LoopsLowered(str(module))

        backend, name, width, _ = TARGETS[self.arch]
        target = GPUTarget(backend, name, width)
        # Loops are pipelined before the code generation, which takes most of the time.
        with mock.patch.object(HIPBackend, "make_llir", staticmethod(stop)):
            try:
                options = options | {"num_stages": 1}
                one_stage = triton.compile(source, target=target, options=options).asm["ttgir"]
            except _LoopsLowered as lowered:  # else it was in Triton's cache
                one_stage = str(lowered)
        return one_stage != made.asm["ttgir"]


class _LoopsLowered(Exception):
    """The intermediate code after the last pass that pipelines loops."""


def specialization(value: Any, is_constexpr: bool, arch: str) -> tuple[str, Any, list]:
    """Return (Triton type, value if constant, attributes) of an argument, as Triton's launcher
    does.
    """
    import torch
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        value = value.value
    if is_constexpr or value is None:
        return "constexpr", value, []
    if isinstance(value, torch.Tensor):
        attributes = []
        if value.storage_offset() * value.element_size() % 16 == 0:
            attributes.append(["tt.divisibility", 16])
        if arch.startswith("gfx") and value.untyped_storage().nbytes() < 2**31:
            attributes.append(["tt.pointer_range", 32])
        return f"*{POINTERS[str(value.dtype)]}", None, attributes
    if isinstance(value, float):
        return "fp32", None, []
    assert isinstance(value, int) and not isinstance(value, bool), f"a launch passes {value!r}"
    if value == 1:
        return "constexpr", 1, []
    kind = "i32" if abs(value) < 2**31 else "i64"
    attributes = []
    if value % 16 == 0:
        attributes.append(["tt.divisibility", 16])
    return kind, None, attributes


POINTERS = {
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.uint8": "u8",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.float8_e4m3fn": "fp8e4nv",
    "torch.float8_e5m2": "fp8e5",
    "torch.float8_e4m3fnuz": "fp8e4b8",
    "torch.float8_e5m2fnuz": "fp8e5b16",
}


def spills(asm: Any, backend: str) -> int:
    """Return the registers spilled on AMD, or the bytes of local memory per thread on NVIDIA.

    AMD's number is in the metadata of the assembly. PTX has unlimited registers, so NVIDIA's is
    read from the machine code.
    """
    if backend == "hip":
        counts = re.findall(r"\.[sv]gpr_spill_count: +(\d+)", asm["amdgcn"])
        assert len(counts) == 2, "the assembly does not say how many registers are spilled"
        return sum(map(int, counts))
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage)
    assert len(counts) == 2, "cuobjdump does not say how much local memory is used"
    return sum(map(int, counts))


def wide_accesses(asm: Any, backend: str) -> list[int]:
    """Return the numbers of loads and of stores of 16 bytes in a thread's code."""
    if backend == "hip":
        code = asm["amdgcn"]
        patterns = [rf"(?:buffer|global)_{name}_dwordx4 " for name in ("load", "store")]
    else:
        code = asm["ptx"]
        patterns = [rf"\b{name}\.global\S*\.v4\.b32" for name in ("ld", "st")]
    return [len(re.findall(pattern, code)) for pattern in patterns]


def amax_loads(asm: Any, backend: str) -> int:
    """Return the number of loads in a thread's code that bypass the cache of its compute unit."""
    if backend == "hip":
        return len(re.findall(r"_load_dword .* sc0 sc1$", asm["amdgcn"], re.MULTILINE))
    return len(re.findall(r"\bld\.global\.cg\b", asm["ptx"]))


def main(arch: str, selection: str = "covering", version: str = "") -> None:
    import torch
    import triton

    # Read when the kernels' modules are imported.
    torch.version.hip = "7.2" if TARGETS[arch][0] == "hip" else None
    import common.kernels.architecture as module

    assert not version or triton.__version__ == version, f"found triton {triton.__version__}"
    assert module.architecture(torch.device("meta")) == module.DEFAULT
    module.architecture = lambda device: arch  # before any kernel module imports it
    recorders = []
    for kernels in kernel_modules():
        for name, value in list(vars(kernels).items()):
            if name.endswith("_kernel") and getattr(value, "__module__", "") == kernels.__name__:
                recorders.append(Recorder(arch, value))
                setattr(kernels, name, recorders[-1])
    from shipped_launches import launch_all

    from common.kernels import fp8

    # Compile the kernels that store both layouts, for GPUs that do not read FP8 in every layout.
    fp8.takes_every_layout = lambda device: False

    launch_all()
    if selection == "every" or arch in SPILLING_BY_DEFAULT:
        recorders.append(one_that_spills(arch))
    for recorder in recorders:
        for form in recorder.forms if selection == "every" else covering(recorder.forms):
            print(json.dumps(recorder.compiled(form)), flush=True)


def one_that_spills(arch: str) -> Recorder:
    """Launch, as _spilling_kernel, a tile with too many rows for its number of warps."""
    import torch
    from shipped_launches import META, bf16

    from common.kernels import lora, rms_norm
    from common.kernels.architecture import Tile

    if arch == "gfx942":
        lora.down_backward_settings = lambda arch: Tile(64, 64, warps=4, stages=3, parts=16)
        recorder = Recorder(arch, lora._down_backward_kernel.kernel, "_spilling_kernel")
        lora._down_backward_kernel = recorder
        dropout = lora.Dropout(torch.empty(1, dtype=torch.int64, device=META), 0.1)
        norm = lora.Norm(torch.empty(8192, device=META), bf16(8192))
        lora.down_backward_triton_(
            bf16(8192, 8192), bf16(8192, 8192), norm, bf16(8192, 16), bf16(16, 8192), dropout
        )
        return recorder
    # LLVM takes 21 s for a tile with twice the elements, 5 s for this one, of which gfx950
    # spills 83 registers.
    rows, columns = (2, 8192) if arch == "gfx950" else (4, 4096)
    rms_norm.add_rms_norm_settings = lambda arch, num_columns: Tile(rows, columns, warps=1)
    recorder = Recorder(arch, rms_norm._add_rms_norm_kernel.kernel, "_spilling_kernel")
    rms_norm._add_rms_norm_kernel = recorder
    rms_norm.add_rms_norm_triton(bf16(64, columns), bf16(64, columns), bf16(columns), 1e-5, None)
    return recorder


if __name__ == "__main__":
    main(*sys.argv[1:])
