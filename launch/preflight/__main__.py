"""Check that this machine is ready for a run: `./run_and_time.sh preflight [benchmark]`.

It reads and measures, changes nothing, and does not need root.

The machine is checked for a run with --config or DGXSYSTEM, or else with the config for all visible
GPUs (or for DGXNGPU GPUs). DATADIR, MODEL, LOGDIR and GPU_KIND are read as well. Without a
benchmark, only the machine itself is checked, not a config or data.

The output is a table with one row per check: ok, warn, refuse, or skipped with the reason. Skipped
does not mean passed. Exit code 0 if no check refuses, 18 if one does, 2 for a wrong command line or
config. See docs/preflight.md.

--nodes runs preflight on several hosts, compares the hosts, and measures all-reduce between them.
It names the hosts that fail. The checkout and its Python must have the same paths on all hosts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common import benchmarks, values
from common.command_line import Parser, exit_code_of, refuse_without
from common.config import RunConfig
from common.errors import ConfigError, Interrupted, OutOfMemory, PreflightError
from common.estimate.memory import host_bytes
from common.estimate.workload import benchmark_workload
from common.gpu_kinds import GpuKind
from common.known_issues import installed
from common.machine import network
from common.machine.gpu_stats import (
    HEALTH,
    DriverError,
    read_gpus,
    read_power_profiles,
    read_vboost,
    with_throttling,
)
from common.machine.hardware import Probe, node_size
from common.machine.host import read_host
from common.paths import ROOT
from common.repository import commit_of
from common.terminal import inform
from common.values import number_between, of_variable, seconds
from launch.job import Job, Node, directories
from launch.node_facts import hardware_facts, machine_facts, node_facts
from launch.preflight import gpus, host, kernel_log
from launch.preflight.check_row import CheckRow, graded, overall, skipped, table
from launch.preflight.nodes.examine import DEADLINE_S
from launch.preflight.nodes.examine import examine as examine_nodes
from launch.preflight.rank_report import RankReport, read_ranks
from launch.processes.ranks import cpus_of_ranks, rank_environment, ranks_command
from launch.processes.supervise import supervise
from launch.selection.check import GPUS, VERSIONS, Choice, Objection
from launch.selection.choose import choose, name, require_gpus
from launch.selection.machine import Machine, add_machine_options
from launch.selection.request import OF_CONFIG, Request, add_config_option
from launch.torch_build import broken_torch

SECONDS = 3.0  # for which each speed is measured
QUICK_SECONDS = 0.5  # the same with --quick
# Subjects of objections to a config that other rows report.
ROWS_OF_THEIR_OWN = (GPUS, VERSIONS)
SAMPLE_S = 1.0  # between readings of the driver while the GPUs work


@dataclass(frozen=True)
class PreflightRequest:
    """The run that the machine is checked for. Without a config, it uses all visible GPUs."""

    kind: str  # name of the GPU kind, or CPU
    count: int  # processes on this node
    rows: tuple[CheckRow, ...]  # about the config
    nodes: int = 1
    miniature: bool = False
    env: dict[str, str] = field(default_factory=dict)
    pinned_bytes: int = 0  # host memory that each process pins
    # "" and None if only the machine is checked.
    benchmark: str = ""
    choice: Choice | None = None

    @property
    def config(self) -> RunConfig | None:
        """The config to check for, None if only the machine is checked."""
        return self.choice.config if self.choice else None

    @property
    def device(self) -> str:
        """Device of the measuring processes: "cpu", or "cuda" for CUDA and ROCm."""
        return "cpu" if self.kind == "CPU" else "cuda"


def main(arguments: list[str]) -> int:
    """Check the machine, and return the exit code: 0, 18 if a row refuses, 2 for bad usage."""
    return exit_code_of(lambda: examine(*benchmarks.split(arguments)))


def examine(benchmark: str, rest: list[str]) -> None:
    """Print the table. Raise PreflightError if a row refuses."""
    options = parser(benchmark).parse_args(rest)
    options.benchmark = benchmark
    if options.nodes is not None:
        examine_nodes(options, os.environ)
        return
    refuse_without("--nodes", {"--launcher": options.launcher, "--deadline": options.deadline})
    rows, ranks, facts = check(options, os.environ)
    if options.json:
        head = {"benchmark": options.benchmark, "verdict": overall(rows)}
        answer = {**head, "rows": rows, "ranks": ranks, **facts}
        print(json.dumps(answer, default=asdict, indent=1))
    else:
        print(table(rows))
    refused = [row.check for row in rows if row.verdict == "refuse"]
    if refused:
        raise PreflightError(
            f"this machine is not ready for the run: {', '.join(refused)}",
            "these checks refuse it",
            "follow the advice below the table",
        )


def parser(benchmark: str = "") -> Parser:
    """Return the argument parser of `preflight`."""
    parser = Parser(
        f"{benchmark} preflight".strip(),
        __doc__,
        ["preflight --quick", "preflight llama31_8b", "preflight --nodes host1,host2"],
    )
    which = parser.add_mutually_exclusive_group()
    add_config_option(which, benchmark, "default: selected for the GPUs found")
    which.add_argument("--miniature", action="store_true", help="check for the toy model")
    add_machine_options(parser)
    parser.variables = (*OF_CONFIG, "MODEL")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"measure each speed for {QUICK_SECONDS:g} s instead of {SECONDS:g} s",
    )
    _add_node_options(parser)
    return parser


def _add_node_options(parser: Parser) -> None:
    several = parser.add_argument_group("several nodes")
    several.add_argument(
        "--nodes", metavar="HOSTS", help="check these hosts, separated by commas, or a Slurm list"
    )
    several.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="ssh, srun, or a command with {node} in it (default: srun in a Slurm job, else ssh)",
    )
    several.add_argument(
        "--deadline",
        type=number_between(1, 7200, seconds),
        metavar="S",
        help=f"seconds for the checks of each host by itself (default: {DEADLINE_S:.0f})",
    )


def check(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[list[CheckRow], list[RankReport], dict]:
    """Return all rows, the ranks' measurements, and what `preflight --nodes` compares."""
    wanted = Request.of(options.benchmark, options, environment)
    try:
        machine = Machine.of(environment, options.device, options.gpu_kind or "")
        require_gpus(wanted, machine)
        kind = machine.kind
    except PreflightError as error:
        return (
            [
                CheckRow(
                    "GPU kind", "refuse", error.what, "unpartitioned GPUs of one kind", error.do
                )
            ],
            [],
            {},
        )
    found = machine.probe
    request = requested_run(wanted, machine)
    rows = [*request.rows]
    can_measure = True
    if request.device == "cuda":
        presence = gpus.judge_presence(kind, len(found.devices), request.kind, request.count)
        if kind and request.choice is None:
            presence[1] = gpus.judge_node(len(found.devices), node_size(ROOT, kind))
        presence.append(host.judge_torch_build(found, installed(found.driver), environment))
        presence.append(host.judge_compiler(environment))
        rows += presence
        can_measure = overall(presence) != "refuse"
    else:
        found = Probe("none")
        kind = None
    rows += host_rows(options.benchmark, request, environment)
    ranks: list[RankReport] = []
    measured_rows = [
        skipped("health and speed of the GPUs", "a row above refuses the GPUs or torch")
    ]
    if can_measure:
        ranks, measured_rows = measure(request, found, kind, options, environment)
    rows.append(host.judge_software())
    if found.driver:
        rows.append(CheckRow("driver", "ok", found.driver))
    if found.vendor == "nvidia":
        rows.append(power_settings(found))
    if kind:
        rows.append(host.judge_known_issues(kind, installed(found.driver), environment))
    rows.append(kernel_log.judge(*kernel_log.read()))
    facts = describe(request, replace(machine, probe=found), environment) if options.json else {}
    return rows + measured_rows, ranks, facts


