"""Leave behind what a killed process leaves of a file or folder that it was writing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from common.paths import ROOT

SCRIPT = """
import os, signal, sys
from pathlib import Path
from common import atomic_write
with getattr(atomic_write, sys.argv[1])(Path(sys.argv[2])) as new:
    if sys.argv[1] == "new_file":
        new.write(b"half")
        new.flush()
    else:
        (new / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def leave_behind(kind: str, target: Path) -> Path:
    """Return the path that a killed writer of `target` left. `kind`: new_file or new_folder."""
    before = set(target.parent.iterdir())
    command = [sys.executable, "-c", SCRIPT, kind, str(target)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    (left,) = set(target.parent.iterdir()) - before
    return left
