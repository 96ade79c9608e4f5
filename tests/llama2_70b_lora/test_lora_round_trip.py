"""Test the way from a checkpoint through a run to a peft adapter and a merged checkpoint.

All of them give the same logits. A closed-division log is written by the real loop and rules.
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_govreport import LENGTH, VOCAB, write
from tiny import LORA, lora_config, run_here

from common.errors import CheckFailed, RunError, StorageError
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.paths import ROOT
from common.training import finetuning
from common.training.log_keys import hyperparameters
from common.training.run import Run
from launch.diagnosis import read_result
from llama2_70b_lora import merge, train
from llama2_70b_lora.rules import CLOSED
from submission.compliance_checker import closed_verdict
from submission.examined_log import examine
from submission.official_tools import CLOSED_RULESETS

SHAPE = replace(LORA.shape, vocab_size=VOCAB)
TINY = replace(
    LORA,
    shape=SHAPE,
    sequence_length=LENGTH,
    train_samples=16,
    eval_samples=3,
    eval_interval_samples=16,
    target_loss=100.0,
    lora_dropout=0.1,
)


def start(
    folder, rules, processes, layout="fused", run_dir=None, checkpoint="", continues=None, **changes
):
    """Run the LoRA trainer in this process.

    Returns the run directory (default: `folder`/run) and the RunError that ended the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    splits = {"train": rules.train_samples, "validation": rules.eval_samples}
    write(
        folder / "data",
        **{
            split: np.repeat(random.integers(VOCAB, size=(rows, 1, LENGTH)), 2, 1)
            for split, rows in splits.items()
        },
    )
    base = fused_llama(SHAPE, LENGTH)
    init_weights(base, SHAPE.num_layers, 1, 0.2, copy_weight)
    write_checkpoint(base, folder / "data" / "base", layout=layout)
    run_dir = run_dir or folder / "run"
    run_dir.mkdir(exist_ok=True)
    sizes = {"gpus_per_node": processes.world_size, "micro_batch_size": 8}
    config = lora_config(**sizes | changes)
    asked = Run(
        benchmark="llama2_70b_lora",
        config=config,
        config_name="H200_1x8.toml",
        seed=3123456789,
        rank=processes.rank,
        device="cpu",
        run_dir=run_dir,
        data_dir=folder / "data",
        checkpoint=checkpoint,
        continues=continues,
    )
    return run_dir, run_here(train, rules, asked)


@pytest.mark.parametrize("layout", ["fused", "ordinary"])
def test_peft_and_the_merged_checkpoint_give_the_logits_of_the_run(tmp_path, processes, layout):
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    run_dir, error = start(tmp_path, TINY, processes, layout)
    assert error is None
    saved = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in saved.items() if "lora_B" in name), (
        "the adapters have learned something"
    )
    base, ordinary = tmp_path / "data" / "base", tmp_path / "ordinary"
    model = fused_llama(SHAPE, LENGTH)
    load_base(model, base)
    write_checkpoint(model, ordinary, layout="ordinary")  # what transformers can read
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCAB
    peft = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(ordinary, dtype=torch.float32), run_dir / "adapter"
    ).eval()
    merged = tmp_path / "merged"
    assert (
        merge.main(
            ["--base", str(base), "--adapter", str(run_dir / "adapter"), "--out", str(merged)]
        )
        == 0
    )
    ours = fused_llama(SHAPE, LENGTH)
    load_base(ours, merged)
    with torch.no_grad():
        expected, got, alone = peft(tokens).logits, ours(tokens), model(tokens)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, alone, rtol=1e-2, atol=1e-3), "it is not the base alone"


def test_a_closed_log_of_the_real_loop_passes_the_checkers(tmp_path, processes, monkeypatch):
    """Rules and loop are real. Step and evaluation are scripted, without computation."""
    losses = iter([0.93, 0.925])
    closed = replace(CLOSED, shape=SHAPE, sequence_length=LENGTH)
    monkeypatch.setattr(
        "common.training.loop.train_step", lambda *args: (torch.tensor(1.2), torch.tensor(0.1))
    )
    monkeypatch.setattr("common.training.loop.evaluate", lambda *args, per_token: next(losses))
    monkeypatch.setattr("common.training.timed_run.warm_up", lambda *args: None)
    monkeypatch.setattr(
        "common.training.timed_run.hyperparameters",
        lambda config, rules, *rest: hyperparameters(config, CLOSED, *rest),
    )
    monkeypatch.setenv("CACHE_CLEARED", "fadvise")
    run_dir, error = start(
        tmp_path,
        closed,
        processes,
        miniature=False,
        opt_base_learning_rate=4e-4,
        opt_learning_rate_training_steps=1024,
        max_samples=6144,
    )
    assert error is None
    log = run_dir / "result.txt"
    text = log.read_text()
    assert (
        '"samples_count": 1536' in text
        and '"samples_count": 1920' in text
        and '"samples_count": 1152' not in text
    )
    assert [closed_verdict(log, ruleset).passed for ruleset in CLOSED_RULESETS] == [True] * 3
    found = examine(log, project_root=ROOT).findings
    assert [each.rule for each in found] == ["batch"] and found[0].severity == "note", "one rank"


def test_no_data_file_is_opened_before_the_clock(tmp_path, processes, monkeypatch):
    started = []

    def watched(*args, read=train.read_rows):
        started.append("run_start" in (tmp_path / "run" / "result.txt").read_text())
        return read(*args)

    monkeypatch.setattr(train, "read_rows", watched)
    with mock.patch("common.training.loop.train", side_effect=RunError("stop here")):
        start(tmp_path, TINY, processes)
    assert started == [True, True]


def test_a_missing_base_ends_the_run_before_the_clock(tmp_path, processes):
    with mock.patch.object(finetuning, "frozen_weights_folder", lambda run: tmp_path / "nowhere"):
        run_dir, error = start(tmp_path, TINY, processes)
    assert (
        error is not None
        and error.exit_code == 16
        and "run_start" not in (run_dir / "result.txt").read_text()
    )


def test_a_base_that_changed_fails_the_run(tmp_path, processes):
    digests = iter([[1], [2]])
    with mock.patch.object(finetuning, "base_fingerprints", lambda *_: next(digests)):
        run_dir, error = start(tmp_path, TINY, processes)
    assert isinstance(error, CheckFailed) and "base changed" in error.what
    assert not (run_dir / "adapter").exists()


@pytest.mark.slow
def test_a_run_that_missed_its_target_leaves_its_adapter(tmp_path, processes):
    run_dir, error = start(tmp_path, replace(TINY, target_loss=0.1), processes)
    assert (
        error is not None
        and error.kind == "target_missed"
        and read_result(run_dir / "result.txt").status == "aborted"
    )
    assert load_file(run_dir / "adapter" / "adapter_model.safetensors")


def test_a_run_whose_adapter_cannot_be_saved_is_still_a_success(tmp_path, processes):
    with mock.patch.object(
        finetuning, "save_peft_adapter", side_effect=StorageError("the disk is full")
    ):
        run_dir, error = start(tmp_path, TINY, processes)
    assert error is not None and error.exit_code == 17
    assert read_result(run_dir / "result.txt").stands
