"""Several nodes, one run: `./run_and_time.sh` is started on each of them, and the launcher of node 0 leads.

Node 0 alone chooses seed and run directory and owns result.txt, check, report and ledger. The other launchers follow: they connect
to MASTER_PORT + 1 of node 0, do what they are told, and hand over what their ranks left behind. One line of JSON per message:

    follower                            leader
    node 1                          ->
                                    <-  do facts               one node after the other: two on one disk must not both build data
    facts {...}                     ->                         must be the leader's: config, code, packages, GPUs
                                    <-  do prepare, run, seed
    cache fadvise                   ->                         run directory made, data out of the page cache
                                    <-  do start
    beats {rank: heartbeat}         ->                         every second, so that a hang is seen, and named, on node 0
    ended 0, files, exits           ->                         what the ranks left in ranks/, what torchrun saw
                                    <-  do stop                at any time between start and ended
                                    <-  do end, code           no further run

The connection lasts as long as both launchers. Where it breaks, a node is lost, and the others end with a message. Nothing that
comes over it is executed; whoever reaches the port could join in, as with torchrun's own: it belongs on a cluster's inner network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import select
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from common.errors import ConfigError, Hang, Interrupted, RankLost, RunError
from launch.screen import tell
from launch.supervise import GRACE_S, Ending, HangLimits, HangWatch

PORT = 29500  # torchrun's habit, below the range of ports that the kernel gives away
JOIN_S = 900.0  # for all nodes to be there
PREPARE_S = 900.0  # for a node to clear gigabytes from the page cache, or to build the miniature's data
ENDED_S = GRACE_S + 10.0  # for a node to stop its ranks
VICTIMS_S = 5.0  # for our own ranks to end by themselves after those of another node failed
BEAT_S = 1.0
KEPT = re.compile(r"rank_(\d+)\.(json|stack|traceback)")  # files of ranks/ that go to node 0
LONGEST = 16 * 2**20  # bytes of a message; and a quarter of a million characters of a file


class NodeLost(Interrupted):
    """Without its nodes a series cannot go on, as after a signal: it ends, and `--resume` takes it up again."""

    kind = "rank_lost"

    def __init__(self, what: str, why: str):
        RunError.__init__(self, what, why, "see that node's own messages; then start all nodes again")
        self.exit_code = RankLost.exit_code


@dataclasses.dataclass(frozen=True)
class Place:
    """Which node this is, of how many, and where node 0 is."""

    rank: int = 0
    count: int = 1
    address: str = "localhost"
    port: int = PORT


def place_of(environment: Mapping[str, str], count: int) -> Place:
    """From NODE_RANK (or Slurm's SLURM_NODEID), MASTER_ADDR and MASTER_PORT. Raises ConfigError if they do not fit `count` nodes."""
    rank = environment.get("NODE_RANK") or environment.get("SLURM_NODEID") or ("0" if count == 1 else "")
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT") or str(PORT)
    if not rank.isdigit() or int(rank) >= count:
        what = f"NODE_RANK={rank} is no node of {count}" if rank else f"the config is for {count} nodes, and NODE_RANK is not set"
        do = "set it to 0 .. nodes - 1, another one on each node, or use run.sub" if count > 1 else "use a config with more nodes"
        raise ConfigError(what, "every node must know which one it is", do)
    if count == 1:
        return Place()
    if not address:
        raise ConfigError(
            f"the config is for {count} nodes, and MASTER_ADDR is not set", "the others must find node 0", "set it, or use run.sub"
        )
    if not port.isdigit() or not 0 < int(port) < 65535:
        raise ConfigError(f"MASTER_PORT={port} is no port", "it and the next one are used", "choose one below 65535, or unset it")
    return Place(int(rank), count, address, int(port))


class Wire:
    """Messages to and from another node's launcher. Every method raises NodeLost where the connection is gone."""

    def __init__(self, connection: socket.socket, who: str):
        self.connection, self.who, self.unread = connection, who, b""
        # A machine that lost power says nothing: ask after 10 s of silence, and give up 15 to 30 s later.
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
        ):
            connection.setsockopt(level, option, value)

    def lost(self, why: str) -> NodeLost:
        return NodeLost(f"{self.who} is gone", why)

    def send(self, **message) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self.lost(f"its connection broke: {error}") from None

    def take(self, patience_s: float = 0.0) -> dict | None:
        """The next message; None if there is none within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while b"\n" not in self.unread:
            if not select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            self._receive()
        line, _, self.unread = self.unread.partition(b"\n")
        with contextlib.suppress(ValueError):
            if isinstance(message := json.loads(line), dict):
                return message
        raise self.lost("it sent what is no message of a launcher")

    def _receive(self) -> None:
        try:
            data = self.connection.recv(2**16)
        except OSError as error:
            raise self.lost(f"its connection broke: {error}") from None
        if not data or len(self.unread) > LONGEST:
            raise self.lost("its launcher ended, was killed, or its machine went down")
        self.unread += data

    def expect(self, key: str, patience_s: float):
        """The value of the message `key`; others before it are passed over."""
        deadline = time.monotonic() + patience_s
        while (message := self.take(deadline - time.monotonic())) is not None:
            if key in message:
                return message[key]
        raise self.lost(f"it did not answer within {patience_s:.0f} s")


# --- node 0 -----------------------------------------------------------------------------------------------------------


class Leader:
    """Node 0 of a run; with one node only, nothing here does anything. A context: at its end the others are told the exit code."""

    def __init__(self, place: Place, facts: Mapping):
        self.place, self.facts, self.code = place, facts, 1
        self.wires: dict[int, Wire] = {}
        self.ended: dict[int, dict] = {}
        self.lost: dict[int, NodeLost] = {}

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for wire in self.wires.values():
            with contextlib.suppress(NodeLost):
                wire.send(do="end", code=error.exit_code if isinstance(error, RunError) else self.code, why=str(error or ""))
            wire.connection.close()

    def gather(self) -> None:
        """Wait for the other nodes, and see that they run the same. Raises ConfigError if they do not, NodeLost if one is missing."""
        if self.place.count == 1:
            return
        tell(f"nodes      0 of {self.place.count}; waiting for the others on port {self.place.port + 1}")
        deadline = time.monotonic() + JOIN_S
        try:
            listener = socket.create_server(("", self.place.port + 1))
        except OSError as error:
            why = f"{error.strerror}; another run on this machine?"
            raise ConfigError(f"port {self.place.port + 1} cannot be used", why, "set another MASTER_PORT on all nodes") from None
        with listener:
            listener.settimeout(1.0)
            while len(self.wires) < self.place.count - 1:
                with contextlib.suppress(TimeoutError):
                    self._welcome(listener.accept()[0])
                if time.monotonic() > deadline:
                    missing = [str(node) for node in range(1, self.place.count) if node not in self.wires]
                    raise NodeLost(
                        f"node {', '.join(missing)} did not come within {JOIN_S:.0f} s", "it was not started, or cannot reach us"
                    )
        for node, wire in sorted(self.wires.items()):
            wire.send(do="facts")
            self._compare(node, wire.expect("facts", PREPARE_S))

    def _welcome(self, connection: socket.socket) -> None:
        wire = Wire(connection, "a node")
        try:
            node = wire.expect("node", 10.0)
        except NodeLost:  # a port scanner, not a node
            connection.close()
            return
        if type(node) is not int or not 0 < node < self.place.count or node in self.wires:
            raise ConfigError(f"a second launcher says that it is node {node}", "each node has its own number", "correct NODE_RANK")
        wire.who = f"node {node} ({connection.getpeername()[0]})"
        self.wires[node] = wire

    def _compare(self, node: int, theirs: Mapping) -> None:
        ours = json.loads(json.dumps(dict(self.facts)))
        different = [f"{key} is {theirs.get(key)}, here {value}" for key, value in ours.items() if theirs.get(key) != value]
        if different:
            why = "a run is of one config, one code, and one kind of machine"
            raise ConfigError(f"node {node} is not like node 0: {'; '.join(different)}", why, "make them equal, then start all again")

    def prepare(self, run: str, seed: int, cleared: str) -> str:
        """All nodes make ready for this run; how the data left the page cache: `no` if it stayed on any of them."""
        self.ended, self.lost = {}, {}
        for wire in self.wires.values():
            wire.send(do="prepare", run=run, seed=seed)
        answers = [cleared, *(wire.expect("cache", PREPARE_S) for wire in self.wires.values())]
        return "no" if "no" in answers else cleared

    def start(self) -> None:
        for wire in self.wires.values():
            wire.send(do="start")

    def watch(self, ranks: Path, ranks_per_node: int, limits: HangLimits) -> HangWatch:
        return _LeaderWatch(self, ranks, ranks_per_node, limits)

    def listen(self, ranks: Path, ranks_per_node: int) -> None:
        """Take what the others sent: heartbeats become files in `ranks`, where the hang watch reads those of our own ranks."""
        for node, wire in self.wires.items():
            try:
                while node not in self.ended and node not in self.lost and (message := wire.take()) is not None:
                    self._heard(node, message, ranks, ranks_per_node)
            except NodeLost as error:
                self.lost[node] = error

    def _heard(self, node: int, message: dict, ranks: Path, ranks_per_node: int) -> None:
        if "ended" in message:
            self.ended[node] = message
        for rank in map(str, range(node * ranks_per_node, (node + 1) * ranks_per_node)):
            if beat := message.get("beats", {}).get(rank):
                # Its process is none of this machine: nobody here may look for it, or send it a signal.
                (ranks / f"rank_{rank}.heartbeat").write_text(json.dumps(beat | {"pid": None}))

    @property
    def failed(self) -> bool:
        """Another node's ranks failed."""
        return any(message["ended"] for message in self.ended.values())

    def finish(self, run_dir: Path, ranks_per_node: int, ending: Ending) -> Ending:
        """Wait until the others have ended, stopping them first if our own run failed; their ranks' records go into ours."""
        if ending.returncode or ending.signal_number or ending.hang:
            for wire in self.wires.values():
                with contextlib.suppress(NodeLost):
                    wire.send(do="stop")
        deadline = time.monotonic() + ENDED_S
        while len(self.ended) + len(self.lost) < len(self.wires) and time.monotonic() < deadline:
            time.sleep(0.05)
            self.listen(run_dir / "ranks", ranks_per_node)
        for node, wire in self.wires.items():
            if node not in self.ended and node not in self.lost:
                self.lost[node] = wire.lost(f"it did not end its ranks within {ENDED_S:.0f} s")
        for message in self.ended.values():
            _keep(run_dir, message)
        return dataclasses.replace(ending, returncode=1) if self.failed and not ending.returncode else ending


