"""Tune recorded GEMMs with torch's TunableOp on one GPU, and check every solution numerically.

On AMD, TunableOp times the solutions of hipBLASLt and rocBLAS. On NVIDIA it has only the default of
cuBLAS, so tuning works but gains nothing. This code was run on an H100, and never on an AMD GPU.
The numerical check is necessary because a fast solution can be wrong. For example, hipBLASLt's
solution 320617 returned NaN on MI355X for e5m2 x e4m3 with an extreme dequantization scale
(ROCm/rocm-libraries#9450).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.cuda.tunable as tunable
from torch import Tensor

from common.errors import PreflightError
from common.text_tables import number
from throughput.gemm_tuning.tunable_op_files import (
    Key,
    per_gpu,
    read_recorded,
    read_tuned,
    recorded_files,
    write_tuned,
)

# Twice the 256 MB Infinity Cache of an MI300X, so that operands are read from memory.
ROTATING_BUFFER_MB = 512
MAX_MS_PER_SOLUTION = 30
DTYPES = {"float": torch.float32, "tf32": torch.float32, "BFloat16": torch.bfloat16}
DTYPES |= {
    f"Float8_{name}": getattr(torch, f"float8_{name}")
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
}
# Dequantization scales of the two operands. A gradient whose amax is 1e-12 has the scale 448 /
# 1e-12, whose inverse is 2e-15.
EXTREME_SCALES: tuple[tuple[float, float], ...] = (
    (1.0, 1.0),
    (1e-15, 1.0),
    (1.0, 1e-15),
    (1e15, 1.0),
    (1.0, 1e15),
    (1e-15, 1e-15),
)


def versions() -> dict[str, str]:
    """Return the versions for which TunableOp accepts a file, by library.

    They are versions of torch and, on AMD, of HIP, hipBLASLt, rocBLAS and the chip.
    """
    return dict(cast(Any, tunable.get_validators()))


def results() -> dict[Key, tuple[str, float]]:
    """Return TunableOp's table in this process: solution and milliseconds of each GEMM."""
    return {
        (op, parameters): (solution, ms)
        for op, parameters, solution, ms in cast(Any, tunable.get_results())
    }


def reproduce(key: Key, device: torch.device) -> tuple[Tensor, Tensor, torch.dtype] | None:
    """Return operands a [m, k] and b [k, n] of the recorded call, and the dtype of a x b.

    The operands have the recorded dtypes and strides. Their values are normally distributed, for
    FP8 over the range of the dtype. Return None for an operation, dtype or scaling that the
    trainers do not use. TunableOp's matrices are column-major: its first operand is b here.
    """
    names = "|".join(sorted(DTYPES, key=len, reverse=True))
    op = re.fullmatch(
        rf"(?:Gemm|ScaledGemm)TunableOp_({names})(?:_({names})_({names}))?_([NT])([NT])", key[0]
    )
    sizes = re.fullmatch(
        r"[nt]{2}_(\d+)_(\d+)_(\d+)_ld_(\d+)_(\d+)_\d+(?:_rw_0_bias_None)?", key[1]
    )
    if op is None or sizes is None:
        return None
    n, m, k, ldb, lda = (int(size) for size in sizes.groups())
    a_dtype = DTYPES[op[1]]
    # A name with one dtype has it for both operands and the result.
    b_dtype = DTYPES[op[2] or op[1]]
    out = DTYPES[op[3] or op[1]]
    generator = torch.Generator(device).manual_seed(0)

    def stored(
        rows: int, columns: int, leading: int, transposed: bool, dtype: torch.dtype
    ) -> Tensor:
        inner, outer = (rows, columns) if transposed else (columns, rows)
        values = torch.randn(outer, leading, generator=generator, device=device)
        if dtype.itemsize == 1:
            largest = torch.finfo(dtype).max
            values = (values * largest / 4).clamp(-largest, largest)
        part = values.to(dtype)[:, :inner]
        return part.t() if transposed else part

    a = stored(m, k, lda, op[5] == "T", a_dtype)
    b = stored(k, n, ldb, op[4] == "T", b_dtype)
    return a, b, out


