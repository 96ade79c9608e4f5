"""Check several nodes: `preflight --nodes host1,host2,...`.

1. Run `preflight --json` on each node. A node that does not answer in time delays no other node.
2. Compare the answers. A node fails if its facts differ from the most common ones.
3. Measure all-reduce on the nodes that pass, in pairs and on all of them (all_reduce.py).
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from common.errors import PreflightError
from common.terminal import inform
from common.variables import Use, select
from launch.job import PORT
from launch.preflight.check_row import VERDICTS, CheckRow, overall, skipped, table
from launch.preflight.nodes import compare
from launch.preflight.nodes.start import Ended, command_on, launcher_words, node_names, run_on_nodes

SECONDS = 2.0  # for which each all-reduce is measured
QUICK_SECONDS = 0.5  # the same with --quick
DEADLINE_S = 600.0  # default of --deadline
START_S = 120.0  # for imports and the start of the process group
PAIR_S = 60.0  # for each all-reduce


def examine(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Check all nodes and print the result.

    Raises PreflightError if a node or the network fails, ConfigError for a wrong command line.
    """
    check = NodesCheck(options, environment)
    check.ask()
    check.compare()
    if len(check.passing()) > 1:
        check.measure()
    else:
        check.network.append(skipped("all-reduce", "fewer than two nodes pass"))
    print(json.dumps(check.as_dict(), indent=1) if options.json else check.table())
    check.require_pass()