class _LeaderWatch(HangWatch):
    """The hang watch over all ranks of all nodes; it also ends the run when a node is lost or has failed."""

    def __init__(self, leader: Leader, ranks: Path, ranks_per_node: int, limits: HangLimits):
        super().__init__(ranks, leader.place.count * ranks_per_node, limits)
        self.leader, self.ranks_per_node = leader, ranks_per_node
        self.failed_at: float | None = None

    def look(self) -> bool:
        self.leader.listen(self.ranks, self.ranks_per_node)
        if self.leader.lost:
            return True
        if self.leader.failed:
            self.failed_at = self.failed_at or self.clock()
            return self.clock() - self.failed_at > VICTIMS_S
        return super().look()

    def explain(self) -> tuple[Hang, dict]:
        if self.leader.lost or self.leader.failed:  # the verdict is made of the records, not of this
            return Hang("another node failed", "its ranks are gone", "see its records in ranks/"), {}
        return super().explain()

    def pids(self) -> list[int]:
        return [pid for pid in super().pids() if pid is not None]


def _keep(run_dir: Path, message: dict) -> None:
    for name, text in message.get("files", {}).items():
        if KEPT.fullmatch(name):
            (run_dir / "ranks" / name).write_text(text)
    path = run_dir / "torchrun.json"
    if exits := message.get("exits"):
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else []) + exits))


