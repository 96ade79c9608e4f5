"""Run two launches of run_and_time.sh on this machine as two nodes.

One test uses real torchrun, gloo and trainer and compares the losses with one process. The others,
including failures of a node, use stand-ins for torchrun and the trainer that start within a second.
The launchers' store is always the real one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from toy import ROOT, TORCHRUN, alive, finish, make_project, shorten, wait_until

from common.errors import ConfigError
from launch import multi_node
from launch.job import Node, node_from
from launch.multi_node import LeaderEnded, NodeLost, Nodes


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = make_project(tmp_path_factory.mktemp("cluster"), torchrun=TORCHRUN)
    shorten(root, "launch/multi_node.py", "LOST_S = 30.0", "LOST_S = 4.0")
    config = (root / "configs/toy/CPU_1x1.toml").read_text()
    config = config.replace("nodes = 1", "nodes = 2").replace(
        "micro_batch_size = 8\neval", "micro_batch_size = 4\neval"
    )
    (root / "configs/toy/CPU_2x2.toml").write_text(
        config.replace("hang_timeout_s = 60.0", "hang_timeout_s = 2.0")
    )
    return root


def free_ports() -> int:
    """The first of two ports next to each other that nobody uses."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue


def launch(project, cwd, node, port, *arguments, benchmark="toy", **variables):
    """run_and_time.sh of one node, with its own LOGDIR."""
    names = ("SEED", "NEXP", "DATADIR", "LOGDIR", "DGXNGPU", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    keep = {key: value for key, value in os.environ.items() if key not in names}
    ours = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    ours |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": str(node),
        "DGXSYSTEM": "CPU_2x2",
    }
    ours |= {"LOGDIR": f"out{node}", "TOY": "good", "VICTIM": "3"}
    command = [str(project / "run_and_time.sh"), benchmark, *arguments]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=keep | ours | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def both(project, cwd, *arguments, **variables):
    port = free_ports()
    return [launch(project, cwd, node, port, *arguments, **variables) for node in (0, 1)]


def runs(cwd, node):
    return sorted(path for path in (cwd / f"out{node}" / "toy").iterdir() if path.is_dir())


def ledger(cwd, node=0):
    return [
        json.loads(line)
        for line in (cwd / f"out{node}/toy/attempts.jsonl").read_text().splitlines()
    ]


# --- everything real ------------------------------------------------------------------------------

SMALL = """
from common.model.shapes import ModelShape
MINIATURE = {rules!r}
DIVISIONS = (CLOSED, MINIATURE)
"""


def test_two_nodes_of_two_ranks_train_as_one_process_does(tmp_path, tiny_data):
    import tiny
    import torch

    project = make_project(tmp_path / "project")
    for room in ("llama31_8b", "throughput"):
        shutil.copytree(ROOT / room, project / room)
    with (project / "llama31_8b/rules.py").open("a") as file:
        file.write(SMALL.format(rules=tiny.TINY))
    config = project / "configs/llama31_8b/CPU_2x2.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        tiny.run_config(
            nodes=2, gpus_per_node=2, micro_batch_size=1, hang_timeout_s=120.0
        ).as_toml()
    )
    arguments = {"benchmark": "llama31_8b", "SEED": "5", "DATADIR": str(tiny_data)}
    launched = both(project, tmp_path, **arguments)
    try:
        one = tiny.run(tmp_path / "one", tiny_data, seed=5)
    finally:
        torch.distributed.destroy_process_group()
        ends = [process.communicate(timeout=150) for process in launched]
    # The target is out of reach.
    assert [process.returncode for process in launched] == [10, 10], ends
    (run_dir,) = [path for path in (tmp_path / "out0/llama31_8b").iterdir() if path.is_dir()]
    failure = json.loads((run_dir / "failure.json").read_text())
    assert (failure["kind"], failure["exit_code"]) == ("target_missed", 10) and (
        run_dir / "report.html"
    ).is_file()
    assert (
        failure["what"].startswith("target ")
        and "96 sequences" in failure["what"]
        and failure["what"] in ends[0][1]
    ), "on the terminal of node 0"
    two = tiny.facts(run_dir)
    assert two.status == "aborted"
    assert len(one.losses) == 12 and len(one.evaluations) == 3
    assert two.losses == pytest.approx(one.losses, abs=1e-6) and two.norms == pytest.approx(
        one.norms, rel=1e-5
    )
    assert dict(two.evaluations) == pytest.approx(dict(one.evaluations), abs=1e-6)
    assert {path.name for path in (run_dir / "ranks").glob("*.json")} == {
        f"rank_{rank}.json" for rank in range(4)
    }


