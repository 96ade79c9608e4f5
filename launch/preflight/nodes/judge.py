"""Judgments of several nodes: differences, clocks, ports and links. Nothing is measured here.

The limits for speed are our choice, not measured. They allow for healthy links of one fabric, which
differ by a few percent.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from launch.preflight.check_row import CheckRow, graded, skipped, worst

Pair = tuple[str, str]  # a link: from, to
# Limits for warn and refuse.
CLOCK_S = (0.1, 10.0)  # difference of clocks
SLOW = (0.2, 0.5)  # share by which a link is slower than the usual one
COLLECTIVE = (0.5, 0.8)  # share by which a collective is slower than the links
# A few TCP streams fill links up to this speed. Faster links are meant for RDMA.
TCP_GBIT_S = 25.0
NCCL_LOG = "repeat it with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p, and read that file"


def usual(values: Iterable[str]) -> str:
    """Return the most common value. If several are equally common, return the first of them."""
    return Counter(values).most_common(1)[0][0]


def differences(facts: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Pair]]:
    """Return node -> name -> (value on the node, value on most nodes), where the two differ.

    `facts`: node -> name -> value.
    """
    names = dict.fromkeys(name for values in facts.values() for name in values)
    different: dict[str, dict[str, Pair]] = {node: {} for node in facts}
    for name in names:
        most = usual(values.get(name, "") for values in facts.values())
        for node, values in facts.items():
            here = values.get(name, "")
            if here != most:
                different[node][name] = (here, most)
    return different


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
    """Judge this node's clock: its median difference from the others', as pings measured it."""
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


def links_by_node(bad: Iterable[Pair], nodes: Sequence[str]) -> dict[str, list[Pair]]:
    """Attribute bad links to as few nodes as possible: return node -> its bad links.

    The node with the most bad links comes first, then the one with the most of those that are left.
    If several have equally many, the one that receives over most of them is taken, or else the last
    one. With two nodes, the cause cannot be told.
    """
    left = set(bad)
    links_of: dict[str, list[Pair]] = {}

    def number_of_bad_links(node: str) -> tuple[int, int, int]:
        receiving = sum(node == to for _, to in left)
        return sum(node in pair for pair in left), receiving, nodes.index(node)

    while left:
        worst_node = max(nodes, key=number_of_bad_links)
        links_of[worst_node] = sorted(pair for pair in left if worst_node in pair)
        left -= set(links_of[worst_node])
    return links_of


def unreachable(links: Mapping[Pair, Mapping]) -> dict[Pair, str]:
    """Return, for each link with a port that cannot be reached, which port and why."""
    why_unreachable = {}
    for pair, link in links.items():
        reasons = [f"port {port}: {why}" for port, why in link.get("port_errors", {}).items()]
        if "error" in link:
            reasons.append(f"any port: {link['error']}")
        if reasons:
            why_unreachable[pair] = ", ".join(reasons)
    return why_unreachable


def judge_ports(
    node: str, links_of_nodes: Mapping[str, list[Pair]], why: Mapping[Pair, str]
) -> CheckRow:
    """Judge whether this node's ports are reachable, and whether it reaches those of others.

    `links_of_nodes`: result of `links_by_node`. `why`: result of `unreachable`.
    """
    pairs = links_of_nodes.get(node, [])
    links_by_reason: dict[str, list[str]] = {}
    for start, to in pairs:
        links_by_reason.setdefault(why[start, to], []).append(f"{start} -> {to}")
    value = "; ".join(f"{text} ({', '.join(links)})" for text, links in links_by_reason.items())
    do = "open MASTER_PORT, the next port and the kernel's free ports in the firewall of this node"
    return graded("ports", value or "reachable", "reachable", do, refuse=bool(pairs))


def usual_rate(rates: Mapping[Pair, float]) -> float:
    """Return the rate of a healthy link: the median over all nodes of each node's best rate.

    The median of all links would not do: if one of three nodes is slow, most links are slow.
    """
    nodes = {node for pair in rates for node in pair}
    best = [max(rate for pair, rate in rates.items() if node in pair) for node in nodes]
    return statistics.median_high(best) if best else 0.0


def judge_links(
    check: str, rates: Mapping[Pair, float], nodes: Sequence[str]
) -> dict[str, CheckRow]:
    """Judge each node's links against the usual rate. Return node -> row. `rates`: in Gb/s."""
    healthy = usual_rate(rates)
    expected = f"{(1 - SLOW[0]) * healthy:.2f} Gb/s or more, usual {healthy:.2f}"
    do = "check cable, switch port, speed and errors of this node's interface (ethtool)"
    bad: dict[str, set[Pair]] = {"refuse": set(), "warn": set()}
    for pair, rate in rates.items():
        verdict = worst(1 - rate / healthy, SLOW)
        if verdict != "ok":
            bad[verdict].add(pair)
    links_of_nodes = {verdict: links_by_node(pairs, nodes) for verdict, pairs in bad.items()}
    rows = {}
    for node in nodes:
        own = {pair: rate for pair, rate in rates.items() if node in pair}
        good = [rate for pair, rate in own.items() if pair not in bad["refuse"] | bad["warn"]]
        if not own:
            rows[node] = skipped(check, "not measured", expected)
            continue
        value = f"slowest {min(good):.2f} Gb/s" if good else "only links to slow nodes"
        rows[node] = CheckRow(check, "ok", value, expected)
        for verdict in ("warn", "refuse"):
            if pairs := links_of_nodes[verdict].get(node):
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
        return skipped("ring", "no link of the ring was measured")
    slowest = min(measured, key=lambda pair: measured[pair])
    healthy = usual_rate(rates)
    verdict = "ok" if worst(1 - measured[slowest] / healthy, SLOW) == "ok" else "warn"
    value = f"slowest link {slowest[0]} -> {slowest[1]}, {measured[slowest]:.2f} Gb/s"
    expected = f"{(1 - SLOW[0]) * healthy:.2f} Gb/s or more"
    return CheckRow("ring", verdict, value, expected)


