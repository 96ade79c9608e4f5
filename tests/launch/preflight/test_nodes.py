"""Test the preflight of several nodes: made-up values, stand-in launchers, network namespaces."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy import alive, wait_until

from common.errors import ConfigError
from common.machine import network
from launch.preflight import __main__ as preflight_command
from launch.preflight.nodes import compare, examine, start
from launch.preflight.nodes.examine import NodesCheck

# --- judgments ------------------------------------------------------------------------------------


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
    rdma = network.rdma_ports(tmp_path)
    assert rdma["mlx5_0:1"]["gbit_s"] == 400 and "mlx5_2:1" not in rdma
    same, _ = compare.propose({}, {"a": rdma, "b": rdma}, True)
    assert same == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}
    different, rows = compare.propose({}, {"a": rdma, "b": {}}, True)
    assert different == {} and rows[-1].verdict == "warn" and "b none" in rows[-1].value
    for on_gpus, verdict in ((True, "warn"), (False, "skipped")):
        row = compare.propose({}, {"a": {}, "b": {}}, on_gpus)[1][-1]
        assert row.verdict == verdict and ("TCP" in row.value) is on_gpus


def interface(address, gbit_s=0):
    return {"address": address, "gbit_s": gbit_s}


@pytest.mark.quick
def test_the_proposed_interface_leads_to_the_other_nodes():
    """It is the fastest one of one network. Neither docker0 nor another network is."""
    nodes = {}
    for number in (1, 2):
        nodes[f"host{number}"] = {
            "docker0": interface("172.17.0.1/16", 100),
            "eth0": interface(f"10.0.0.{number}/24", 25),
            "eth1": interface(f"10.0.{number}.1/24", 400),
            "ib0": interface(f"10.1.0.{number}/24", 200),
            "ib1": interface("", 400),
        }
    assert compare.propose(nodes, {}, True)[0] == {"NCCL_SOCKET_IFNAME": "=ib0"}
    del nodes["host2"]["ib0"]
    assert compare.propose(nodes, {}, True)[0] == {"NCCL_SOCKET_IFNAME": "=eth0"}
    del nodes["host2"]["eth0"]
    proposal, rows = compare.propose(nodes, {}, True)
    assert proposal == {} and rows[0].verdict == "skipped"


@pytest.mark.quick
def test_the_node_that_differs_from_most_is_named():
    facts = {"a": {"torch": "2.11"}, "b": {"torch": "2.10", "numpy": "2"}, "c": {"torch": "2.11"}}
    for refuse, verdict in ((True, "refuse"), (False, "warn")):
        rows = compare.judge_differences("facts", facts, refuse)
        assert [rows[node].verdict for node in "abc"] == ["ok", verdict, "ok"]
    assert all(word in rows["b"].value for word in ("torch", "2.10", "2.11", "numpy", "missing"))


@pytest.mark.quick
@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_slow_node_is_named_and_not_its_neighbors(count):
    nodes = [f"n{number}" for number in range(count)]
    rates = {}
    for first, second in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        rates[first, second] = 1.0 if "n1" in (first, second) else 10.0
    rows = compare.judge_pairs(rates, nodes)
    assert [node for node in nodes if rows[node].verdict != "ok"] == ["n1"]
    assert rows["n1"].verdict == "refuse" and "10.00" in rows["n1"].expected
    rates = {pair: 7.0 if "n1" in pair else 10.0 for pair in rates}
    assert compare.judge_pairs(rates, nodes)["n1"].verdict == "warn"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rate", "rdma", "verdict"),
    [(300, 400, "ok"), (150, 400, "warn"), (50, 400, "refuse"), (50, 0, "skipped")],
)
def test_an_all_reduce_is_held_against_the_rdma_ports(rate, rdma, verdict):
    assert compare.judge_all_reduce(rate, 2, rdma).verdict == verdict


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("hosts", ["", "one", "a,a", "a,-oProxyCommand=x", "a,b;reboot"])
def test_hosts_that_are_no_hosts_are_refused(hosts):
    assert start.node_names("a,user@b") == ["a", "user@b"]
    with pytest.raises(ConfigError):
        start.node_names(hosts)
    with pytest.raises(ConfigError, match="--nodes"):
        preflight_command.examine("", ["--nodes", hosts, "--launcher", "env N={node}"])


@pytest.mark.quick
def test_a_list_of_slurm_needs_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError) as caught:
        start.node_names("gpu[01-04]")
    assert "scontrol" in caught.value.why and "not installed" in caught.value.why


@pytest.mark.quick
@pytest.mark.parametrize(("option", "value"), [("--launcher", "ssh"), ("--deadline", "60")])
def test_an_option_of_several_nodes_is_refused_for_one(option, value):
    with pytest.raises(ConfigError, match=f"{option} without --nodes"):
        preflight_command.examine("", [option, value])


@pytest.mark.quick
@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_a_deadline_that_no_node_could_meet_is_refused(seconds):
    with pytest.raises(ConfigError, match="--deadline"):
        preflight_command.parser().parse_args(["--nodes", "a,b", "--deadline", seconds])


@pytest.mark.quick
def test_the_help_names_the_deadline_that_counts(monkeypatch):
    monkeypatch.setattr(preflight_command, "DEADLINE_S", 77.0)
    assert "(default: 77)" in " ".join(preflight_command.parser().format_help().split())


@pytest.mark.quick
def test_the_launcher_fits_the_place(tmp_path):
    for name in ("ssh", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert start.launcher_words("", path)[0] == "ssh"
    in_a_job = start.launcher_words("", path | {"SLURM_JOB_ID": "7"})
    assert in_a_job[0] == "srun" and "--nodelist={node}" in in_a_job
    with pytest.raises(ConfigError, match="kubectl"):
        start.launcher_words("kubectl exec -i {node} --", path)
    with pytest.raises(ConfigError):
        start.launcher_words("telnet", path)


@pytest.mark.quick
def test_the_login_shell_gets_the_command_as_one_word(tmp_path):
    """As ssh does: it joins its arguments, and the user's shell splits them."""
    script = "import os, sys; print(sys.argv[1], os.environ['A'])"
    command = start.command_on("a", ["ssh", "{node}"], ["-c", script, "x  y"], {"A": "$b 'c'"}, 60)
    assert command[:2] == ["ssh", "a"] and len(command) == 3
    ended = start.run_on_nodes({"a": ["sh", "-c", command[2]]}, 60)
    assert (ended["a"].exit_code, ended["a"].output) == (0, "x  y $b 'c'\n")