# Four ranks on two nodes, without launchers: what test_adapters.py and test_loop.py say of two
# ranks on one node.


def on_four_ranks(processes, folder):
    from tiny import lora_steps

    assert processes.mesh.mesh_dim_names == ("replicate", "shard") and tuple(
        processes.mesh.shape
    ) == (2, 2)
    import torch

    sizes = [float(processes.sum(torch.ones(()))), processes.shard_group.size()]
    lora = lora_steps(processes, micro_batch_size=2)
    return {
        "sizes": sizes,
        "losses": lora["losses"],
        "norms": lora["norms"],
        "adapters": lora["adapters"],
        "evaluation": lora["evaluation"],
    }


@pytest.mark.slow
def test_lora_on_two_nodes_trains_as_on_one_process(tmp_path, processes):
    import torch
    from ranks import call_on_ranks
    from tiny import lora_steps

    one = lora_steps(processes, micro_batch_size=8)
    for two in call_on_ranks(4, "test_multi_node:on_four_ranks", tmp_path, ranks_per_node=2):
        assert two["sizes"] == [4, 2], "all ranks; the shards of one node"
        assert two["losses"] == pytest.approx(one["losses"], abs=1e-6) and two[
            "norms"
        ] == pytest.approx(one["norms"], rel=1e-5)
        for name, adapter in one["adapters"].items():
            torch.testing.assert_close(two["adapters"][name], adapter, atol=1e-6, rtol=1e-5)


# --- who decides ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_node_0_decides_and_has_the_results(project, tmp_path):
    ends = [finish(process) for process in both(project, tmp_path, NEXP="2")]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "STARTING TIMING RUN" in ends[0][1] and not ends[1][1], "one log, one stdout"
    assert [line["event"] for line in ledger(tmp_path)] == [
        "series",
        "start",
        "end",
        "start",
        "end",
        "closed",
    ]
    assert not (tmp_path / "out1/toy/attempts.jsonl").exists()
    assert [path.name for path in runs(tmp_path, 0)] == [path.name for path in runs(tmp_path, 1)]
    seeds = []
    for here, there in zip(runs(tmp_path, 0), runs(tmp_path, 1), strict=True):
        seeds.append(
            {path.read_text() for path in [*here.glob("seed_*"), *there.glob("node_1/seed_*")]}
        )
        assert {"result.txt", "check.txt", "report.html"} <= {path.name for path in here.iterdir()}
        assert [path.name for path in there.iterdir()] == ["node_1"], (
            "nothing but its own ranks' files"
        )
        assert {f"rank_{rank}.json" for rank in range(4)} <= {
            path.name for path in (here / "ranks").iterdir()
        }
    assert [len(each) for each in seeds] == [1, 1] and seeds[0] != seeds[1]
    assert seeds[0] | seeds[1] == {
        str(line["seed"]) for line in ledger(tmp_path) if line["event"] == "start"
    }


