"""Coordination of a run on several nodes: one launcher per node, and node 0 leads.

The user starts `./run_and_time.sh` on every node. torchrun's static rendezvous at MASTER_PORT joins
the ranks. The launchers share a torch.distributed.TCPStore with JSON values, which node 0 hosts at
MASTER_PORT + 1. Node 0 chooses the run directory and the seed, decides whether the run succeeded
and writes its results. In these keys of the store, <n> is a node and <k> a run:

    joined/<n>      number of launchers with NODE_RANK=n; more than one is an error
    data/<n>        node n has its data; the nodes write one after another, because they may share
                    a disk and build data on it
    facts/<n>       what must be equal on all nodes (node_facts.py), as it is on node n
    order/<k>       from node 0: run directory, seed and pinned engines
    ready/<k>/<n>   how node n cleared its page cache; the run starts when all nodes are ready
    status/<k>/<n>  while the ranks of node n run: the time and the ranks' files (heartbeats and
                    failure records); at the end also their exit code
    stop/<k>        from node 0: stop the ranks
    end             from node 0: exit code and reason; no further run follows
    left/<n>        why the launcher of node n ended

Nothing that is read from the store is executed. Neither the store nor torchrun's port has a
password, so use both only on a cluster's internal network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

from common.atomic_write import write_whole
from common.errors import ConfigError, Interrupted, RankLost, RunError, listed
from common.terminal import print_stderr
from launch import node_facts
from launch.job import Node
from launch.processes.supervise import GRACE_S

# Time limits in seconds.
JOIN_S = 1800.0  # for all nodes to be started, and to build the miniature's data
READY_S = 900.0  # for a node to clear gigabytes from the page cache, or to sample its files
LOST_S = 30.0  # a node whose status does not change for this long during a run is lost
ENDED_S = GRACE_S + 10.0  # for a node to stop its ranks
VICTIMS_S = 5.0  # for node 0's ranks to end by themselves after ranks of another node failed
WAITING_S = 30.0  # until node 0 says which nodes it waits for
STILL_WAITING_S = 60.0  # until it says so again
ANSWER_S = 20.0  # for a name server, or for the store, to respond
# Beginning of a key -> what a node reports by it.
WAITS = {"data": "has its data", "facts": "has read its files", "ready": "has cleared its cache"}
POLL_S = 0.1  # between two queries of the store
RANK_FILE = re.compile(r"rank_(\d+)\.(heartbeat|(collectives\.)?json|stack|traceback)")
FILE_LIMIT = 2**18  # most characters of a file that are sent to node 0


class NodeLost(Interrupted):
    """The loss of a node: its launcher ended, or it can no longer be reached.

    A lost node ends a series like a signal does: `--resume` continues the series.
    """

    kind = "rank_lost"

    def __init__(self, what: str, why: str):
        RunError.__init__(
            self, what, why, "see the messages of that node, then start all nodes again"
        )
        self.exit_code = RankLost.exit_code


class LeaderEnded(RunError):
    """The end of the series, announced by node 0.

    The other nodes exit with the exit code of node 0, which is 0 if the series succeeded.
    """

    def __init__(self, exit_code: int, why: str):
        super().__init__(f"node 0 ended with exit code {exit_code}", why)
        self.exit_code = exit_code


class Nodes:
    """Connection of this node's launcher to all other nodes' launchers, as a context manager.

    With one node, nothing is exchanged.

    Methods raise NodeLost if a node that they wait for is lost. On nodes other than 0 they raise
    LeaderEnded after node 0 has ended the series.
    """

    def __init__(self, node: Node, ranks_per_node: int):
        self.node = node
        self.ranks_per_node = ranks_per_node
        self.others = range(1, node.count)
        self.exit_code = 1  # exit code that node 0 sends to the other nodes
        self.failure = ""  # what ended the last run, which node 0 sends as well
        self.note_at = math.inf  # when node 0 says which nodes it waits for
        self.run = 0
        self.store = None
        # node -> (time in its last status, local time when that status changed).
        self.heard: dict[int, tuple[float, float]] = {}
        # node -> (exit code of its ranks, local time when it was received).
        self.ended: dict[int, tuple[int, float]] = {}
        self.lost: dict[int, NodeLost] = {}

    def __enter__(self) -> Nodes:
        if not self.others:
            return self
        _require_route(self.node)
        _import_torch()
        where = f"port {self.node.port + 1} of {self.node.address}"
        if self.node.rank:
            print_stderr(
                f"node       {self.node.rank} of {self.node.count}, waiting for node 0 at {where}"
            )
            _in_thread(functools.partial(_wait_for_listener, self.node), JOIN_S + ANSWER_S)
        try:
            launchers = self._call("add", f"joined/{self.node.rank}", 1, limit_s=ANSWER_S)
        except NodeLost as error:
            what = f"{where} cannot be used; another run may use it"
            if self.node.rank:
                what = f"no launcher answers at {where}; another program may use it"
            raise ConfigError(what, error.why, "set another MASTER_PORT on all nodes") from None
        if launchers > 1:
            raise ConfigError(
                f"two launchers have NODE_RANK={self.node.rank}",
                "each node needs a different number",
                "correct NODE_RANK",
            )
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.node.rank:
            with contextlib.suppress(NodeLost):
                self.put(f"left/{self.node.rank}", str(error))
        elif self.others:
            code = error.exit_code if isinstance(error, RunError) else self.exit_code
            self.put("end", {"exit_code": code, "why": str(error or self.failure)})
            self._wait_until_others_left()

    def _wait_until_others_left(self) -> None:
        """Wait at most ENDED_S until the other launchers have ended.

        The store ends with this process, so the other nodes must read "end" before.
        """
        waiting = [
            node for node in self.others if node not in self.lost and self._get(f"joined/{node}")
        ]
        deadline = time.monotonic() + ENDED_S
        while waiting and time.monotonic() < deadline:
            time.sleep(POLL_S)
            waiting = [node for node in waiting if self._get(f"left/{node}") is None]

    def _call(self, method: str, *arguments, limit_s: float = LOST_S):
        """Call a method of the store. Raise NodeLost if it does not respond within `limit_s`.

        The call runs in a thread: if node 0 loses power, a direct call would block for minutes and
        ignore signals.
        """

        def work():
            self.store = self.store or _connect(self.node)
            return getattr(self.store, method)(*arguments)

        try:
            return _in_thread(work, limit_s)
        except (RuntimeError, TimeoutError) as error:
            why = (
                "its launcher ended, was killed or never started, or its machine cannot be "
                f"reached: {str(error) or 'no answer'}"
            )
            raise NodeLost(
                f"node 0 ({self.node.address}, port {self.node.port + 1}) is lost", why
            ) from None

    def put(self, key: str, value) -> None:
        """Publish `value`, which must be JSON serializable, to all nodes."""
        self._call("set", key, json.dumps(value))

    def _get(self, key: str):
        """Return the value of `key`, None while the key does not exist."""
        return json.loads(self._call("get", key)) if self._call("check", [key]) else None

    def _wait(self, key: str, node: int, limit_s: float):
        """Wait for `key`, which `node` writes, and return its value.

        Raise NodeLost if the node is gone or `limit_s` has passed. Raise LeaderEnded if node 0 has
        ended the series.
        """
        deadline = time.monotonic() + limit_s
        while (value := self._get(key)) is None:
            if (why := self._get(f"left/{node}")) is not None:
                raise NodeLost(f"node {node} is lost", f"its launcher ended: {why}")
            if self.node.rank and (end := self._get("end")):
                raise LeaderEnded(**end)
            if time.monotonic() > self.note_at:
                self._say_who_is_awaited(key, node)
            if time.monotonic() > deadline:
                why = "it was not started, cannot reach node 0, or hangs"
                state = WAITS[key.partition("/")[0]]
                what = f"node {node} did not report within {limit_s:.0f} s that it {state}"
                raise NodeLost(what, why)
            time.sleep(POLL_S)
        return value

    def _say_who_is_awaited(self, key: str, node: int) -> None:
        """Print which nodes are missing, or else what node 0 waits for: `key` of `node`."""
        self.note_at = time.monotonic() + STILL_WAITING_S
        missing = [str(each) for each in self.others if not self._get(f"joined/{each}")]
        text = f"until node {node} {WAITS[key.partition('/')[0]]}"
        if missing:
            here = self.node.count - len(missing)
            nodes = "node" if len(missing) == 1 else "nodes"
            text = f"for {nodes} {', '.join(missing)} ({here} of {self.node.count} are here)"
        print_stderr(f"node       0 of {self.node.count}, waiting {text}")

    def compare(self, ensure_data: Callable[[], None], facts: Callable[[], dict]) -> None:
        """Raise ConfigError on all nodes if any node's `facts` differ from node 0's.

        `ensure_data`: called before, on one node after another.
        """
        if not self.others:
            ensure_data()
            return
        if self.node.rank == 0:
            _require_free(self.node.port)
            self.note_at = time.monotonic() + WAITING_S
        for node in range(self.node.count):
            if node == self.node.rank:
                ensure_data()
                self.put(f"data/{node}", True)
            self._wait(f"data/{node}", node, JOIN_S)
        self.put(f"facts/{self.node.rank}", facts())
        differences: list[str] = []
        of_node_0 = self._wait("facts/0", 0, READY_S)
        for node in self.others:
            facts_there = self._wait(f"facts/{node}", node, READY_S)
            for text in node_facts.differences(facts_there, of_node_0):
                differences.append(f"node {node} has another {text}")
        if differences:
            raise ConfigError(
                f"the nodes differ: {listed(differences)} on node 0",
                "the nodes of a run need the same code, packages, config, engines, GPUs, driver, "
                "variables, data and weights",
                "make them equal (copy files from the right node), then start all nodes again",
            )

    def announce(self, run: str, seed: int, pins: Mapping[str, str]) -> None:
        """Announce the next run and the variables that pin its engines; for node 0."""
        self.run += 1
        if self.others:
            self.put(f"order/{self.run}", {"run": run, "seed": seed, "pins": pins})

    def next_run(self) -> tuple[str, int, dict[str, str]]:
        """Wait for the next run, and return what node 0 announces; for nodes other than 0."""
        self.run += 1
        order = self._wait(f"order/{self.run}", 0, float("inf"))
        return Path(order["run"]).name, int(order["seed"]), order["pins"]

    def ready(self, cleared: str) -> str:
        """Wait until all nodes are ready, and return how the page cache was cleared.

        `cleared`: how this node cleared it. Return `no` if the data stayed cached on any node.
        """
        if self.others:
            self.put(f"ready/{self.run}/{self.node.rank}", cleared)
            if self.node.rank == 0:
                self.note_at = time.monotonic() + WAITING_S
            answers = [
                self._wait(f"ready/{self.run}/{node}", node, READY_S)
                for node in range(self.node.count)
            ]
            cleared = "no" if "no" in answers else cleared
        self.heard = dict.fromkeys(self.others, (0.0, time.monotonic()))
        self.ended = {}
        self.lost = {}
        return cleared

    def poll(self, run_dir: Path) -> bool:
        """Exchange status with other nodes, and return True if this node's ranks must be stopped.

        Call this several times a second while the ranks run.
        """
        if self.node.rank:
            self.publish(run_dir)
            return any(self._get(key) is not None for key in (f"stop/{self.run}", "end"))
        self._receive(run_dir)
        failure_times = [when for exit_code, when in self.ended.values() if exit_code]
        waited_enough = any(time.monotonic() - when > VICTIMS_S for when in failure_times)
        return bool(self.lost) or waited_enough

    @property
    def failed(self) -> bool:
        """True if ranks of another node failed."""
        return any(exit_code for exit_code, _ in self.ended.values())

    def publish(self, run_dir: Path, exit_code: int | None = None) -> None:
        """Send the files of this node's ranks to node 0, with `exit_code` once they have ended."""
        paths = [run_dir / "torchrun.json"]
        with contextlib.suppress(OSError):  # the launcher watches the directory
            in_ranks = list((run_dir / "ranks").iterdir())
            paths += [path for path in in_ranks if RANK_FILE.fullmatch(path.name)]
        files = {}
        for path in paths:
            # A file that cannot be read now is sent with the next status.
            with contextlib.suppress(OSError):
                if path.is_file():
                    files[path.name] = path.read_text(errors="replace")[:FILE_LIMIT]
        self.put(
            f"status/{self.run}/{self.node.rank}",
            {"time": time.time(), "files": files, "exit_code": exit_code},
        )

    def _receive(self, run_dir: Path) -> None:
        """Read the status of each node whose ranks run, and note nodes that ended or are lost."""
        for node in self.others:
            if node in self.ended or node in self.lost:
                continue
            status = self._get(f"status/{self.run}/{node}")
            now = time.monotonic()
            last_time, changed = self.heard[node]
            if status and status["time"] != last_time:
                self.heard[node] = (status["time"], now)
                self._write(run_dir, node, status["files"])
                if status["exit_code"] is not None:
                    self.ended[node] = (status["exit_code"], now)
            elif now - changed > LOST_S:
                why = (
                    self._get(f"left/{node}")
                    or "its launcher was killed, or its machine is down or cannot be reached"
                )
                self.lost[node] = NodeLost(
                    f"node {node} is lost", f"no status for {LOST_S:.0f} s: {why}"
                )

    def _write(self, run_dir: Path, node: int, files: dict[str, str]) -> None:
        """Write the files that `node` sent, if they belong to ranks of that node."""
        for name, text in files.items():
            match = RANK_FILE.fullmatch(name)
            if name == "torchrun.json":
                path = run_dir / f"torchrun_{node}.json"
            elif match and int(match[1]) // self.ranks_per_node == node:
                path = run_dir / "ranks" / name
            else:
                continue
            # The hang watch looks for changes, so unchanged files are not rewritten. A failed write
            # is made up for by the node's next status.
            with contextlib.suppress(OSError):
                if not path.is_file() or path.read_text() != text:
                    write_whole(path, text.encode())

    def finish(self, run_dir: Path, stop: bool) -> None:
        """Wait until the ranks of the other nodes have ended; for node 0.

        `stop`: whether to stop these ranks first.
        """
        if self.others and stop:
            self.put(f"stop/{self.run}", True)
        deadline = time.monotonic() + ENDED_S
        while len(self.ended) + len(self.lost) < len(self.others) and time.monotonic() < deadline:
            self._receive(run_dir)
            time.sleep(POLL_S)
        for node in set(self.others) - self.ended.keys() - self.lost.keys():
            self.lost[node] = NodeLost(
                f"node {node} is lost", f"it did not end its ranks within {ENDED_S:.0f} s"
            )


