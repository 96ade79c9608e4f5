"""The only place that opens a file under /proc or /sys.

Written are the files of the allow-list and no others. Every component of a path is opened relative to the one before and without
following links, so that neither a link nor `..` leads elsewhere, also when somebody changes the tree at the same time.
"""

from __future__ import annotations

import errno
import os
import re
import stat

CPU = "/sys/devices/system/cpu"
THP = "/sys/kernel/mm/transparent_hugepage"
DROP_CACHES = "/proc/sys/vm/drop_caches"

# cpuN/cpufreq is a link to cpufreq/policyN, and links are refused: hence the policies themselves.
WRITABLE = (
    re.escape(DROP_CACHES),
    r"/proc/sys/kernel/(numa_balancing|nmi_watchdog|randomize_va_space)",
    re.escape(THP) + r"/(enabled|defrag)",
    re.escape(CPU) + r"/cpufreq/policy[0-9]{1,5}/(scaling_governor|energy_performance_preference)",
    re.escape(CPU) + r"/cpu[0-9]{1,5}/cpuidle/state[0-9]{1,2}/disable",
)
VALUE = r"[A-Za-z0-9_+-]{1,40}"  # one word: no newline, no blank, nothing that a second line could hide in
MAX_BYTES = 65536  # a page is the most that these files hold; scaling_available_governors is the longest


class Refused(Exception):
    """The path or the value is not one that this package touches."""


def value_of(raw: str) -> str:
    """The value in the text of a file: the word in brackets where the file lists choices (`always [madvise] never`)."""
    chosen = re.search(r"\[([^\]\s]+)\]", raw)
    return chosen[1] if chosen else raw.strip()


def choices_of(raw: str) -> list[str]:
    """The choices that a bracketed file offers."""
    return raw.replace("[", "").replace("]", "").split()


def check_writable(path: str, value: str | None = None) -> None:
    """Raise Refused unless `path` is on the allow-list and `value` is one plain word."""
    if not any(re.fullmatch(pattern, path) for pattern in WRITABLE):
        raise Refused(f"{path!r} is not on the list of files that may be written")
    if value is not None and not re.fullmatch(VALUE, value):
        raise Refused(f"{value!r} is not a value for {path}")


class Tree:
    """/proc and /sys of this host. Raises OSError as the kernel does (FileNotFoundError: not supported here), and Refused."""

    def __init__(self, root: str = "/"):
        self.root = root
        self._root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root_fd)

    def read(self, path: str) -> str:
        """The text of a file, as it is."""
        descriptor = self._open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, MAX_BYTES).decode("utf-8", "surrogateescape")
        finally:
            os.close(descriptor)

    def names(self, path: str, pattern: str) -> list[str]:
        """What a directory holds that matches `pattern`, ordered by the number in it; nothing if there is no such directory."""
        try:
            descriptor = self._open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            found = [name for name in os.listdir(descriptor) if re.fullmatch(pattern, name)]
        finally:
            os.close(descriptor)
        return sorted(found, key=lambda name: int("0" + re.sub(r"[^0-9]", "", name)))

    def why_not_writable(self, path: str) -> OSError | None:
        """What the kernel answers to opening the file for writing; None if it may be written. Nothing is written."""
        check_writable(path)
        try:
            os.close(self._open(path, os.O_WRONLY))
        except OSError as error:
            return error
        return None

    def write(self, path: str, value: str) -> None:
        """Give the kernel one word. One write(2): the kernel takes it whole or not at all."""
        check_writable(path, value)
        descriptor = self._open(path, os.O_WRONLY)
        try:
            self._put(descriptor, path, value)
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Write dirty pages back, without which dropping the page cache leaves them where they are."""
        os.sync()

    def _put(self, descriptor: int, path: str, value: str) -> None:
        os.write(descriptor, f"{value}\n".encode())

    def _open(self, path: str, flags: int) -> int:
        """Open component by component. O_NONBLOCK: a FIFO in the way must not hang us before we see that it is one."""
        parts = path.split("/")
        if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
            raise Refused(f"{path!r} is not a plain absolute path")
        here = self._root_fd
        try:
            for part in parts[1:-1]:
                below = self._step(part, os.O_PATH | os.O_DIRECTORY, here, path)
                if here != self._root_fd:
                    os.close(here)
                here = below
            descriptor = self._step(parts[-1], flags | os.O_NONBLOCK, here, path)
        finally:
            if here != self._root_fd:
                os.close(here)
        try:
            _refuse_unless_plain(os.fstat(descriptor), path, directory=bool(flags & os.O_DIRECTORY))
        except Refused:
            os.close(descriptor)
            raise
        return descriptor

    def _step(self, name: str, flags: int, directory: int, path: str) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, directory):
                raise Refused(f"{path}: {name} is a symbolic link") from None
            if error.errno in (errno.ENXIO, errno.EISDIR):
                raise Refused(f"{path} is not a regular file") from None
            raise OSError(error.errno, error.strerror, path) from None  # the whole path, where os.open names one component


def _is_link(name: str, directory: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _refuse_unless_plain(found: os.stat_result, path: str, directory: bool) -> None:
    if directory:
        return  # O_DIRECTORY has seen to it
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"{path} is not a regular file")
    if found.st_nlink != 1:  # the kernel's files have one name; a second one would be somebody's own file under the name of ours
        raise Refused(f"{path} has {found.st_nlink} hard links")


class Rehearsal(Tree):
    """Plain files in a copy of /proc and /sys, answering as the kernel would: for tests, and to rehearse on a copy of a host.

    Brackets move to the new choice, a trigger keeps nothing, and a file without any write bit refuses also root.
    """

    def __init__(self, root: str):
        for top in ("proc", "sys"):
            if os.path.isdir(os.path.join(root, top)) and os.stat(os.path.join(root, top)).st_dev != os.stat(root).st_dev:
                raise Refused(f"{os.path.join(root, top)} is mounted there, perhaps the real one: a rehearsal is on plain files")
        super().__init__(root)

    def sync(self) -> None:
        pass

    def _open(self, path: str, flags: int) -> int:
        descriptor = super()._open(path, flags)
        if flags & os.O_ACCMODE == os.O_WRONLY and not os.fstat(descriptor).st_mode & 0o222:
            os.close(descriptor)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return descriptor

    def _put(self, descriptor: int, path: str, value: str) -> None:
        if path == DROP_CACHES:
            return
        raw = self.read(path)
        if re.search(r"\[[^\]]+\]", raw):
            if value not in choices_of(raw):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            text = " ".join(f"[{word}]" if word == value else word for word in choices_of(raw)) + "\n"
        else:
            text = f"{value}\n"
        # One write as long as the old text and then the cut: killed between the two, the file still holds the new value.
        os.pwrite(descriptor, text.ljust(len(raw), "\n").encode(), 0)
        os.ftruncate(descriptor, len(text))


def open_tree(root: str) -> Tree:
    """The host itself for `/`, else a rehearsal. Raises OSError (no such directory) and Refused."""
    return Tree() if os.path.realpath(root) == "/" else Rehearsal(os.path.realpath(root))
