"""`./run_and_time.sh <benchmark> preflight`: is this machine fit for a run? Reads and measures; changes nothing; needs no root.

    preflight                  for the config that fits this machine, with all visible GPUs (or DGXNGPU of them)
    preflight --config FILE    for this config; DGXSYSTEM names one of ours
    preflight --quick          half a second for each speed instead of three
    preflight --json           the answer for programs

Environment: DATADIR, MODEL, LOGDIR, DGXSYSTEM, DGXNGPU, GPU_KIND. A table on stdout, one row per check: ok, warn, refuse, or skipped
with the reason; skipped is not passed. Exit code 0 if nothing refuses, 18 if something does, 2 for a wrong command line or config.
docs/preflight.md says what each row means.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import config as configs
from common.errors import ConfigError, PreflightError, RunError
from common.gpu_kinds import GpuKind
from common.hardware import Probe, config_name, config_names, config_path, identify, probe
from plan import estimate as plan
from plan.command import workload
from preflight import gpus, host, versions
from preflight.measure import Measured, limit_s
from preflight.rows import Row, overall, skipped, table

ROOT = Path(__file__).resolve().parents[1]
SECONDS, QUICK_SECONDS = 3.0, 0.5
SAMPLE_S = 1.0  # between questions to the driver while the GPUs work
PATIENCE_S = 45.0  # torchrun gives its ranks 30 s to end


@dataclass(frozen=True)
class Wanted:
    """What the run would be: from a config file, or, where there is none for this machine, all that is visible."""

    kind: str  # a name of common.gpu_kinds.KINDS, or CPU
    count: int  # processes on this node
    row: Row
    nodes: int = 1
    miniature: bool = False
    env: dict[str, str] = field(default_factory=dict)
    pinned_bytes: int = 0  # of the host's memory, for each process

    @property
    def device(self) -> str:
        return "cpu" if self.kind == "CPU" else "cuda"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    try:
        rows, ranks = check(options, os.environ)
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    verdict = overall(rows)
    if options.json:
        answer = {"benchmark": options.benchmark, "verdict": verdict, "rows": rows, "ranks": ranks}
        print(json.dumps(answer, default=asdict, indent=1))
    else:
        print(table(rows))
    if verdict != "refuse":
        return 0
    refused = ", ".join(row.check for row in rows if row.verdict == "refuse")
    unfit = PreflightError(f"this machine is not fit for the run: {refused}", "the rows that refuse say it", "do what they say")
    print(unfit.lines(), file=sys.stderr)
    return unfit.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    usage = "./run_and_time.sh <benchmark> preflight [--config FILE] [--device cpu|cuda] [--quick] [--json]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, allow_abbrev=False, formatter_class=formatter)
    parser.add_argument("benchmark", help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="this TOML instead of the one that fits the machine")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPUs if there are any (ROCm's are cuda as well)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s for each speed instead of {SECONDS:g}")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[list[Row], list[Measured]]:
    """All rows, and what the ranks measured. Raises ConfigError."""
    try:
        found = Probe("none") if options.device == "cpu" else probe(environment)
    except PreflightError as error:
        return [Row("GPU driver", "refuse", error.what, "an answer", error.do)], []
    if options.device == "cuda" and not found.devices:
        return [Row("GPU driver", "refuse", "no GPU is visible", "a GPU", "see the driver and *_VISIBLE_DEVICES")], []
    override = environment.get("GPU_KIND", "")
    try:
        kind = identify(found, override)
    except PreflightError as error:
        return [Row("GPU kind", "refuse", error.what, "whole cards of one known kind", error.do)], []
    wanted = wanted_run(options, environment, kind, len(found.devices))
    rows = [wanted.row]
    fit = True
    if wanted.device == "cuda":
        kind, presence = gpus.judge_presence(found, override, wanted.kind, wanted.count)
        rows += presence
        fit = overall(presence) != "refuse"
    else:
        found, kind = Probe("none"), None
    rows += host_rows(options.benchmark, wanted, environment)
    ranks, measured_rows = measured(wanted, found, kind, options, environment) if fit else ([], [_not_measured()])
    first = next((rank for rank in ranks if rank.phase != "start"), None)
    rows.append(versions.judge_software(versions.installed(first.cuda if first else None, first.hip if first else None)))
    rows.append(versions.judge_driver(found.vendor, found.driver))
    return rows + measured_rows, ranks


def _not_measured() -> Row:
    return skipped("health and speed of the GPUs", "the GPUs are not those of the config")


# --- what is wanted ---------------------------------------------------------------------------------------------------


def wanted_run(options: argparse.Namespace, environment: Mapping[str, str], kind: GpuKind | None, visible: int) -> Wanted:
    """Raises ConfigError for a benchmark or config that does not exist or cannot be read."""
    benchmark = options.benchmark
    if not (ROOT / benchmark / "rules.py").is_file():
        raise ConfigError(f"unknown benchmark {benchmark}", "it has no rules.py", "./run_and_time.sh --help lists the benchmarks")
    count = int(environment.get("DGXNGPU") or visible) if environment.get("DGXNGPU", "1").isdigit() else 0
    if environment.get("DGXNGPU") and not count:
        raise ConfigError(f"DGXNGPU={environment['DGXNGPU']} is not a number of GPUs", "it must be 1 or more", "correct or unset it")
    name = environment.get("DGXSYSTEM", "").removesuffix(".toml")
    named = options.config or name
    name = name or config_name(kind, count if kind else 1)
    if not named and name not in config_names(ROOT, benchmark):
        row = Row("config", "warn", f"none is called {name}", "a config for this machine", "only the machine itself is looked at")
        return Wanted(kind.name if kind else "CPU", count if kind else 1, row)
    path = Path(options.config) if options.config else config_path(ROOT, benchmark, name)
    config = configs.load(path, importlib.import_module(f"{benchmark}.rules").Config)
    row = Row("config", "ok", f"{path.name}: {config.gpus_per_node} x {config.gpu}")
    pinned = plan.host_bytes(config, workload(benchmark, config))
    return Wanted(config.gpu, config.gpus_per_node, row, config.nodes, config.miniature, config.env, pinned)


def host_rows(benchmark: str, wanted: Wanted, environment: Mapping[str, str]) -> list[Row]:
    data = environment.get("DATADIR") or ROOT / "data" / (f"{benchmark}-miniature" if wanted.miniature else benchmark)
    rows = host.judge(host.read(), wanted.count, wanted.device, wanted.nodes, wanted.pinned_bytes)
    rows += host.judge_read_folder("DATADIR", Path(data).absolute(), wanted.miniature)
    if environment.get("MODEL"):
        rows += host.judge_read_folder("MODEL", Path(environment["MODEL"]).absolute(), wanted.miniature)
    return [*rows, host.judge_log_folder(Path(environment.get("LOGDIR") or ROOT / "results").absolute())]


# --- what is measured -------------------------------------------------------------------------------------------------


def measured(
    wanted: Wanted, found: Probe, kind: GpuKind | None, options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[list[Measured], list[Row]]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    print(f"measuring on {wanted.count} x {wanted.kind}, {seconds:g} s for each speed ...", file=sys.stderr, flush=True)
    samples: list[gpus.Samples] = []

    def ask() -> None:
        if kind:
            samples.append(gpus.read(found.vendor, environment))

    ask()
    ranks = run_ranks(wanted, seconds, environment, ask)
    ask()
    rows = [judge_ranks(ranks, wanted.count)]
    if rows[0].verdict == "refuse":
        rows.append(skipped("speeds", "not every rank came to its end"))
    seen = [rank for rank in ranks if rank.memory_bytes]
    if kind is None:
        rows.append(skipped("health of the GPUs", "the run would be on the CPU"))
    elif len(seen) == wanted.count:
        rows.append(gpus.judge_torch(seen, found.vendor, kind, environment.get("GPU_KIND", "")))
        rows += [gpus.judge_memory_in_use(seen), gpus.judge_busy(seen, samples[0]), gpus.judge_errors(seen, samples[0], samples[-1])]
        rows += [gpus.judge_throttling(seen, samples[1:-1])]
        rows += [gpus.judge_memory_mode(seen, samples[0])] if found.vendor == "amd" else []
    if rows[0].verdict == "ok":
        rows += [gpus.judge_fp8(ranks, wanted.device), *gpus.judge_speeds(ranks, wanted.device, wanted.kind)]
    return ranks, rows


def judge_ranks(ranks: Sequence[Measured], count: int) -> Row:
    """Did every process come to its end? A first error often makes the others stop where they are: errors come first."""
    names = {rank.rank: rank for rank in ranks}
    failed = [f"{gpus.label(rank)} in {rank.phase!r}: {rank.error}" for rank in ranks if rank.error]
    stopped = [f"{gpus.label(rank)} stopped in {rank.phase!r}" for rank in ranks if rank.phase != "done" and not rank.error]
    silent = [f"GPU {k} never reported" for k in range(count) if k not in names]
    value = "; ".join(failed or silent or stopped) or "all came to their end"
    bad = bool(failed or silent or stopped)
    do = "if it is out of memory, see who uses the GPU; else see the messages above, and the kernel log for this address"
    return Row("measuring processes", "refuse" if bad else "ok", value, f"{count} of {count}", do if bad else "")


def run_ranks(wanted: Wanted, seconds: float, environment: Mapping[str, str], meanwhile: Callable[[], None]) -> list[Measured]:
    """One process per GPU, started as a run starts its ranks (by launch.torchrun), with the config's environment."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        size = ["--standalone", "--nnodes", "1", "--nproc-per-node", str(wanted.count)]
        work = ["-m", "preflight.measure", folder, wanted.device, str(seconds)]
        command = [sys.executable, "-m", "launch.torchrun", folder, *size, *work]
        ours["TMPDIR"] = folder  # torchrun leaves an empty folder in there
        process = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **environment, **wanted.env, **ours}, stdout=sys.stderr)
        deadline = time.monotonic() + limit_s(seconds) + PATIENCE_S  # the ranks watch themselves; this is for torchrun
        try:
            while process.poll() is None and time.monotonic() < deadline:
                meanwhile()
                _wait(process, SAMPLE_S)
        finally:
            process.terminate()
            if not _wait(process, PATIENCE_S):
                process.kill()
        return read_ranks(Path(folder))


def _wait(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def read_ranks(folder: Path) -> list[Measured]:
    found = [Measured(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
    return sorted(found, key=lambda rank: rank.rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