def _import_torch() -> None:
    """Import torch.distributed before any time limit of the store applies.

    The import can take a minute on a busy machine or from a cold disk.
    """
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    # torch reads it at import. FATAL hides the store's stack traces: the launcher's own errors
    # replace them.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    import torch.distributed  # noqa: F401

    os.environ.pop("TORCH_CPP_LOG_LEVEL")
    if level is not None:  # the ranks inherit the user's value
        os.environ["TORCH_CPP_LOG_LEVEL"] = level


def _connect(node: Node):
    """Connect to the launchers' store, which node 0 hosts. Raise RuntimeError if that fails."""
    from torch.distributed import TCPStore

    host = node.address if node.rank else "127.0.0.1"
    return TCPStore(
        host,
        node.port + 1,
        is_master=node.rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=ANSWER_S),
    )


def _in_thread(work: Callable, limit_s: float):
    """Run `work` in a thread and return its result. Raise its exception, if any.

    Raise TimeoutError after `limit_s`. Without the thread, a name server or a machine without power
    could block the call for minutes, during which signals are ignored.
    """
    result: Future = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(limit_s)


def _require_route(node: Node) -> None:
    """Raise ConfigError if node 0's name does not resolve or this machine has no route to it."""
    try:
        addresses = _in_thread(
            lambda: socket.getaddrinfo(node.address, node.port, type=socket.SOCK_DGRAM), ANSWER_S
        )
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
    except (OSError, TimeoutError, UnicodeError) as error:
        why = str(error) or f"no name server answered within {ANSWER_S:.0f} s"
        do = "set it to a name or address of node 0 that this node can resolve and reach"
        raise ConfigError(f"MASTER_ADDR={node.address} cannot be reached", why, do) from None


def _wait_for_listener(node: Node) -> None:
    """Wait until something listens at node 0's port. Raise NodeLost after JOIN_S.

    The store checks later whether it is a launcher.
    """
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            return socket.create_connection((node.address, node.port + 1), ANSWER_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise NodeLost(
                    f"node 0 ({node.address}, port {node.port + 1}) does not answer", str(error)
                ) from None
            time.sleep(POLL_S)


def _require_free(port: int) -> None:
    """Raise ConfigError if torchrun could not listen on `port`."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        do = "end the program that listens there, or set another MASTER_PORT on all nodes"
        raise ConfigError(
            f"port {port} (MASTER_PORT) cannot be used on node 0", error.strerror or str(error), do
        ) from None
