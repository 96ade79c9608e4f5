"""Judgments of several nodes: differences, clocks, ports and links. Nothing is measured here.

The limits of speed are chosen, not measured: 8 healthy links of one fabric differ by a few percent.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from launch.preflight.check_row import CheckRow, graded, skipped, worst

Pair = tuple[str, str]  # a link: from, to
CLOCK_S = (0.1, 10.0)  # difference of clocks: warn, refuse
SLOW = (0.2, 0.5)  # loss of a link against the others: warn, refuse
# TCP fills links up to this speed with a few streams. Faster ones are for RDMA.
TCP_GBIT_S = 25.0
NCCL_LOG = "repeat it with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p, and read that file"
COLLECTIVE = (0.5, 0.8)  # loss of a collective against the links: warn, refuse


def usual(values: Iterable[str]) -> str:
    """Return the most common value; of equally common ones, the first node's."""
    return Counter(values).most_common(1)[0][0]


def differences(facts: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Pair]]:
    """Return node -> name -> (value there, value on most nodes), where they differ.

    `facts`: node -> name -> value.
    """
    names = dict.fromkeys(name for values in facts.values() for name in values)
    found: dict[str, dict[str, Pair]] = {node: {} for node in facts}
    for name in names:
        most = usual(values.get(name, "") for values in facts.values())
        for node, values in facts.items():
            if (here := values.get(name, "")) != most:
                found[node][name] = (here, most)
    return found


def judge_differences(check: str, different: Mapping[str, Pair], refuse: bool) -> CheckRow:
    """Judge one node's values that differ from those of most nodes."""
    value = "; ".join(
        f"{name} {here or 'missing'} (others: {most or 'missing'})"
        for name, (here, most) in different.items()
    )
    return graded(
        check,
        value or "as on the other nodes",
        "equal on all nodes",
        "make it equal to the other nodes",
        refuse=bool(different) and refuse,
        warn=bool(different),
    )


def judge_clock(node: str, links: Mapping[Pair, Mapping]) -> CheckRow:
    """Judge this node's clock against the median of the others, by the pings between them."""
    ahead = []
    for (start, to), link in links.items():
        if "clock_s" in link and to == node:
            ahead.append(link["clock_s"])
        elif "clock_s" in link and start == node:
            ahead.append(-link["clock_s"])
    expected = f"within {CLOCK_S[0]:g} s of the other nodes"
    if not ahead:
        return skipped("clock", "no link to another node", expected)
    offset = statistics.median(ahead)
    verdict = worst(abs(offset), CLOCK_S)
    do = "" if verdict == "ok" else "start chrony or another time service on this node"
    return CheckRow("clock", verdict, f"{offset * 1e3:+.3f} ms", expected, do)


def blamed(bad: Iterable[Pair], nodes: Sequence[str]) -> dict[str, list[Pair]]:
    """Attribute bad links to as few nodes as possible: node -> its bad links.

    The node with the most bad links is blamed first, then the one with the most of those left. Of
    equal ones it is the node that is sent to, then the later one: with two nodes nobody can tell.
    """
    left = set(bad)
    found = {}
    while left:
        worst_node = max(
            nodes,
            key=lambda node: (
                sum(node in pair for pair in left),
                sum(node == pair[1] for pair in left),
                nodes.index(node),
            ),
        )
        found[worst_node] = sorted(pair for pair in left if worst_node in pair)
        left -= set(found[worst_node])
    return found


def unreachable(links: Mapping[Pair, Mapping]) -> dict[Pair, str]:
    """Return the links with a port that cannot be reached -> which port, and why."""
    found = {}
    for pair, link in links.items():
        reasons = [f"port {port}: {why}" for port, why in link.get("port_errors", {}).items()]
        if "error" in link:
            reasons.append(f"any port: {link['error']}")
        if reasons:
            found[pair] = ", ".join(reasons)
    return found


def judge_ports(node: str, culprits: Mapping[str, list[Pair]], why: Mapping[Pair, str]) -> CheckRow:
    """Judge whether this node's ports are reachable, and whether it reaches those of others."""
    pairs = culprits.get(node, [])
    links: dict[str, list[str]] = {}
    for start, to in pairs:
        links.setdefault(why[start, to], []).append(f"{start} -> {to}")
    value = "; ".join(f"{reason} ({', '.join(found)})" for reason, found in links.items())
    do = "open MASTER_PORT, the next port and the kernel's free ports in the firewall of this node"
    return graded("ports", value or "reachable", "reachable", do, refuse=bool(pairs))


def usual_rate(rates: Mapping[Pair, float]) -> float:
    """Return the rate of a healthy link: the median over nodes of each node's best link.

    The median of all links would be a slow one as soon as one node of three is slow.
    """
    nodes = {node for pair in rates for node in pair}
    best = [max(rate for pair, rate in rates.items() if node in pair) for node in nodes]
    return statistics.median_high(best) if best else 0.0


