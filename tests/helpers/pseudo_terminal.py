"""A pseudo-terminal of a given width, for programs that draw on one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from time import monotonic  # not the clock that a test replaces

import pytest

pyte = pytest.importorskip("pyte")  # a GPU machine may lack packages of the tests


class PseudoTerminal:
    """`stream` writes to the terminal, `type` is what a user types, `read` returns its output.

    `screen` returns what a user sees.
    """

    def __init__(self, columns: int = 120, rows: int = 40):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.stream = os.fdopen(slave, "w")
        self.emulator = pyte.Screen(columns, rows)
        self.shown = pyte.Stream(self.emulator)

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Start a program with this terminal as its standard streams and controlling terminal."""
        streams = {"stdin": self.stream, "stdout": self.stream, "stderr": self.stream}
        return subprocess.Popen(
            command,
            **streams,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **options,
        )

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self, until: str = "", seconds: float = 0.1) -> str:
        """Return the output of `seconds`, or the output until `until` appears.

        It ends at a pause of 0.1 s.
        """
        self.stream.flush()
        text = b""
        ends = monotonic() + seconds
        while True:
            while select.select([self.master], [], [], 0.1)[0]:  # output arrives in pieces
                text += os.read(self.master, 100_000)
            written = text.replace(b"\r\n", b"\n")  # as it is returned
            if monotonic() >= ends or (until and until.encode() in written):
                self.shown.feed(text.decode())
                return text.decode().replace("\r\n", "\n")

    def screen(self) -> list[str]:
        """Return the lines on the screen that are not empty."""
        self.read()
        return [line.rstrip() for line in self.emulator.display if line.strip()]