# --- processes on the nodes -----------------------------------------------------------------------


def test_a_node_that_hangs_or_ends_delays_nobody(monkeypatch):
    monkeypatch.setattr(start, "END_S", 0.5)
    commands = {
        "hangs": ["sleep", "60"],
        "ends": ["sh", "-c", "echo no route >&2; exit 255"],
        "raises": ["sh", "-c", "echo 'ValueError: wrong\n=====' >&2; exit 1"],
        "is killed": ["sh", "-c", "echo '[W1129 socket.cpp:207] a warning' >&2; exit 137"],
        "is good": ["echo", "good"],
    }
    began = time.monotonic()
    ended = start.run_on_nodes(commands, 1.0)
    assert time.monotonic() - began < 10
    assert "no answer" in ended["hangs"].reason
    assert ended["ends"].reason == "no route" and ended["raises"].reason == "ValueError: wrong"
    assert ended["is killed"].reason == "exit code 137"
    assert (ended["is good"].exit_code, ended["is good"].output) == (0, "good\n")


def test_a_failure_ends_what_runs_together(monkeypatch):
    monkeypatch.setattr(start, "END_S", 0.5)
    monkeypatch.setattr(start, "VICTIMS_S", 0.2)
    began = time.monotonic()
    ended = start.run_on_nodes({"a": ["false"], "b": ["sleep", "60"]}, 60, together=True)
    assert time.monotonic() - began < 10
    assert (ended["a"].exit_code, ended["b"].exit_code) == (1, None)