@pytest.mark.slow
def test_the_nodes_of_a_slurm_step_get_a_derived_config(project, tmp_path):
    """Four nodes, as run.sub starts them, for which configs/ has no file."""
    port = free_ports()
    step = {"DGXSYSTEM": "", "NODE_RANK": "", "SLURM_STEP_NUM_NODES": "4"}
    launched = []
    for node in range(4):
        launched.append(launch(project, tmp_path, 0, port, SLURM_NODEID=str(node), **step))
    ends = [finish(process) for process in launched]
    assert [code for code, _, _ in ends] == [0, 0, 0, 0], ends
    assert "derived for 4 nodes" in ends[0][2]
    (run_dir,) = runs(tmp_path, 0)
    assert "CPU_4x1" in run_dir.name
    for rank in range(4):
        assert (run_dir / f"ranks/rank_{rank}.json").is_file()


def test_other_code_or_variables_on_a_node_are_refused(project, tmp_path):
    other = shutil.copytree(project, tmp_path / "other")
    with (other / "common/training/loop.py").open("a") as file:
        file.write("# changed\n")
    port = free_ports()
    ends = [
        finish(process)
        for process in [
            launch(project, tmp_path, 0, port, GLOO_SOCKET_IFNAME="lo"),
            launch(other, tmp_path, 1, port, NCCL_ALGO="Tree"),
        ]
    ]
    assert [code for code, _, _ in ends] == [2, 2]
    for _, _, error in ends:
        assert "node 1" in error and "code" in error
        assert "NCCL_ALGO" in error and "Tree" in error and "IFNAME" not in error
    assert not list(tmp_path.glob("out*/toy/2*")), "no run was begun"


def test_other_data_or_weights_on_a_node_end_all_launchers(project, tmp_path):
    """The differing node is neither the first nor the last. The files differ in their middle."""
    config = (project / "configs/toy/CPU_2x2.toml").read_text()
    for line in ("nodes = 2", "gpus_per_node = 2", "global_batch_size = 16"):
        assert line in config
    config = config.replace("nodes = 2", "nodes = 3").replace("_node = 2", "_node = 1")
    (project / "configs/toy/CPU_3x1.toml").write_text(config.replace("size = 16", "size = 12"))
    shards = ("model-1.safetensors", "model-2.safetensors")
    changed = ("t.bin", "v.bin", shards[1])
    launched = []
    port = free_ports()
    for node in range(3):
        folder = tmp_path / f"files{node}"
        folder.mkdir()
        for name in ("t.bin", "t.idx", "v.bin", "v.idx", *shards):
            content = bytearray(4 << 20)
            if node == 1 and name in changed:
                content[2 << 20 : (2 << 20) + (1 << 15)] = b"x" * (1 << 15)
            (folder / name).write_bytes(content)
        variables = {"DGXSYSTEM": "CPU_3x1", "DATADIR": str(folder), "MODEL": str(folder)}
        launched.append(launch(project, tmp_path, node, port, **variables))
    ends = [finish(process) for process in launched]
    assert [code for code, _, _ in ends] == [2, 2, 2], ends
    for _, _, error in ends:
        assert all(name in error for name in changed)
        assert shards[0] not in error and ".idx" not in error
        assert "node 1" in error and "node 2" not in error
        assert "data" in error and "weights" in error
    assert not list(tmp_path.glob("out*/toy/2*")), "no run was begun"


STEP = {"MASTER_ADDR": "a", "SLURM_STEP_NUM_NODES": "2"}  # as run.sub starts two nodes


