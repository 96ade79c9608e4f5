"""Terminal output: messages on stderr, tables and progress bars, drawn by rich.

rich is imported only inside the functions that draw with it, because ranks, and a Python without
packages, import this module too. They print plain lines. Output to a file or a pipe is always
plain.

A run must continue if stdout or stderr can no longer be written (`outlive_readers`): the program
that reads them exits, the terminal is closed, or the disk is full.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from common import text_tables
from common.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

QUIET = "RUN_QUIET"  # set by --quiet
UNLIMITED = 10_000  # columns of a file or pipe: lines are not folded
DEFAULT_COLUMNS = 80  # of a terminal that does not report its width
_live: Live | None = None  # the active live display; messages are printed above it
CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
LABEL = re.compile(r" *(\w+:?  +|(error|why|do|note|warning): +)")  # label at the start of a line


# --- messages -------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Return `text` without control characters, such as those of a foreign file's name.

    Line ends, tabs and the sequences that set colors remain.
    """
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def print_stderr(*lines: str) -> None:
    """Print `lines` on stderr. On a terminal, fold them between words and color errors."""
    lines = tuple(map(printable, lines))
    if not sys.stderr.isatty() or not has_rich():
        print("\n".join(lines), file=sys.stderr, flush=True)
        return
    from rich.text import Text

    out = _live.console if _live else console(sys.stderr)
    for line in "\n".join(lines).split("\n"):
        text = Text(fold(line, columns(sys.stderr)))
        text.highlight_regex(r"^error:", "bold red")
        text.highlight_regex(r"^ +(why|do):", "bold")
        out.print(text, soft_wrap=True)
    sys.stderr.flush()


def inform(*lines: str) -> None:
    """Print `lines` on stderr, unless --quiet is set."""
    if lines and not is_quiet():
        print_stderr(*lines)


def is_quiet() -> bool:
    """Return whether --quiet is set."""
    return bool(os.environ.get(QUIET))


