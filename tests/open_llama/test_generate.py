"""`generate` and `eval` of small models with random weights, and what both refuse."""

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from common.data import corpus
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import (
    ConfigError,
    DataError,
    NonFinite,
    PreflightError,
    StorageError,
    WeightsError,
)
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.shapes import ModelShape
from open_llama import eval as evaluation_command
from open_llama import evaluation, generate
from open_llama.tokenizer import load_tokenizer

TEXTS = [f"Document {number} has {number * 37 % 101} words, and a line.\n" for number in range(99)]

SHORT = """
model = "llama3.2-1b"
sequence_length = 5
global_batch_size = 1
max_samples = 4
eval_samples = 1
eval_interval_samples = 4
opt_base_learning_rate = 1e-3
schedule = "constant"
opt_learning_rate_warmup_steps = 0
weight_decay = 0.0
gradient_clip_norm = 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose vocabulary is twenty times its tokenizer's."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    model = fused_llama(ModelShape(1, 32, 48, 4, 2, 6000, 10000.0), 64)
    init_weights(model, 1, seed=1, std=0.2, set_weight=copy_weight)
    write_checkpoint(model, folder, layout=ORDINARY)  # a context of 64 tokens
    corpus.train_sentencepiece(TEXTS, 300, folder / "tokenizer.model")
    return folder


def test_only_tokens_that_the_tokenizer_can_decode_are_generated(model, capsys):
    pytest.importorskip("transformers")
    words = [str(model), "--prompt", "Document", "--tokens", "20", "--temperature", "2"]
    assert generate.main(words) == 0
    assert "Document" in capsys.readouterr().out.splitlines()[1]


def test_a_length_that_the_model_was_not_trained_with_is_noted(model, tmp_path, capsys):
    pytest.importorskip("transformers")
    words = [str(model), "--prompt", "Document", "--prompt", "x", "--temperature", "0"]
    prompt = len(load_tokenizer(model).encode(["Document"])[0])
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    (run / "config.toml").write_text(SHORT)
    in_run = [str(run / "model"), *words[1:]]
    for command, tokens, trained in ((words, 65, 64), (words, 4, 0), (in_run, 4, 5)):
        assert generate.main([*command, "--tokens", str(tokens)]) == 0
        lines = capsys.readouterr().err.splitlines()  # transformers may add its own
        notes = [line for line in lines if line.startswith("note:")]
        assert len(notes) == (1 if trained else 0)
        for note in notes:
            assert f" {prompt + tokens} tokens" in note and f" {trained} " in note


def test_a_text_ends_at_the_end_of_text_token_of_the_model(model, tmp_path, capsys):
    """Data may have been prepared with another one (--eos) than the tokenizer names."""
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(["Document"])[0]
    trained = transformers.AutoModelForCausalLM.from_pretrained(str(model))
    unused = list(range(tokenizer.vocab_size, 6000))
    tokens = trained.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, suppress_tokens=unused
    )[0].tolist()
    assert len(tokens) == len(ids) + 20
    end = len(ids) + 3  # the fourth new token
    shutil.copytree(model, tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": tokens[end]}))
    words = [str(tmp_path / "model"), "--prompt", "Document", "--temperature", "0"]
    first = tokens.index(tokens[end], len(ids))
    for more, last in (([], first), (["--eos", "</s>"], len(tokens) - 1)):
        assert generate.main([*words, "--tokens", "20", *more]) == 0
        text = tokenizer.decode(tokens[: last + 1])
        assert capsys.readouterr().out == f"--- 'Document'\n{text}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--temperature -1", "'-1' is not from 0 to"),
        ("--temperature nan", "'nan' is not a number"),
        ("--top-p 1.5", "'1.5' is not from 0 to 1"),
    ],
)
def test_a_number_out_of_its_range_is_refused(words, message, capsys):
    assert generate.main(["x", "--prompt", "x", *words.split()]) == ConfigError.exit_code
    assert f"{words.split()[0]}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "x", str(2**64)])
def test_a_seed_out_of_its_range_is_refused(value, capsys):
    assert generate.main(["x", "--prompt", "x", "--seed", value]) == ConfigError.exit_code
    assert "is not a whole number from 0 to" in capsys.readouterr().err


def test_a_prompt_that_the_model_cannot_read_is_refused(model, tmp_path, capsys):
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 6000}, "a"))
    made.save(str(tmp_path / "tokenizer.json"))  # without beginning-of-text
    words = [str(model), "--tokenizer", str(tmp_path), "--eos", "a"]
    for prompt, reason in (("", "has no tokens"), ("b", "token id 6000")):
        assert generate.main([*words, "--prompt", prompt]) == ConfigError.exit_code
        assert reason in capsys.readouterr().err


def test_a_wrong_adapter_is_refused_without_asking_for_it_elsewhere(model, tmp_path, capsys):
    for folder, error, word in (
        (tmp_path, WeightsError, "adapter_config.json"),
        (tmp_path / "nowhere", ConfigError, "nowhere"),
    ):
        words = [str(model), "--prompt", "x", "--adapter", str(folder)]
        assert generate.main(words) == error.exit_code
        assert word in capsys.readouterr().err


def test_the_directory_of_a_run_is_its_model_and_has_no_adapter(model, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    assert generate.main([str(run), "--prompt", "x", "--tokens", "1"]) == 0
    assert "--- 'x'" in capsys.readouterr().out
    evaluated = ["--data", str(tmp_path / "nothing")]
    assert evaluation_command.main([str(run), *evaluated]) == DataError.exit_code
    assert "nothing" in capsys.readouterr().err
    adapter = ["--adapter", str(run)]
    words = [str(run / "model"), *evaluated, *adapter, "--device", "cpu"]
    assert evaluation_command.main(words) == WeightsError.exit_code
    assert "adapter/ of a run" in capsys.readouterr().err


def test_eval_prints_any_finite_loss_and_refuses_others(model, tmp_path, monkeypatch, capsys):
    writer = IndexedDatasetWriter(tmp_path / "text", 300)
    writer.add(list(range(50)))
    writer.finish()
    words = [str(model), "--data", str(tmp_path / "text"), "--sequence-length", "8"]
    for loss, code, printed in (
        (2.0, 0, "perplexity 7.39"),
        (800.0, 0, "perplexity inf"),
        (math.nan, NonFinite.exit_code, "the loss is nan"),
    ):
        monkeypatch.setattr(evaluation, "evaluate", lambda *_, per_token, loss=loss: loss)
        assert evaluation_command.main([*words, "--device", "cpu"]) == code
        assert printed in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("sequence_length = 4", None),
        ("sequence_length = 'x'", ConfigError.exit_code),
        ("sequence_length = ", ConfigError.exit_code),
        (b"\xff", ConfigError.exit_code),
        (errno.EACCES, ConfigError.exit_code),
        (errno.EIO, StorageError.exit_code),
        (errno.ESTALE, StorageError.exit_code),
    ],
)
def test_eval_names_a_config_that_it_cannot_read(
    model, tmp_path, monkeypatch, capsys, content, code
):
    """It takes no other sequence length. A config of an older version is read for its length."""
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    path = run / "config.toml"
    if isinstance(content, int):
        path.touch()
        read_text = Path.read_text

        def fail(self, *arguments, **options):
            if self == path:
                raise OSError(content, os.strerror(content), str(path))
            return read_text(self, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", fail)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    writer = IndexedDatasetWriter(tmp_path / "text", 300)
    writer.add(list(range(40)))
    writer.finish()
    words = [str(run / "model"), "--data", str(tmp_path / "text"), "--device", "cpu"]
    assert evaluation_command.main(words) == (code or 0)
    output = capsys.readouterr()
    if code:
        assert str(path) in output.err and not output.out
    else:
        assert "9 sequences of 4 tokens" in output.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_eval_on_a_gpu_that_is_not_there_is_refused(model, capsys):
    words = [str(model), "--data", "x", "--device", "cuda"]
    assert evaluation_command.main(words) == PreflightError.exit_code
    assert "no GPU" in capsys.readouterr().err
