"""Check several nodes: `preflight --nodes host1,host2,...`.

1. Check each node by itself, without any rendezvous: versions, kernel settings, kernel log, and the
   rows of `preflight`. A node that does not answer in time fails and delays no other node.
2. Compare the nodes. A node whose versions differ from those of most nodes fails.
3. Measure every link over TCP. In round d, each node sends to the node d places further in the
   list, so all nodes are busy and none receives from two others. Round 1 is the ring.
4. Measure all-reduce and all-to-all (NCCL, RCCL, or gloo on CPUs), first in pairs of nodes, then on
   all passing nodes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import ConfigError, PreflightError
from common.terminal import inform
from launch.job import PORT
from launch.preflight.check_row import CheckRow, skipped
from launch.preflight.nodes import judge, kernel_log, under_torchrun
from launch.preflight.nodes.judge import Pair
from launch.preflight.nodes.remote import Remote, agent_command, at_once, close, node_names
from launch.preflight.nodes.report import Report, text, write

# Time limits in seconds.
FACTS_S = 60.0  # for an agent to start and read its facts
LISTEN_S = 15.0  # for an agent to start its listener, or to answer after its own limit
PROBE_S = 60.0  # for the measurement of a link
COLLECTIVE_S = 180.0  # for imports, the start of the process group and both collectives
SECONDS = 2.0  # for which each link and each collective is measured
QUICK_SECONDS = 0.5  # the same with --quick
# Advice for a node that does not answer.
NO_ANSWER = "check that the node runs, and that ssh or --launcher reaches it without a password"
# Variables of the user that the checks of one node read. They are sent to all nodes.
SENT_VARIABLES = (
    "DATADIR",
    "MODEL",
    "LOGDIR",
    "DGXSYSTEM",
    "DGXNGPU",
    "GPU_KIND",
    "ALLOW_KNOWN_ISSUES",
)


def examine(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Check all nodes, print the result and write the files.

    Raises PreflightError if a node or the network fails, ConfigError for a wrong command line.
    """
    names = node_names(options.nodes)
    if under_torchrun.is_rank(environment) and environment["RANK"] != "0":
        under_torchrun.serve(names, environment)
        return
    commands = {name: agent_command(options.launcher, name, environment) for name in names}
    remotes = [Remote(name, command) for name, command in commands.items()]
    try:
        report = check(remotes, options, environment)
    finally:
        close(remotes)
    # Print first: the result of minutes is not lost if the files cannot be written.
    print(json.dumps(report.as_dict(), indent=1) if options.json else text(report), flush=True)
    write(report, options.out)
    inform(
        f"written to {options.out}/: passing_nodes.txt, failing_nodes.txt, nodes.html, nodes.json"
    )
    failing = [node for node in names if not report.passes(node)]
    refused = [row.check for row in report.cluster if row.verdict == "refuse"]
    if failing or refused:
        raise PreflightError(
            f"not ready: {', '.join([*failing, *refused])}",
            "these nodes or network checks fail",
            f"follow the advice above or in {options.out}/nodes.html, or run on the nodes in "
            "passing_nodes.txt",
        )


def check(
    remotes: Sequence[Remote], options: argparse.Namespace, environment: Mapping[str, str]
) -> Report:
    """Return the report of all phases. No phase starts with a node that failed before."""
    nodes = [remote.name for remote in remotes]
    report = Report(nodes, {node: [] for node in nodes})
    for name, value in environment.items():
        if name.startswith(("NCCL_", "RCCL_")):
            report.nccl[name] = value

    def passing() -> list[Remote]:
        return [remote for remote in remotes if report.passes(remote.name)]

    inform(f"nodes      checking {len(remotes)}, each for at most {options.deadline:.0f} s ...")
    check_each(report, remotes, options, environment)
    compare(report)
    seconds = QUICK_SECONDS if options.quick else SECONDS
    port = master_port(environment)
    if len(passing()) > 1:
        count = len(passing())
        inform(f"links      measuring between {count} nodes in {count - 1} rounds ...")
        measure_links(report, passing(), port, seconds)
        add_link_rows(report)
    if len(passing()) > 1:
        inform(f"collective measuring all-reduce and all-to-all on {len(passing())} nodes ...")
        measure_collectives(report, passing(), port, seconds)
    else:
        report.cluster.append(skipped("network", "fewer than two nodes pass"))
    return report


