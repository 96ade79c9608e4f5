"""Guard a rank's main function.

Signals become exceptions, every failure is recorded, and the process always terminates.

torchrun ends with exit code 1 after any failure, and it often names a rank that failed only because
another one had. So each rank writes its own record. The record of a rank that only lost a peer is
marked `secondary`. The launcher reads the records and names the rank that failed first.
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
    first_line,
    write_rank_record,
)

# Words in the messages of collectives. Other errors do not come from a collective.
_BACKENDS = ("gloo", "NCCL", "c10d", "TCPStore", "socket")
# Messages of gloo and NCCL if a peer has exited or does not answer, seen with torch 2.9 to 2.13.
# All other errors count as failures of this rank.
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

SECONDS_TO_FINISH = 5.0  # time to finish writing after torchrun has exited
_signals_raise = False  # whether SIGTERM and SIGINT raise Interrupted in this process


def run_guarded(
    run_dir: Path | None,
    rank: int,
    body: Callable[[], None],
    on_failure: Callable[[], None],
    step: Callable[[], int],
    returns: bool = False,
) -> None:
    """Run `body`, write a record and terminate the process.

    `on_failure`: called after a failure, before the record is written. It may end the log.
    `step`: returns the number of steps done.
    `returns`: return after success, for a profiler that writes its results at interpreter shutdown.

    The process ends by `os._exit`, for two reasons. Tearing down a broken process group can hang.
    And after success, a thread of gloo may free tensors during interpreter shutdown without the
    GIL. That called std::terminate in 4 of 72 processes under load.
    """
    global _signals_raise
    try:
        _listen_to_signals(run_dir, rank)
        body()
        _signals_raise = False  # the work is done; a late SIGTERM is not a failure
        if run_dir is not None:
            with contextlib.suppress(OSError):  # nor is a record that cannot be written
                write_rank_record(run_dir, rank, "done", step=step())
    except BaseException as error:
        # This statement must come first: at any call, Python would raise the exception of a pending
        # signal instead. After a rank has died, torchrun sends SIGTERM to all others, at about the
        # time when their collectives fail. The error of the collective must be recorded.
        _signals_raise = False
        exit_with_failure(run_dir, rank, error, on_failure, step)
    if not returns:
        os._exit(0)


def classify(error: BaseException, run_dir: Path | None = None, rank: int = 0) -> RunError:
    """Return the RunError that explains `error` to the user.

    For a GPU out-of-memory error, also write the allocations to `run_dir`.
    """
    if isinstance(error, torch.OutOfMemoryError):
        from common.training.evidence import out_of_memory  # imported only after a failure

        return out_of_memory(error, run_dir, rank)
    failure = failure_of(error)
    if failure is not None:
        return failure
    if isinstance(error, SystemExit):
        return RankLost(
            f"the rank exited by itself with exit code {error.code}",
            "some code called exit",
            "see the traceback in ranks/",
        )
    if is_secondary(error):
        why = first_line(error)[:300]
        do = "look in ranks/ for the rank that wrote no record"
        if any(word in str(error) for word in _TIMED_OUT):
            return Hang("a collective timed out", why, do)
        return RankLost("another rank ended", why, do)
    return RunError(
        f"{type(error).__name__}: {error}",
        "this is an internal error",
        f"report it with ranks/rank_{rank}.traceback",
    )


def is_secondary(error: BaseException) -> bool:
    """Return whether `error` comes from a collective because another rank failed."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    names_a_backend = any(word in text for word in _BACKENDS)
    return names_a_backend and any(word in text for word in (*_TIMED_OUT, *_PEER_GONE))


def _listen_to_signals(run_dir: Path | None, rank: int) -> None:
    """Raise Interrupted at SIGTERM and SIGINT, write stacks at SIGUSR1, and watch torchrun."""
    global _signals_raise
    _signals_raise = True

    def interrupt(number: int, frame) -> None:
        if _signals_raise:
            raise Interrupted(number)

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    stack = None
    if run_dir is not None:
        # The launcher sends SIGUSR1 to ranks that hang. faulthandler then writes their stacks to
        # this file, which must stay open.
        try:
            (run_dir / "ranks").mkdir(parents=True, exist_ok=True)
            stack = open(run_dir / "ranks" / f"rank_{rank}.stack", "w")  # noqa: SIM115
            faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        except OSError as error:
            note = f"note: rank {rank} will write no stack if it hangs: {error}"
            with contextlib.suppress(OSError):  # the reader of stderr may have exited
                print(note, file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch_torchrun, args=(os.getppid(), stack), daemon=True).start()


def _watch_torchrun(torchrun: int, stack: IO | None) -> None:
    """End this process if torchrun was killed, and collect evidence of a hang.

    After SECONDS_TO_FINISH, the process ends even if its main thread waits for ranks that no longer
    exist. When the launcher has made a hanging rank write its `stack`, this thread also writes its
    collectives, because the main thread cannot.
    """
    while os.getppid() == torchrun:
        time.sleep(0.5)
        with contextlib.suppress(OSError):
            if stack and os.fstat(stack.fileno()).st_size:
                from common.training.evidence import write_collectives  # only after a failure

                write_collectives(Path(stack.name))
                stack = None
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_FINISH)
    os._exit(128 + signal.SIGTERM)


def exit_with_failure(
    run_dir: Path | None,
    rank: int,
    error: BaseException,
    on_failure: Callable[[], None],
    step: Callable[[], int],
) -> None:
    """Record `error` in `run_dir`, or print it to stderr, and exit with its exit code."""
    failure = classify(error, run_dir, rank)
    with contextlib.suppress(Exception):  # a second failure must not hide the first one
        on_failure()
    text = "".join(traceback.format_exception(error))
    launcher_reports = False  # whether the launcher reads the record and reports it to the user
    with contextlib.suppress(OSError):  # the disk may be the cause of the failure
        if run_dir is not None:
            outcome = "interrupted" if isinstance(failure, Interrupted) else "failed"
            facts = {
                "step": step(),
                "secondary": is_secondary(error),
                "gpu_memory_full": isinstance(error, torch.OutOfMemoryError),
            }
            write_rank_record(run_dir, rank, outcome, failure, **facts)
            launcher_reports = LAUNCHED in os.environ
            (run_dir / "ranks" / f"rank_{rank}.traceback").write_text(text)
    with contextlib.suppress(Exception):  # stderr may be closed, or its reader may have exited
        if not launcher_reports:
            message = failure.lines()
            if not isinstance(error, RunError):
                message = text + message
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(failure.exit_code)
