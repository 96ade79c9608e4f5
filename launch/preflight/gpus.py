"""Judgments of the GPUs: number, kind, load, health, correctness and speed.

The functions are pure: they turn measurements into rows of the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from common import known_issues
from common.gpu_kinds import GIB, KINDS, GpuKind
from common.machine.gpu_stats import FAULTS
from common.machine.hardware import WHOLE_CARD
from common.text_tables import number
from launch.preflight.check_row import CheckRow, Limits, graded, skipped, worst
from launch.preflight.rank_report import COLLECTIVES, UNITS, RankReport

# Result of common.machine.gpu_stats.read_gpus: one entry for each visible GPU, in the order of the
# ranks; [] if the driver does not respond.
Stats = list[dict]
# Verdict on one GPU and the reason; None if the driver does not report the value.
Finding = tuple[str, str] | None
USED_GIB = 2  # preflight's own CUDA or HIP context uses about 0.5 GiB of an idle card
BUSY_PERCENT = (1, 10)  # limits for warn and refuse; an idle card reports 0


def judge_presence(
    kind: GpuKind | None, visible: int, kind_name: str, count: int
) -> list[CheckRow]:
    """Return rows about the kind and number of GPUs.

    `kind`, `visible`: the GPUs found. `kind_name`, `count`: those that the run needs.
    """
    name = kind.name if kind else "none"
    do = "leave out --config and DGXSYSTEM, or name a config for this GPU"
    is_unknown = kind is not None and kind.name not in KINDS
    if is_unknown and name == kind_name:
        do = (
            "the kind was derived, so its runs cannot be submitted; to add it to "
            "common/gpu_kinds.py, see CONTRIBUTING.md"
        )
    return [
        graded("GPU kind", name, kind_name, do, refuse=name != kind_name, warn=is_unknown),
        graded(
            "GPU count",
            f"{visible} visible",
            str(count),
            "make more GPUs visible, or use a config for fewer",
            refuse=visible < count,
        ),
    ]


def judge_node(visible: int, usual: int) -> CheckRow:
    """Judge the number of GPUs without a config. `usual`: number in a whole node, 0 if unknown."""
    is_short = usual > visible and usual % visible != 0
    return graded(
        "GPU count",
        f"{visible} visible",
        str(usual if is_short else visible),
        f"a whole node has {usual}: see the kernel log whether a GPU has fallen off the bus",
        warn=is_short,
    )


def _per_gpu(
    check: str,
    expected: str,
    do: str,
    ranks: Sequence[RankReport],
    findings: list[Finding],
    good: str,
) -> CheckRow:
    """Return one row from the findings on all GPUs. `good`: its value if all are ok."""
    unknown = findings.count(None)
    if unknown:
        return skipped(
            check, f"the driver does not report it for {unknown} of {len(ranks)} GPUs", expected
        )
    bad = {
        rank.label: finding
        for rank, finding in zip(ranks, findings, strict=True)
        if finding and finding[0] != "ok"
    }
    verdicts = {verdict for verdict, _ in bad.values()}
    value = "; ".join(f"{label}: {text}" for label, (_, text) in bad.items())
    return graded(
        check, value or good, expected, do, refuse="refuse" in verdicts, warn="warn" in verdicts
    )


def judge_torch(ranks: Sequence[RankReport], kind: GpuKind) -> CheckRow:
    """Judge whether torch sees the same GPUs as the driver.

    Partitions in a container, and a wrong build of torch, are visible only to torch.
    """
    units = f"{kind.compute_units} compute units, " if kind.compute_units else ""
    expected = f"{kind.name}, {units}{kind.memory_bytes / GIB:.0f} GiB"
    do = "use a torch built for this GPU, and the same *_VISIBLE_DEVICES everywhere"
    findings: list[Finding] = []
    for rank in ranks:
        is_same = rank.arch.startswith(kind.arch) and kind.compute_units in (0, rank.compute_units)
        is_whole = rank.memory_bytes >= WHOLE_CARD * kind.memory_bytes
        text = (
            f"{rank.name}, {rank.arch}, {rank.compute_units} compute units, "
            f"{rank.memory_bytes / GIB:.0f} GiB"
        )
        findings.append(("ok" if is_same and is_whole else "refuse", text))
    return _per_gpu("GPUs as torch sees them", expected, do, ranks, findings, ranks[0].name)


def _values(ranks: Sequence[RankReport], stats: Stats, name: str) -> list:
    """Return the value `name` for each rank's GPU, None where the driver does not report it."""
    return [stats[rank.rank].get(name) if stats else None for rank in ranks]


