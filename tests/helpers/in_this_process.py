"""Worker processes of `prepare text` that are threads of this process."""

import multiprocessing
import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection


class InThisProcess(threading.Thread):
    """A thread in place of a process, which would be slow to start.

    It is interrupted after `limit` parts.
    """

    limit = 10**9
    Pipe = staticmethod(multiprocessing.Pipe)
    exitcode = None

    def __init__(self, target, args, daemon):
        super().__init__(daemon=daemon)
        self.target = target
        self.pipe, self.work = args
        self.done = -1  # parts that are complete

    @classmethod
    def Process(cls, **arguments):
        return cls(**arguments)

    def start(self):
        self.pipe = Connection(os.dup(self.pipe.fileno()))  # the caller closes its own
        super().start()

    def run(self):
        with suppress(EOFError, ConnectionError, KeyboardInterrupt):
            self.target(self, self.work)
        self.pipe.close()

    def send(self, message):
        if message is None:
            self.done += 1
        self.pipe.send(message)

    def recv(self):
        task = self.pipe.recv()
        if self.done >= self.limit:
            raise KeyboardInterrupt
        return task

    def terminate(self):
        pass