def judge_collective(name: str, rate: float, nodes: int, gpus: int, link_gbit_s: float) -> CheckRow:
    """Judge the bus bandwidth of a collective on all nodes, in Gb/s, against a node's links.

    A ring all-reduce sends its bus bandwidth over each node's links. In an all-to-all of n ranks
    with g ranks per node, each rank sends (n - g) / (n - 1) of its bus bandwidth to other nodes.
    """
    local = max(gpus, 1)
    ranks = nodes * local
    most = link_gbit_s
    if name == "all-to-all":
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
    devices = {}  # node -> its fastest RDMA ports
    for node, own in facts.items():
        fastest = max((port["gbit_s"] for port in own["rdma"].values()), default=0)
        names = [name for name, port in own["rdma"].items() if port["gbit_s"] == fastest]
        devices[node] = ",".join(names)
    variables = {}
    rows = []
    # `missing`: the row's text if no node has a value.
    for check, variable, chosen, missing in (
        ("interface", "NCCL_SOCKET_IFNAME", interfaces, "none found: NCCL chooses one itself"),
        ("RDMA devices", "NCCL_IB_HCA", devices, "none found: NCCL uses TCP"),
    ):
        values = {value for value in chosen.values() if value}
        each = "; ".join(f"{node} {value or 'none'}" for node, value in chosen.items())
        if not values:
            rows.append(skipped(check, missing if chosen else "no node passes"))
        elif len(set(chosen.values())) == 1:
            variables[variable] = "=" + values.pop()
            rows.append(CheckRow(check, "ok", f"{variable}={variables[variable]}"))
        else:
            do = f"set {variable} on each node separately, or give the devices equal names"
            rows.append(CheckRow(check, "warn", each, "equal on all nodes", do))
    return variables, rows
