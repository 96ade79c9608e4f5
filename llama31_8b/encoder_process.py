"""A tokenizer in a process of its own, which can be ended when it does not answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from common.errors import DataError

Encode = Callable[[list[str]], list[list[int]]]
# A batch fails after BATCH_FLOOR_S plus its characters / CHARACTERS_PER_S. One core encodes more
# than 500,000 characters a second. A regular expression that backtracks takes a time that doubles
# with each character.
BATCH_FLOOR_S = 120.0
CHARACTERS_PER_S = 10_000


class EncoderProcess:
    """A forked process that encodes batches of documents, as a context manager.

    Enter it before anything is encoded in this process: a fork does not copy a tokenizer's threads.
    """

    def __init__(self, encode: Encode, tokenizer_path: Path):
        self.tokenizer_path = tokenizer_path
        context = multiprocessing.get_context("fork")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(encode, child_end, self._pipe), daemon=True
        )
        self._process.start()
        child_end.close()

    def __enter__(self) -> EncoderProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of `texts`.

        Raises DataError if the tokenizer fails or takes too long.
        """
        limit_s = BATCH_FLOOR_S + sum(map(len, texts)) / CHARACTERS_PER_S
        longest = max(map(len, texts))
        try:
            self._pipe.send(texts)
            if not self._pipe.poll(limit_s):
                raise self._failure(
                    f"no answer after {limit_s:.0f} s for {len(texts)} documents, "
                    f"the longest of {longest:,} characters",
                    "a regular expression in it may backtrack without end on one of the documents",
                )
            ids, failure = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            raise self._failure(
                f"its process ended with exit code {self._process.exitcode}",
                "it crashed, or the system killed it because memory ran out",
            ) from None
        if failure:
            raise self._failure(failure, "its rules fail on one of the documents")
        return ids

    def _failure(self, what: str, why: str) -> DataError:
        return DataError(
            f"{self.tokenizer_path} cannot encode the input: {what}",
            why,
            "use Llama 3.1's own tokenizer.json; the conversion starts again from the beginning",
        )


def _serve(encode: Encode, pipe: Connection, parent_end: Connection) -> None:
    """Answer each batch with (ids, "") or ([], message) until the pipe closes."""
    parent_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic in Rust prints lines of its own
    while True:
        try:
            texts = pipe.recv()
        except EOFError:
            return
        try:
            answer = encode(texts), ""
        except BaseException as error:  # a panic in Rust is not an Exception
            answer = [], f"{type(error).__name__}: {str(error)[:200]}"
        pipe.send(answer)
