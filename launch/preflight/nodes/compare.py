"""Judgments of several nodes: their differences, speeds and network cards. Nothing is measured.

The limits for speed are our choice, not measured. They allow for healthy links of one fabric, which
differ by a few percent.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from launch.node_facts import differences
from launch.preflight.check_row import CheckRow, graded, skipped, worst

Pair = tuple[str, str]  # two nodes
# Limits for warn and refuse.
SLOW = (0.2, 0.5)  # share by which a node is slower than the usual one
BELOW_LINKS = (0.5, 0.8)  # share by which an all-reduce is slower than the RDMA ports
NCCL_LOG = "repeat it with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p, and read that file"


def judge_differences(
    check: str, facts: Mapping[str, Mapping[str, str]], refuse: bool
) -> dict[str, CheckRow]:
    """Return node -> row about its facts that differ from the most common ones.

    `facts`: node -> name -> value. With two nodes, the first one is right.
    """
    usual = {}
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        [(value, _)] = Counter(own.get(name) for own in facts.values()).most_common(1)
        if value is not None:
            usual[name] = value
    rows = {}
    for node, own in facts.items():
        different = differences(own, usual)
        rows[node] = graded(
            check,
            "; ".join(different) or "equal",
            "as on the other nodes",
            "make it equal to the other nodes",
            refuse=bool(different) and refuse,
            warn=bool(different),
        )
    return rows


def judge_pairs(rates: Mapping[Pair, float], nodes: Sequence[str]) -> dict[str, CheckRow]:
    """Return node -> row about its all-reduces with single other nodes. `rates`: in Gb/s.

    A node is as fast as its fastest pair: with a slow node, its neighbors have another pair.
    """
    best = {}
    for node in nodes:
        own = [rate for pair, rate in rates.items() if node in pair]
        if own:
            best[node] = max(own)
    usual = statistics.median_high(best.values()) if best else 0.0
    expected = f"{(1 - SLOW[0]) * usual:.2f} Gb/s or more, usual {usual:.2f}"
    do = "check cable, switch port, speed and errors of this node's cards (ethtool, ibstat)"
    rows = {}
    for node, rate in best.items():
        verdict = worst(1 - rate / usual, SLOW)
        advice = "" if verdict == "ok" else do
        rows[node] = CheckRow("all-reduce in pairs", verdict, f"{rate:.2f} Gb/s", expected, advice)
    return rows


def judge_all_reduce(rate: float, nodes: int, rdma_gbit_s: float) -> CheckRow:
    """Judge the all-reduce of all nodes, in Gb/s of bus bandwidth.

    A ring sends the bus bandwidth over each node's cards. `rdma_gbit_s`: the sum of the rates of a
    node's RDMA ports, 0 if they are not used.
    """
    value = f"{rate:.2f} Gb/s bus bandwidth, {nodes} nodes"
    if not rdma_gbit_s:
        return skipped("all-reduce", f"{value}, not judged: no RDMA port to compare it with")
    verdict = worst(1 - rate / rdma_gbit_s, BELOW_LINKS)
    do = "" if verdict == "ok" else NCCL_LOG
    return CheckRow("all-reduce", verdict, value, f"RDMA ports: {rdma_gbit_s:g} Gb/s", do)


# --- proposed variables ---------------------------------------------------------------------------


def common_interfaces(networks: Mapping[str, Mapping[str, Mapping]]) -> list[str]:
    """Return the fastest interfaces of one name and one IPv4 network on all nodes.

    `networks`: node -> interfaces (common/machine/network.py). Addresses must differ, and docker0's
    do not.
    """
    speeds = {}
    for name in dict.fromkeys(name for own in networks.values() for name in own):
        found = [own[name] for own in networks.values() if own.get(name, {}).get("address")]
        addresses = [ipaddress.IPv4Interface(interface["address"]) for interface in found]
        one_network = len({address.network for address in addresses}) == 1
        if one_network and len({address.ip for address in addresses}) == len(networks):
            speeds[name] = min(interface["gbit_s"] for interface in found)
    return [name for name, speed in speeds.items() if speed == max(speeds.values())]


def propose(
    networks: Mapping[str, Mapping[str, Mapping]],
    rdma: Mapping[str, Mapping[str, Mapping]],
    on_gpus: bool,
) -> tuple[dict[str, str], list[CheckRow]]:
    """Return the variables proposed for NCCL and RCCL, and the rows about them.

    `rdma`: node -> its active RDMA ports.
    """
    variables = {}
    rows = []
    if names := common_interfaces(networks):
        variables["NCCL_SOCKET_IFNAME"] = "=" + ",".join(names)
        rows.append(CheckRow("interface", "ok", f"NCCL_SOCKET_IFNAME=={','.join(names)}"))
    else:
        why = "no interface has one name and one IPv4 network on all nodes: NCCL chooses itself"
        rows.append(skipped("interface", why))
    chosen = {}  # node -> its fastest RDMA ports
    for node, ports in rdma.items():
        fastest = max((port["gbit_s"] for port in ports.values()), default=0)
        chosen[node] = ",".join(name for name, port in ports.items() if port["gbit_s"] == fastest)
    each = "; ".join(f"{node} {names or 'none'}" for node, names in chosen.items())
    if not on_gpus:
        rows.append(skipped("RDMA ports", "not used without GPUs"))
    elif not any(chosen.values()):
        value = "none is active: NCCL and RCCL fall back to TCP"
        do = "check the driver of the network cards (ibstat), and what the containers get"
        rows.append(CheckRow("RDMA ports", "warn", value, "equal on all nodes", do))
    elif len(set(chosen.values())) == 1:
        variables["NCCL_IB_HCA"] = "=" + next(iter(chosen.values()))
        rows.append(CheckRow("RDMA ports", "ok", f"NCCL_IB_HCA={variables['NCCL_IB_HCA']}"))
    else:
        do = "set NCCL_IB_HCA on each node separately, or repair the missing ports"
        rows.append(CheckRow("RDMA ports", "warn", each, "equal on all nodes", do))
    return variables, rows