# --- the other nodes --------------------------------------------------------------------------------------------------


class Follower:
    """A node other than 0. A context, open from the first word to the last."""

    def __init__(self, place: Place):
        self.place = place
        self.pending: dict = {}  # an order that came where another one was expected: node 0 gave up before it began

    def __enter__(self) -> Follower:
        place, deadline = self.place, time.monotonic() + JOIN_S
        tell(f"nodes      {place.rank} of {place.count}; node 0 at {place.address} port {place.port + 1} leads, and has the results")
        while True:
            try:
                self.wire = Wire(socket.create_connection((place.address, place.port + 1), timeout=5.0), f"node 0 ({place.address})")
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise NodeLost(f"node 0 does not answer at {place.address} port {place.port + 1}", str(error)) from None
                time.sleep(0.2)
        self.wire.connection.settimeout(None)
        self.wire.send(node=place.rank)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.wire.connection.close()

    def join(self, facts: Callable[[], Mapping]) -> None:
        """Tell node 0 what runs here; `facts` is asked when it is our turn, which may take as long as other nodes need to come."""
        if self.wire.expect("do", JOIN_S + self.place.count * PREPARE_S) == "facts":
            self.wire.send(facts=dict(facts()))

    def order(self) -> dict:
        """The next run (run, seed), or the end (code). Waits as long as node 0 lives."""
        while True:
            message, self.pending = self.pending or self.wire.take(60.0) or {}, {}
            name = message.get("run", "")
            if message.get("do") == "end" or (message.get("do") == "prepare" and Path(name).name == name):
                return message

    def ready(self, cleared: str) -> bool:
        """Say how the data left the page cache; False if the run is not to be started after all."""
        self.wire.send(cache=cleared)
        while (message := self.wire.take(60.0)) is None:
            pass
        if message.get("do") != "start":
            self.pending = message
        return not self.pending

    def watch(self, ranks: Path, ranks_per_node: int) -> HangWatch:
        return _Relay(self, ranks, ranks_per_node)

    def ended(self, run_dir: Path, ending: Ending) -> None:
        kept = [path for path in sorted((run_dir / "ranks").iterdir()) if KEPT.fullmatch(path.name)]
        exits = run_dir / "torchrun.json"
        # Stopped because node 0 said so: that is no failure of ours.
        code = 0 if ending.hang else 128 + ending.signal_number if ending.signal_number else ending.returncode
        files = {path.name: path.read_text(errors="replace")[: 2**18] for path in kept}
        self.wire.send(ended=code, files=files, exits=json.loads(exits.read_text()) if exits.is_file() else [])