def judge_memory_in_use(ranks: Sequence[RankReport], is_grace: bool = False) -> CheckRow:
    """Judge whether the GPU memory is free.

    With a Grace CPU, the host's page cache may be in GPU memory. The kernel frees it when needed,
    so the row only warns.
    """
    used_gib = [rank.used_bytes / GIB for rank in ranks]
    verdict = "warn" if is_grace else "refuse"
    findings: list[Finding] = [
        (verdict if gib >= USED_GIB else "ok", f"{gib:.1f} GiB") for gib in used_gib
    ]
    good = f"at most {max(used_gib):.1f} GiB, including our own context"
    do = "end the processes on these GPUs (nvidia-smi, rocm-smi)"
    if is_grace:
        do += (
            "; if there are none, the memory holds page cache: drop it, or load the driver in CDMM "
            "mode (driver 580)"
        )
    return _per_gpu("GPU memory in use", f"< {USED_GIB} GiB", do, ranks, findings, good)


def judge_utilization(ranks: Sequence[RankReport], before: Stats) -> CheckRow:
    """Judge whether the GPUs were idle before the measurements."""
    percents = _values(ranks, before, "utilization_percent")
    findings = [
        None if percent is None else (worst(percent, BUSY_PERCENT), f"{percent:g} %")
        for percent in percents
    ]
    do = "find the program that uses the GPU, and wait for it or end it"
    return _per_gpu(
        "GPU use before the test", f"< {BUSY_PERCENT[0]} %", do, ranks, findings, "idle"
    )


def judge_errors(ranks: Sequence[RankReport], before: Stats, after: Stats) -> CheckRow:
    """Judge memory errors: uncorrected errors refuse, new corrected errors warn.

    Corrected errors are common, but should not appear during the measurement.
    """
    findings: list[Finding] = []
    uncorrected_now = _values(ranks, after, "uncorrected_errors")
    corrected_before = _values(ranks, before, "corrected_errors")
    corrected_now = _values(ranks, after, "corrected_errors")
    for uncorrected, then, now in zip(
        uncorrected_now, corrected_before, corrected_now, strict=True
    ):
        if uncorrected is None:
            findings.append(None)
        elif uncorrected:
            findings.append(("refuse", f"{uncorrected:g} uncorrected"))
        elif then is not None and (now or 0) > then:
            findings.append(("warn", f"{now:g} corrected, rising"))
        else:
            findings.append(("ok", ""))
    do = "reset the GPU or restart the host; if the errors return, have the card replaced"
    return _per_gpu(
        "memory errors (ECC)", "none uncorrected, none new", do, ranks, findings, "none"
    )


def judge_throttling(ranks: Sequence[RankReport], during: Sequence[Stats]) -> CheckRow:
    """Judge whether heat, power or the driver lowered the clocks under load."""
    findings: list[Finding] = []
    for rank in ranks:
        reported = []
        for stats in during:
            [reasons] = _values([rank], stats, "throttle")
            if reasons is not None:
                reported.append(reasons)
        faults = [name for name in FAULTS if any(name in reasons for reasons in reported)]
        if not reported:
            findings.append(None)
        elif faults:
            findings.append(("warn", ", ".join(faults)))
        else:
            findings.append(("ok", ""))
    do = "check the cooling and power supply of this GPU"
    return _per_gpu(
        "throttling under load", "none beyond the power limit", do, ranks, findings, "none"
    )


def judge_power_settings(vboost: Sequence[tuple[int, int] | None], profiles: str) -> CheckRow:
    """Report the boost sliders and the active power profiles, and warn if the sliders differ.

    `vboost`: position and largest position of each GPU's slider. `profiles`: as the driver prints
    them, "" if there are none. A run does not change them.
    """
    check = "power settings"
    expected = "the same on all GPUs"
    if not profiles and all(slider is None for slider in vboost):
        return skipped(check, "the driver reports no boost slider or power profile", expected)
    positions = dict.fromkeys(slider or (0, 0) for slider in vboost)
    texts = [f"vboost {position} of {largest}" for position, largest in positions if largest]
    texts.append(f"power profiles: {profiles or 'none'}")
    do = "set one vboost on all GPUs: nvidia-smi boost-slider --vboost 0 (needs root)"
    return graded(check, "; ".join(texts), expected, do, warn=len(positions) > 1)


# --- correct and fast -----------------------------------------------------------------------------

# Limits for warn and refuse, as shares of the other GPUs' median. Healthy GPUs of one host differ
# by less than 1 %: in MLPerf Training v5.1 logs, the standard deviation is 0.04 to 0.71 %.
SIBLINGS = (0.98, 0.95)
# Limits for warn and refuse, as shares of EXPECTED. Between hosts, cooling and power make a
# difference of a few percent, not of a fifth.
TABLE = (0.95, 0.80)
# Speed of one GPU in UNITS while all GPUs of the host work. H200: our measurements, on the machines
# in docs/results.md. H100: one machine.
EXPECTED: dict[str, dict[str, float]] = {
    "H200": {"bf16 GEMM": 679.0, "FP8 GEMM": 1287.0, "copy": 4.27},
    "H100": {"copy": 3.0},
}


