"""Speed, latency and clock difference of the link to another node, over TCP. Standard library only.

A listener either receives data and answers with the number of bytes, or answers pings with the time
of its clock. Like torchrun's port it has no password. It exists only during the check.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

CONNECT_S = 3.0
ANSWER_S = 10.0  # for a listener to answer, and for its queues to drain
PINGS = 50  # of one measurement
STREAMS = 4  # one TCP stream does not fill a fast link
CHUNK = 2**18  # bytes
# First byte of a connection: what the listener does.
PING = b"p"
SINK = b"s"


class Listener:
    """A listener on `ports`, and on `free_port`, which the kernel chooses, until `close`.

    `errors`: port -> why it cannot be used.
    """

    def __init__(self, ports: Sequence[int]):
        self.errors: dict[int, str] = {}
        self.sockets: list[socket.socket] = []
        for port in (*ports, 0):
            try:
                self.sockets.append(socket.create_server(("", port)))
            except OSError as error:
                self.errors[port] = error.strerror or str(error)
        self.free_port = self.sockets[-1].getsockname()[1]
        for listening in self.sockets:
            threading.Thread(target=_accept, args=(listening,), daemon=True).start()

    def close(self) -> None:
        for listening in self.sockets:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
            listening.close()


def _accept(listening: socket.socket) -> None:
    """Serve each connection to `listening` in a thread of its own, until the socket is closed."""
    with contextlib.suppress(OSError):  # raised by accept after the socket was closed
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    """Do what the first byte of `connection` asks for, until the other side closes it."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = connection.recv(1)
        if kind == PING:
            while connection.recv(1):
                connection.sendall(struct.pack("d", time.time()))
        elif kind == SINK:
            buffer = bytearray(CHUNK)
            count = 0
            while read := connection.recv_into(buffer):
                count += read
            connection.sendall(struct.pack("q", count))


def probe(host: str, ports: Sequence[int], free_port: int, seconds: float) -> dict:
    """Measure the link to the listener of `host`. Return a dict with these keys:

    port_errors    port -> why it cannot be reached, for `ports`
    error          why nothing was measured; without it, all of the following are there
    gbit_s         rate in Gb/s
    trip_s         median round trip
    clock_s        the other node's clock minus this one's
    clock_error_s  uncertainty of clock_s
    address        local address of the link
    """
    every_port = [*ports, free_port]
    with ThreadPoolExecutor(len(every_port)) as pool:
        reasons = pool.map(lambda port: _reach(host, port), every_port)
        errors = dict(zip(every_port, reasons, strict=True))
    result: dict = {"port_errors": {port: errors[port] for port in ports if errors[port]}}
    if errors[free_port]:
        return result | {"error": errors[free_port]}
    try:
        return result | ping(host, free_port) | {"gbit_s": send(host, free_port, seconds) / 1e9}
    except (OSError, struct.error) as error:
        return result | {"error": f"the connection broke: {error}"}


def _reach(host: str, port: int) -> str:
    """Return why `port` cannot be reached, "" if it can."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        return str(error)
    return ""


def _connect(host: str, port: int, kind: bytes) -> socket.socket:
    """Return a connection to a listener, which then does `kind`: PING or SINK."""
    connection = socket.create_connection((host, port), CONNECT_S)
    connection.settimeout(ANSWER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(kind)
    return connection


def ping(host: str, port: int) -> dict:
    """Return median round trip, clock difference and its uncertainty in s, and local address.

    The clock difference is estimated as in NTP (RFC 5905), from the fastest round trip: the other
    clock's time minus the middle of the round trip. The error is at most half of the round trip.
    """
    trips = []
    with _connect(host, port, PING) as connection:
        local = connection.getsockname()[0]
        for _ in range(PINGS):
            sent = time.time()
            start = time.perf_counter()
            connection.sendall(PING)
            [other_clock] = struct.unpack("d", connection.recv(8, socket.MSG_WAITALL))
            trip = time.perf_counter() - start
            trips.append((trip, other_clock - (sent + trip / 2)))
    fastest, clock_difference = min(trips)
    median = statistics.median(trip for trip, _ in trips)
    return {
        "trip_s": median,
        "clock_s": clock_difference,
        "clock_error_s": fastest / 2,
        "address": local,
    }


def send(host: str, port: int, seconds: float) -> float:
    """Send for `seconds` on STREAMS connections, and return the rate in bit/s.

    The time includes the listener's confirmation, so that data in buffers does not count as sent.
    """
    chunk = bytes(CHUNK)

    def stream() -> int:
        with _connect(host, port, SINK) as connection:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)
            [received] = struct.unpack("q", connection.recv(8, socket.MSG_WAITALL))
            return received

    start = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        counts = [pool.submit(stream) for _ in range(STREAMS)]
        total = sum(count.result() for count in counts)
    return total * 8 / (time.perf_counter() - start)