def test_a_lost_connection_ends_the_command_and_its_processes(tmp_path):
    """What was started must not go on measuring."""
    code = (
        "import os, signal, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pid_0')!r}, 'w').write(str(os.getpid()))\n"
        f"open({str(tmp_path / 'pid_1')!r}, 'w').write(str(child.pid))\n"
        "try:\n"
        "    signal.sigwait([signal.SIGTERM])\n"
        "finally:\n"
        "    child.kill()\n"
        "    child.wait()\n"
    )
    command = start.command_on("a", ["env", "N={node}"], ["-c", code], {}, 60)
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    process.stdin.write(b"go\n")
    process.stdin.flush()
    wait_until((tmp_path / "pid_1").exists, 30)
    process.stdin.close()
    process.wait(30)
    wait_until(lambda: not alive(tmp_path), 10)


@pytest.mark.quick
def test_a_launcher_that_passes_no_stdin_is_told_what_to_write():
    command = start.command_on("a", ["env", "N={node}"], ["-c", "print(1)"], {}, 60)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1 and "exec -i" in done.stderr and not done.stdout


def launcher(folder, script):
    """A command that starts another one on a "node" of this host. $node: its name."""
    path = folder / "launcher"
    path.write_text(f'#!/bin/sh\nnode=$1; shift\n{script}\nexec "$@"\n')
    path.chmod(0o755)
    return f"{path} {{node}}"


NVIDIA_SMI = """#!{python}
import sys
gpus, values = {gpus}, {values}
fields = [word[12:] for word in sys.argv if word.startswith("--query-gpu=")]
if not fields:
    sys.exit(6)
for gpu in range(gpus):
    values |= {{"uuid": f"GPU-{{gpu}}", "index": str(gpu)}}
    print(", ".join(values.get(field, "[N/A]") for field in fields[0].split(",")))
"""
H200 = {
    "name": "NVIDIA H200",
    "memory.total": "143771",
    "compute_cap": "9.0",
    "mig.mode.current": "Disabled",
    "driver_version": "580.95.05",
    "vbios_version": "96.00.A5",
    "clocks.max.sm": "1980",
}


