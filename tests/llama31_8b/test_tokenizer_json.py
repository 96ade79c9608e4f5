"""`prepare convert` with a tokenizer.json of Llama 3.1's kind and size, against transformers."""

import json
import multiprocessing
import os
import sys
import time

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.data import text_parts
from common.data.gpt_dataset import validation_tokens
from common.data.indexed_dataset import Index
from common.errors import ConfigError, DataError
from llama31_8b import prepare
from llama31_8b.rules import CLOSED

pytestmark = pytest.mark.quick

VOCAB = CLOSED.shape.vocab_size
SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(254)),
]
TEXTS = [
    f"document {i}: the quick brown fox jumps over {i * 37} lazy dogs, naïvely 🙂.\n" * (1 + i % 5)
    for i in range(600)
]
# The last is longer than the file's truncation.
TEXTS += [
    "it says <|end_of_text|> in the middle",
    "",
    "word " * 700,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """tokenizer.json with byte-level BPE, split and template as in Llama 3.1.

    small.json is the same before it is filled up to 128,256 tokens.
    """
    folder = tmp_path_factory.mktemp("tokenizer")
    small = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(
        Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated"
    )
    small.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    small.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    small.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    small.save(str(folder / "small.json"))
    table = json.loads(small.to_str())
    vocab = table["model"]["vocab"]
    vocab.update({f"unused_{i}": i for i in range(len(vocab), VOCAB - len(SPECIAL))})
    full = Tokenizer.from_str(json.dumps(table))
    full.add_special_tokens(SPECIAL)
    full.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], VOCAB - len(SPECIAL))]
    )
    full.enable_truncation(512)
    full.enable_padding(length=16, pad_id=VOCAB - 1, pad_token=SPECIAL[-1])
    full.save(str(folder / "tokenizer.json"))
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    return folder


def convert(files, tokenizer, prefix):
    arguments = [
        "--input",
        files / "texts.jsonl",
        "--tokenizer",
        files / tokenizer,
        "--output-prefix",
        prefix,
        "--processes",
        1,
    ]
    return prepare.main(["convert", *map(str, arguments)])


def test_ids_are_those_of_transformers_and_the_trainer_reads_them(files, tmp_path):
    from transformers import PreTrainedTokenizerFast

    assert convert(files, "tokenizer.json", tmp_path / "p") == 0
    peer = PreTrainedTokenizerFast(tokenizer_file=str(files / "tokenizer.json"))
    # NeMo's AutoTokenizer.text_to_ids.
    expected = [peer.convert_tokens_to_ids(peer.tokenize(text)) for text in TEXTS if text]
    index = Index.read(tmp_path / "p")
    assert index.sequence_lengths.tolist() == [
        len(ids) for ids in expected
    ] and index.dtype == np.dtype("<i4")
    flat = np.concatenate(expected)
    assert (
        len(np.unique(flat)) > 100
        and VOCAB - len(SPECIAL) not in flat
        and (flat == VOCAB - len(SPECIAL) + 1).sum() == 1
    )
    rows = validation_tokens(tmp_path / "p", 16, (len(flat) - 1) // 16, VOCAB)
    np.testing.assert_array_equal(rows[:, :-1].ravel(), flat[: rows[:, :-1].size])


def test_another_models_tokenizer_is_refused(files, tmp_path, capsys):
    assert convert(files, "small.json", tmp_path / "p") == DataError.exit_code
    assert "128,256" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, "", '{"model": 1}'])
def test_missing_or_damaged_tokenizer_is_named(files, tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert convert(files, tmp_path / "tokenizer.json", tmp_path / "p") == DataError.exit_code
    assert "tokenizer.json" in capsys.readouterr().err


def test_without_the_package_it_says_how_to_install_it(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert convert(files, "tokenizer.json", tmp_path / "p") == ConfigError.exit_code
    assert "pip install tokenizers" in capsys.readouterr().err


@pytest.fixture
def slow_regex(files, tmp_path):
    """The tokenizer with an expression that backtracks: its time doubles with each "a"."""
    table = json.loads((files / "tokenizer.json").read_text())
    table["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"(a|a|aa)+$"}
    (tmp_path / "slow.json").write_text(json.dumps(table))
    return tmp_path / "slow.json"


def converted(files, tokenizer, folder, text):
    (folder / "in.jsonl").write_text(text)
    arguments = ["--input", folder / "in.jsonl", "--tokenizer", files / tokenizer]
    arguments += ["--processes", 1]
    return prepare.main(["convert", *map(str, [*arguments, "--output-prefix", folder / "p"])])


def test_an_expression_that_backtracks_is_one_error(files, slow_regex, tmp_path, capfd):
    """The engine gives up after some time, with a panic."""
    text = json.dumps({"text": "a" * 60 + "b"})
    assert converted(files, slow_regex, tmp_path, text) == DataError.exit_code
    err = capfd.readouterr().err
    assert sum(line.startswith("error:") for line in err.splitlines()) == 1
    assert "slow.json cannot encode" in err and "panicked" not in err


def never(texts):
    if "stop" in texts:
        time.sleep(600)
    return [[1, 2, 3] for _ in texts]


def never_answers(path):
    """Return an encoder, in a worker process. Its limits are those of a test."""
    text_parts.BATCH_FLOOR_S = 1.0
    text_parts.BATCH_DOCUMENTS = 1
    return never


def ends(path):
    return lambda texts: os._exit(9)


def test_a_tokenizer_without_an_answer_is_ended_and_other_data_stays(
    files, tmp_path, monkeypatch, capfd
):
    assert convert(files, "tokenizer.json", tmp_path / "earlier") == 0
    before = (tmp_path / "earlier.bin").read_bytes()
    text = '{"text": "go"}\n{"text": "stop"}\n'
    with monkeypatch.context() as patch:
        patch.setattr("llama31_8b.convert.encoder", never_answers)
        began = time.monotonic()
        assert converted(files, "tokenizer.json", tmp_path, text) == DataError.exit_code
    assert time.monotonic() - began < 60
    err = capfd.readouterr().err
    assert err.count("error:") == 1 and "tokenizer.json" in err and "backtrack" in err
    assert (tmp_path / "earlier.bin").read_bytes() == before
    assert not (tmp_path / "p.bin").exists() and not multiprocessing.active_children()
    assert converted(files, "tokenizer.json", tmp_path, '{"text": "go"}\n') == 0


def test_a_tokenizer_whose_process_dies_is_one_error(files, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("llama31_8b.convert.encoder", ends)
    assert converted(files, "tokenizer.json", tmp_path, '{"text": "a"}') == DataError.exit_code
    err = capfd.readouterr().err
    assert err.count("error:") == 1 and "tokenizer.json ended" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r'{"text": "half \ud800 of a pair"}', "surrogate"),
        ("[" * 100_000, "recursion"),
        ('{"text": ' + "[" * 100_000, "recursion"),
    ],
    ids=["lone surrogate", "brackets", "brackets in the text"],
)
def test_a_line_that_means_harm_is_one_error(files, tmp_path, line, said, capfd):
    text = '{"text": "good"}\n' + line
    assert converted(files, "tokenizer.json", tmp_path, text) == DataError.exit_code
    err = capfd.readouterr().err
    assert err.count("error:") == 1 and "line 2" in err and said in err
    assert "Traceback" not in err and not (tmp_path / "p.idx").exists()
