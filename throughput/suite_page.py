"""The page of `throughput suite`: headline, machine, parts, and the tables of every part."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.measure import report
from common.measure.tables import Section
from common.text_tables import number
from throughput import baseline, result

NOT_MEASURED = "not measured"


def write(
    folder: Path,
    ended: dict[str, dict],
    results: dict[str, dict[str, Any]],
    verdicts: list[baseline.BaselineVerdict],
    comparison: list[Section],
) -> None:
    """Write table.md and page.html into `folder`, and print the headline.

    `ended`: part -> command and outcome. `results`: part -> result, from `read_results`.
    `verdicts` and `comparison`: from --against, or empty. Raises StorageError.
    """
    tiles = headline(ended, results, verdicts)
    report.write(folder, title(results), [tiles, *comparison, *sections(folder, ended, results)])
    for name, value in tiles.rows:
        print(f"{name}: {value}", flush=True)


def read_results(folder: Path, ended: dict[str, dict]) -> dict[str, dict[str, Any]]:
    """Return the result of each part that wrote one."""
    results: dict[str, dict[str, Any]] = {}
    for name in ended:
        with contextlib.suppress(RunError):  # without a result, the part's row says how it ended
            results[name] = result.read(folder / name)
    return results


def title(results: dict[str, dict[str, Any]]) -> str:
    """Return the title of the page, with machine and date if a part wrote a result."""
    first = next(iter(results.values()), None)
    return report.title("suite", first) if first else "suite"


def sections(
    folder: Path, ended: dict[str, dict], results: dict[str, dict[str, Any]]
) -> list[Section]:
    """Return the sections of the page below the headline and the comparison.

    They are the machine, the parts, each part's tables, and the published tables of the same GPU.
    """
    command = shlex.join(["python3", "-m", "throughput", *sys.argv[1:]])
    made = []
    if results:
        made.append(
            report.facts_section([("", next(iter(results.values())) | {"command": command})])
        )
    made.append(parts_section(folder, ended, results))
    for name, data in results.items():
        made += report.with_prefix(report.measured_sections(data), name)
    tables = [table for data in results.values() for table in data["tables"]]
    gpus = {report.gpu_kind(data) for data in results.values()}
    return made + report.published_sections(tables, gpus)


def headline(
    ended: dict[str, dict],
    results: dict[str, dict[str, Any]],
    verdicts: list[baseline.BaselineVerdict],
) -> Section:
    """Return the section with the few numbers that summarize the machine."""
    succeeded = sum(part["exit_code"] == 0 for part in ended.values())
    tiles = [("Parts that succeeded", f"{succeeded} of {len(ended)}")]
    if verdicts:
        tiles.append(("Against the baseline", baseline.summary(verdicts)))
    rows: list[dict[str, Any]] = []
    for data in results.values():
        rows += [row for row in data["rows"] if "error" not in row]
    for precision in ("bf16", "fp8"):
        products = [row for row in rows if row["table"] == "gemm" and row["precision"] == precision]
        best = max((row["tflops"] for row in products), default=None)
        text = NOT_MEASURED if best is None else f"{number(best, ',.4g')} TFLOP/s"
        tiles.append((f"Best {precision.upper()} product", text))
    tiles.append(llama_tile(rows))
    reductions = [
        row["bus_gb_per_s"]
        for row in rows
        if row["table"] == "collectives" and row["name"].startswith("all-reduce")
    ]
    text = f"{number(max(reductions), ',.4g')} GB/s" if reductions else NOT_MEASURED
    tiles.append(("All-reduce, bus bandwidth", text))
    return Section("Headline", "", ("", ""), (False, False), tuple(tiles), tiles=True)


def llama_tile(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the model and the tokens/s of the fastest step of full training."""
    steps = [row for row in rows if row["table"] == "llama" and row["mode"] == "full"]
    if not steps:
        return "Llama 3.1 8B", NOT_MEASURED
    best = max(steps, key=lambda row: row["tokens_per_s"])
    name = f"{best['model']}, {best['precision']}, {best['layers']} layers"
    if best["gpus"] > 1:
        name += f", {best['gpus']} GPUs"
    return name, f"{best['tokens_per_s']:,.0f} tokens/s"


def parts_section(
    folder: Path, ended: dict[str, dict], results: dict[str, dict[str, Any]]
) -> Section:
    """Return the section that says how each part ended and, if it failed, why."""
    rows = []
    for name, part in ended.items():
        measured = results.get(name, {}).get("rows", [])
        failed = sum("error" in row for row in measured)
        rows.append(
            (
                name,
                outcome(part["exit_code"], result.read_failure(folder / name)),
                f"{part['seconds']:,.0f}",
                str(len(measured) - failed),
                str(failed),
                part["command"],
            )
        )
    heads = ("Part", "Outcome", "Seconds", "Rows measured", "Rows failed", "Command")
    return Section("Parts", "", heads, (False, False, True, True, True, False), tuple(rows))


def outcome(exit_code: int, why: str) -> str:
    """Return how a part ended, in words. `why`: its error, or "" if it wrote none."""
    if exit_code == 0:
        return "succeeded"
    text = f"failed, exit code {exit_code}"
    if exit_code < 0:
        text = f"failed, killed by signal {-exit_code}"
    return f"{text}: {why}" if why else text