def test_another_number_of_gpus_driver_firmware_and_clock_are_named(tmp_path, monkeypatch, capsys):
    """Each node has an nvidia-smi of its own. torch for CPUs is refused on all of them."""
    fakes = {
        "good": (8, {}),
        "twin": (8, {}),
        "seven": (7, {}),
        "driver": (8, {"driver_version": "575.1"}),
        "firmware": (8, {"vbios_version": "96.00.OLD", "clocks.max.sm": "1755"}),
        "silent": (8, {}),
    }
    for node, (gpus, values) in fakes.items():
        path = tmp_path / node / "nvidia-smi"
        path.parent.mkdir()
        path.write_text(NVIDIA_SMI.format(python=sys.executable, gpus=gpus, values=H200 | values))
        path.chmod(0o755)
    script = f'[ "$node" = silent ] && exit 255\nexport PATH={tmp_path}/$node:$PATH'
    for name in ("CUDA_VISIBLE_DEVICES", "DGXSYSTEM", "DGXNGPU", "GPU_KIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    options = ["--launcher", launcher(tmp_path, script), "--nodes", ",".join(fakes)]
    assert preflight_command.main([*options, "--json"]) == 18
    answer = json.loads(capsys.readouterr().out)
    rows = {
        node: {row["check"]: row for row in own if row["verdict"] != "ok"}
        for node, own in answer["rows"].items()
    }
    facts, hardware = "software, GPUs and data", "firmware, clocks and links"
    assert {node for node, own in rows.items() if facts in own} == {"seven", "driver"}
    assert {node for node, own in rows.items() if hardware in own} == {"firmware"}
    assert "7 x NVIDIA H200" in rows["seven"][facts]["value"]
    assert (
        "575.1" in rows["driver"][facts]["value"] and rows["driver"][facts]["verdict"] == "refuse"
    )
    for words in ("96.00.OLD", "1755", "1980"):
        assert words in rows["firmware"][hardware]["value"]
    assert rows["firmware"][hardware]["verdict"] == "warn"
    assert rows["silent"]["answer"]["verdict"] == "refuse"


def nodes_check(*arguments, environment=None):
    options = preflight_command.parser("").parse_args(list(arguments))
    options.benchmark = ""
    return NodesCheck(options, {"PATH": os.environ["PATH"], **(environment or {})})


def test_a_node_that_does_not_answer_is_named_with_the_command_without_it(tmp_path, capsys):
    """The others answer at once: preflight itself is not run here."""
    answer = {"benchmark": "", "rows": [], "facts": {"GPUs": "none"}, "hardware": {}}
    answer |= {"gpus": 0, "interfaces": {}, "rdma": {}}
    (tmp_path / "answer").write_text(
        "a banner of the login shell {\n" + json.dumps(answer, indent=1)
    )
    script = '[ "$node" = b ] && { echo "no route to host" >&2; exit 255; }\n'
    script += f'case "$*" in *all_reduce*) exit 3;; esac\nexec cat {tmp_path}/answer'
    options = ["--nodes", "a,b,c", "--launcher", launcher(tmp_path, script), "--quick"]
    assert preflight_command.main(options) == 18
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if "answer (b)" in line]
    assert lines[0].startswith("refuse") and "no route to host" in lines[0]
    assert "--nodes a,c --quick" in printed.err and "error: not ready: b" in printed.err
    # The all-reduce on the other two fails, and says where.
    assert "all-reduce (a, c)" in printed.out and "exit code 3" in printed.out


@pytest.mark.quick
def test_all_reduce_uses_the_proposal_unless_the_user_sets_nccl_variables():
    arguments = ["--nodes", "a,b", "--launcher", "env N={node}"]
    check = nodes_check(*arguments, environment={"NCCL_IB_HCA": "mlx5_7"})
    own = {"gpus": 8, "interfaces": {"eth2": interface("10.0.0.7/24")}}
    check.answers = {"a": own, "b": own}
    check.proposal = {"NCCL_SOCKET_IFNAME": "=eth2", "NCCL_IB_HCA": "=mlx5_0:1"}
    for rank, command in enumerate(check.all_reduce_commands(["a", "b"], 60).values()):
        words = shlex.split(command[-1].split("timeout ")[1].split("\n")[0])
        assert {"NCCL_SOCKET_IFNAME==eth2", "NCCL_IB_HCA=mlx5_7"} <= {*words}
        after = dict(itertools.pairwise(words))
        assert after["--master-addr"] == "10.0.0.7" and after["--node-rank"] == str(rank)
        assert after["--nproc-per-node"] == "8"
        assert after["launch.preflight.nodes.all_reduce"] == "cuda"


@pytest.mark.quick
def test_each_node_is_checked_with_the_users_variables(monkeypatch):
    own = {"DATADIR": "/d", "NCCL_NET": "Socket", "ATTENTION_ENGINE": "sdpa", "HSA_X": "1"}
    local = {"CUDA_VISIBLE_DEVICES": "1", "LD_LIBRARY_PATH": "/l", "HF_TOKEN": "t", "SEED": "1"}
    local |= {"MLFLOW_TRACKING_URI": "http://user:password@host"}
    check = nodes_check("--nodes", "a,b", "--launcher", "env {node}", environment=own | local)
    commands = {}

    def run_on_nodes(own, limit_s):
        commands.update(own)
        return {}

    monkeypatch.setattr(examine, "run_on_nodes", run_on_nodes)
    check.ask()
    for command in commands.values():
        words = {*shlex.split(command[-1].split("timeout ")[1].split("\n")[0])}
        assert {f"{name}={value}" for name, value in own.items()} <= words
        assert not words & {f"{name}={value}" for name, value in local.items()}
    assert commands.keys() == {"a", "b"}


