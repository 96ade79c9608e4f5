"""The command line: `python -m launch ARGUMENTS` is `./run_and_time.sh ARGUMENTS` with this Python.

run_and_time.sh puts --install in front: packages that the command needs and this Python lacks are
then installed first. Standard library only.
"""

from __future__ import annotations

import os
import sys

from common.command_line import exit_code_of
from common.paths import ROOT
from launch import cli, environment
from launch.processes.ranks import finding_modules
from launch.processes.supervise import raise_at_signals


def main(arguments: list[str]) -> None:
    """Replace this process by the command's module, so that signals reach its own processes."""
    raise_at_signals()
    install = arguments[:1] == ["--install"]
    needs, words = cli.read(
        arguments[install:]
    )  # a typo or --help is answered before anything is installed
    python = str(
        environment.python_for(ROOT / needs, ROOT / ".venv")
        if install and needs
        else sys.executable
    )
    os.execve(python, [python, *words], os.environ | finding_modules(os.environ))


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