class NodesCheck:
    """The nodes of one command and what is known about them."""

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str]):
        self.options = options
        self.environment = environment
        self.launcher = launcher_words(options.launcher or "", environment)
        self.rows: dict[str, list[CheckRow]] = {node: [] for node in node_names(options.nodes)}
        self.answers: dict[str, dict] = {}  # node -> answer of `preflight --json`
        self.network: list[CheckRow] = []
        self.all_reduce: list[dict] = []  # nodes and Gb/s of each measurement
        self.proposal: dict[str, str] = {}  # variables for NCCL and RCCL

    def passing(self) -> list[str]:
        """Return the nodes that no row refuses."""
        return [node for node, rows in self.rows.items() if overall(rows) != "refuse"]

    def ask(self) -> None:
        """Run `preflight --json` on all nodes, and keep the answer and the rows of each."""
        benchmark = filter(None, [self.options.benchmark])
        arguments = ["-m", "launch.preflight", *benchmark, "--json", *self._options_of_a_node()]
        sent = select(Use.NODES, self.environment)
        limit_s = self.options.deadline or DEADLINE_S
        inform(f"nodes      checking {len(self.rows)}, each for at most {limit_s:.0f} s ...")
        commands = {
            node: command_on(node, self.launcher, arguments, sent, limit_s) for node in self.rows
        }
        for node, ended in run_on_nodes(commands, limit_s).items():
            try:
                # A login shell may print a banner before the answer.
                answer = json.loads(ended.output[ended.output.index('{\n "benchmark"') :])
            except ValueError:
                do = f"check the node, and that {self.launcher[0]} needs no password"
                row = CheckRow("answer", "refuse", ended.reason, f"within {limit_s:.0f} s", do)
                self.rows[node].append(row)
                continue
            self.answers[node] = answer
            self.rows[node] += [CheckRow(**row) for row in answer["rows"]]

    def compare(self) -> None:
        """Add each node's rows about facts that differ from the most common ones."""
        for check, key, refuse in (
            ("software, GPUs and data", "facts", True),
            ("firmware, clocks and links", "hardware", False),
        ):
            facts = {node: answer.get(key, {}) for node, answer in self.answers.items()}
            for node, row in compare.judge_differences(check, facts, refuse).items():
                self.rows[node].append(row)

    def measure(self) -> None:
        """Measure all-reduce with the variables proposed for NCCL, and add the rows about both."""
        nodes = self.passing()
        interfaces = {node: self.answers[node]["interfaces"] for node in nodes}
        rdma = {node: self.answers[node]["rdma"] for node in nodes}
        self.proposal, rows = compare.propose(
            interfaces, rdma, bool(self.answers[nodes[0]]["gpus"])
        )
        self.network += rows
        inform(f"all-reduce measuring on {len(nodes)} nodes ...")
        limit_s = START_S + PAIR_S * (len(nodes) + 1)
        commands = self.all_reduce_commands(nodes, limit_s)
        self.read_results(nodes, run_on_nodes(commands, limit_s, together=True))
        pairs = {}
        for result in self.all_reduce:
            if len(result["nodes"]) < len(nodes):
                pairs[tuple(result["nodes"])] = result["gbit_s"]
                continue
            ports = [sum(port["gbit_s"] for port in own.values()) for own in rdma.values()]
            limit = min(ports) if self.answers[nodes[0]]["gpus"] else 0.0
            row = compare.judge_all_reduce(result["gbit_s"], len(nodes), limit)
            self.network.append(row)
        for node, row in compare.judge_pairs(pairs, nodes).items():
            self.rows[node].append(row)

    def all_reduce_commands(self, nodes: list[str], limit_s: float) -> dict[str, list[str]]:
        """Return node -> torchrun command of all_reduce.py.

        The user's own variables take precedence over the proposal.
        """
        first = self.answers[nodes[0]]
        gpus = first["gpus"]
        own = select(Use.NODES, self.environment)
        variables = {**self.proposal, "OMP_NUM_THREADS": "1", **own}
        address = nodes[0].rpartition("@")[2]  # without ssh's user
        if names := variables.get("NCCL_SOCKET_IFNAME", "").lstrip("="):
            variables["GLOO_SOCKET_IFNAME"] = names
            interface = first["interfaces"].get(names.split(",")[0], {})
            address = interface.get("address", "").partition("/")[0] or address
        seconds = QUICK_SECONDS if self.options.quick else SECONDS
        torchrun = {
            "--nnodes": len(nodes),
            "--nproc-per-node": max(gpus, 1),
            "--rdzv-conf": f"timeout={START_S:.0f}",
            "--master-addr": address,
            "--master-port": self.environment.get("MASTER_PORT") or PORT,
        }
        commands = {}
        for rank, node in enumerate(nodes):
            arguments = ["-m", "torch.distributed.run", "--node-rank", str(rank)]
            for option, value in torchrun.items():
                arguments += [option, str(value)]
            arguments += ["-m", "launch.preflight.nodes.all_reduce"]
            arguments += ["cuda" if gpus else "cpu", str(seconds)]
            commands[node] = command_on(node, self.launcher, arguments, variables, limit_s)
        return commands

    def read_results(self, nodes: list[str], ended: Mapping[str, Ended]) -> None:
        """Keep the measurements that all_reduce.py printed, and add a row if it failed."""
        last: list[str] = []  # nodes of the last measurement that began
        for line in ended[nodes[0]].output.splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                last = [nodes[rank] for rank in result["nodes"]]
                if "gbit_s" in result:
                    self.all_reduce.append({**result, "nodes": last})
        reasons = [f"{node}: {end.reason}" for node, end in ended.items() if end.exit_code != 0]
        if reasons:
            check = f"all-reduce ({', '.join(last or nodes)})"
            row = CheckRow(check, "refuse", "; ".join(reasons), "", compare.NCCL_LOG)
            self.network.append(row)

    def as_dict(self) -> dict:
        """Return the result for --json."""
        return {
            "passing": self.passing(),
            "rows": {node: [asdict(row) for row in rows] for node, rows in self.rows.items()},
            "network": [asdict(row) for row in self.network],
            "all_reduce": self.all_reduce,
            "proposal": self.proposal,
        }

    def table(self) -> str:
        """Return the table: each node, what is wrong on which nodes, and the network."""
        rows = []
        nodes_of: dict[CheckRow, list[str]] = {}
        for node, own in self.rows.items():
            counts = Counter(row.verdict for row in own)
            text = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
            rows.append(CheckRow(node, overall(own), text))
            for row in own:
                if row.verdict in ("warn", "refuse"):
                    nodes_of.setdefault(row, []).append(node)
        for row, nodes in nodes_of.items():
            where = "all nodes" if len(nodes) == len(self.rows) else ", ".join(nodes)
            rows.append(replace(row, check=f"{row.check} ({where})"))
        return table([*rows, *self.network])

    def _options_of_a_node(self) -> list[str]:
        """Return the options of this command that each node's `preflight` gets."""
        options = self.options
        config = options.config and Path(options.config).absolute()
        values = {"--config": config, "--device": options.device, "--gpu-kind": options.gpu_kind}
        flags = {"--quick": options.quick, "--miniature": options.miniature}
        words = [text for name, value in values.items() if value for text in (name, str(value))]
        return words + [flag for flag, is_set in flags.items() if is_set]

    def require_pass(self) -> None:
        """Raise PreflightError if a node or the network fails."""
        passing = self.passing()
        failing = [node for node in self.rows if node not in passing]
        failing += [row.check for row in self.network if row.verdict == "refuse"]
        do = "follow the advice below the table"
        if 1 < len(passing) < len(self.rows):
            words = ["./run_and_time.sh", *filter(None, [self.options.benchmark]), "preflight"]
            if self.options.launcher:
                words += ["--launcher", self.options.launcher]
            words += ["--nodes", ",".join(passing), *self._options_of_a_node()]
            do += f"; to go on without the nodes that fail: {shlex.join(words)}"
        if failing:
            raise PreflightError(
                f"not ready: {', '.join(failing)}", "these nodes or network checks fail", do
            )
