"""The GPUs: what the driver says of their health, and the judgement of that and of what was measured on them.

The driver is asked with nvidia-smi, which comes with it, or through amdgpu's files in sysfs: both need no root and no package.
Judging is pure: facts in, rows out.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import PreflightError
from common.gpu_kinds import GIB, GpuKind
from common.hardware import Device, Probe, identify
from preflight.measure import UNITS, Measured
from preflight.rows import Row, graded, skipped

# --- what the driver says ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One GPU at one moment; None where the driver does not say."""

    busy_percent: int | None = None
    uncorrected: int | None = None  # memory errors since the driver was loaded
    corrected: int | None = None
    throttle_bits: int | None = None  # NVML's clock event reasons
    memory_mode: str = ""  # AMD: NPS1 is one piece


Samples = dict[str, Sample]  # by PCI address, 0000:1b:00.0

NVIDIA_QUERY = (
    "pci.bus_id,utilization.gpu,ecc.errors.uncorrected.volatile.total,ecc.errors.corrected.volatile.total,clocks_event_reasons.active"
)
# Bits of nvml.h that take clock away beyond the power limit, at which a healthy card stands under these matrix products.
THROTTLING = {0x08: "hardware slowdown", 0x20: "thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}


def read(vendor: str, environment: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys")) -> Samples:
    """All GPUs of the machine that this process may see; empty if the driver does not answer."""
    return read_amd(sysfs) if vendor == "amd" else read_nvidia(environment)


def read_nvidia(environment: Mapping[str, str]) -> Samples:
    command = ["nvidia-smi", f"--query-gpu={NVIDIA_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_nvidia(answer.stdout) if answer.returncode == 0 else {}


def parse_nvidia(text: str) -> Samples:
    """`text` is the answer to NVIDIA_QUERY; what a card does not have is [N/A]."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
    return {_pci(pci): Sample(_number(a), _number(b), _number(c), _number(d)) for pci, a, b, c, d in (row for row in rows if len(row) == 5)}


def _pci(text: str) -> str:
    """NVML writes the domain with eight digits, Linux with four."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _number(text: str) -> int | None:
    return int(text, 16 if text.startswith("0x") else 10) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text) else None


def read_amd(sysfs: Path) -> Samples:
    cards = [path.parent for path in (sysfs / "bus/pci/devices").glob("*/mem_info_vram_total") if _text(path.parent / "vendor") == "0x1002"]
    return {card.name: _amd_sample(card) for card in cards}


def _amd_sample(card: Path) -> Sample:
    """Error counts are `ue: 0` and `ce: 0` in a file per block; sysfs has no throttle reasons in words that hold across drivers."""
    counts = [dict(re.findall(r"(ue|ce): (\d+)", _text(path))) for path in sorted((card / "ras").glob("*_err_count"))]
    uncorrected, corrected = (sum(int(count.get(name, 0)) for count in counts) if counts else None for name in ("ue", "ce"))
    return Sample(_number(_text(card / "gpu_busy_percent")), uncorrected, corrected, None, _text(card / "current_memory_partition"))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- present, alike, whole, idle, healthy -----------------------------------------------------------------------------

USED_GIB = 2  # more than our own CUDA or HIP context takes on an empty card, some 0.5 GiB
BUSY_PERCENT = (1, 10)  # an idle card says 0


def judge_presence(found: Probe, override: str, wanted_kind: str, wanted_count: int) -> tuple[GpuKind | None, list[Row]]:
    """One kind, whole cards, the kind and the number that are wanted. Without a usable kind nothing can be measured."""
    count = len(found.devices)
    try:
        kind = identify(found, override)
    except PreflightError as error:
        return None, [Row("GPU kind", "refuse", error.what, wanted_kind, error.do)]
    name = kind.name if kind else "none"
    do = "drop --config or DGXSYSTEM, or use one for this GPU"
    return kind, [
        graded("GPU kind", name, wanted_kind, do, refuse=name != wanted_kind),
        graded(
            "GPU count", f"{count} visible", str(wanted_count), "show more GPUs, or use a config for fewer", refuse=count < wanted_count
        ),
    ]


def judge_torch(ranks: Sequence[Measured], vendor: str, kind: GpuKind, override: str) -> Row:
    """The same question to torch: partitions of a container, or the wrong build of torch, show here and not in the driver."""
    devices = tuple(Device(rank.name, rank.arch, rank.memory_bytes, rank.compute_units) for rank in ranks)
    wanted = f"{kind.name}, {kind.compute_units} compute units, {kind.memory_bytes / GIB:.0f} GiB"
    try:
        seen = identify(Probe(vendor, devices), override)
    except PreflightError as error:
        return Row("GPUs as torch sees them", "refuse", error.what, wanted, error.do)
    do = "use a torch built for this GPU, and the same *_VISIBLE_DEVICES everywhere"
    return graded("GPUs as torch sees them", str(devices[0]), wanted, do, refuse=seen is None or seen.name != kind.name)


def judge_memory_in_use(ranks: Sequence[Measured]) -> Row:
    used = [(rank, rank.used_bytes / GIB) for rank in ranks]
    bad = [f"{label(rank)}: {gib:.1f} GiB" for rank, gib in used if gib >= USED_GIB]
    value = "; ".join(bad) or f"at most {max(gib for _, gib in used):.1f} GiB, our own context included"
    return graded(
        "GPU memory in use", value, f"< {USED_GIB} GiB", "end the processes on these GPUs (nvidia-smi, rocm-smi)", refuse=bool(bad)
    )


def judge_busy(ranks: Sequence[Measured], before: Samples) -> Row:
    check, wanted = "GPU use before the test", f"< {BUSY_PERCENT[0]} %"
    known = [(rank, sample.busy_percent) for rank, sample in _join(ranks, before) if sample.busy_percent is not None]
    if len(known) < len(ranks):
        return skipped(check, f"the driver does not say for {len(ranks) - len(known)} of {len(ranks)} GPUs", wanted)
    bad = [f"{label(rank)}: {percent} %" for rank, percent in known if percent >= BUSY_PERCENT[0]]
    refuse = any(percent >= BUSY_PERCENT[1] for _, percent in known)
    return graded(check, "; ".join(bad) or "idle", wanted, "find out who computes there, and wait or end it", refuse=refuse, warn=bool(bad))


def judge_errors(ranks: Sequence[Measured], before: Samples, after: Samples) -> Row:
    """Uncorrected memory errors refuse; corrected ones are everyday, but not while we look."""
    check, wanted = "memory errors (ECC)", "none uncorrected, none new"
    pairs = [(rank, now, before.get(rank.pci, now)) for rank, now in _join(ranks, after) if now.uncorrected is not None]
    if len(pairs) < len(ranks):
        return skipped(check, f"the driver does not say for {len(ranks) - len(pairs)} of {len(ranks)} GPUs", wanted)
    dead = [f"{label(rank)}: {now.uncorrected} uncorrected" for rank, now, _ in pairs if now.uncorrected]
    new = [f"{label(rank)}: {now.corrected} corrected, rising" for rank, now, then in pairs if (now.corrected or 0) > (then.corrected or 0)]
    do = "reset the GPU or restart the host; if they come back, have the card replaced"
    return graded(check, "; ".join(dead + new) or "none", wanted, do, refuse=bool(dead), warn=bool(new))


def judge_throttling(ranks: Sequence[Measured], during: Sequence[Samples]) -> Row:
    check, wanted = "throttling under load", "none beyond the power limit"
    bits: dict[int, int] = {}
    for samples in during:
        for rank, sample in _join(ranks, samples):
            if sample.throttle_bits is not None:
                bits[rank.rank] = bits.get(rank.rank, 0) | sample.throttle_bits
    if len(bits) < len(ranks):
        return skipped(check, f"the driver does not say for {len(ranks) - len(bits)} of {len(ranks)} GPUs", wanted)
    found = [(rank, [word for bit, word in THROTTLING.items() if bits[rank.rank] & bit]) for rank in ranks]
    bad = [f"{label(rank)}: {', '.join(words)}" for rank, words in found if words]
    return graded(check, "; ".join(bad) or "none", wanted, "look at cooling and power supply of this GPU", warn=bool(bad))


def judge_memory_mode(ranks: Sequence[Measured], samples: Samples) -> Row:
    """Compute partitions are refused by judge_presence; memory partitions (NPS4) leave the counts as they are."""
    modes = [(rank, sample.memory_mode) for rank, sample in _join(ranks, samples)]
    if len(modes) < len(ranks) or not all(mode for _, mode in modes):
        return skipped("memory partition", "the driver does not say, or this GPU has none", "NPS1")
    bad = [f"{label(rank)}: {mode}" for rank, mode in modes if mode != "NPS1"]
    return graded("memory partition", "; ".join(bad) or "NPS1", "NPS1", "amd-smi set --memory-partition NPS1", refuse=bool(bad))


def _join(ranks: Sequence[Measured], samples: Samples) -> list[tuple[Measured, Sample]]:
    return [(rank, samples[rank.pci]) for rank in ranks if rank.pci in samples]


def label(rank: Measured) -> str:
    """`GPU 3 (GPU-8f2..., 0000:1b:00.0)`: the visible index, and what is printed on no card but known to the driver."""
    return f"GPU {rank.rank} ({', '.join(filter(None, (rank.uuid, rank.pci))) or 'no address'})"


# --- right and fast ---------------------------------------------------------------------------------------------------

SIBLINGS = (0.98, 0.95)  # healthy GPUs of one host differ by less than 1 %: MLPerf Training v5.1 logs, sd of throughput 0.04 to 0.71 %
TABLE = (0.95, 0.80)  # other hosts, other cooling and power: a few per cent are no illness, a fifth is
# What we expect of one GPU, all GPUs of a host at work. H200: measured by us, docs/results.md's machines; H100: one machine.
EXPECTED: dict[str, dict[str, float]] = {
    "H200": {"bf16 GEMM": 679.0, "FP8 GEMM": 1287.0, "copy": 4.27},
    "H100": {"copy": 3.0},
}
FP8_DB = (50.0, 25.0)  # bf16 output rounds at 56 dB; e4m3 of normal numbers keeps 28.6 dB of a product; half of each value is 6 dB


def judge_fp8(ranks: Sequence[Measured], device: str) -> Row:
    """Wrong FP8 arithmetic, or the wrong of the two e4m3 (fnuz, OCP), gives plausible numbers: only this comparison tells."""
    check, wanted = "FP8 self-test", f">= {FP8_DB[0]:g} dB to its operands, >= {FP8_DB[1]:g} dB to bf16"
    if device == "cpu" and any(rank.fp8_error for rank in ranks):
        return skipped(check, f"this CPU's torch has no FP8 product: {ranks[0].fp8_error}", wanted)
    bad = [
        f"{label(rank)}: {rank.fp8_error or ' and '.join(f'{db:.1f} dB' for db in rank.fp8_db)}"
        for rank in ranks
        if rank.fp8_error or len(rank.fp8_db) < 2 or any(not db >= least for db, least in zip(rank.fp8_db, FP8_DB, strict=True))
    ]
    value = "; ".join(bad) or " and ".join(f"{min(rank.fp8_db[i] for rank in ranks):.1f} dB" for i in range(2))
    return graded(check, value, wanted, "use bf16, or a torch that is built for this GPU", refuse=bool(bad))


def judge_speeds(ranks: Sequence[Measured], device: str, kind: str) -> list[Row]:
    """Two rows per measurement: against the other GPUs of this host, and against what we expect of this kind."""
    rows = []
    for name, unit in UNITS.items():
        values = [rank.speeds.get(name) for rank in ranks]
        known = [value for value in values if value is not None]
        if device == "cpu":
            why = f"{_range(known, unit)}: processes of a CPU share its cores" if known else "not measured on one process"
            rows.append(skipped(name, why))
        elif len(known) < len(ranks):
            rows.append(skipped(name, "takes two GPUs" if len(ranks) == 1 else "not measured on every GPU"))
        else:
            rows += [_against_siblings(name, unit, ranks, known), _against_table(name, unit, ranks, known, kind)]
    return rows


def _against_siblings(name: str, unit: str, ranks: Sequence[Measured], values: list[float]) -> Row:
    check, wanted = f"{name}, siblings", f"within {100 - 100 * SIBLINGS[0]:.0f} % of the others' median"
    if len(values) == 1:
        return skipped(check, f"{_range(values, unit)}: one GPU has no sibling", wanted)
    medians = [statistics.median(values[:i] + values[i + 1 :]) for i in range(len(values))]
    return _slower(check, unit, ranks, values, lambda i: medians[i], SIBLINGS, wanted)


def _against_table(name: str, unit: str, ranks: Sequence[Measured], values: list[float], kind: str) -> Row:
    check, expected = f"{name}, table", EXPECTED.get(kind, {}).get(name)
    if expected is None:
        return skipped(check, f"{_range(values, unit)}: we have no number of our own for {kind}")
    return _slower(check, unit, ranks, values, lambda i: expected, TABLE, f">= {TABLE[0]:.0%} of {expected:g} {unit}")


def _slower(
    check: str,
    unit: str,
    ranks: Sequence[Measured],
    values: list[float],
    reference: Callable[[int], float],
    limits: tuple[float, float],
    wanted: str,
) -> Row:
    shares = [round(value / reference(i), 4) for i, value in enumerate(values)]  # what is printed as 5.0 % counts as 5 %
    bad = [f"{label(ranks[i])}: {values[i]:.4g} {unit}, {1 - share:.1%} slower" for i, share in enumerate(shares) if share <= limits[0]]
    do = "see who else uses this GPU, its clocks, power and temperature; then reset it or leave it out"
    refuse = any(share <= limits[1] for share in shares)
    return graded(check, "; ".join(bad) or _range(values, unit), wanted, do, refuse=refuse, warn=bool(bad))


def _range(values: Sequence[float], unit: str) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