def judge_links(
    check: str, rates: Mapping[Pair, float], nodes: Sequence[str]
) -> dict[str, CheckRow]:
    """Judge each node's links (Gb/s) against the usual link: node -> row."""
    healthy = usual_rate(rates)
    expected = f"{(1 - SLOW[0]) * healthy:.2f} Gb/s or more, usual {healthy:.2f}"
    do = "check cable, switch port, speed and errors of this node's interface (ethtool)"
    bad: dict[str, set[Pair]] = {"refuse": set(), "warn": set()}
    for pair, rate in rates.items():
        if (verdict := worst(1 - rate / healthy, SLOW)) != "ok":
            bad[verdict].add(pair)
    culprits = {verdict: blamed(pairs, nodes) for verdict, pairs in bad.items()}
    rows = {}
    for node in nodes:
        own = {pair: rate for pair, rate in rates.items() if node in pair}
        fine = [rate for pair, rate in own.items() if pair not in bad["refuse"] | bad["warn"]]
        if not own:
            rows[node] = skipped(check, "not measured", expected)
            continue
        value = f"slowest {min(fine):.2f} Gb/s" if fine else "only links to slow nodes"
        rows[node] = CheckRow(check, "ok", value, expected)
        for verdict in ("warn", "refuse"):
            if pairs := culprits[verdict].get(node):
                value = ", ".join(f"{a} -> {b} {rates[a, b]:.2f} Gb/s" for a, b in pairs)
                rows[node] = CheckRow(check, verdict, value, expected, do)
    return rows


def judge_interface_speed(
    rates: Mapping[Pair, float], speed_gbit_s: float, interface: str
) -> CheckRow:
    """Judge the usual TCP rate against the speed that the interface reports."""
    check = "TCP against the interface"
    usual_gbit_s = usual_rate(rates)
    if not speed_gbit_s:
        return skipped(check, f"{interface or 'the interface'} reports no speed")
    value = f"{usual_gbit_s:.2f} Gb/s of {speed_gbit_s:g} Gb/s ({interface})"
    if speed_gbit_s > TCP_GBIT_S:
        return skipped(check, f"{value}: TCP does not fill more than {TCP_GBIT_S:g} Gb/s")
    return graded(
        check,
        value,
        "half of the interface's speed or more",
        "check MTU, offloads and the switch",
        warn=usual_gbit_s < speed_gbit_s / 2,
    )


def judge_ring(rates: Mapping[Pair, float], nodes: Sequence[str]) -> CheckRow:
    """Name the slowest link of the ring, whose links were all loaded at the same time."""
    ring = [(node, nodes[(at + 1) % len(nodes)]) for at, node in enumerate(nodes)]
    measured = {pair: rates[pair] for pair in ring if pair in rates}
    if not measured:
        return skipped("ring", "no link of it was measured")
    slowest = min(measured, key=lambda pair: measured[pair])
    healthy = usual_rate(rates)
    verdict = "ok" if worst(1 - measured[slowest] / healthy, SLOW) == "ok" else "warn"
    value = f"slowest link {slowest[0]} -> {slowest[1]}, {measured[slowest]:.2f} Gb/s"
    expected = f"{(1 - SLOW[0]) * healthy:.2f} Gb/s or more"
    return CheckRow("ring", verdict, value, expected)


def judge_collective(name: str, rate: float, nodes: int, gpus: int, link_gbit_s: float) -> CheckRow:
    """Judge the bus bandwidth of a collective on all nodes, in Gb/s, against a node's links.

    An all-reduce of a ring carries its bus bandwidth over each node's links. Of an all-to-all of n
    ranks, g on a node, each GPU sends (n - g) / (n - 1) of its bus bandwidth to other nodes.
    """
    ranks = nodes * max(gpus, 1)
    most = link_gbit_s
    if name == "all-to-all":
        local = max(gpus, 1)
        most = link_gbit_s * (ranks - 1) / (local * (ranks - local))
    value = f"{rate:.2f} Gb/s bus bandwidth, {nodes} nodes"
    verdict = worst(1 - rate / most, COLLECTIVE) if most else "skipped"
    do = "" if verdict in ("ok", "skipped") else NCCL_LOG
    return CheckRow(name, verdict, value, f"links: {most:.2f} Gb/s" if most else "", do)


def proposal(
    facts: Mapping[str, Mapping], interfaces: Mapping[str, str]
) -> tuple[dict[str, str], list[CheckRow]]:
    """Return the variables proposed for NCCL and RCCL, and the rows about them.

    `facts`: node -> facts of the agent. `interfaces`: node -> interface that its links used.
    """
    devices = {}
    for node, found in facts.items():
        fastest = max((port["gbit_s"] for port in found["rdma"].values()), default=0)
        names = [name for name, port in found["rdma"].items() if port["gbit_s"] == fastest]
        devices[node] = ",".join(names)
    variables = {}
    rows = []
    for check, variable, chosen in (
        ("interface", "NCCL_SOCKET_IFNAME", interfaces),
        ("RDMA devices", "NCCL_IB_HCA", devices),
    ):
        values = {value for value in chosen.values() if value}
        each = "; ".join(f"{node} {value or 'none'}" for node, value in chosen.items())
        if not values:
            rows.append(skipped(check, "none found: NCCL would use TCP" if devices else "unknown"))
        elif len(set(chosen.values())) == 1:
            variables[variable] = "=" + values.pop()
            rows.append(CheckRow(check, "ok", f"{variable}={variables[variable]}"))
        else:
            do = f"set {variable} on each node by itself, or give the devices equal names"
            rows.append(CheckRow(check, "warn", each, "equal on all nodes", do))
    return variables, rows