def judge_self_test(
    ranks: Sequence[RankReport], kind: GpuKind | None, versions: Mapping[str, str]
) -> CheckRow:
    """Judge whether every op computes correctly at the config's shapes.

    If one does not, the advice names known issues of these versions that may be the cause.
    """
    check = "self-test"
    expected = "every op correct at the config's shapes"
    if not all(rank.self_test for rank in ranks):
        return skipped(
            check, "there is no config to test, or some process did not run it", expected
        )
    findings: list[Finding] = []
    failures: set[tuple[str, str]] = set()
    for rank in ranks:
        bad = [(op, line) for op, line, good in rank.self_test if not good]
        failures |= set(bad)
        findings.append(("refuse", ", ".join(line for _, line in bad)) if bad else ("ok", ""))
    suspects = known_issues.suspects(sorted(failures), kind, versions) if kind else []
    installed = ", ".join(f"{name} {text}" for name, text in versions.items())
    do = f"no known issue of {installed} explains it: try other versions, and report it"
    if suspects:
        do = "; ".join(f"{issue}: {issue.cure}" for issue in suspects)
    slowest = max(rank.self_test_s for rank in ranks)
    good = (
        f"{len(ranks[0].self_test)} ops, {slowest:.1f} s; attention by "
        f"{', '.join(sorted({rank.attention for rank in ranks}))}"
    )
    return _per_gpu(check, expected, do, ranks, findings, good)


def judge_engines(ranks: Sequence[RankReport]) -> list[CheckRow]:
    """Return a row for each operation: its engine, why, and its times. A problem warns."""
    expected = "the fastest usable one, or a pinned one"
    rows = []
    for operation, choice in ranks[0].engines.items():
        rows.append(CheckRow(f"engine of {operation}", "ok", choice, expected))
    if notes := "; ".join(ranks[0].engine_notes):
        do = "if it repeats, check the folder: without its files, each start takes seconds longer"
        rows.append(CheckRow("kept times of engines", "warn", notes, "whole and writable", do))
    return rows


def judge_speeds(ranks: Sequence[RankReport], device: str, kind: str) -> list[CheckRow]:
    """Return two rows per measurement: against the host's other GPUs and against EXPECTED.

    A measurement that was not made has one skipped row.
    """
    rows = []
    for name, unit in UNITS.items():
        values = [rank.speeds[name] for rank in ranks if name in rank.speeds]
        speed = EXPECTED.get(kind, {}).get(name)
        siblings = f"{name}, siblings"
        table = f"{name}, table"
        if device == "cpu":
            why = "not measured: slow on a CPU"
            if values:
                why = f"{_range(values, unit)}, not judged: processes of a CPU share its cores"
            elif name in COLLECTIVES:
                why = "needs two processes"
            rows.append(skipped(name, why))
            continue
        if len(values) < len(ranks):
            why = "needs two processes" if len(ranks) == 1 else "not measured by every process"
            rows.append(skipped(name, why))
            continue
        if len(values) == 1:
            rows.append(skipped(siblings, f"{_range(values, unit)}: one GPU has no sibling"))
        else:
            # For each GPU, the median of the others.
            medians = [statistics.median(values[:i] + values[i + 1 :]) for i in range(len(values))]
            expected = f"within {100 - 100 * SIBLINGS[0]:.0f} % of the others' median"
            rows.append(_not_slower(siblings, expected, ranks, name, medians, SIBLINGS))
        if speed is None:
            rows.append(skipped(table, f"{_range(values, unit)}: no reference speed for {kind}"))
        else:
            expected = f">= {TABLE[0]:.0%} of {number(speed, 'g')} {unit}"
            references = [speed] * len(values)
            rows.append(_not_slower(table, expected, ranks, name, references, TABLE))
    return rows


def _not_slower(
    check: str,
    expected: str,
    ranks: Sequence[RankReport],
    name: str,
    references: list[float],
    limits: Limits,
) -> CheckRow:
    """Return a row that compares each rank's speed with the rank's reference.

    `limits`: shares of the reference at or below which the row warns and refuses.
    """
    findings: list[Finding] = []
    for rank, reference in zip(ranks, references, strict=True):
        # Round, so that a value that is printed as 5.0 % counts as 5 %.
        slower = 1 - round(rank.speeds[name] / reference, 4)
        verdict = worst(round(slower, 4), (round(1 - limits[0], 4), round(1 - limits[1], 4)))
        findings.append(
            (verdict, f"{number(rank.speeds[name], '.4g')} {UNITS[name]}, {slower:.1%} slower")
        )
    do = (
        "find other programs on this GPU; check its clocks, power and temperature; then reset or "
        "exclude it"
    )
    good = _range([rank.speeds[name] for rank in ranks], UNITS[name])
    return _per_gpu(check, expected, do, ranks, findings, good)


def _range(values: Sequence[float], unit: str) -> str:
    """Return the smallest and the largest value for display, or one if they look the same."""
    low = number(min(values), ".4g")
    high = number(max(values), ".4g")
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
