"""Test the preflight of several nodes: verdicts on made-up values, and five network namespaces."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from toy import alive, wait_until

from common.errors import ConfigError
from common.paths import ROOT
from launch.preflight import __main__ as preflight_command
from launch.preflight.nodes import (
    examine,
    facts,
    judge,
    kernel_log,
    links,
    remote,
    report,
    under_torchrun,
)

# --- one machine ----------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    "line, name, verdict",
    [
        ("[5.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off", "Xid 79", "refuse"),
        ("[5.0] NVRM: Xid (PCI:0000:1b:00): 13, pid=1, Graphics Exception", "Xid 13", "warn"),
        ("[5.0] EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "uncorrected", "refuse"),
        ("[5.0] EDAC MC0: 1 CE memory read error on CPU_SrcID#0", "corrected", "warn"),
        ("[5.0] amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "amdgpu GPU reset", "refuse"),
        ("[5.0] amdgpu 0000:c1:00.0: 1 uncorrectable hardware errors", "amdgpu unc", "refuse"),
        ("[5.0] pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error", "PCIe error", "refuse"),
    ],
)
def test_the_kernel_log_names_the_part(line, name, verdict):
    found = kernel_log.errors(["[1.0] Linux version 6", line, line])
    row = kernel_log.judge(found, "")
    assert [error["count"] for error in found.values()] == [2]
    assert row.verdict == verdict and name in row.value


@pytest.mark.quick
def test_a_log_that_nobody_may_read_has_not_passed():
    assert kernel_log.judge({}, "Operation not permitted").verdict == "skipped"
    assert (
        kernel_log.judge(kernel_log.errors(["[1.0] eth0: link becomes ready"]), "").verdict == "ok"
    )


@pytest.mark.quick
def test_only_active_rdma_ports_are_proposed_and_only_the_fastest(tmp_path):
    for device, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_2", "1: DOWN", "400 Gb/sec (4X NDR)"),
        ("mlx5_3", "4: ACTIVE", "25 Gb/sec (1X EDR)"),
    ):
        port = tmp_path / f"sys/class/infiniband/{device}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
    rdma = facts.rdma_devices(tmp_path)
    assert rdma["mlx5_0:1"]["gbit_s"] == 400 and "mlx5_2:1" not in rdma
    same, _ = judge.proposal({"a": {"rdma": rdma}, "b": {"rdma": rdma}}, {"a": "eth2", "b": "eth2"})
    assert same == {"NCCL_SOCKET_IFNAME": "=eth2", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}
    different, rows = judge.proposal(
        {"a": {"rdma": rdma}, "b": {"rdma": {}}}, {"a": "eth2", "b": "ib0"}
    )
    assert different == {} and [row.verdict for row in rows] == ["warn", "warn"]


# --- judgments ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_node_that_differs_from_most_is_named():
    found = judge.differences(
        {"a": {"torch": "2.11"}, "b": {"torch": "2.10"}, "c": {"torch": "2.11"}}
    )
    assert found == {"a": {}, "b": {"torch": ("2.10", "2.11")}, "c": {}}
    assert judge.judge_differences("versions", found["b"], refuse=True).verdict == "refuse"
    assert judge.judge_differences("settings", found["b"], refuse=False).verdict == "warn"
    assert judge.judge_differences("versions", found["a"], refuse=True).verdict == "ok"


@pytest.mark.quick
def test_a_slow_node_is_blamed_even_among_three():
    nodes = ["a", "b", "c"]
    rates = {(x, y): 1.0 if "b" in (x, y) else 10.0 for x in nodes for y in nodes if x != y}
    rows = judge.judge_links("links", rates, nodes)
    assert {node: row.verdict for node, row in rows.items()} == {
        "a": "ok",
        "b": "refuse",
        "c": "ok",
    }
    ring = judge.judge_ring({**rates, ("b", "c"): 0.5}, nodes)
    assert ring.verdict == "warn" and "b -> c" in ring.value


@pytest.mark.quick
def test_one_closed_port_blames_the_node_that_closed_it():
    probes = {(x, "c"): {"port_errors": {"29500": "timed out"}} for x in "ab"}
    why = judge.unreachable(probes | {("c", "a"): {"port_errors": {}}})
    rows = {node: judge.judge_ports(node, judge.links_by_node(why, "abc"), why) for node in "abc"}
    assert [rows[node].verdict for node in "abc"] == ["ok", "ok", "refuse"]
    assert "29500" in rows["c"].value


@pytest.mark.quick
@pytest.mark.parametrize("ahead, verdict", [(0.001, "ok"), (-2.0, "warn"), (60.0, "refuse")])
def test_a_clock_is_judged_by_the_pings_in_both_directions(ahead, verdict):
    probes = {("a", "b"): {"clock_s": ahead}, ("b", "a"): {"clock_s": -ahead}}
    probes |= {("a", "c"): {"clock_s": 0.0}, ("c", "b"): {"clock_s": ahead}}
    assert judge.judge_clock("b", probes).verdict == verdict
    assert judge.judge_clock("c", {}).verdict == "skipped"


@pytest.mark.quick
def test_a_collective_is_held_against_the_links():
    assert judge.judge_collective("all-reduce", 300, 2, 8, 400).verdict == "ok"
    assert judge.judge_collective("all-reduce", 150, 2, 8, 400).verdict == "warn"
    assert judge.judge_collective("all-reduce", 50, 2, 8, 400).verdict == "refuse"
    # 16 ranks, 8 on a node: each GPU sends 8/15 to the other node, so 400 Gb/s carry 93.75.
    assert "93.75" in judge.judge_collective("all-to-all", 90, 2, 8, 400).expected


@pytest.mark.quick
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_rounds_hold_every_pair_once_and_no_node_twice(count):
    nodes = [f"n{k}" for k in range(count)]
    found = examine.rounds(nodes)
    pairs = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in found)


# --- links and agents -----------------------------------------------------------------------------


@pytest.mark.quick
def test_a_link_is_measured_and_a_closed_port_named():
    listener = links.Listener([])
    try:
        result = links.probe("127.0.0.1", [1], listener.free_port, 0.1)
    finally:
        listener.close()
    assert list(result["port_errors"]) == [1]
    assert result["gbit_s"] > 0.1 and result["address"] == "127.0.0.1"
    assert abs(result["clock_s"]) <= result["clock_error_s"] + 0.01
    assert "error" in links.probe("127.0.0.1", [], listener.free_port, 0.1)


@pytest.mark.quick
def test_a_port_in_use_is_named():
    first = links.Listener([])
    second = links.Listener([first.free_port])
    assert list(second.errors) == [first.free_port]
    first.close()
    second.close()


@pytest.mark.quick
@pytest.mark.parametrize("hosts", ["", "one", "a,a", "a,-oProxyCommand=x", "a,b;reboot"])
def test_hosts_that_are_no_hosts_are_refused(hosts):
    assert remote.node_names("a,user@b") == ["a", "user@b"]
    with pytest.raises(ConfigError):
        remote.node_names(hosts)
    with pytest.raises(ConfigError, match="--nodes"):
        preflight_command.examine("", ["--nodes", hosts])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("option", "value"), [("--launcher", "ssh"), ("--deadline", "60"), ("--out", "elsewhere")]
)
def test_an_option_of_several_nodes_is_refused_for_one(option, value):
    with pytest.raises(ConfigError, match=f"{option} without --nodes"):
        preflight_command.examine("", [option, value])


@pytest.mark.quick
@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_a_deadline_that_no_node_could_meet_is_refused(seconds):
    with pytest.raises(ConfigError, match="--deadline"):
        preflight_command.parser().parse_args(["--nodes", "a,b", "--deadline", seconds])


@pytest.mark.quick
def test_the_launcher_fits_the_place(tmp_path):
    for name in ("ssh", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert remote.agent_command("", "a", path)[0] == "ssh"
    in_a_job = remote.agent_command("", "a", path | {"SLURM_JOB_ID": "7"})
    assert in_a_job[0] == "srun" and "--nodelist=a" in in_a_job
    with pytest.raises(ConfigError, match="kubectl"):
        remote.agent_command("kubectl exec {node} --", "a", path)
    with pytest.raises(ConfigError):
        remote.agent_command("telnet", "a", path)


def test_a_node_that_hangs_or_ends_delays_nobody(monkeypatch):
    monkeypatch.setattr(remote, "END_S", 1.0)
    commands = {"hangs": ["sleep", "60"], "ends": ["sh", "-c", "echo no route >&2; exit 255"]}
    remotes = [remote.Remote(name, command) for name, command in commands.items()]
    start = time.monotonic()
    _, failures = remote.at_once(remotes, lambda each: each.ask(1.0, "facts"))
    for each in remotes:
        each.close()
    assert time.monotonic() - start < 10
    assert "no answer" in failures["hangs"] and "no route" in failures["ends"]
    assert all("versions" in why and "facts" not in why for why in failures.values())


@pytest.mark.parametrize("start_s", [0.0, 1.0])
def test_an_agent_takes_its_processes_with_it(start_s, tmp_path):
    """A lost connection closes the agent's stdin. What it started must not go on measuring.

    With `start_s` the stdin is closed while the agent still starts processes.
    """
    pid_file = tmp_path / "pid"
    script = f"""
