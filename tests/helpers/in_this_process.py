"""A pool of processes that works in this process."""

from common.data import text_parts


class InThisProcess:
    """A pool without processes, which would be slow to start. Fails at its `limit`-th task."""

    limit = 10**9

    def __init__(self, processes, context, initializer, arguments):
        initializer(*arguments)
        self.done = 0

    def shutdown(self, **options):
        pass

    def submit(self, function, *arguments):
        future = text_parts.Future()
        self.done += 1
        try:
            if self.done > self.limit:
                raise KeyboardInterrupt
            future.set_result(function(*arguments))
        except (Exception, KeyboardInterrupt) as error:
            future.set_exception(error)
        return future