def master_port(environment: Mapping[str, str]) -> int:
    """Return MASTER_PORT or its default. Raises ConfigError if it is not a valid port.

    Under torchrun, which listens on MASTER_PORT, the port after the next one is returned.
    """
    text = environment.get("MASTER_PORT") or str(PORT)
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise ConfigError(
            f"MASTER_PORT={text} is not a valid port",
            "this port and the next one are checked",
            "choose one below 65535, or unset it",
        )
    if under_torchrun.is_rank(environment):
        return int(text) + under_torchrun.PORT_OFFSET
    return int(text)


def check_each(
    report: Report,
    remotes: Sequence[Remote],
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> None:
    """Ask every node for its facts, and then for the rows of its own checks. Add them to `report`.

    All nodes work at the same time.
    """
    arguments = [options.benchmark] if options.benchmark else []
    if options.config:
        arguments += ["--config", str(Path(options.config).absolute())]
    if options.device:
        arguments += ["--device", options.device]
    if options.quick:
        arguments.append("--quick")
    if options.miniature:
        arguments.append("--miniature")
    sent = {name: environment[name] for name in SENT_VARIABLES if name in environment}

    def ask(remote: Remote) -> dict:
        facts = remote.ask(FACTS_S, "facts")
        limit_s = options.deadline
        rows = remote.ask(
            limit_s + LISTEN_S, "check", arguments=arguments, environment=sent, limit_s=limit_s
        )
        return {"facts": facts, "check": rows}

    answers, failures = at_once(remotes, ask)
    for node, why in failures.items():
        report.rows[node].append(CheckRow("connection", "refuse", why, "an answer", NO_ANSWER))
    for node, answer in answers.items():
        rows = report.rows[node]
        rows.append(CheckRow("connection", "ok", "answered"))
        error = answer["facts"].get("error") or answer["check"].get("error")
        if error:
            do = "run preflight on this node by itself, which prints all its messages"
            rows.append(CheckRow("preflight", "refuse", error, "", do))
            continue
        facts = answer["facts"]
        report.facts[node] = facts
        if options.device == "cpu":
            facts["gpus"] = 0
        rows += [CheckRow(**row) for row in answer["check"]["rows"]]
        rows.append(kernel_log.judge(facts["kernel_log"], facts["kernel_log_unreadable"]))


def compare(report: Report) -> None:
    """Add each node's rows about versions and settings that differ from those of most nodes."""
    versions = judge.differences({node: facts["versions"] for node, facts in report.facts.items()})
    settings = judge.differences({node: facts["settings"] for node, facts in report.facts.items()})
    for node in report.facts:
        report.rows[node].append(judge.judge_differences("versions", versions[node], refuse=True))
        report.rows[node].append(
            judge.judge_differences("kernel settings", settings[node], refuse=False)
        )


# --- links ----------------------------------------------------------------------------------------


def measure_links(report: Report, remotes: Sequence[Remote], port: int, seconds: float) -> None:
    """Measure every link between the nodes, in both directions."""
    ports = [port, port + 1]
    listeners, failures = at_once(
        remotes, lambda remote: remote.ask(LISTEN_S, "listen", ports=ports)
    )
    for node, listener in listeners.items():
        errors = listener.get("errors", {})
        used = "; ".join(f"{used_port}: {why}" for used_port, why in errors.items())
        if used or "error" in listener:
            failures[node] = used or listener["error"]
    for node, why in failures.items():
        do = "end the program that listens there, or set another MASTER_PORT"
        report.rows[node].append(CheckRow("MASTER_PORT", "refuse", why, f"{ports} are free", do))
    ready = [remote for remote in remotes if remote.name not in failures]
    targets: dict[str, Remote] = {}  # node -> the node that it sends to in this round

    def probe(remote: Remote) -> dict:
        target = targets[remote.name]
        free_port = listeners[target.name]["free_port"]
        return remote.ask(
            PROBE_S, "probe", host=target.host, ports=ports, free_port=free_port, seconds=seconds
        )

    for distance in range(1, len(ready)):
        for index, remote in enumerate(ready):
            targets[remote.name] = ready[(index + distance) % len(ready)]
        senders = [remote for remote in ready if report.passes(remote.name)]
        answers, failures = at_once(senders, probe)
        for node, answer in answers.items():
            report.links[node, targets[node].name] = answer
        for node, why in failures.items():
            report.rows[node].append(CheckRow("connection", "refuse", why, "an answer", NO_ANSWER))


def add_link_rows(report: Report) -> None:
    """Add the rows about ports, clocks and links: some for each node, some for the network."""
    nodes = list(dict.fromkeys(node for pair in report.links for node in pair))
    why = judge.unreachable(report.links)
    links_of_nodes = judge.links_by_node(why, nodes)
    slow = judge.judge_links("links", report.rates, nodes)
    for node in nodes:
        report.rows[node].append(judge.judge_ports(node, links_of_nodes, why))
        report.rows[node].append(judge.judge_clock(node, report.links))
        report.rows[node].append(slow[node])
    interfaces = {}  # node -> the interface over which it sends
    for (start, _), link in report.links.items():
        if "address" in link:
            interfaces[start] = link["interface"]
    speeds = []  # of these interfaces, in Gb/s; 0 if unknown
    for node, name in interfaces.items():
        facts = report.facts[node]["interfaces"].get(name, {})
        speeds.append(facts.get("gbit_s", 0))
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

    This is the circle method of round-robin tournaments: the first node stays in its place, and the
    others move on by one place each round.
    """
    places = list(nodes)
    if len(places) % 2:
        places.append("")  # the node that is paired with it pauses in this round
    half = len(places) // 2
    pairs_of_rounds = []
    for _ in range(len(places) - 1):
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        pairs_of_rounds.append([pair for pair in opposite if "" not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return pairs_of_rounds


def measure_collectives(
    report: Report, remotes: Sequence[Remote], port: int, seconds: float
) -> None:
    """Measure all-reduce of each pair, then both collectives on all nodes that still pass."""
    if len(remotes) > 2:
        measure_pairs(report, remotes, port, seconds)
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


def measure_pairs(report: Report, remotes: Sequence[Remote], port: int, seconds: float) -> None:
    """Measure all-reduce of each pair of nodes, and add a row about it to each node."""
    by_name = {remote.name: remote for remote in remotes}
    nodes = list(by_name)
    why: dict[Pair, str] = {}  # pair that failed -> error
    for pairs in rounds(nodes):
        groups = [[by_name[node] for node in pair] for pair in pairs]
        for pair, answer in zip(pairs, collective(report, groups, port, seconds), strict=True):
            if "error" in answer:
                why[pair] = answer["error"]
            else:
                report.pairs[pair] = answer["rates"]["all-reduce"]
    links_of_nodes = judge.links_by_node(why, nodes)
    rate_rows = judge.judge_links("all-reduce in pairs", report.pairs, nodes)
    for node in nodes:
        row = rate_rows[node]
        if node in links_of_nodes:
            value = "; ".join(f"{a} with {b}: {why[a, b]}" for a, b in links_of_nodes[node])
            row = CheckRow("all-reduce in pairs", "refuse", value, "", judge.NCCL_LOG)
        report.rows[node].append(row)


def link_gbit_s(report: Report, nodes: Sequence[str]) -> float:
    """Return the rate at which a node can send to others, the lowest of `nodes`.

    On GPU nodes that all have RDMA ports, it is the sum of the ports' rates, otherwise the measured
    rate over TCP.
    """
    rdma = [sum(port["gbit_s"] for port in report.facts[node]["rdma"].values()) for node in nodes]
    if report.facts[nodes[0]]["gpus"] and min(rdma) > 0:
        return min(rdma)
    tcp = [rate for (a, b), rate in report.rates.items() if a in nodes and b in nodes]
    return min(tcp, default=0.0)


def collective(
    report: Report, groups: Sequence[Sequence[Remote]], port: int, seconds: float
) -> list[dict]:
    """Run the collectives in all groups of nodes at the same time.

    Return the answer of each group's first node, or {"error"} with the reasons of all its nodes.
    """
    group_and_rank = {}
    for members in groups:
        for number, remote in enumerate(members):
            group_and_rank[remote.name] = (members, number)

    def ask(remote: Remote) -> dict:
        group, rank = group_and_rank[remote.name]
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
        report.rows[node].append(CheckRow("connection", "refuse", why, "an answer", NO_ANSWER))
    results = []
    for group in groups:
        names = [remote.name for remote in group]
        errors = []
        for name in names:
            if error := failures.get(name) or answers[name].get("error"):
                errors.append(f"{name}: {error}")
        results.append({"error": "; ".join(errors)} if errors else answers[names[0]])
    return results
