"""Check several nodes: `preflight --nodes host1,host2,...`.

1. Each node by itself, without any rendezvous: versions, kernel settings, kernel log, and the
   checks of `preflight`. A node that does not answer in time fails and delays no other.
2. Nodes that passed are compared. One that differs from most of them fails.
3. Every link, over TCP. In round d each node sends to the node that is d places further, so that
   all nodes work at the same time and none has two partners. Round 1 is the ring.
4. All-reduce and all-to-all (NCCL, RCCL, or gloo on CPUs), in pairs and then on all passing nodes.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import ConfigError, PreflightError, write_whole
from common.terminal import inform
from launch.job import PORT
from launch.preflight.check_row import CheckRow, graded, overall, skipped, table
from launch.preflight.nodes import judge, kernel_log, page
from launch.preflight.nodes.judge import Pair
from launch.preflight.nodes.remote import Remote, agent_command, at_once, close, node_names

FACTS_S = 60.0  # for an agent to start and read its facts
LISTEN_S = 15.0
PROBE_S = 60.0
# Seconds that a link or a collective is measured, and with --quick.
SECONDS = (2.0, 0.5)
COLLECTIVE_S = 180.0  # for imports, the start of the process group and both collectives
# Variables of the user that the checks of one node read, sent to all nodes.
SENT = ("DATADIR", "MODEL", "LOGDIR", "DGXSYSTEM", "DGXNGPU", "GPU_KIND", "ALLOW_KNOWN_ISSUES")


@dataclass
class Report:
    """Findings about all nodes. Rates are in Gb/s."""

    nodes: list[str]
    rows: dict[str, list[CheckRow]]  # node -> rows
    cluster: list[CheckRow] = field(default_factory=list)
    facts: dict[str, dict] = field(default_factory=dict)
    links: dict[Pair, dict] = field(default_factory=dict)  # as links.probe returns them
    pairs: dict[Pair, float] = field(default_factory=dict)  # all-reduce of two nodes
    proposal: dict[str, str] = field(default_factory=dict)
    # The user's own variables of NCCL and RCCL. They take precedence over the proposal.
    nccl: dict[str, str] = field(default_factory=dict)

    def passes(self, node: str) -> bool:
        return overall(self.rows[node]) != "refuse"

    @property
    def passing(self) -> list[str]:
        return [node for node in self.nodes if self.passes(node)]

    def reasons(self, node: str) -> list[str]:
        return [f"{row.check}: {row.value}" for row in self.rows[node] if row.verdict == "refuse"]

    @property
    def rates(self) -> dict[Pair, float]:
        """Links between passing and failing nodes that were measured -> Gb/s."""
        return {pair: link["gbit_s"] for pair, link in self.links.items() if "gbit_s" in link}

    def as_dict(self) -> dict:
        return {
            "passing": self.passing,
            "failing": {node: self.reasons(node) for node in self.nodes if not self.passes(node)},
            "rows": {node: [asdict(row) for row in rows] for node, rows in self.rows.items()},
            "cluster": [asdict(row) for row in self.cluster],
            "links": [{"from": a, "to": b, **link} for (a, b), link in self.links.items()],
            "pairs": [{"nodes": pair, "all-reduce": rate} for pair, rate in self.pairs.items()],
            "proposal": self.proposal,
            "facts": self.facts,
        }


def examine(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Check all nodes, write the files and print the result.

    Raises PreflightError if a node or the network fails, ConfigError for a wrong command line.
    """
    names = node_names(options.nodes)
    commands = {name: agent_command(options.launcher, name, environment) for name in names}
    remotes = [Remote(name, command) for name, command in commands.items()]
    try:
        report = check(remotes, options, environment)
    finally:
        close(remotes)
    write(report, options.out)
    print(json.dumps(report.as_dict(), indent=1) if options.json else text(report))
    inform(f"written to {options.out}/: passing_nodes.txt, failing_nodes.txt, nodes.html")
    failing = [node for node in names if not report.passes(node)]
    refused = [row.check for row in report.cluster if row.verdict == "refuse"]
    if failing or refused:
        raise PreflightError(
            f"not ready: {', '.join([*failing, *refused])}",
            "these nodes or checks fail",
            f"see {options.out}/nodes.html; repair the nodes, or run on passing_nodes.txt",
        )