class _Relay(HangWatch):
    """Passes the heartbeats of this node's ranks on to node 0, which judges them; ends the run when node 0 says so, or is gone."""

    def __init__(self, follower: Follower, ranks: Path, ranks_per_node: int):
        super().__init__(ranks, follower.place.count * ranks_per_node, HangLimits(0.0, 0.0))
        self.follower, self.last = follower, 0.0
        self.mine = range(follower.place.rank * ranks_per_node, (follower.place.rank + 1) * ranks_per_node)
        self.lost: NodeLost | None = None

    def look(self) -> bool:
        try:
            if self.clock() - self.last > BEAT_S:
                self._pass_on()
            message = self.follower.wire.take()
        except NodeLost as error:
            self.lost = error
            return True
        if message and message.get("do") != "stop":
            self.follower.pending = message
        return bool(message)

    def _pass_on(self) -> None:
        before = dict(self.modified)
        for rank in self.mine:
            self._read(rank)
        changed = {str(rank): self.beats[rank] for rank in self.beats if self.modified[rank] != before.get(rank)}
        if changed:
            self.follower.wire.send(beats=changed)
        self.last = self.clock()

    def explain(self) -> tuple[Hang, dict]:
        return Hang("this node was stopped", "node 0 said so, or is gone", ""), {}