@pytest.mark.parametrize(
    ("environment", "count", "words"),
    [
        ({"MASTER_ADDR": "a"}, 2, "NODE_RANK is not set"),
        ({"NODE_RANK": "0"}, 2, "MASTER_ADDR is not set"),
        ({"NODE_RANK": "2", "MASTER_ADDR": "a"}, 2, "NODE_RANK=2.* 2 nodes"),
        ({"NODE_RANK": "-1", "MASTER_ADDR": "a"}, 2, "NODE_RANK=-1.* 2 nodes"),
        ({"NODE_RANK": "1"}, 1, "NODE_RANK=1.* 1 node"),
        ({"SLURM_NODEID": "1"}, 1, "SLURM_NODEID=1.* 1 node"),
        ({"SLURM_NODEID": "1", "NODE_RANK": "2"}, 1, "NODE_RANK=2.* 1 node"),
        (STEP | {"SLURM_NODEID": "0"}, 4, "2 nodes.* 4"),  # else it would wait for nodes 2 and 3
        (STEP | {"SLURM_NODEID": "0"}, 1, "2 nodes.* 1"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "65535"}, 2, "MASTER_PORT=65535"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "http"}, 2, "MASTER_PORT=http"),
    ],
)
def test_impossible_nodes(environment, count, words):
    with pytest.raises(ConfigError, match=words):
        node_from(environment, count)


def test_nodes():
    assert node_from({"MASTER_ADDR": "elsewhere", "MASTER_PORT": "7"}, 1) == Node(), (
        "a batch system may set what one node ignores"
    )
    assert node_from({"NODE_RANK": "1", "MASTER_ADDR": "a"}, 2) == Node(1, 2, "a", 29500)
    assert node_from(STEP | {"SLURM_NODEID": "1"}, 2) == Node(1, 2, "a", 29500)
    alone = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}
    assert node_from(alone, 1) == Node(), "a measurement on each node for itself"
    assert node_from({"SLURM_NODEID": "3", "MASTER_ADDR": "a", "MASTER_PORT": "7000"}, 4) == Node(
        3, 4, "a", 7000
    )


def test_a_run_on_one_node_says_that_it_ignores_the_variables_of_several(project, tmp_path):
    one_node = {"DGXSYSTEM": "CPU_1x1", "SLURM_JOB_ID": ""}
    code, _, error = finish(launch(project, tmp_path, 0, 7000, "--print", **one_node))
    [note] = [line for line in error.splitlines() if "MASTER_ADDR" in line]
    assert code == 0 and "NOTE" in note and "NODE_RANK" in note and "1 node" in note

    several = finish(launch(project, tmp_path, 0, 7000, "--print"))
    job_of_slurm = one_node | {"SLURM_JOB_ID": "7"}  # run.sub sets MASTER_ADDR in each job
    slurm = finish(launch(project, tmp_path, 0, 7000, "--print", **job_of_slurm))
    assert "MASTER_ADDR" not in several[2] + slurm[2]


