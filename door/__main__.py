"""The one door: `python -m door ARGUMENTS` is `./run_and_time.sh ARGUMENTS` with this Python. run_and_time.sh starts this file, with
--install in front: what the verb needs and this Python lacks is then installed first. Standard library only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run_and_time.sh starts it as a file, from any directory

from common.command_line import exit_code_of  # noqa: E402
from door import environment, verbs  # noqa: E402
from supervision.ranks import finding_modules  # noqa: E402
from supervision.supervise import raise_at_signals  # noqa: E402


def main(arguments: list[str]) -> None:
    """The verb's module in place of this process, so that every signal reaches it: it may have processes of its own to end."""
    raise_at_signals()
    install = arguments[:1] == ["--install"]
    needs, words = verbs.read(arguments[install:])  # a typo or --help is answered before anything is installed
    python = str(environment.python_for(ROOT / needs, ROOT / ".venv") if install and needs else sys.executable)
    os.execve(python, [python, *words], os.environ | finding_modules(os.environ))


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
