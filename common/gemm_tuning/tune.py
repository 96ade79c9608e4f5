"""GEMM tuning by torch's TunableOp: tune recorded GEMMs offline, prove each solution, and check at start that a file is in use.

    python -m common.gemm_tuning.tune tune RECORDED_DIR OUT.csv     on one GPU, started by `gemms tune`
    python -m common.gemm_tuning.tune check FILE.csv                started by `gemms check`

On AMD, TunableOp times the solutions of hipBLASLt and rocBLAS; on NVIDIA it knows only cuBLAS's own choice, so there the mechanism
runs and gains nothing. It was run on an H100, and never on an AMD GPU. Why each solution is proven: hipBLASLt's solution 320617
gave NaN on MI355X for e5m2 x e4m3 with an extreme dequantisation scale (ROCm/rocm-libraries#9450), where its default did not.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.cuda.tunable as tunable
from torch import Tensor

from common.config import RunConfig
from common.errors import ConfigError, PreflightError, RunError
from common.gemm_tuning.file import Key, Tuned, read_recorded, read_tuned, require_same_versions, write_tuned

FILE_VARIABLE = "PYTORCH_TUNABLEOP_FILENAME"
ROTATING_BUFFER_MB = 512  # operands come from fresh memory: twice the 256 MB Infinity Cache of an MI300X
MAX_MS_PER_SOLUTION = 30
DTYPES = {
    "float": torch.float32,
    "tf32": torch.float32,
    "BFloat16": torch.bfloat16,
    "Half": torch.half,
    "Float8_e4m3fn": torch.float8_e4m3fn,
    "Float8_e5m2": torch.float8_e5m2,
    "Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "Float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
# Dequantisation scales of the operands. A gradient whose largest value is 1e-12 has 448 / 1e-12 as its scale, 2e-15 as its inverse.
EXTREME_SCALES = ((1.0, 1.0), (1e-15, 1.0), (1.0, 1e-15), (1e15, 1.0), (1.0, 1e15), (1e-15, 1e-15))


Row = tuple[str, str, str, float]  # operation, parameters, solution, milliseconds


def versions() -> dict[str, str]:
    """What TunableOp ties a file to: torch, and on AMD also HIP, hipBLASLt, rocBLAS and the chip."""
    return dict(cast(tuple[tuple[str, str], ...], tunable.get_validators()))


def results() -> tuple[Row, ...]:
    """TunableOp's table; the first call reads the file that PYTORCH_TUNABLEOP_FILENAME names."""
    return tuple(cast(Row, tuple(row)) for row in cast(tuple[Row, ...], tunable.get_results()))


# --- at the start of a run --------------------------------------------------------------------------------------------


def require_loaded(config: RunConfig, device: torch.device) -> None:
    """Raises ConfigError unless this rank uses the config's file, whole and with these versions; nothing to do without a file."""
    if not config.gemm_tuning_file:
        return
    template = os.environ.get(FILE_VARIABLE, "")
    if (
        device.type != "cuda"
        or not template
        or not tunable.is_enabled()
        or tunable.tuning_is_enabled()
        or tunable.record_untuned_is_enabled()
    ):
        raise ConfigError(
            f"gemm_tuning_file = {config.gemm_tuning_file!r}, but tuned GEMMs are not switched on in this process",
            f"it runs on {device.type}, and the launcher's PYTORCH_TUNABLEOP_* variables are missing or others"
            if device.type == "cuda"
            else "they are for GPUs",
            "start it through ./run_and_time.sh with no PYTORCH_TUNABLEOP_* of your own",
        )
    path = Path(template.replace("%d", str(device.index)))
    tuned = read_tuned(path)
    require_same_versions(tuned, versions(), Path(config.gemm_tuning_file))
    missing = tuned.solutions.keys() - {row[:2] for row in results()}
    if missing:
        raise ConfigError(
            f"torch has not taken {len(missing)} of {len(tuned.solutions)} solutions of {config.gemm_tuning_file}",
            f"it reads {tunable.get_filename() or 'no file'}; the first that is missing: {','.join(min(missing))}",
            "tune again with what is here, see docs/gemm_tuning.md",
        )