def test_the_command_of_a_node(project, tmp_path):
    code, out, _ = finish(launch(project, tmp_path, 1, 7000, "--print"))
    where = "--rdzv-backend static --master-addr 127.0.0.1 --master-port 7000 --node-rank 1"
    assert code == 0 and f"--nnodes 2 {where} --nproc-per-node 2 -m toy.train" in out


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "code", "kind", "words"),
    [
        pytest.param("fail", 1, "internal", "rank 3: boom", marks=pytest.mark.slow),
        ("kill", 14, "rank_lost", "rank 3 (process"),
        pytest.param("hang", 13, "hang", "rank 3 holds up the others", marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_node_1_fails_and_is_named_on_node_0(project, tmp_path, mode, code, kind, words):
    shared = {"LOGDIR": "out0"} if mode == "kill" else {}  # the nodes may share a disk
    ends = [finish(process) for process in both(project, tmp_path, TOY=mode, **shared)]
    assert [end[0] for end in ends] == [code, code], ends
    (run_dir,) = runs(tmp_path, 0)
    failure = json.loads((run_dir / "failure.json").read_text())
    assert (failure["kind"], failure["rank"]) == (kind, 3) and words in failure["what"]
    assert words in ends[0][2] and f"exit code {code}" in ends[1][2]
    for _, _, error in ends:
        assert any(words in line and "on node 1" in line for line in error.splitlines()), error
    rank_3 = tmp_path / f"out{0 if shared else 1}/toy/{run_dir.name}/node_1/ranks/rank_3.heartbeat"
    assert rank_3.read_text() == (run_dir / "ranks/rank_3.heartbeat").read_text()
    assert not alive(tmp_path)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_node_ends_the_other(project, tmp_path, victim):
    launched = both(project, tmp_path, TOY="wait", NEXP="3")
    wait_until(
        lambda: (
            len(
                list(tmp_path.glob("out*/toy/*/waiting_*"))
                + list(tmp_path.glob("out*/toy/*/node_1/waiting_*"))
            )
            == 4
        )
    )
    launched[victim].kill()
    launched[victim].communicate()
    code, _, err = finish(launched[1 - victim])
    assert code == 14 and f"error: node {victim}" in err and "lost" in err
    wait_until(lambda: not alive(tmp_path))
    if victim:
        assert [line["event"] for line in ledger(tmp_path)] == ["series", "start", "end"], (
            "no further attempt without the node"
        )
        assert (ledger(tmp_path)[-1]["kind"], ledger(tmp_path)[-1]["exit_code"]) == (
            "rank_lost",
            14,
        )


@pytest.mark.slow
def test_sigterm_to_node_0_ends_both(project, tmp_path):
    launched = both(project, tmp_path, TOY="wait")
    wait_until(
        lambda: (
            len(
                list(tmp_path.glob("out*/toy/*/waiting_*"))
                + list(tmp_path.glob("out*/toy/*/node_1/waiting_*"))
            )
            == 4
        )
    )
    launched[0].send_signal(signal.SIGTERM)
    assert [finish(process)[0] for process in launched] == [143, 143]
    assert not alive(tmp_path)


@pytest.fixture
def leader():
    """Node 0 of two, one rank each."""
    with Nodes(Node(0, 2, "127.0.0.1", free_ports()), ranks_per_node=1) as nodes:
        nodes.put("left/1", "for the end of the test")
        yield nodes


def test_another_node_writes_the_files_of_its_own_ranks_only(tmp_path, leader):
    (tmp_path / "ranks").mkdir()
    leader.announce("run", 1, {})
    leader.put("ready/1/1", "no")
    assert leader.ready("fadvise") == "no", (
        "the log must say so if the data stayed in the page cache of any node"
    )
    files = {
        "../result.txt": "forged",
        "rank_0.json": "{}",
        "rank_1.json": "{}",
        "rank_1.json/../../x": "",
        "config.toml": "",
    }
    files |= {"rank_1.collectives.json": "{}", "rank_0.collectives.json": "{}"}
    leader.put("status/1/1", {"time": 1.0, "files": files, "exit_code": 0})
    leader.finish(tmp_path, stop=False)
    written = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    )
    assert written == ["ranks/rank_1.collectives.json", "ranks/rank_1.json"]
    assert not leader.failed and not leader.lost


def test_two_launchers_of_one_node_are_refused(leader):
    second = Node(1, 2, "127.0.0.1", leader.node.port)
    Nodes(second, 1).__enter__()
    with pytest.raises(ConfigError, match="NODE_RANK=1"), Nodes(second, 1):
        pass
    with pytest.raises(ConfigError, match="port "), Nodes(leader.node, 1):
        pass


def hangs(*arguments, **options):
    time.sleep(60)


def knows_nobody(*arguments, **options):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def no_way_there(*arguments, **options):
    # The system refuses to send to all.
    return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("255.255.255.255", 7000))]


