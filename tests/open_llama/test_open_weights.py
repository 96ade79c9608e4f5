"""Test loading and saving weights of open_llama, and `eval` with adapters."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from common import config as configs
from common.errors import ConfigError, WeightsError
from common.model import merged_adapter, saved_model
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.lora import adapter_parameters
from common.model.peft_adapter import save_peft_adapter
from common.model.shapes import ModelShape
from common.training.finetuning import assemble_lora
from common.training.loop import evaluate, next_token_pairs, rank_micro_batches
from common.training.pretraining import assemble_full
from open_llama import exported_weights, merge
from open_llama.base_config import CONTEXT, copy_generation_config, kept_entries
from open_llama.evaluation import add_adapter, default_length, load_model
from open_llama.rules import Config, rules_of
from open_llama.tokenizer import RECORD
from open_llama.train import load_masters

LENGTH, VOCAB = 24, 64
SHAPES = {
    "llama": ModelShape(2, 32, 48, 4, 2, VOCAB, 10000.0),
    "qwen3, tied": ModelShape(
        2, 32, 48, 4, 2, VOCAB, 1e6, explicit_head_dim=16, qk_norm=True, tied_embedding=True
    ),
}


@pytest.fixture(params=SHAPES)
def folder(request, tmp_path):
    """A checkpoint of Hugging Face with random weights."""
    model = fused_llama(SHAPES[request.param], LENGTH)
    init_weights(model, 2, seed=1, std=0.2, set_weight=copy_weight)
    write_checkpoint(model, tmp_path / "model", layout=ORDINARY)
    return tmp_path / "model"


def config_of(folder, **changes) -> Config:
    table = {
        "gpu": "CPU",
        "model": str(folder),
        "weights": str(folder),
        "sequence_length": LENGTH,
        "global_batch_size": 4,
        "max_samples": 40,
        "eval_samples": 4,
        "eval_interval_samples": 4,
        "opt_base_learning_rate": 1e-3,
        "schedule": "constant",
        "opt_learning_rate_warmup_steps": 0,
        "weight_decay": 0.0,
        "gradient_clip_norm": 1.0,
    }
    return configs.from_table({**table, **changes}, Config, "test")


def test_a_saved_model_keeps_context_and_token_ids_of_its_base(folder, tmp_path, processes):
    path = folder / "config.json"
    base = {"max_position_embeddings": 4096, "eos_token_id": [5, 7], "bos_token_id": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | base))
    (folder / "generation_config.json").write_text('{"top_p": 0.9}')
    for weights, kept in ((str(folder), base), ("", {"max_position_embeddings": 4096})):
        config = config_of(folder, weights=weights)
        out = tmp_path / f"saved_{bool(weights)}"
        out.mkdir()
        entries = kept_entries(config, None)
        trained = fused_llama(rules_of(config).shape, LENGTH)
        init_weights(trained, 2, seed=1, std=0.2, set_weight=copy_weight)
        model = saved_model.save_model(trained, out, lambda: None, entries)
        copy_generation_config(config, model)
        saved = json.loads((model / "config.json").read_text())
        assert {key: saved[key] for key in base if saved[key] is not None} == kept
        assert (model / "generation_config.json").is_file() is bool(weights)
    assert kept_entries(config_of(folder, sequence_length=8192), None)[CONTEXT] == 8192
    path.unlink()
    assert kept_entries(config_of("llama3.2-1b", weights=str(folder)), None) == {}


def test_a_saved_mistral_is_one_with_its_window(tmp_path, processes):
    load = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    base = tmp_path / "base"
    model = fused_llama(SHAPES["llama"], LENGTH)
    init_weights(model, 2, seed=1, std=0.2, set_weight=copy_weight)
    write_checkpoint(model, base, layout=ORDINARY)
    path = base / "config.json"
    llama = path.read_text()
    mistral = {"model_type": "mistral", "sliding_window": 16, CONTEXT: 4096}
    path.write_text(json.dumps(json.loads(llama) | mistral))
    config = config_of(base, sequence_length=16)
    loaded = load_model(base, 16, torch.device("cpu"))
    saved = saved_model.save_model(loaded, tmp_path, lambda: None, kept_entries(config, None))
    written = json.loads((saved / "config.json").read_text())
    assert {key: written[key] for key in mistral} == mistral
    tokens = torch.arange(LENGTH)[None]
    with torch.no_grad():
        expected, logits = (load(folder)(tokens).logits for folder in (base, saved))
    assert torch.equal(logits, expected)
    # The window is that of the weights, whatever the key `model` names.
    (tmp_path / "llama.json").write_text(llama)
    for length, weights in ((17, ""), (16, str(base))):
        rules_of(config_of(tmp_path / "llama.json", weights=weights, sequence_length=length))
    with pytest.raises(ConfigError, match="sliding window"):
        rules_of(config_of(tmp_path / "llama.json", weights=str(base), sequence_length=17))


def test_ids_that_no_weights_define_are_those_of_the_tokenizer_of_the_data(folder, tmp_path):
    path = folder / "config.json"
    config_json = json.loads(path.read_text())
    path.write_text(json.dumps(config_json | {CONTEXT: 4096, "eos_token_id": [5, 7]}))
    record = {"key": "text", "bos_token_id": None, "eos_token_id": 9}
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert kept_entries(config_of(folder, weights=""), tmp_path) == {
        CONTEXT: 4096,
        "eos_token_id": 9,
    }
    assert kept_entries(config_of("llama3.2-1b", weights=""), tmp_path) == {"eos_token_id": 9}
    assert kept_entries(config_of(folder), tmp_path)["eos_token_id"] == [5, 7]
    for other in ("[]", "{", json.dumps({"eos_token_id": "9"})):  # not from `prepare text`
        (tmp_path / RECORD).write_text(other)
        assert kept_entries(config_of(folder, weights=""), tmp_path) == {CONTEXT: 4096}


def test_eval_takes_the_sequence_length_of_the_run(folder, tmp_path, capsys):
    for context, length in ((LENGTH, LENGTH), (4096, 1024)):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {CONTEXT: context}))
        assert default_length(folder) == length
        assert str(length) in capsys.readouterr().err
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config_of(folder, sequence_length=48).as_toml())
    assert default_length(folder, run / "adapter") == 48
    assert default_length(folder.rename(run / "model")) == 48
    assert f"48: the length used by the run ({run / 'config.toml'})" in capsys.readouterr().err


def loss_of(model, processes) -> float:
    windows = np.random.default_rng(0).integers(VOCAB, size=(6, LENGTH + 1)).astype(np.int32)
    return evaluate(model, rank_micro_batches(next_token_pairs(windows), processes, 2), processes)


def test_a_run_and_eval_start_from_the_same_weights(folder, processes):
    config = config_of(folder)
    assembly = assemble_full(config, rules_of(config), processes, partial(load_masters, folder))
    loaded = load_model(folder, LENGTH, torch.device("cpu"))
    assert loss_of(assembly.model, processes) == loss_of(loaded, processes)


@pytest.fixture
def trained_model(folder, tmp_path, processes):
    """The model of a LoRA run whose adapters, also saved in tmp_path/adapter, are random."""
    config = config_of(folder, lora_rank=4, lora_alpha=10)

    def load(model, base):
        load_base(model, folder, frozen=base)

    assembly, _ = assemble_lora(config, rules_of(config), processes, 1, load)
    adapters = adapter_parameters(assembly.model)
    random = partial(torch.randn, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(0.3 * random(parameter.shape))
    base = Path(config.weights)
    save_peft_adapter(tmp_path / "adapter", adapters, rules_of(config).shape, 4, 10, 0.0, base)
    return assembly.model


def test_exported_adapters_name_their_base(folder, tmp_path, monkeypatch):
    config = config_of(folder, lora_rank=4, lora_alpha=10)
    rules = rules_of(config)
    monkeypatch.setattr(exported_weights, "read_master", lambda _, name, size: torch.ones(size))
    exported_weights.export_adapter(tmp_path, config, rules, tmp_path / "adapter", lambda new: None)
    stored = merged_adapter.read_adapter(tmp_path / "adapter")
    assert (stored.rank, stored.scale, len(stored.tensors)) == (4, 2.5, 8 * rules.shape.num_layers)
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (Path(written["base_model_name_or_path"]) / "config.json").is_file()


def test_eval_adds_adapters_as_training_does(folder, tmp_path, processes, trained_model):
    loaded = load_model(folder, LENGTH, torch.device("cpu"))
    alone = loss_of(loaded, processes)
    add_adapter(loaded, tmp_path / "adapter")
    trained = loss_of(trained_model, processes)
    assert loss_of(loaded, processes) == pytest.approx(trained, rel=1e-5)
    assert abs(trained - alone) > 1e-2


def test_an_adapter_that_peft_would_scale_otherwise_is_refused(folder, tmp_path, trained_model):
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    with pytest.raises(WeightsError, match="use_rslora"):
        add_adapter(load_model(folder, LENGTH, torch.device("cpu")), tmp_path / "adapter")


def test_a_merged_checkpoint_has_the_logits_of_peft(folder, tmp_path, trained_model):
    peft = pytest.importorskip("peft")
    load = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    arguments = {"--base": folder, "--adapter": tmp_path / "adapter", "--out": tmp_path / "merged"}
    assert merge.main([str(word) for pair in arguments.items() for word in pair]) == 0
    base = load(folder, dtype=torch.float32)
    merged, loaded = load(tmp_path / "merged", dtype=torch.float32, output_loading_info=True)
    assert type(merged) is type(base)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    tokens = torch.arange(LENGTH)[None]
    with torch.no_grad():
        alone = base(tokens).logits
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens).logits
        logits = merged(tokens).logits
    # In fp32, as tests/model/test_lora_adapter.py compares logits.
    assert (logits - expected).norm() <= 1e-5 * expected.norm()
    assert (alone - expected).norm() > 0.1 * expected.norm()
