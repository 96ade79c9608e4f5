"""stdout and stderr are copies for those who look on: a reader that ends, a closed terminal or a full disk behind them ends no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


class Copy:
    """A text stream that turns to /dev/null, with the processes that are started from then on, when it can no longer be written."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._or_drop(self._stream.write, text)

    def flush(self) -> None:
        self._or_drop(self._stream.flush)

    def _or_drop(self, do: Callable, *text: str) -> Any:
        try:
            return do(*text)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def outlive_readers() -> None:
    """From now on a failed write to stdout or stderr is no failure of this process."""
    sys.stdout, sys.stderr = (Copy(stream or open(os.devnull, "w")) for stream in (sys.stdout, sys.stderr))  # noqa: SIM115 - None: closed