# --- a recorded GEMM, made again --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gemm:
    """a [m, k] x b [k, n], `batch` of them if > 0. TunableOp counts in columns: its first operand is our b, its m our n."""

    kind: str  # mm, bmm, linear or scaled
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    a_transposed: bool  # as stored
    b_transposed: bool
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    batch: int = 0
    rowwise: bool = False
    bias: str = ""


KINDS = {"GemmTunableOp": "mm", "GemmStridedBatchedTunableOp": "bmm", "GemmAndBiasTunableOp": "linear", "ScaledGemmTunableOp": "scaled"}


def parse(key: Key) -> Gemm | None:
    """None for an operation or a type that we do not know."""
    names = "|".join(sorted(DTYPES, key=len, reverse=True))
    op = re.fullmatch(rf"(\w+?TunableOp)_({names})(?:_({names})_({names}))?_([NT])([NT])", key[0])
    sizes = re.match(r"[nt]{2}_(\d+)_(\d+)_(\d+)(?:_B_(\d+))?_ld_(\d+)_(\d+)_(\d+)(?:_rw_([01])_bias_(\w+))?", key[1])
    if op is None or sizes is None or op[1] not in KINDS:
        return None
    kind, first = KINDS[op[1]], DTYPES[op[2]]
    n, m, k, batch, ldb, lda = (int(sizes[i] or 0) for i in (1, 2, 3, 4, 5, 6))
    return Gemm(
        kind=kind,
        a=first,
        b=DTYPES[op[3]] if op[3] else first,
        out=DTYPES[op[4]] if op[4] else first,
        b_transposed=op[5] == "T",
        a_transposed=op[6] == "T",
        m=m,
        n=n,
        k=k,
        lda=lda,
        ldb=ldb,
        batch=batch,
        rowwise=sizes[8] == "1",
        bias="" if sizes[9] in (None, "None") else sizes[9],
    )


def operands(gemm: Gemm, device: torch.device) -> tuple[Tensor, Tensor]:
    """a [m, k] and b [k, n] of normal values, over the whole range where FP8, laid out as recorded."""
    generator = torch.Generator(device).manual_seed(0)

    def stored(rows: int, columns: int, leading: int, transposed: bool, dtype: torch.dtype) -> Tensor:
        inner, outer = (rows, columns) if transposed else (columns, rows)
        shape = (*([gemm.batch] if gemm.batch else []), outer, leading)
        values = torch.randn(shape, generator=generator, device=device)
        if dtype.itemsize == 1:
            values = (values * torch.finfo(dtype).max / 4).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        part = values.to(dtype)[..., :inner]
        return part.transpose(-1, -2) if transposed else part

    a = stored(gemm.m, gemm.k, gemm.lda, gemm.a_transposed, gemm.a)
    return a, stored(gemm.k, gemm.n, gemm.ldb, gemm.b_transposed, gemm.b)


def scales(gemm: Gemm, pair: tuple[float, float], device: torch.device) -> tuple[Tensor, Tensor]:
    shapes: tuple = ((gemm.m, 1), (1, gemm.n)) if gemm.rowwise else ((), ())
    return torch.full(shapes[0], pair[0], device=device), torch.full(shapes[1], pair[1], device=device)


def product(gemm: Gemm, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """By the call that leads to the recorded operation. Scales are used by `scaled` alone, and the bias is zero."""
    if gemm.kind == "scaled":
        bias = torch.zeros(gemm.n, dtype=DTYPES[gemm.bias], device=a.device) if gemm.bias else None
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=gemm.out, bias=bias)
    if gemm.kind == "linear":
        return torch.nn.functional.linear(a, b.t(), torch.zeros(gemm.n, dtype=gemm.a, device=a.device))
    return torch.bmm(a, b) if gemm.kind == "bmm" else torch.mm(a, b)


# --- proof ------------------------------------------------------------------------------------------------------------


