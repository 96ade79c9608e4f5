"""`generate` and `eval` of small models with random weights, and what both refuse."""

import pytest
import torch

from common.data import corpus
from common.errors import ConfigError, PreflightError, WeightsError
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.shapes import ModelShape
from open_llama import eval as evaluation_command
from open_llama import generate

TEXTS = [f"Document {number} has {number * 37 % 101} words, and a line.\n" for number in range(99)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose vocabulary is twenty times its tokenizer's."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    model = fused_llama(ModelShape(1, 32, 48, 4, 2, 6000, 10000.0), 64)
    init_weights(model, 1, seed=1, std=0.2, set_weight=copy_weight)
    write_checkpoint(model, folder, layout=ORDINARY)
    corpus.train_sentencepiece(TEXTS, 300, folder / "tokenizer.model")
    return folder


def test_only_tokens_that_the_tokenizer_can_decode_are_generated(model, capsys):
    pytest.importorskip("transformers")
    words = [str(model), "--prompt", "Document", "--tokens", "20", "--temperature", "2"]
    assert generate.main(words) == 0
    assert "Document" in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize("words", ["--temperature -1", "--temperature nan", "--top-p 1.5"])
def test_a_number_out_of_its_range_is_refused(words, capsys):
    assert generate.main(["x", "--prompt", "x", *words.split()]) == ConfigError.exit_code
    assert "is not a number from 0 to" in capsys.readouterr().err


def test_a_wrong_adapter_is_refused_without_asking_for_it_elsewhere(model, tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        words = [str(model), "--prompt", "x", "--adapter", str(folder)]
        assert generate.main(words) == WeightsError.exit_code
        assert "adapter_config.json" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_eval_on_a_gpu_that_is_not_there_is_refused(model, capsys):
    words = [str(model), "--data", "x", "--device", "cuda"]
    assert evaluation_command.main(words) == PreflightError.exit_code
    assert "no GPU" in capsys.readouterr().err
