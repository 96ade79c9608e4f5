"""Make one call of a function of `os` fail."""

import os
import re


def fail_once(function, end: str, nth: int, number: int, done: bool):
    """Return `function` with its `nth` call on a path that ends in `end` failing with an errno.

    `end`: regular expression of the end of the path. The first argument is the path, or a file
    descriptor of it.
    `done`: do the work first, as when NFS repeats a request whose answer was lost.
    """
    calls = 0

    def call(target, *arguments, **options):
        nonlocal calls
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if re.search(f"{end}$", path):
            calls += 1
            if calls == nth:
                if done:
                    function(target, *arguments, **options)
                raise OSError(number, os.strerror(number), path)
        return function(target, *arguments, **options)

    return call
