"""Runs on several nodes: one launcher on each node, of which node 0 leads and the others follow.

`./run_and_time.sh` is started on every node. torchrun's static rendezvous at MASTER_PORT joins the
ranks. The launchers share a torch.distributed.TCPStore with JSON values, which node 0 hosts at
MASTER_PORT + 1. Node 0 chooses run directory and seed, judges the run and owns its results. In
these keys of the store, <n> is a node and <k> a run:

    joined/<n>      number of launchers that are node n: more than one means the same NODE_RANK
    facts/<n>       config, code, packages, GPUs; the nodes write in turn, because they may share
                    a disk and build data on it
    order/<k>       from node 0: run directory and seed
    ready/<k>/<n>   how node n cleared its page cache; the run starts when all nodes are ready
    status/<k>/<n>  while the ranks of node n run: time and their files (heartbeats, records of
                    failures); at the end their exit code
    stop/<k>        from node 0: stop the ranks
    end             from node 0: exit code and reason; there is no further run
    left/<n>        why the launcher of node n ended

Nothing that is read from the store is executed. The store has no password, like torchrun's port, so
both belong on a cluster's internal network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

from common.errors import ConfigError, Interrupted, RankLost, RunError
from common.terminal import print_stderr
from launch.job import Node
from launch.processes.supervise import GRACE_S

JOIN_S = 1800.0  # for a node to be started, and to build the miniature's data
READY_S = 900.0  # for a node to clear gigabytes from the page cache
LOST_S = 30.0  # a node whose status does not change for this long during a run is lost
ENDED_S = GRACE_S + 10.0  # for a node to stop its ranks
VICTIMS_S = 5.0  # for node 0's ranks to end by themselves after ranks of another node failed
ANSWER_S = 20.0  # for a name server to respond, and for a store
POLL_S = 0.1
RANK_FILE = re.compile(r"rank_(\d+)\.(heartbeat|(collectives\.)?json|stack|traceback)")
FILE_LIMIT = 2**18  # characters of a file that are sent to node 0


class NodeLost(Interrupted):
    """Loss of a node.

    It ends a series as a signal does, and `--resume` continues the series.
    """

    kind = "rank_lost"

    def __init__(self, what: str, why: str):
        RunError.__init__(
            self, what, why, "see that node's own messages; then start all nodes again"
        )
        self.exit_code = RankLost.exit_code


class LeaderEnded(RunError):
    """End of the series by node 0.

    The other nodes exit with the exit code of node 0, which may be 0.
    """

    def __init__(self, exit_code: int, why: str):
        super().__init__(f"node 0 ended with exit code {exit_code}", why)
        self.exit_code = exit_code


class Nodes:
    """The launchers of all nodes, as a context manager.

    Nothing is exchanged if there is only one node.

    Methods raise NodeLost if a node that they wait for is gone. On nodes other than 0 they raise
    LeaderEnded after node 0 has ended the series.
    """

    def __init__(self, node: Node, ranks_per_node: int):
        self.node = node
        self.ranks_per_node = ranks_per_node
        self.others = range(1, node.count)
        self.exit_code = 1  # node 0's exit code, sent to the other nodes
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
                f"node       {self.node.rank} of {self.node.count}, waits for node 0 at {where}"
            )
            _in_thread(functools.partial(_wait_for_listener, self.node), JOIN_S + ANSWER_S)
        try:
            launchers = self._call("add", f"joined/{self.node.rank}", 1, limit_s=ANSWER_S)
        except NodeLost as error:
            what = (
                f"{where} is not answered by a launcher: another program?"
                if self.node.rank
                else f"{where} cannot be used: another run?"
            )
            raise ConfigError(what, error.why, "set another MASTER_PORT on all nodes") from None
        if launchers > 1:
            raise ConfigError(
                f"a second launcher is node {self.node.rank}",
                "each node has its own number",
                "correct NODE_RANK",
            )
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.node.rank:
            with contextlib.suppress(NodeLost):
                self.put(f"left/{self.node.rank}", str(error))
        elif self.others:
            code = error.exit_code if isinstance(error, RunError) else self.exit_code
            self.put("end", {"exit_code": code, "why": str(error or "")})
            joined = [
                node
                for node in self.others
                if node not in self.lost and self._get(f"joined/{node}")
            ]
            # The store ends with this process, so the other nodes must read "end" first.
            deadline = time.monotonic() + ENDED_S
            while time.monotonic() < deadline and any(
                self._get(f"left/{node}") is None for node in joined
            ):
                time.sleep(POLL_S)

    def _call(self, method: str, *arguments, limit_s: float = LOST_S):
        """Call the store in a thread, with a time limit. Raise NodeLost if it does not respond.

        If node 0 loses power, a direct call would block for minutes and ignore signals.
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
                f"node 0 ({self.node.address}, port {self.node.port + 1}) is gone", why
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
                raise NodeLost(f"node {node} is gone", f"its launcher ended: {why}")
            if self.node.rank and (end := self._get("end")):
                raise LeaderEnded(**end)
            if time.monotonic() > deadline:
                why = "it was not started, cannot reach node 0, or is stuck"
                raise NodeLost(f"node {node} did not write {key} within {limit_s:.0f} s", why)
            time.sleep(POLL_S)
        return value

    def compare(self, facts: Callable[[], dict]) -> None:
        """Call `facts` on one node after another and compare the results with node 0's.

        Raise ConfigError on a node whose facts differ from those of node 0, and on node 0 itself.
        """
        if not self.others:
            facts()
            return
        if self.node.rank == 0:
            _require_free(self.node.port)
        found: list[dict] = []
        for node in range(self.node.count):
            if node == self.node.rank:
                self.put(f"facts/{node}", facts())
            found.append(self._wait(f"facts/{node}", node, JOIN_S))
            here = found[node]
            different = [
                f"{key} is {here.get(key)}, there {value}"
                for key, value in found[0].items()
                if here.get(key) != value
            ]
            if different and self.node.rank in (0, node):
                why = "the nodes of a run need the same config, code, packages and GPUs"
                raise ConfigError(
                    f"node {node} is not like node 0: {'; '.join(different)}",
                    why,
                    "make them equal, then start all again",
                )

    def announce(self, run: str, seed: int) -> None:
        """Announce the next run; for node 0."""
        self.run += 1
        if self.others:
            self.put(f"order/{self.run}", {"run": run, "seed": seed})

    def next_run(self) -> tuple[str, int]:
        """Wait for the next run and return its directory name and seed; for nodes other than 0."""
        self.run += 1
        order = self._wait(f"order/{self.run}", 0, float("inf"))
        return Path(order["run"]).name, int(order["seed"])

    def ready(self, cleared: str) -> str:
        """Wait until all nodes are ready, and return how the page cache was cleared.

        Return `no` if the data stayed there on any node.
        """
        if self.others:
            self.put(f"ready/{self.run}/{self.node.rank}", cleared)
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
        failed = [when for exit_code, when in self.ended.values() if exit_code]
        return bool(self.lost) or any(time.monotonic() - when > VICTIMS_S for when in failed)

    @property
    def failed(self) -> bool:
        """True if ranks of another node failed."""
        return any(exit_code for exit_code, _ in self.ended.values())

    def publish(self, run_dir: Path, exit_code: int | None = None) -> None:
        """Send the files of this node's ranks to node 0, with `exit_code` once they have ended."""
        paths = [
            run_dir / "torchrun.json",
            *(path for path in (run_dir / "ranks").iterdir() if RANK_FILE.fullmatch(path.name)),
        ]
        files = {
            path.name: path.read_text(errors="replace")[:FILE_LIMIT]
            for path in paths
            if path.is_file()
        }
        self.put(
            f"status/{self.run}/{self.node.rank}",
            {"time": time.time(), "files": files, "exit_code": exit_code},
        )

    def _receive(self, run_dir: Path) -> None:
        for node in self.others:
            if node in self.ended or node in self.lost:
                continue
            status, (last, changed), now = (
                self._get(f"status/{self.run}/{node}"),
                self.heard[node],
                time.monotonic(),
            )
            if status and status["time"] != last:
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
                    f"node {node} is gone", f"no sign of life for {LOST_S:.0f} s: {why}"
                )

    def _write(self, run_dir: Path, node: int, files: dict[str, str]) -> None:
        for name, text in files.items():
            match = RANK_FILE.fullmatch(name)
            if name == "torchrun.json":
                path = run_dir / f"torchrun_{node}.json"
            elif match and int(match[1]) // self.ranks_per_node == node:
                path = run_dir / "ranks" / name
            else:
                continue
            # The hang watch looks for changes, so unchanged files are not rewritten.
            if not path.is_file() or path.read_text() != text:
                path.write_text(text)

    def finish(self, run_dir: Path, stop: bool) -> None:
        """Wait until the other nodes' ranks have ended; for node 0.

        `stop`: stop them first.
        """
        if self.others and stop:
            self.put(f"stop/{self.run}", True)
        deadline = time.monotonic() + ENDED_S
        while len(self.ended) + len(self.lost) < len(self.others) and time.monotonic() < deadline:
            self._receive(run_dir)
            time.sleep(POLL_S)
        for node in set(self.others) - self.ended.keys() - self.lost.keys():
            self.lost[node] = NodeLost(
                f"node {node} is gone", f"it did not end its ranks within {ENDED_S:.0f} s"
            )


def _import_torch() -> None:
    """Import torch.distributed ahead of the store's time limits.

    The import can take a minute on a busy machine or from a cold disk.
    """
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    # Read at import: the launcher's own messages replace the store's stack traces.
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
    """Run `work` in a thread and return or raise its result.

    Raise TimeoutError after `limit_s`. A name server or a machine without power can block a call
    for minutes, during which signals are ignored.
    """
    answer: Future = Future()

    def fill() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=fill, daemon=True).start()
    return answer.result(limit_s)


def _require_route(node: Node) -> None:
    """Raise ConfigError if node 0's name does not resolve or this machine has no route to it."""
    try:
        found = _in_thread(
            lambda: socket.getaddrinfo(node.address, node.port, type=socket.SOCK_DGRAM), ANSWER_S
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
    except (OSError, TimeoutError, UnicodeError) as error:
        why = str(error) or f"no name server answered within {ANSWER_S:.0f} s"
        do = "set it to a name or address of node 0 that this node knows"
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
