"""What stands around a rank's work: signals become exceptions, every failure becomes a record, and the process really ends.

torchrun answers every failure with exit 1 and often names the victim; so each rank leaves its own record, in which a rank that
only saw a peer vanish says so (`secondary`). The launcher reads the records and finds the guilty one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from common.errors import (
    LAUNCHED,
    Hang,
    Interrupted,
    RankLost,
    RunError,
    failure_of,
    write_rank_record,
)

# What gloo and NCCL say when a peer is gone or silent. Seen with torch 2.9 to 2.13; anything else counts as our own failure.
_TIMED_OUT = ("timed out", "Timed out", "timeout")
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "socket",
    "NCCL",
    "gloo",
    "remote process exited",
)

ALONE_S = 5.0  # to write what is to be written, without torchrun
_signals_raise = False  # do SIGTERM and SIGINT end the work of this process?


def run_guarded(
    run_dir: Path | None,
    rank: int,
    body: Callable[[], None],
    on_failure: Callable[[], None],
    step: Callable[[], int],
    returns: bool = False,
) -> None:
    """Run `body`, leave a record and end the process; on failure call `on_failure` before (which may write run_stop aborted).

    `step` tells how far the run got. Ends by `os._exit`: tearing down a broken group can hang, and after a good end a thread of gloo that frees a
    collective's tensors while the interpreter shuts down may not have the GIL: std::terminate, 4 of 72 processes under load. `returns`: after a good
    end, for a profiler around the process, which writes when that shuts down.
    """
    global _signals_raise
    _listen_to_signals(run_dir, rank)
    try:
        body()
        _signals_raise = False  # the work is done: a late SIGTERM must not turn it into a failure
        if run_dir is not None:
            write_rank_record(run_dir, rank, "done", step=step())
    except BaseException as error:
        # Before any call, at which python would raise what a signal has asked for: torchrun ends all ranks when one died, at about the time
        # when the others see that it did, and what they saw is to be told.
        _signals_raise = False
        end_badly(run_dir, rank, error, on_failure, step)
    if not returns:
        os._exit(0)


def classify(error: BaseException, run_dir: Path | None = None, rank: int = 0) -> RunError:
    """The RunError that tells the user what `error` means. Of a full GPU it leaves in `run_dir` what held its memory."""
    if isinstance(error, torch.OutOfMemoryError):
        from common.training.evidence import out_of_memory  # no good run needs it

        return out_of_memory(error, run_dir, rank)
    if known := failure_of(error):
        return known
    if isinstance(error, SystemExit):
        return RankLost(
            f"the rank ended itself with exit code {error.code}",
            "some code called exit",
            "see the traceback in ranks/",
        )
    if is_secondary(error):
        hangs = any(word in str(error) for word in _TIMED_OUT)
        kind, what = (
            (Hang, "a collective timed out") if hangs else (RankLost, "another rank went away")
        )
        return kind(
            what, str(error).splitlines()[0][:300], "see which rank did not report in ranks/"
        )
    return RunError(
        f"{type(error).__name__}: {error}",
        "a defect, or a failure this program does not know",
        "see the traceback in ranks/",
    )


def is_secondary(error: BaseException) -> bool:
    """True where this rank only saw the failure of another one: what a collective raised."""
    ours, signs = ("gloo", "NCCL", "c10d", "TCPStore", "socket"), (*_TIMED_OUT, *_PEER_GONE)
    known = all(any(word in str(error) for word in words) for words in (ours, signs))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and known)


def _listen_to_signals(run_dir: Path | None, rank: int) -> None:
    global _signals_raise
    _signals_raise = True

    def interrupt(number: int, frame) -> None:
        if _signals_raise:
            raise Interrupted(number)

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    stack = None
    if run_dir is not None:
        (run_dir / "ranks").mkdir(parents=True, exist_ok=True)
        # The launcher sends SIGUSR1 to ranks that hang: where they stand goes into this file. It stays open for the process.
        stack = open(run_dir / "ranks" / f"rank_{rank}.stack", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(), stack), daemon=True).start()


def _watch(torchrun: int, stack: IO | None) -> None:
    """End this process when torchrun was killed; after ALONE_S also where its main thread waits for ranks that are gone. When the launcher
    has asked a rank that hangs for its `stack`, leave its collectives too: the main thread cannot."""
    while os.getppid() == torchrun:
        time.sleep(0.5)
        if stack and os.fstat(stack.fileno()).st_size:
            from common.training.evidence import write_collectives  # no good run needs it

            write_collectives(Path(stack.name))
            stack = None
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ALONE_S)
    os._exit(128 + signal.SIGTERM)


def end_badly(
    run_dir: Path | None,
    rank: int,
    error: BaseException,
    on_failure: Callable[[], None],
    step: Callable[[], int],
) -> None:
    """End the process with the exit code of `error`, after a record of it in `run_dir` or a message on stderr."""
    failure = classify(error, run_dir, rank)
    with contextlib.suppress(
        Exception
    ):  # the first failure counts; a second one while reporting must not hide it
        on_failure()
    text = "".join(traceback.format_exception(error))
    told = False  # to the launcher, which tells the user
    with contextlib.suppress(OSError):  # the disk may be what failed
        if run_dir is not None:
            outcome = "interrupted" if isinstance(failure, Interrupted) else "failed"
            write_rank_record(
                run_dir, rank, outcome, failure, step=step(), secondary=is_secondary(error)
            )
            told = LAUNCHED in os.environ
            (run_dir / "ranks" / f"rank_{rank}.traceback").write_text(text)
    with contextlib.suppress(Exception):  # stderr may be closed, or its reader gone
        if not told:
            print(
                failure.lines() if isinstance(error, RunError) else text + failure.lines(),
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(failure.exit_code)