def fold(line: str, width: int) -> str:
    """Fold a line between words. Continuation lines are indented to the text after its label."""
    if len(line) <= width:
        return line
    label = LABEL.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip())
    # The longest word, such as a path, must fit beside the indentation.
    largest_indent = width - max(map(len, line.split()))
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * max(min(indent, largest_indent), 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def shown(path: Path) -> str:
    """Return `path` as text, relative to the working directory if it is inside it."""
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def data_size(count: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1: "16.1 GB", "3 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            digits = 1 if unit == "GB" and count < 1e11 else 0
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count:.0f} bytes"


def plural(count: int, noun: str) -> str:
    """Return "1 error", "2 errors" and the like."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """Return a duration as text, such as "4m16" or "1h05" (hours and minutes)."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}" if hours else f"{minutes}m{seconds:02d}"


# --- rich -----------------------------------------------------------------------------------------


def has_rich() -> bool:
    """Return whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def columns(stream: TextIO) -> int:
    """Return the width of the terminal that `stream` writes to, or UNLIMITED if there is none."""
    if not stream.isatty():
        return UNLIMITED
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_COLUMNS
    except OSError:  # the terminal was closed
        return DEFAULT_COLUMNS


def console(stream: TextIO, indent: int = 0) -> Console:
    """Return a rich Console that writes to `stream`, without styles if NO_COLOR is set."""
    from rich.console import Console

    is_terminal = stream.isatty()
    has_styles = is_terminal and not os.environ.get("NO_COLOR")
    return Console(
        file=stream,
        width=columns(stream) - indent,
        force_terminal=is_terminal,
        color_system="auto" if has_styles else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def render(content: RenderableType, out: Console) -> list[str]:
    """Return the lines that rich prints for `content` on `out`, without trailing spaces."""
    with out.capture() as captured:
        out.print(content)
    return [line.rstrip() for line in captured.get().splitlines()]


def start_live(transient: bool) -> Live:
    """Start a live display on stderr, which `draw` redraws.

    `transient`: erase the display when it stops.
    """
    global _live
    from rich.live import Live

    stream: Any = sys.stderr
    if isinstance(stream, GuardedStream):
        stream = stream.for_drawing()
    _live = Live(
        console=console(stream),
        auto_refresh=False,  # it would start a thread, and callers fork
        transient=transient,
        redirect_stdout=False,
    )
    _live.start()
    return _live


def draw(live: Live, content: Callable[[int], RenderableType]) -> None:
    """Redraw `live`. `content`: returns what to draw for a width in columns."""
    live.console.width = columns(sys.stderr)
    live.update(content(live.console.width), refresh=True)


def stop_live(live: Live) -> None:
    """Stop the live display."""
    global _live
    _live = None
    live.stop()


def table(rows: Sequence[Sequence[str]], alignment: str, indent: int = 0) -> list[str]:
    """Return the lines of a table that fits the terminal behind stdout.

    The first row is the head. `alignment` has one character per column: "<" aligns cells to the
    left, ">" to the right. `indent` is the number of columns by which the caller indents the lines.
    If the columns do not fit side by side, each row becomes a block with one line per cell. Without
    rich, cells are padded, and long lines are not folded.
    """
    if not has_rich():
        return ["  ".join(cells).rstrip() for cells in text_tables.align(rows, alignment)]
    from rich.measure import Measurement
    from rich.table import Table

    head, *body = rows
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title, side in zip(head, alignment, strict=True):
        drawn.add_column(title, justify="right" if side == ">" else "left", overflow="fold")
    for row in body:
        drawn.add_row(*row)
    out = console(sys.stdout, indent)
    unlimited = out.options.update(max_width=UNLIMITED)
    if Measurement.get(out, unlimited, drawn).minimum <= out.width:
        return render(drawn, out)
    blocks = Table.grid(padding=(0, 2, 0, 0))
    for row in body:
        for title, cell in zip(head, row, strict=True):
            if cell:
                blocks.add_row(title, cell)
        blocks.add_row()
    return render(blocks, out)[:-1]


# --- progress -------------------------------------------------------------------------------------


class Rate:
    """The rate of counted work over the last 30 seconds, and the remaining time."""

    WINDOW_S = 30.0

    def __init__(self, total: float, unit: str):
        """Start to count.

        `total`: amount of work; 0 if unknown.
        `unit`: plural of what is counted; "B" for bytes.
        """
        self.total = total
        self.unit = unit
        self.began = time.monotonic()
        self.points: deque[tuple[float, float]] = deque()

    def add(self, done: float) -> None:
        """Record that `done` of `total` is done now."""
        now = time.monotonic()
        self.points.append((now, done))
        while now - self.points[0][0] > self.WINDOW_S and len(self.points) > 2:
            self.points.popleft()

    @property
    def per_second(self) -> float:
        """Work done per second; 0 if unknown."""
        if len(self.points) < 2:
            return 0.0
        first_time, first_done = self.points[0]
        last_time, last_done = self.points[-1]
        return (last_done - first_done) / max(last_time - first_time, 1e-9)

    def text(self) -> str:
        """Return the amount done, the rate and the remaining time, as text.

        If the total is unknown, return the elapsed time.
        """
        if not self.total:
            return duration(time.monotonic() - self.began)
        done = self.points[-1][1] if self.points else 0
        parts = [self._amount(done)]
        rate = self.per_second
        if rate:
            if self.unit == "B":
                parts.append(f"{data_size(rate)}/s")
            elif self.unit != "s":  # seconds per second mean nothing
                parts.append(f"{rate:,.1f} {self.unit}/s")
            parts.append(f"{duration((self.total - done) / rate)} left")
        return " · ".join(parts)

    def _amount(self, done: float) -> str:
        if self.unit == "B":
            return f"{data_size(done)} of {data_size(self.total)}"
        return f"{done:,.0f} of {self.total:,.0f} {self.unit}"


def progress_row(title: str, rate: Rate, width: int) -> RenderableType:
    """Return one line of `width` columns: title, bar, amount, rate and remaining time."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done = rate.points[-1][1] if rate.points else 0
    title = printable(title)
    text = rate.text()
    bar_width = width - len(title) - len(text) - 2
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(no_wrap=True, overflow="ellipsis")
    if bar_width >= 8:
        # A bar without a total pulses.
        bar = ProgressBar(rate.total or None, done, width=min(bar_width, 30))
        row.add_row(title, bar, text)
    else:
        row.add_row(Text(f"{title} {text}", no_wrap=True, overflow="ellipsis"))
    return row


class Progress:
    """Progress of long work on stderr: a bar on a terminal, otherwise a line every 30 seconds.

    Use it as a context manager. The bar is erased at the end.
    """

    REDRAW_S = 0.1
    LINE_S = 30.0

    def __init__(self, title: str, total: float, unit: str, is_shown: bool = True):
        """Prepare the display. `total`, `unit`: see Rate."""
        self.title = title
        self.rate = Rate(total, unit)
        self.is_shown = is_shown and not is_quiet()
        self.is_bar = sys.stderr.isatty() and has_rich()
        self.live: Live | None = None
        self.drawn = time.monotonic()

    def __enter__(self) -> Progress:
        if self.is_bar and self.is_shown:
            self.live = start_live(transient=True)
        self.at(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            stop_live(self.live)

    def advance(self, done: float) -> None:
        """Show that `done` more units are done."""
        self.at(self.rate.points[-1][1] + done)

    def at(self, done: float, title: str = "", total: float | None = None) -> None:
        """Show that `done` units are done in total. A new title or total restarts the rate."""
        if (title and title != self.title) or (total is not None and total != self.rate.total):
            self.title = title or self.title
            self.rate = Rate(self.rate.total if total is None else total, self.rate.unit)
        self.rate.add(done)
        now = time.monotonic()
        period_s = self.REDRAW_S if self.live else self.LINE_S
        if not self.is_shown or now - self.drawn < period_s:
            return
        self.drawn = now
        if not self.live:
            print(f"{self.title}: {self.rate.text()}", file=sys.stderr, flush=True)
            return
        draw(self.live, lambda width: progress_row(self.title, self.rate, width))


# --- readers that exit ----------------------------------------------------------------------------


class GuardedStream:
    """Standard output or error. On a terminal, it writes only what is `printable`.

    If it can no longer be written, it is redirected to /dev/null. Processes started after that
    inherit this. What is written is dropped then, or raises BrokenPipeError or StorageError.
    """

    def __init__(self, stream: Any, drops: bool, filters: bool = True):
        self._stream = stream
        self.drops = drops
        self.filters = filters

    def for_drawing(self) -> GuardedStream:
        """Return this stream for a live display, which moves the cursor by control characters."""
        return GuardedStream(self._stream, self.drops, filters=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self.filters and self.isatty():
            text = printable(text)
        return self._guarded(self._stream.write, text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, method: Callable, *text: str) -> Any:
        try:
            return method(*text)
        except OSError as error:
            _discard(self.fileno())
            if self.drops:
                return None
            if isinstance(error, BrokenPipeError):
                raise
            raise StorageError(
                f"standard output: {error.strerror or error}",
                "the command's output could not be written",
                "free space, or redirect the output to another file",
            ) from None


def guarded(stream: Any, drops: bool = False) -> GuardedStream:
    """Return `stream` as a GuardedStream, which drops output if it already does or `drops`.

    Python sets a closed stream to None. It stays one that cannot be written.
    """
    if not isinstance(stream, GuardedStream):
        stream = GuardedStream(stream or open(os.devnull), drops)  # noqa: SIM115
    stream.drops |= drops
    return stream


def outlive_readers() -> None:
    """Ignore failed writes to stdout and stderr from now on."""
    sys.stdout = guarded(sys.stdout, drops=True)
    sys.stderr = guarded(sys.stderr, drops=True)
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:  # closed from the beginning: the ranks must be able to write
            _discard(number)


def _discard(number: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    if null != number:  # the number was closed
        os.close(null)
