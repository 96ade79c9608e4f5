"""Terminal output on stderr: color, lines that --quiet leaves out, durations, a sparkline. Standard
library only.

stdout and stderr may go to someone who only watches. So a reader that ends, a closed terminal or a
full disk behind them must not end a run.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

QUIET = "RUN_QUIET"  # set by --quiet
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 24  # characters of a sparkline


def print_stderr(*lines: str) -> None:
    text = "\n".join(lines)
    print(
        paint("error:", "1;31") + text[6:] if text.startswith("error:") else text,
        file=sys.stderr,
        flush=True,
    )


def inform(*lines: str) -> None:
    """Print `lines` on stderr, unless --quiet is set."""
    if lines and not is_quiet():
        print_stderr(*lines)


def is_quiet() -> bool:
    return bool(os.environ.get(QUIET))


def paint(text: str, code: str) -> str:
    """Return `text` in the style of an ANSI code (1: bold, 31: red) if stderr is a terminal with
    colors (no-color.org).
    """
    plain = (
        os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty()
    )
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"


def shown(path: Path) -> str:
    """Return `path` relative to the working directory if it is inside it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def sparkline(values: Sequence[float], floor: float) -> str:
    """Return a sparkline of at most WIDTH means of `values`. The lowest bar means `floor` or
    less.
    """
    size = max(1, -(-len(values) // WIDTH))
    groups = [
        [value for value in values[at : at + size] if math.isfinite(value)]
        for at in range(0, len(values), size)
    ]
    means = [sum(group) / len(group) for group in groups if group]
    span = max(max(means, default=floor) - floor, 1e-9)
    return "".join(BARS[round(max(0.0, mean - floor) / span * (len(BARS) - 1))] for mean in means)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}" if hours else f"{minutes}m{seconds:02d}"


class Copy:
    """A text stream that is redirected to /dev/null when it can no longer be written.

    Processes started after that inherit the redirection.
    """

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
    """Ignore failed writes to stdout and stderr from now on."""
    if not isinstance(sys.stdout, Copy):
        sys.stdout = Copy(sys.stdout or open(os.devnull, "w"))  # noqa: SIM115 - None if closed
    if not isinstance(sys.stderr, Copy):
        sys.stderr = Copy(sys.stderr or open(os.devnull, "w"))  # noqa: SIM115