def check(
    remotes: Sequence[Remote], options: argparse.Namespace, environment: Mapping[str, str]
) -> Report:
    """Return the report of all phases. No phase starts with a node that failed before."""
    report = Report([remote.name for remote in remotes], {remote.name: [] for remote in remotes})
    report.nccl = {
        name: value for name, value in environment.items() if name.startswith(("NCCL_", "RCCL_"))
    }

    def passing() -> list[Remote]:
        return [remote for remote in remotes if report.passes(remote.name)]

    inform(f"nodes      each of {len(remotes)} by itself, at most {options.deadline:.0f} s ...")
    check_each(report, remotes, options, environment)
    compare(report)
    seconds = SECONDS[options.quick]
    port = master_port(environment)
    if len(passing()) > 1:
        inform(f"links      {len(passing()) - 1} rounds of all {len(passing())} nodes ...")
        measure_links(report, passing(), port, seconds)
        judge_links(report)
    if len(passing()) > 1:
        inform(f"collective all-reduce and all-to-all of {len(passing())} nodes ...")
        measure_collectives(report, passing(), port, seconds)
    else:
        report.cluster.append(skipped("network", "fewer than two nodes pass"))
    return report


def master_port(environment: Mapping[str, str]) -> int:
    text = environment.get("MASTER_PORT") or str(PORT)
    if not text.isdigit() or not 0 < int(text) < 65535:
        raise ConfigError(
            f"MASTER_PORT={text} is not a valid port",
            "this port and the next one are checked",
            "choose one below 65535, or unset it",
        )
    return int(text)


