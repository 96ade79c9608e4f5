"""Timed run of `llama31_8b` on one rank (arguments: common/training/timed_run.py).

--save writes the model at the end (common/model/saved_model.py).
"""

from __future__ import annotations

import sys

from common.training import timed_run
from common.training.pretraining import run_on_token_files
from common.training.reports import Reports
from common.training.run import Run
from llama31_8b.rules import BENCHMARK, rules_of


def run_rank(run: Run, reports: Reports) -> None:
    """Do a timed run on one rank, from the first line of the log to the last."""
    run_on_token_files(run, reports, rules_of(run.config))


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, run_rank)
