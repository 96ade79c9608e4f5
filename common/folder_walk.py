"""Walk through a folder and the folders in it, also those that are links. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def walk(
    top: Path,
    onerror: Callable[[OSError], object] | None = None,
    onrepeat: Callable[[Path], object] | None = None,
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (folder, names of its subfolders, names of its other entries), as os.walk does.

    Linked folders are entered too, but each folder once, so that a link to a parent ends. The
    caller may remove subfolders that should not be entered. `onerror`: called if a folder cannot be
    listed. `onrepeat`: called with a folder that is not entered again.
    """
    entered = set()
    for name, subfolders, others in os.walk(top, onerror=onerror, followlinks=True):
        state = os.stat(name)
        identity = (state.st_dev, state.st_ino)
        if identity in entered:
            subfolders.clear()
            if onrepeat is not None:
                onrepeat(Path(name))
            continue
        entered.add(identity)
        folder = Path(name)
        # Links last, so that a folder is found under its own name if both are here.
        links = {each for each in subfolders if (folder / each).is_symlink()}
        subfolders[:] = [*sorted(set(subfolders) - links), *sorted(links)]
        yield folder, subfolders, others
