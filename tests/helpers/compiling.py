"""Triton without a GPU: compile a kernel for one that is not here, as the launcher would for our shapes, and run it in the interpreter."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[2]
# (backend, arch, wave width, shared memory of one block in bytes); sources: CUDA C programming guide, AMD CDNA3/CDNA4 ISA guides.
TARGETS = [("hip", "gfx942", 64, 64 << 10), ("hip", "gfx950", 64, 160 << 10), ("cuda", 90, 32, 227 << 10), ("cuda", 100, 32, 227 << 10)]
ODD = {"kv_heads", "rotated_heads"}  # sizes that are no multiple of 16 in our models


def fp8_pointer(arch, gradient=False):
    """Triton's words for pointers to e4m3 and e5m2, FNUZ on gfx942 and OCP elsewhere."""
    return (("*fp8e4b8", "*fp8e5b16") if arch == "gfx942" else ("*fp8e4nv", "*fp8e5"))[gradient]


def check_compiles(target, kernel, signature, constants, num_warps, name=""):
    """Fails on spilled registers and on more shared memory than the chip has.

    Every pointer and almost every size of ours is a multiple of 16, which the launcher tells the compiler; so do we.
    """
    backend, arch, width, shared_limit = target
    place = {argument: (index,) for index, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constexprs={place[argument]: value for argument, value in constants.items()},
        attrs={
            place[argument]: [["tt.divisibility", 16]]
            for argument, kind in signature.items()
            if kind.startswith(("*", "i")) and argument not in ODD
        },
    )
    compiled = triton.compile(source, target=GPUTarget(backend, arch, width), options={"num_warps": num_warps})
    what = name or kernel.__name__
    assert compiled.metadata.shared <= shared_limit, f"{what}: {compiled.metadata.shared} bytes of shared memory"
    spilled = spills(compiled.asm, backend)
    assert spilled == 0, f"{what} spills {spilled} on {arch}"
    return compiled


def spills(asm, backend: str) -> int:
    """Registers spilled (AMD, by the assembly's metadata); bytes of a thread's local memory (NVIDIA: of the machine code, as PTX has
    registers without end; disassembling it to count the stores takes a hundred times as long).
    """
    if backend == "hip":
        counts = re.findall(r"\.[sv]gpr_spill_count: +(\d+)", asm["amdgcn"])
        assert len(counts) == 2, "no counts in the assembly: this test no longer sees what it is for"
        return sum(map(int, counts))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage)
    assert len(counts) == 2, "no counts: this test no longer sees what it is for"
    return sum(map(int, counts))


def run_in_interpreter(script, *options):
    """Run a script whose kernels work on CPU tensors; it must end with printing "agreed". In a process of its own: triton looks once."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}:{ROOT / 'tests/kernels'}:{ROOT / 'tests/model'}",
    }
    command = [sys.executable, *options, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "agreed" in done.stdout
