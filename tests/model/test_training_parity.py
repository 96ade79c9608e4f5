"""Compare 50 steps of open_llama with transformers and AdamW, and with peft, in fp32 on a CPU."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_lora_parity import their_adapters
from test_model import hugging_face

from common import config as configs
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.kernels.cross_entropy import IGNORE_INDEX
from common.model.checkpoint_loader import load_base
from common.model.lora import adapter_parameters
from common.model.peft_adapter import OUTPUT, SPLIT, peft_tensors
from common.model.shapes import ModelShape
from common.training.assembly import Batching
from common.training.finetuning import assemble_lora
from common.training.loop import train_step
from common.training.pretraining import assemble_full
from open_llama.data import training_batches
from open_llama.rules import Config, rules_of
from open_llama.train import learning_rate, load_masters

STEPS, BATCH, LENGTH, VOCAB = 50, 4, 24, 61
TOLERANCE = 1e-5  # relative, of each loss
SHAPES = {  # kind of transformers, shape
    "Llama": ModelShape(2, 32, 48, 4, 2, VOCAB, 10000.0),
    "Llama, tied": ModelShape(2, 32, 48, 4, 4, VOCAB, 10000.0, tied_embedding=True),
    "Qwen3": ModelShape(2, 32, 48, 4, 2, VOCAB, 10000.0, explicit_head_dim=16, qk_norm=True),
    "Mistral": ModelShape(2, 32, 48, 4, 2, VOCAB, 10000.0),
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """Documents of 5 to 60 tokens, each token a little above the one before."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    writer = IndexedDatasetWriter(folder / "train", VOCAB)
    for length in random.integers(5, 60, 100):
        steps = 1 + (random.random(length) < 0.2)
        writer.add((random.integers(VOCAB) + np.cumsum(steps)) % VOCAB)
    writer.finish()
    return folder


def their_model(name: str, folder: Path):
    """A model of transformers with random weights, saved in `folder`."""
    torch.manual_seed(3)
    options = {"sliding_window": LENGTH} if name == "Mistral" else {}
    model = hugging_face(SHAPES[name], LENGTH, kind=name.split(",")[0], **options)
    model.save_pretrained(folder)
    return model


def config_of(folder: Path, **changes) -> Config:
    table = {
        "gpu": "CPU",
        "model": str(folder),
        "weights": str(folder),
        "sequence_length": LENGTH,
        "global_batch_size": BATCH,
        "micro_batch_size": 2,
        "max_samples": STEPS * BATCH,
        "eval_samples": 1,
        "eval_interval_samples": STEPS * BATCH,
        "opt_base_learning_rate": 3e-3,
        "schedule": "cosine",
        "opt_learning_rate_warmup_steps": 5,
        "weight_decay": 0.1,
        "gradient_clip_norm": 0.5,
    }
    return configs.from_table({**table, **changes}, Config, "test")


def our_losses(config: Config, assembly, data_dir: Path, processes) -> list[float]:
    batches = training_batches(config, rules_of(config), data_dir, 1, rank=0, step=0)
    lr_at, batching = learning_rate(config), Batching(BATCH, config.gradient_accumulation_steps)
    tensors = map(torch.from_numpy, batches)
    return [
        float(train_step(assembly, tensors, batching, lr_at(step), processes)[0])
        for step in range(STEPS)
    ]


def their_losses(model, config: Config, data_dir: Path) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta_1, config.adam_beta_2)
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=config.adam_epsilon)
    batches = training_batches(config, rules_of(config), data_dir, 1, rank=0, step=0)
    lr_at = learning_rate(config)
    losses = []
    for step in range(STEPS):
        batch = torch.from_numpy(np.concatenate([next(batches), next(batches)])).long()
        tokens, labels = batch.unbind(1)
        logits = model(tokens).logits.transpose(1, 2)
        each = torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=IGNORE_INDEX, reduction="none"
        )
        loss = (each.sum(1) / (labels != IGNORE_INDEX).sum(1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.gradient_clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "documents"), [*((name, False) for name in SHAPES), ("Llama", True)]
)
def test_fifty_steps_follow_transformers_and_torch(name, documents, data_dir, tmp_path, processes):
    theirs = their_model(name, tmp_path)
    config = config_of(tmp_path, one_document_per_sequence=documents)
    fill = partial(load_masters, Path(config.weights))
    assembly = assemble_full(config, rules_of(config), processes, fill)
    ours = our_losses(config, assembly, data_dir, processes)
    expected = their_losses(theirs, config, data_dir)
    assert ours == pytest.approx(expected, rel=TOLERANCE)
    assert expected[-1] < 0.9 * expected[0], "something was learned"


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_fifty_steps_of_lora_follow_peft(name, data_dir, tmp_path, processes):
    peft = pytest.importorskip("peft")
    theirs = their_model(name, tmp_path)
    changes = {"lora_rank": 4, "lora_alpha": 8, "opt_base_learning_rate": 1e-2}
    config = config_of(tmp_path, **changes)

    def load(model, base):
        load_base(model, Path(config.weights), frozen=base)

    assembly, _ = assemble_lora(config, rules_of(config), processes, 1, load)
    adapters = adapter_parameters(assembly.model)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[*SPLIT, OUTPUT], task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(theirs, settings)
    for layer in theirs.base_model.model.model.layers:
        shared = layer.self_attn.q_proj.lora_A["default"].weight
        for module in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            module.lora_A["default"].weight = shared
    shape = SHAPES[name]
    peft.set_peft_model_state_dict(theirs, peft_tensors(adapters, shape))
    ours = our_losses(config, assembly, data_dir, processes)
    expected = their_losses(theirs, config, data_dir)
    assert ours == pytest.approx(expected, rel=TOLERANCE)
    assert expected[-1] < expected[0]
    for key, reached in their_adapters(theirs, shape, gradients=False).items():
        torch.testing.assert_close(adapters[key].detach(), reached, rtol=1e-3, atol=1e-5)