def product(a: Tensor, b: Tensor, out: torch.dtype, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return a x b [m, n] in dtype `out`, computed by the torch call that was recorded.

    The scales (fp32 scalars) apply to FP8 operands only.
    """
    if a.dtype.itemsize == 1:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out)
    return torch.mm(a, b)


def fault(key: Key, device: torch.device) -> str:
    """Describe what is wrong with the tuned solution of `key`, or return "".

    The tuned solution must be about as accurate as the default one, also at extreme scales: its
    error may be at most twice the default's. The error is relative, in the Frobenius norm,
    against the fp32 product of the same operands.
    """
    call = reproduce(key, device)
    if call is None:
        return "the numerical check does not cover this operation"
    a, b, out = call

    pairs = EXTREME_SCALES
    if a.dtype.itemsize > 1:  # scales apply to FP8 operands only
        pairs = EXTREME_SCALES[:1]
    for pair in pairs:
        scale_a, scale_b = (torch.tensor(scale, device=device) for scale in pair)
        truth = ((a.float() * scale_a) @ (b.float() * scale_b)).double()
        known = len(results())
        tunable.enable(True)
        tuned = product(a, b, out, scale_a, scale_b)
        # A new entry means that torch looked up another key, so another solution was used.
        if len(results()) != known:
            return "the numerical check could not reproduce the recorded call"
        tunable.enable(False)
        default = relative_error(product(a, b, out, scale_a, scale_b), truth)
        error = relative_error(tuned, truth)
        if not error <= 2 * default + torch.finfo(torch.float32).eps:  # NaN fails as well
            scales = f"dequantization scales {pair[0]:g} and {pair[1]:g}"
            errors = f"{number(error, '.2g')} (default: {number(default, '.2g')})"
            return f"relative error {errors} at {scales}"
    return ""


def relative_error(computed: Tensor, truth: Tensor) -> float:
    """Return |computed - truth| / |truth|, in fp64, because squares of 1e-30 underflow in fp32."""
    return float((computed.double() - truth).norm() / truth.norm())


def tune(folder: Path, out: Path, gpus: int, device: torch.device) -> Iterator[str]:
    """Tune and check every GEMM recorded in `folder`, and write `out` for each GPU of a node.

    Yields a line for each GEMM, and a summary. An existing file of the same versions is extended.
    Raises ConfigError if its versions differ, PreflightError if nothing was tuned.
    """
    recorded = read_recorded(folder)
    files = per_gpu(out, gpus)
    solutions: dict[Key, str] = {}
    if files[0].exists():
        before = read_tuned(files[0], versions())
        solutions = {key: solution for key, solution in before.items() if key not in recorded}
    yield f"tuning {len(recorded)} GEMMs"
    tuned = _tuned(recorded_files(folder))
    for key in recorded:
        wrong = fault(key, device) if key in tuned else "TunableOp does not tune it offline"
        if wrong:
            outcome = f"{wrong}; the default solution is kept"
        else:
            solution, milliseconds = tuned[key]
            outcome = f"{solution},{milliseconds:.6g}"
            solutions[key] = outcome
        yield f"{','.join(key)}: {outcome}"
    tunable.enable(False)
    if not solutions:
        raise PreflightError(
            "no GEMM could be tuned",
            "the lines above give the reason for each GEMM",
            "nothing was written",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    for path in files:
        write_tuned(path, versions(), solutions)
    count = sum(key in solutions for key in recorded)
    yield f"{count} of {len(recorded)} GEMMs tuned and checked; {files[0]} has {len(solutions)}"


def _tuned(paths: list[Path]) -> dict[Key, tuple[str, float]]:
    """Let TunableOp tune the GEMMs in its recorded files. Return its table, as `results` does."""
    tunable.enable(True)
    tunable.tuning_enable(True)
    tunable.record_untuned_enable(False)
    tunable.set_rotating_buffer_size(ROTATING_BUFFER_MB)
    tunable.set_max_tuning_duration(MAX_MS_PER_SOLUTION)
    # TunableOp also writes its own file, here a temporary one with unchecked solutions.
    with tempfile.TemporaryDirectory() as folder:
        tunable.set_filename(str(Path(folder, "results.csv")))
        for path in paths:
            tunable.tune_gemm_in_file(str(path))
    return results()