import time
from launch.preflight.nodes import agent as module
agent = module.Agent()
start = module._start
def slow_start(*arguments):
    process = start(*arguments)
    time.sleep({start_s})
    return process
module._start = slow_start
command = ['sh', '-c', 'echo $$ > {pid_file}; sleep 60']
agent.do_check = lambda: agent._run([(command, {{}})], 60)
agent.serve()
"""
    each = remote.Remote("here", [sys.executable, "-c", script])
    assert each.process.stdin
    each.process.stdin.write('{"do": "check"}\n')
    each.process.stdin.flush()
    wait_until(pid_file.exists, 30)
    each.close()
    assert not alive(tmp_path)


@pytest.mark.quick
def test_a_rank_of_torchrun_finds_its_node_by_its_address():
    assert under_torchrun.name_of_this_node(["198.51.100.1", "me@127.0.0.1"]) == "me@127.0.0.1"
    for names in (["198.51.100.1", "198.51.100.2"], ["127.0.0.1", "127.0.0.2"]):
        with pytest.raises(ConfigError, match="--nodes"):
            under_torchrun.name_of_this_node(names)


@pytest.mark.quick
def test_under_torchrun_no_other_launcher_is_needed_and_its_variables_are_not_inherited():
    environment = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "PATH": ""}
    here = remote.agent_command("", "127.0.0.1", environment)
    assert {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} <= {*here} and "PATH" not in here
    assert here[-1] == "launch.preflight.nodes.agent"
    assert remote.agent_command("", "198.51.100.1", environment)[-2:] == ["ask", "198.51.100.1"]
    assert examine.master_port(environment) == examine.PORT + under_torchrun.PORT_OFFSET


@pytest.mark.quick
def test_the_screen_shows_why_a_node_cannot_be_reached_and_what_to_do():
    class Unreachable:
        name = host = "down"

        def ask(self, limit_s, do, /, **message):
            raise remote.NodeFailed("ssh: Connection refused")

    checked = examine.Report(["down"], {"down": []})
    options = preflight_command.parser("").parse_args(["--nodes", "down,up"])
    options.benchmark = ""
    examine.check_each(checked, [Unreachable()], options, {})
    lines = report.text(checked).splitlines()
    reason = lines.index("      connection: ssh: Connection refused")
    assert "do: " in lines[reason + 1] and "ssh" in lines[reason + 1]


def test_the_result_is_printed_even_if_its_files_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = [
        "--nodes",
        "a,b",
        "--launcher",
        "false {node}",
        "--out",
        str(tmp_path / "file/out"),
    ]
    assert preflight_command.main(arguments) == 17
    printed = capsys.readouterr()
    assert "connection" in printed.out and "file/out" in printed.err


class Stub:
    """An agent that answers at once, and keeps what it was asked."""

    def __init__(self, name: str, answer: dict):
        self.name, self.host, self.answer = name, name, answer

    def ask(self, limit_s, do, /, **message):
        self.asked = message
        return self.answer


@pytest.mark.quick
def test_collectives_use_the_proposal_unless_the_user_sets_nccl_variables():
    nodes = [Stub("a", {"rates": {"all-reduce": 1.0}}), Stub("b", {"rates": {}})]
    report = examine.Report(
        ["a", "b"], {"a": [], "b": []}, facts={"a": {"gpus": 8}, "b": {"gpus": 8}}
    )
    report.proposal = {"NCCL_SOCKET_IFNAME": "=eth2", "NCCL_IB_HCA": "=mlx5_0:1"}
    report.nccl = {"NCCL_IB_HCA": "mlx5_7"}
    assert examine.collective(report, [nodes], 29500, 0.5) == [{"rates": {"all-reduce": 1.0}}]
    variables = nodes[1].asked["environment"]
    assert variables["NCCL_SOCKET_IFNAME"] == "=eth2" and variables["NCCL_IB_HCA"] == "mlx5_7"
    assert variables["MASTER_ADDR"] == "a" and nodes[1].asked["rank"] == 1


@pytest.mark.quick
def test_a_pair_that_fails_is_named_and_the_rest_go_on():
    nodes = [Stub(name, {"rates": {"all-reduce": 9.0, "all-to-all": 8.0}}) for name in "abc"]
    nodes[2].answer = {"error": "NCCL timeout"}
    report = examine.Report(list("abc"), {name: [] for name in "abc"})
    report.facts = {name: {"gpus": 0, "rdma": {}} for name in "abc"}
    report.links = {("a", "b"): {"gbit_s": 10.0}, ("b", "a"): {"gbit_s": 10.0}}
    examine.measure_collectives(report, nodes, 29500, 0.5)
    assert report.passing == ["a", "b"] and "NCCL timeout" in report.reasons("c")[0]
    assert [(row.check, row.verdict) for row in report.cluster] == [
        ("all-reduce", "ok"),
        ("all-to-all", "ok"),
    ]


# --- namespaces -----------------------------------------------------------------------------------

NET = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
GOOD, ALSO_GOOD, SLOW, CLOSED, OTHER, SILENT = (f"{NET}.{k}" for k in range(11, 17))
BRIDGE = f"pf{os.getpid()}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def namespaces():
    """Five network namespaces on one bridge, named like their addresses.

    Links have 200 Mbit/s, and that of SLOW has 40.
    """
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("ip and tc are not installed")
    nodes = [GOOD, ALSO_GOOD, SLOW, CLOSED, OTHER]
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        ip("link", "set", BRIDGE, "up")
        for at, node in enumerate(nodes):
            outside = f"{BRIDGE}_{at}"
            ip("netns", "add", node)
            ip("link", "add", outside, "type", "veth", "peer", "name", "fabric0", "netns", node)
            ip("link", "set", outside, "master", BRIDGE, "up")
            ip("-n", node, "address", "add", f"{node}/24", "dev", "fabric0")
            ip("-n", node, "link", "set", "fabric0", "up")
            ip("-n", node, "link", "set", "lo", "up")
            rate = "40mbit" if node == SLOW else "200mbit"
            shape = (
                f"tc -n {node} qdisc add dev fabric0 root tbf rate {rate} burst 64k latency 50ms"
            )
            subprocess.run(shape.split(), check=True)
        ip("-n", CLOSED, "rule", "add", "ipproto", "tcp", "sport", "29500", "blackhole")
        yield
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)


@pytest.mark.slow
def test_each_fault_is_found_and_named(namespaces, tmp_path, monkeypatch, capsys):
    """Faults: a silent node, a slow link, a closed port, another Triton version."""
    packages = tmp_path / "packages/triton-0.0.1.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 0.0.1\n")
    launcher = tmp_path / "launcher"
    launcher.write_text(
        "#!/bin/sh\nnode=$1; shift\n"
        f"case $node in {SILENT}) exec sleep 600;; {OTHER}) export PYTHONPATH={packages.parent};; "
        "esac\n"
        'exec ip netns exec "$node" "$@"\n'
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(examine, "FACTS_S", 20.0)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    nodes = [GOOD, ALSO_GOOD, SLOW, CLOSED, OTHER, SILENT]
    out = tmp_path / "out"
    arguments = ["--nodes", ",".join(nodes), "--launcher", f"{launcher} {{node}}", "--quick"]
    start = time.monotonic()
    code = preflight_command.main(
        [*arguments, "--device", "cpu", "--out", str(out), "--deadline", "100"]
    )
    printed = capsys.readouterr()
    print(printed.out, printed.err, f"{time.monotonic() - start:.1f} s", file=sys.stderr)
    assert code == 18
    assert (out / "passing_nodes.txt").read_text().split() == [GOOD, ALSO_GOOD]
    lines = (out / "failing_nodes.txt").read_text().splitlines()
    failing = dict(line.split("\t") for line in lines)
    assert failing.keys() == {SLOW, CLOSED, OTHER, SILENT}
    for node, words in (
        (SLOW, "links:"),
        (CLOSED, "29500"),
        (OTHER, "triton 0.0.1"),
        (SILENT, "no answer"),
    ):
        assert words in failing[node] and words not in "".join(
            failing[other] for other in failing if other != node
        )
    result = json.loads((out / "nodes.json").read_text())
    rates = {(link["from"], link["to"]): link.get("gbit_s") for link in result["links"]}
    assert len(rates) == 12 and 0.1 < rates[GOOD, ALSO_GOOD] < 0.25 and rates[SLOW, GOOD] < 0.06
    assert result["proposal"] == {"NCCL_SOCKET_IFNAME": "=fabric0"}
    measured = {row["check"]: row["verdict"] for row in result["cluster"]}
    assert measured["all-reduce"] in ("ok", "warn") and measured["all-to-all"] in ("ok", "warn")
    assert "fabric0" not in printed.err and GOOD in (out / "nodes.html").read_text()


@pytest.mark.slow
def test_healthy_nodes_pass_with_every_pair_measured(namespaces, tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    nodes = [GOOD, ALSO_GOOD, OTHER]
    out = tmp_path / "out"
    arguments = ["--nodes", ",".join(nodes), "--launcher", "ip netns exec {node}", "--quick"]
    code = preflight_command.main([*arguments, "--device", "cpu", "--out", str(out)])
    result = json.loads((out / "nodes.json").read_text())
    assert result["failing"] == {} and code == 0
    assert (out / "passing_nodes.txt").read_text().split() == nodes
    assert {frozenset(pair["nodes"]) for pair in result["pairs"]} == {
        frozenset(pair) for pair in itertools.combinations(nodes, 2)
    }
    assert all(0.02 < pair["all-reduce"] < 0.25 for pair in result["pairs"])


@pytest.mark.slow
def test_two_ranks_of_torchrun_check_their_nodes(namespaces, tmp_path):
    """Nothing but torchrun starts a process on the second node."""
    out = tmp_path / "out"
    nodes = [GOOD, ALSO_GOOD]
    check = ["-m", "launch.preflight", "--nodes", ",".join(nodes), "--quick", "--device", "cpu"]
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "static"]
    where += ["--master-addr", GOOD, "--master-port", "29400"]
    environment = {**os.environ, "LOGDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("MASTER_PORT", None)
    ranks = []
    for rank, node in enumerate(nodes):
        command = ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run"]
        command += [*where, "--node-rank", str(rank), *check, "--out", str(out)]
        ranks.append(subprocess.Popen(command, env=environment, text=True))
    assert [rank.wait(150) for rank in ranks] == [0, 0]
    assert (out / "passing_nodes.txt").read_text().split() == nodes
    result = json.loads((out / "nodes.json").read_text())
    assert {(link["from"], link["to"]) for link in result["links"]} == {
        (GOOD, ALSO_GOOD),
        (ALSO_GOOD, GOOD),
    }
    measured = {row["check"]: row["verdict"] for row in result["cluster"]}
    assert measured["all-reduce"] in ("ok", "warn")
    ports = [row for row in result["rows"][GOOD] if row["check"] == "ports"]
    assert [row["verdict"] for row in ports] == ["ok"]
