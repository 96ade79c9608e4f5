"""Install the packages of a run: `./run_and_time.sh setup`.

Other commands install missing packages automatically. Use this command if the machine that runs the
benchmark has no network. Prepare .venv on a login node with `--for cuda`, in a folder that both
machines share. Both machines must have the same processor type (x86_64 or aarch64) and the same
Python.
"""

from __future__ import annotations

import argparse
import os
import sys

from common.command_line import Parser, program
from common.paths import ROOT
from common.terminal import inform
from launch.environment import ALL, python_for
from launch.torch_build import BUILDS, missing_compiler, suitable_builds


def parser() -> Parser:
    """Return the argument parser of `setup`."""
    parser = Parser("setup", __doc__, ["setup", "setup --for cuda"])
    text = (
        "build of torch: cpu, cuda (CUDA 13, driver 580), cuda12 (driver 525, on Blackwell 570) "
        "or rocm (default: this machine's)"
    )
    parser.add_argument("--for", dest="build", choices=BUILDS, default="", help=text)
    return parser


def setup(options: argparse.Namespace) -> None:
    """Install the packages into .venv."""
    print(python_for(ROOT / ALL, ROOT / ".venv", options.build))
    has_gpu = (options.build or suitable_builds(os.environ)[0]) != "cpu"
    if has_gpu and (missing := missing_compiler()):
        inform(f"NOTE  {missing}, on the machine with the GPUs")


main = program(parser, setup)


if __name__ == "__main__":
    sys.exit(main())