def describe(
    request: PreflightRequest, machine: Machine, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return what `preflight --nodes` compares. Raises DataError and WeightsError."""
    gpus = machine.probe
    facts = {"commit": commit_of(ROOT) or "none"}
    if request.choice:
        data_dir, log_dir = directories(request.benchmark, request.config, environment)
        job = Job(
            benchmark=request.benchmark,
            selection=request.choice,
            machine=machine,
            data_dir=data_dir,
            log_dir=log_dir,
            environment=environment,
            node=Node(),
            save=False,
        )
        facts = node_facts(job)
    return {
        "gpus": len(gpus.devices),
        "facts": facts | machine_facts(gpus, environment),
        "hardware": hardware_facts(gpus),
        "interfaces": network.interfaces(),
        "rdma": network.rdma_ports(),
    }


def power_settings(found: Probe) -> CheckRow:
    """Return the row of boost sliders and power profiles. They are read and never set."""
    try:
        vboost = read_vboost([device.address for device in found.devices])
        return gpus.judge_power_settings(vboost, read_power_profiles())
    except DriverError as error:
        return skipped("power settings", str(error))


def requested_run(request: Request, machine: Machine) -> PreflightRequest:
    """Return the run to check for.

    Raise ConfigError for a named config that does not exist or cannot be read.
    """
    kind = machine.kind
    count = request.gpus or machine.gpus
    if not request.benchmark:
        if request.file is not None:
            raise ConfigError(
                "--config needs a benchmark",
                "every config belongs to a benchmark",
                f"add one of {', '.join(benchmarks.names())}",
            )
        row = skipped("config", "no benchmark given: only the machine is checked")
        return _request_without_config(row, kind, count)
    named = name(request, machine)
    try:
        choice = choose(request, machine)
    except (ConfigError, OutOfMemory) as error:
        if request.system or request.file or named.path.is_file():
            raise
        row = CheckRow(
            "config",
            "warn",
            f"{error.what} ({error.why})",
            "a config for this machine",
            "only the machine itself is checked",
        )
        return _request_without_config(row, kind, count)
    config = choice.config
    text = choice.derived or f"{choice.path.name}: {config.gpus_per_node} x {config.gpu}"
    rows = [CheckRow("config", "ok", text)]
    for objection in choice.objections:
        if objection.about not in ROWS_OF_THEIR_OWN:
            rows.append(_refusal(objection))
    pinned = host_bytes(config, benchmark_workload(request.benchmark, config))
    return PreflightRequest(
        kind=config.gpu,
        count=config.gpus_per_node,
        rows=tuple(rows),
        nodes=config.nodes,
        miniature=config.miniature,
        env=config.env,
        pinned_bytes=pinned,
        benchmark=request.benchmark,
        choice=choice,
    )


def _refusal(objection: Objection) -> CheckRow:
    """Return the row of an objection to the config."""
    error = objection.error
    return CheckRow(objection.about, "refuse", error.what, error.why, error.do)


def _request_without_config(row: CheckRow, kind: GpuKind | None, gpus: int) -> PreflightRequest:
    """Return the request for a check of the machine only: its `gpus`, or one process on a CPU."""
    if kind is None:
        return PreflightRequest("CPU", 1, (row,))
    return PreflightRequest(kind.name, gpus, (row,))


def host_rows(
    benchmark: str, request: PreflightRequest, environment: Mapping[str, str]
) -> list[CheckRow]:
    """Return the rows about the host: memory, limits, data, results and system settings."""
    data_dir, log_dir = directories(benchmark, request.config, environment)
    rows = host.judge(
        read_host(), request.count, request.device, request.nodes, request.pinned_bytes
    )
    if request.device == "cuda" and request.nodes > 1:
        rows.append(host.judge_rdma({**environment, **request.env}))
    if benchmark:
        rows.append(host.judge_read_folder("DATADIR", data_dir, request.miniature))
    if model_dir := of_variable(environment, "MODEL", values.folder):
        rows.append(host.judge_read_folder("MODEL", model_dir.absolute(), request.miniature))
    rows.append(host.judge_log_folder(log_dir))
    if request.device == "cuda":
        rows.append(host.judge_system_tuning())
    if benchmark in benchmarks.closed() and not request.miniature:
        rows.append(host.judge_checkout(ROOT, environment))
    return rows


# --- measurements --------------------------------------------------------------------------------


def measure(
    request: PreflightRequest,
    found: Probe,
    kind: GpuKind | None,
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> tuple[list[RankReport], list[CheckRow]]:
    """Run the measuring processes. Return their measurements, and the rows about them."""
    seconds = QUICK_SECONDS if options.quick else SECONDS
    inform(f"measuring on {request.count} x {request.kind}, {seconds:g} s for each speed ...")
    readings: list[gpus.Stats] = []  # of the driver
    unread: list[str] = []  # why there are no more readings

    def read() -> None:
        reading: gpus.Stats = []
        if kind:
            try:
                addresses = [device.address for device in found.devices]
                if not unread:
                    reading = read_gpus(found.vendor, addresses, HEALTH)
            except DriverError as error:
                unread.append(str(error))
        readings.append(reading)

    read()
    try:
        ranks = run_ranks(request, seconds, environment, read, cpus_of_ranks(found, request.count))
    except PreflightError as error:
        row = CheckRow("measuring processes", "refuse", error.what, "torch", error.do)
        return [], [row, *gpus.judge_readings(unread, found.vendor)]
    read()
    rows = [judge_ranks(ranks, request.count), *gpus.judge_readings(unread, found.vendor)]
    if rows[0].verdict == "refuse":
        rows.append(skipped("speeds", "not every process finished"))
    seen_by_torch = [rank for rank in ranks if rank.memory_bytes]
    if kind is None:
        rows.append(skipped("health of the GPUs", "the run would be on the CPU"))
    elif len(seen_by_torch) == request.count:
        is_grace = found.vendor == "nvidia" and platform.machine() == "aarch64"
        rows += health_rows(seen_by_torch, kind, readings, is_grace)
    if rows[0].verdict == "ok":
        rows.append(gpus.judge_self_test(ranks, kind, installed(found.driver)))
        rows += gpus.judge_engines(ranks)
        rows += gpus.judge_speeds(ranks, request.device, request.kind)
    return ranks, rows


def health_rows(
    ranks: Sequence[RankReport], kind: GpuKind, readings: Sequence[gpus.Stats], is_grace: bool
) -> list[CheckRow]:
    """Return the rows about the state of the GPUs.

    `readings`: of the driver before, during and after the measurements. `is_grace`: whether the CPU
    is a Grace.
    """
    under_load = [with_throttling(*pair) for pair in itertools.pairwise(readings)]
    return [
        gpus.judge_torch(ranks, kind),
        gpus.judge_memory_in_use(ranks, is_grace),
        gpus.judge_utilization(ranks, readings[0]),
        gpus.judge_errors(ranks, readings[0], readings[-1]),
        gpus.judge_throttling(ranks, under_load),
    ]


def judge_ranks(ranks: Sequence[RankReport], count: int) -> CheckRow:
    """Return a row that says whether every process finished.

    If a process reports an error, only errors are listed: one often makes the other ranks stop.
    """
    reported = {rank.rank for rank in ranks}
    failed = [f"{rank.label} in {rank.phase!r}: {rank.error}" for rank in ranks if rank.error]
    silent = [f"GPU {k} never reported" for k in range(count) if k not in reported]
    stopped = [
        f"{rank.label} stopped in {rank.phase!r}"
        for rank in ranks
        if rank.phase != "done" and not rank.error
    ]
    value = "; ".join(failed or silent or stopped)
    do = (
        "if it is out of memory, find the program that uses the GPU; otherwise see the messages "
        "above, and the kernel log for this address"
    )
    return graded(
        "measuring processes",
        value or "all finished",
        f"{count} of {count}",
        do,
        refuse=bool(value),
    )


def run_ranks(
    request: PreflightRequest,
    seconds: float,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None],
    cpus: Sequence[str] = (),
) -> list[RankReport]:
    """Run one measuring process per GPU and return the measurements.

    launch.processes.torchrun starts the processes with the config's environment, as in a run.
    `meanwhile` is called every SAMPLE_S. A rank that hangs ends itself after
    launch.preflight.rank_report.limit_s.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as name:
        folder = Path(name)
        arguments = ["-m", "launch.preflight.measure", name, request.device, str(seconds)]
        if request.config is not None:
            (folder / "config.toml").write_text(request.config.as_toml())
            arguments.append(request.benchmark)
        command = ranks_command(folder, request.count, arguments, cpus=cpus)
        # torchrun leaves an empty folder in TMPDIR.
        env = rank_environment(environment, request.env, 1) | {"TMPDIR": name}

        def sample_and_continue() -> bool:
            meanwhile()
            return False

        ending = supervise(
            command, env, folder, stop=sample_and_continue, poll_s=SAMPLE_S, stdout=sys.stderr
        )
        if ending.signal_number:
            raise Interrupted(ending.signal_number)
        if ending.returncode == PreflightError.exit_code:
            raise broken_torch()
        return read_ranks(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