@pytest.mark.quick
def test_the_pair_that_failed_is_named():
    check = nodes_check("--nodes", "a,b,c", "--launcher", "env N={node}")
    lines = [{"nodes": [0, 1]}, {"nodes": [0, 1], "gbit_s": 9.0}, {"nodes": [1, 2]}]
    first = start.Ended(1, "\n".join(map(json.dumps, lines)), "RuntimeError: timed out\n=====")
    ended = {"a": first, "b": start.Ended(0, "", ""), "c": start.Ended(None, "", "")}
    check.read_results(["a", "b", "c"], ended)
    assert check.all_reduce == [{"nodes": ["a", "b"], "gbit_s": 9.0}]
    [row] = check.network
    assert row.verdict == "refuse" and "b, c" in row.check
    assert "a: RuntimeError: timed out" in row.value and "c: no answer" in row.value


# --- network namespaces ---------------------------------------------------------------------------

NET = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
GOOD, ALSO_GOOD, SLOW, OTHER, SILENT = (f"{NET}.{k}" for k in range(11, 16))
BRIDGE = f"pf{os.getpid()}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces():
    """Four network namespaces on one bridge, named like their addresses.

    Links have 200 Mbit/s, and that of SLOW has 40.
    """
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("ip and tc are not installed")
    nodes = [GOOD, ALSO_GOOD, SLOW, OTHER]
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
        yield
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)


def skip_the_wait(monkeypatch, marks: list[Path]) -> None:
    """Let the deadline of the nodes pass 2 s after they have made `marks`."""

    def monotonic() -> float:
        if all(mark.exists() and time.time() - mark.stat().st_mtime > 2.0 for mark in marks):
            return time.monotonic() + 3600.0
        return time.monotonic()

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(start, "time", clock)


@pytest.mark.slow
def test_each_fault_is_found_and_named(namespaces, tmp_path, monkeypatch, capsys):
    """Faults: a silent node, a slow node, another Triton version and variable."""
    packages = tmp_path / "packages/triton-0.0.1.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 0.0.1\n")
    script = (
        f"case $node in {SILENT}) exec sleep 600;;\n"
        f"{OTHER}) export PYTHONPATH={packages.parent} NCCL_ALGO=Tree;; esac\n"
        'ip netns exec "$node" "$@"; code=$?\n'
        f"touch {tmp_path}/ended_$node\nexit $code"
    )
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    nodes = [GOOD, ALSO_GOOD, SLOW, OTHER, SILENT]
    skip_the_wait(monkeypatch, [tmp_path / f"ended_{node}" for node in nodes[:-1]])
    arguments = ["--nodes", ",".join(nodes), "--launcher", launcher(tmp_path, script), "--quick"]
    code = preflight_command.main([*arguments, "--device", "cpu", "--json", "--deadline", "120"])
    printed = capsys.readouterr()
    print(printed.out, printed.err, file=sys.stderr)
    answer = json.loads(printed.out)
    assert code == 18 and answer["passing"] == [GOOD, ALSO_GOOD]
    refused = {}
    for node, rows in answer["rows"].items():
        refused[node] = [row for row in rows if row["verdict"] == "refuse"]
    [slow], [other], [silent] = refused[SLOW], refused[OTHER], refused[SILENT]
    assert slow["check"] == "all-reduce in pairs"
    assert all(word in other["value"] for word in ("triton", "0.0.1", "NCCL_ALGO", "Tree"))
    assert silent["check"] == "answer" and "no answer" in silent["value"]
    assert answer["proposal"] == {"NCCL_SOCKET_IFNAME": "=fabric0"}
    rates = {tuple(each["nodes"]): each["gbit_s"] for each in answer["all_reduce"]}
    assert len(rates) == 4 and 0.1 < rates[GOOD, ALSO_GOOD] < 0.25
    assert rates[ALSO_GOOD, SLOW] < 0.06
