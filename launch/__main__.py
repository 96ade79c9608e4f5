"""Command line of the project, also started by ./run_and_time.sh.

`python -m launch ARGUMENTS` is `./run_and_time.sh ARGUMENTS` with this Python. run_and_time.sh adds
--install in front: packages that the command needs and this Python lacks are installed first. This
module uses only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from common.command_line import exit_code_of
from common.paths import ROOT
from launch import cli, environment
from launch.processes.ranks import process_variables


def main(arguments: list[str]) -> None:
    """Replace this process with the command's module, so that signals reach it directly."""
    install = arguments[:1] == ["--install"]
    # Read the arguments first: a typo or --help needs no installation.
    requirements, command, installs = cli.read(arguments[1:] if install else arguments)
    python = Path(sys.executable)
    if install and requirements:
        folder = ROOT / ".venv"
        python = environment.python_for(ROOT / requirements, folder, installs=installs)
        if installs and requirements == environment.ALL:
            environment.add_hopper_packages(python, ROOT, folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until launch.start receives it
    command = [str(python), "-m", "launch.start", *command]
    os.execve(python, command, os.environ | process_variables(os.environ))


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
