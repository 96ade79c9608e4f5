"""The lines that a user reads before a run."""

import argparse
from pathlib import Path

from common.hardware import Probe
from launch import console
from launch.select_config import select_config
from llama31_8b.rules import MINIATURE

ROOT = Path(__file__).parents[2]


def test_the_header_names_config_data_and_results_and_that_a_miniature_is_no_result():
    options = argparse.Namespace(config=None, set=[], device=None)
    selection = select_config(ROOT, "llama31_8b", options, {}, Probe("none"))
    lines = console.header("llama31_8b", selection, MINIATURE, (Path("/data"), Path("/results")))
    assert "NOT a benchmark result" in lines[0]
    text = "\n".join(lines[1:])
    assert all(words in text for words in ("llama31_8b", "CPU_1x1.toml", str(MINIATURE.target_loss), "/data", "/results"))
    assert "/data" not in "\n".join(console.header("llama31_8b", selection, MINIATURE, None))
