"""The one door: `python -m door ARGUMENTS` is `./run_and_time.sh ARGUMENTS` with this Python. run_and_time.sh starts this file, with
--install in front: what the verb needs and this Python lacks is then installed first. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run_and_time.sh starts it as a file, from any directory

from common.data.preparation import run_to_exit_code  # noqa: E402
from door import environment, verbs  # noqa: E402
from launch.supervise import handled_signals, raise_interrupted  # noqa: E402


def main(arguments: list[str]) -> None:
    """The verb's module in place of this process, so that every signal reaches it: it may have processes of its own to end."""
    for number in handled_signals():
        signal.signal(number, raise_interrupted)
    install = arguments[:1] == ["--install"]
    needs, words = verbs.read(arguments[install:])  # a typo or --help is answered before anything is installed
    python = str(environment.python_for(ROOT / needs, ROOT / ".venv") if install and needs else sys.executable)
    # Packages are imported from here only, not from the current directory.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execve(python, [python, *words], os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"})


if __name__ == "__main__":
    sys.exit(run_to_exit_code(lambda: main(sys.argv[1:])))