@pytest.mark.parametrize(
    ("resolver", "words"),
    [(hangs, "no name server"), (knows_nobody, "not known"), (no_way_there, "Permission denied")],
)
def test_a_node_0_that_cannot_be_reached_is_said_at_once(monkeypatch, resolver, words):
    monkeypatch.setattr(multi_node, "ANSWER_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    for rank in (0, 1):
        with (
            pytest.raises(ConfigError, match="MASTER_ADDR=node0") as caught,
            Nodes(Node(rank, 2, "node0", 7000), 1),
        ):
            pass
        assert words in caught.value.why


def test_no_limit_of_the_store_counts_the_import_of_torch(monkeypatch):
    """Calls of the store are made in threads that have a limit."""
    seen = []
    monkeypatch.setattr(
        multi_node, "_import_torch", lambda: seen.append(threading.current_thread())
    )
    with Nodes(Node(0, 2, "127.0.0.1", free_ports()), 1) as nodes:
        nodes.put("left/1", "")
    assert seen == [threading.main_thread()]


def test_another_program_where_node_0_should_listen(monkeypatch):
    """The program accepts the connection and never answers."""
    monkeypatch.setattr(multi_node, "ANSWER_S", 1.0)
    node = Node(1, 2, "127.0.0.1", free_ports())
    refused = pytest.raises(ConfigError, match=f"no launcher .*port {node.port + 1}")
    with socket.create_server(("127.0.0.1", node.port + 1)), refused, Nodes(node, 1):
        pass


def test_the_port_of_torchrun_is_in_use(leader):
    """Both nodes end, with the port's number."""
    port = leader.node.port
    with (
        socket.create_server(("", port)),
        pytest.raises(ConfigError, match=f"port {port} .MASTER_PORT. cannot be used") as caught,
    ):
        leader.compare(lambda: None, dict)
    with (
        pytest.raises(LeaderEnded, match="exit code 2") as other,
        Nodes(Node(1, 2, "127.0.0.1", port), 1) as node,
    ):
        # As __exit__.
        leader.put("end", {"exit_code": caught.value.exit_code, "why": str(caught.value)})
        node.compare(lambda: None, dict)
    assert str(port) in other.value.why


def test_a_node_that_is_not_started_is_named(leader, monkeypatch, capsys):
    """First while node 0 waits for it, then in the error."""
    monkeypatch.setattr(multi_node, "WAITING_S", 0.0)
    monkeypatch.setattr(multi_node, "JOIN_S", 0.3)
    leader.store.delete_key("left/1")
    try:
        with pytest.raises(NodeLost, match=r"node 1 .*has its data"):
            leader.compare(lambda: None, dict)
        [line] = capsys.readouterr().err.splitlines()
        assert "waiting for node 1" in line and "1 of 2" in line
        with (
            pytest.raises(NodeLost),
            Nodes(Node(1, 2, "127.0.0.1", leader.node.port), 1),
        ):
            leader.compare(lambda: None, dict)
        [line] = capsys.readouterr().err.splitlines()[1:]
        assert "until node 1" in line and "data" in line
    finally:
        leader.put("left/1", "")


def test_the_others_use_the_engines_of_node_0(leader):
    with Nodes(Node(1, 2, "127.0.0.1", leader.node.port), 1) as other:
        leader.announce("a run", 77, {"ATTENTION_ENGINE": "sdpa"})
        assert other.next_run() == ("a run", 77, {"ATTENTION_ENGINE": "sdpa"})


def test_the_others_end_with_the_exit_code_of_node_0(leader):
    with (
        pytest.raises(LeaderEnded) as caught,
        Nodes(Node(1, 2, "127.0.0.1", leader.node.port), 1) as other,
    ):
        leader.put("end", {"exit_code": 17, "why": "disk full"})
        other.next_run()
    assert (caught.value.exit_code, caught.value.why) == (17, "disk full")


def test_a_store_that_does_not_answer_is_a_lost_node(monkeypatch):
    """If node 0 loses power, the connection stays open and calls block."""

    class Silent:
        def check(self, keys):
            time.sleep(60)

    nodes = Nodes(Node(1, 2, "127.0.0.1", 7000), 1)
    nodes.store = Silent()
    monkeypatch.setattr(Nodes._call, "__kwdefaults__", {"limit_s": 0.1})
    with pytest.raises(NodeLost, match="node 0"):
        nodes.next_run()