def fault(key: Key, device: torch.device) -> str:
    """What is wrong with the tuned solution of `key`; "" if it is as good as the default one, also at extreme scales.

    The measure is the relative error in the Frobenius norm against fp32 of the same operands: at most twice the default's.
    """
    gemm = parse(key)
    if gemm is None:
        return "we do not know this operation, so it could not be proven"
    a, b = operands(gemm, device)
    for pair in EXTREME_SCALES if gemm.kind == "scaled" else EXTREME_SCALES[:1]:
        scale_a, scale_b = scales(gemm, pair, device)
        truth = (a.float() * scale_a) @ (b.float() * scale_b)
        known = len(results())
        tunable.enable(True)
        tuned = product(gemm, a, b, scale_a, scale_b)
        if len(results()) != known:  # it was not in the table: we proved something else
            return "it could not be made again as it was recorded"
        tunable.enable(False)
        default = _error(product(gemm, a, b, scale_a, scale_b), truth)
        error = _error(tuned, truth)
        if not error <= 2 * default + torch.finfo(torch.float32).eps:  # NaN fails as well
            return f"relative error {error:.2g} where the default has {default:.2g}, at dequantisation scales {pair[0]:g} and {pair[1]:g}"
    return ""


def _error(found: Tensor, truth: Tensor) -> float:
    """In fp64: squares of 1e-30 are not there in fp32."""
    difference = found.double() - truth.double()
    return float(difference.norm() / truth.double().norm())


# --- tuning -----------------------------------------------------------------------------------------------------------


def tune(recorded: list[Key], out: Path, device: torch.device) -> Iterator[str]:
    """Tune every GEMM of `recorded`, prove it, write `out`; yields a line about each, and one at the end.

    Solutions of an existing `out` stay if its versions are these, and are replaced where the same GEMM is tuned again.
    Raises ConfigError where its versions are others, PreflightError if no solution is left.
    """
    validators = versions()
    before = read_tuned(out) if out.exists() else Tuned(validators, {})
    require_same_versions(before, validators, out)
    solutions = dict(before.solutions)
    tunable.record_untuned_enable(False)
    tunable.tuning_enable(True)
    tunable.set_rotating_buffer_size(ROTATING_BUFFER_MB)
    tunable.set_max_tuning_duration(MAX_MS_PER_SOLUTION)
    kept = 0
    with tempfile.TemporaryDirectory() as name:
        tunable.set_filename(str(Path(name, "results.csv")))  # TunableOp appends to it; ours is written from what was proven
        for number, key in enumerate(recorded, start=1):
            line = f"{number}/{len(recorded)} {','.join(key)}"
            row = _tune_one(key, Path(name, "one.csv"))
            wrong = fault(key, device) if row else "TunableOp does not tune it offline"
            solutions.pop(key, None)
            if row is None or wrong:
                yield f"{line}: {wrong}: left to the default"
                continue
            solutions[key] = (row[2], f"{row[3]:.6g}")
            kept += 1
            yield f"{line}: {row[2]}, {row[3]:.4f} ms"
    tunable.enable(False)
    if not solutions:
        raise PreflightError("no GEMM could be tuned", "see the lines above", "nothing was written")
    write_tuned(out, Tuned(validators, solutions))
    yield f"{kept} of {len(recorded)} GEMMs tuned and proven; {out} holds {len(solutions)}"


def _tune_one(key: Key, path: Path) -> Row | None:
    """None if TunableOp made nothing of it."""
    path.write_text(",".join(key) + "\n")
    tunable.enable(True)
    tunable.tune_gemm_in_file(str(path))
    tunable.enable(False)
    return next((row for row in results() if row[:2] == key), None)


def check(path: Path) -> Iterator[str]:
    """What `path` holds; raises ConfigError if it was tuned with other versions than are here."""
    tuned = read_tuned(path)
    yield from (f"{name} {version}" for name, version in sorted(tuned.validators.items()))
    default = sum(solution == "Default" for solution, _ in tuned.solutions.values())
    yield f"{len(tuned.solutions)} GEMMs, {default} of them left at the default"
    require_same_versions(tuned, versions(), path)
    yield "the versions are those of this machine"


def main(arguments: list[str]) -> int:
    verb, source, *rest = arguments
    try:
        if not torch.cuda.is_available():
            raise PreflightError("no GPU is visible", "versions and speed are those of a GPU's libraries", "run it on the GPU in question")
        device = torch.device("cuda", torch.cuda.current_device())
        for line in tune(read_recorded(Path(source)), Path(rest[0]), device) if verb == "tune" else check(Path(source)):
            print(line, flush=True)
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