def check_each(
    report: Report,
    remotes: Sequence[Remote],
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> None:
    """Ask every node for its facts, and then for the rows of its own checks."""
    arguments = [options.benchmark] if options.benchmark else []
    if options.config:
        arguments += ["--config", str(Path(options.config).absolute())]
    if options.device:
        arguments += ["--device", options.device]
    arguments += [f"--{name}" for name in ("quick", "miniature") if getattr(options, name)]
    sent = {name: environment[name] for name in SENT if name in environment}

    def ask(remote: Remote) -> dict:
        facts = remote.ask(FACTS_S, "facts")
        limit_s = options.deadline
        message = {"arguments": arguments, "environment": sent, "limit_s": limit_s}
        return {"facts": facts, "check": remote.ask(limit_s + LISTEN_S, "check", **message)}

    answers, failures = at_once(remotes, ask)
    for node, why in failures.items():
        report.rows[node].append(
            CheckRow("answer", "refuse", why, "an answer", "see whether it is up, and its sshd")
        )
    for node, answer in answers.items():
        rows = report.rows[node]
        error = answer["facts"].get("error") or answer["check"].get("error")
        rows.append(graded("answer", error or "answered", "", "see above", refuse=bool(error)))
        if error:
            continue
        facts = report.facts[node] = answer["facts"]
        if options.device == "cpu":
            facts["gpus"] = 0
        rows += [CheckRow(**row) for row in answer["check"]["rows"]]
        rows.append(kernel_log.judge(facts["kernel_log"], facts["kernel_log_unreadable"]))


def compare(report: Report) -> None:
    """Add each node's rows about versions and settings that differ from those of most nodes."""
    versions = judge.differences({node: found["versions"] for node, found in report.facts.items()})
    settings = judge.differences({node: found["settings"] for node, found in report.facts.items()})
    for node in report.facts:
        report.rows[node].append(judge.judge_differences("versions", versions[node], refuse=True))
        report.rows[node].append(
            judge.judge_differences("kernel settings", settings[node], refuse=False)
        )


# --- links ----------------------------------------------------------------------------------------


def measure_links(report: Report, remotes: Sequence[Remote], port: int, seconds: float) -> None:
    """Measure every link between the nodes, in both directions."""
    ports = [port, port + 1]
    listeners, failures = at_once(remotes, lambda r: r.ask(LISTEN_S, "listen", ports=ports))
    for node, listener in listeners.items():
        used = "; ".join(f"{p}: {why}" for p, why in listener.get("errors", {}).items())
        if used or "error" in listener:
            failures[node] = used or listener["error"]
    for node, why in failures.items():
        do = "end the program that listens there, or set another MASTER_PORT"
        report.rows[node].append(CheckRow("MASTER_PORT", "refuse", why, f"{ports} are free", do))
    ready = [remote for remote in remotes if remote.name not in failures]
    targets: dict[str, Remote] = {}

    def probe(remote: Remote) -> dict:
        target = targets[remote.name]
        free_port = listeners[target.name]["free_port"]
        message = {"host": target.host, "ports": ports, "free_port": free_port}
        return remote.ask(PROBE_S, "probe", **message, seconds=seconds)

    for distance in range(1, len(ready)):
        for at, remote in enumerate(ready):
            targets[remote.name] = ready[(at + distance) % len(ready)]
        answers, failures = at_once([r for r in ready if report.passes(r.name)], probe)
        for node, answer in answers.items():
            report.links[node, targets[node].name] = answer
        for node, why in failures.items():
            report.rows[node].append(CheckRow("answer", "refuse", why, "an answer", ""))


def judge_links(report: Report) -> None:
    """Add the rows about ports, clocks, and speed of the links, to each node and to all."""
    nodes = list(dict.fromkeys(node for pair in report.links for node in pair))
    why = judge.unreachable(report.links)
    culprits = judge.blamed(why, nodes)
    slow = judge.judge_links("links", report.rates, nodes)
    for node in nodes:
        report.rows[node].append(judge.judge_ports(node, culprits, why))
        report.rows[node].append(judge.judge_clock(node, report.links))
        report.rows[node].append(slow[node])
    interfaces = {
        start: link["interface"] for (start, _), link in report.links.items() if "address" in link
    }
    speeds = [
        report.facts[node]["interfaces"].get(name, {}).get("gbit_s", 0)
        for node, name in interfaces.items()
    ]
    interface = next(iter(interfaces.values()), "")
    passing = {node: report.facts[node] for node in report.passing}
    used = {node: interfaces.get(node, "") for node in passing}
    report.proposal, rows = judge.proposal(passing, used)
    report.cluster += rows
    report.cluster.append(judge.judge_ring(report.rates, nodes))
    speed = min(speeds, default=0)
    report.cluster.append(judge.judge_interface_speed(report.rates, speed, interface))


# --- collectives ----------------------------------------------------------------------------------


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return all pairs of nodes, in rounds in which no node is in two pairs.

    The circle method: the first node stays, the others move on by one place each round.
    """
    places: list[str] = list(nodes) + [""] * (len(nodes) % 2)  # "" is a round off
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([pair for pair in facing if all(pair)])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure_collectives(
    report: Report, remotes: Sequence[Remote], port: int, seconds: float
) -> None:
    """Measure all-reduce of each pair, then both collectives on all nodes that still pass."""
    by_name = {remote.name: remote for remote in remotes}
    why: dict[Pair, str] = {}
    if len(remotes) > 2:
        for pairs in rounds(list(by_name)):
            groups = [[by_name[node] for node in pair] for pair in pairs]
            for pair, answer in zip(pairs, collective(report, groups, port, seconds), strict=True):
                if "error" in answer:
                    why[pair] = answer["error"]
                else:
                    report.pairs[pair] = answer["rates"]["all-reduce"]
        culprits = judge.blamed(why, list(by_name))
        slow = judge.judge_links("all-reduce in pairs", report.pairs, list(by_name))
        for node in by_name:
            pairs = culprits.get(node, [])
            value = "; ".join(f"{a} with {b}: {why[a, b]}" for a, b in pairs)
            row = CheckRow("all-reduce in pairs", "refuse", value, "", judge.NCCL_LOG)
            report.rows[node].append(row if pairs else slow[node])
    group = [remote for remote in remotes if report.passes(remote.name)]
    if len(group) < 2:
        report.cluster.append(skipped("all-reduce", "fewer than two nodes pass"))
        return
    [answer] = collective(report, [group], port, seconds)
    if "error" in answer:
        report.cluster.append(CheckRow("all-reduce", "refuse", answer["error"], "", judge.NCCL_LOG))
        return
    gpus = report.facts[group[0].name]["gpus"]
    limit = link_gbit_s(report, [remote.name for remote in group])
    for name, rate in answer["rates"].items():
        report.cluster.append(judge.judge_collective(name, rate, len(group), gpus, limit))


def link_gbit_s(report: Report, nodes: Sequence[str]) -> float:
    """Return the rate of a node's links: its RDMA ports with GPUs, or else TCP as measured."""
    rdma = [sum(port["gbit_s"] for port in report.facts[node]["rdma"].values()) for node in nodes]
    if report.facts[nodes[0]]["gpus"] and min(rdma) > 0:
        return min(rdma)
    return min(
        (rate for (a, b), rate in report.rates.items() if a in nodes and b in nodes), default=0.0
    )


def collective(
    report: Report, groups: Sequence[Sequence[Remote]], port: int, seconds: float
) -> list[dict]:
    """Run the collectives in all groups at the same time.

    Return the answer of each group's first node, or {"error"} with the reasons of all its nodes.
    """
    member = {remote.name: (group, at) for group in groups for at, remote in enumerate(group)}

    def ask(remote: Remote) -> dict:
        group, rank = member[remote.name]
        interface = report.proposal.get("NCCL_SOCKET_IFNAME", "")
        variables = {"MASTER_ADDR": group[0].host, "MASTER_PORT": str(port), **report.proposal}
        variables |= report.nccl
        if interface:
            variables["GLOO_SOCKET_IFNAME"] = interface.removeprefix("=")
        return remote.ask(
            COLLECTIVE_S + LISTEN_S,
            "collective",
            rank=rank,
            nodes=len(group),
            gpus=report.facts[remote.name]["gpus"],
            environment=variables,
            seconds=seconds,
            limit_s=COLLECTIVE_S,
        )

    answers, failures = at_once([remote for group in groups for remote in group], ask)
    for node, why in failures.items():
        report.rows[node].append(CheckRow("answer", "refuse", why, "an answer", ""))
    results = []
    for group in groups:
        names = [remote.name for remote in group]
        errors = []
        for name in names:
            if error := failures.get(name) or answers[name].get("error"):
                errors.append(f"{name}: {error}")
        results.append({"error": "; ".join(errors)} if errors else answers[names[0]])
    return results


# --- results --------------------------------------------------------------------------------------


def write(report: Report, folder: Path) -> None:
    """Write the lists of nodes, the page and everything as JSON. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    failing = [node for node in report.nodes if not report.passes(node)]
    passing_lines = [f"{node}\n" for node in report.passing]
    failing_lines = [f"{node}\t{'; '.join(report.reasons(node))}\n" for node in failing]
    files = {
        "passing_nodes.txt": "".join(passing_lines),
        "failing_nodes.txt": "".join(failing_lines),
        "nodes.json": json.dumps(report.as_dict(), indent=1),
        "nodes.html": page.page(report.as_dict()),
    }
    for name, content in files.items():
        write_whole(folder / name, content.encode())


def text(report: Report) -> str:
    """Return the result as text: a line for each node, its warnings, and the network's table."""
    lines = []
    for node in report.nodes:
        lines.append(f"{'PASS' if report.passes(node) else 'FAIL'}  {node}")
        lines += [f"      {reason}" for reason in report.reasons(node)]
        warnings = [row for row in report.rows[node] if row.verdict == "warn"]
        lines += [f"      warn: {row.check}: {row.value}" for row in warnings]
    proposed = [f"export {name}={shlex.quote(value)}" for name, value in report.proposal.items()]
    return "\n".join([*lines, "", table(report.cluster), *proposed])
