"""Test that the miniature builds the same classes as every GPU config."""

from dataclasses import replace

import pytest
import torch
from tiny import LORA, TINY

from common.config import load
from common.paths import ROOT
from common.training import finetuning, pretraining
from llama2_70b_lora import rules as lora_rules
from llama31_8b import rules as pretraining_rules

pytestmark = pytest.mark.quick

# Sizes that FP8 products take.
SHAPE = replace(TINY.shape, hidden_size=64, ffn_hidden_size=96, vocab_size=64)


def assembled(benchmark, name, processes):
    """The trainer's own assembly for a shipped config, at a size that a CPU holds."""
    config_class = pretraining_rules.Config if benchmark == "llama31_8b" else lora_rules.Config
    config = load(ROOT / "configs" / benchmark / f"{name}.toml", config_class)
    if benchmark == "llama31_8b":
        return pretraining.assemble_random(config, replace(TINY, shape=SHAPE), processes, 1)
    return finetuning.assemble_random(config, replace(LORA, shape=SHAPE), processes, 1)


def classes(assembly):
    """Return the classes of modules and optimizer, and the functions of a block's passes."""
    block = assembly.model.blocks[0]
    modules = [
        type(module)
        for module in assembly.model.modules()
        if not isinstance(module, torch.nn.ModuleList)
    ]
    return modules, type(assembly.optimizer), type(block).run, type(block).run_backward


CONFIGS = [
    (path.parent.name, path.stem)
    for path in sorted((ROOT / "configs").glob("*/*.toml"))
    if path.stem != "CPU_1x1"
]


@pytest.mark.parametrize(("benchmark", "name"), CONFIGS)
def test_the_miniature_builds_what_every_gpu_config_builds(processes, benchmark, name):
    assert classes(assembled(benchmark, name, processes)) == classes(
        assembled(benchmark, "CPU_1x1", processes)
    )


def test_there_are_configs_to_compare():
    assert len(CONFIGS) >= 18
