"""Compare folders of tokenizers with AutoTokenizer, or test that they are refused."""

import json
import os
import shutil
from itertools import product
from pathlib import Path

import pytest
import sentencepiece
from damage import flip
from in_this_process import InThisProcess
from test_prepare_text import documents_in

from common.data import corpus, text_parts
from common.data.indexed_dataset import Index
from common.errors import ConfigError, DataError, StorageError
from open_llama.prepare import main
from open_llama.tokenizer import copy_tokenizer, load_tokenizer

SIZE = 300
TEXTS = [
    f"Document {number} has {number * 37 % 101} words.\nIt ends <x> here." for number in range(99)
]
SPELLED = "<s>Document</s>\n\n  has caf\u00e9 <|im_end|> and </s>"
ADDED = {"<|im_start|>": SIZE, "<|im_end|>": SIZE + 1}
SETTINGS = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "unk_token": "<unk>"}
NAMES = ("tokenizer_config.json", "special_tokens_map.json", "no file")
FOLDERS = list(product(("SentencePiece", "tokenizer.json"), (False, True), NAMES))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A SentencePiece model as Llama 2's: with a space before the text, and bytes."""
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
            model_writer=file,
            vocab_size=SIZE,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return path


def write_folder(folder: Path, model: Path, added: bool, names: str, **settings) -> Path:
    """Write a folder of a SentencePiece tokenizer whose end of text the file `names` names."""
    folder.mkdir()
    shutil.copyfile(model, folder / "tokenizer.model")
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>" if added else "</s>"}
    config = SETTINGS | (named if names == "tokenizer_config.json" else {}) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if names == "special_tokens_map.json":
        (folder / names).write_text(json.dumps(named))
    if added:
        (folder / "added_tokens.json").write_text(json.dumps(ADDED))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def as_tokenizer_json(source: Path, folder: Path, names: str) -> Path:
    """Save the tokenizer in `source` as the error message says, and move the names to `names`."""
    transformers = pytest.importorskip("transformers")
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    assert not (folder / "tokenizer.model").exists()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("added_tokens_decoder", None)
    if names != path.name:
        named = {key: config.pop(key) for key in ("bos_token", "eos_token")}
        path.write_text(json.dumps(config))
        if names != "no file":
            (folder / names).write_text(json.dumps(named))
    return folder


def made(kind: str, added: bool, names: str, model: Path, folder: Path) -> Path:
    if kind == "SentencePiece":
        return write_folder(folder / "tokenizer", model, added, names)
    source = write_folder(folder / "source", model, added, NAMES[0])
    return as_tokenizer_json(source, folder / "tokenizer", names)


def theirs(folder: Path) -> tuple:
    """Return what transformers makes of SPELLED, the size, and the ids of all special tokens."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(SPELLED, split_special_tokens=True)["input_ids"]
    added = tokenizer.convert_tokens_to_ids(list(ADDED))
    return (ids, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)), added


@pytest.mark.parametrize(("kind", "added", "names"), FOLDERS)
def test_the_ids_are_those_of_transformers_or_the_folder_is_refused(
    kind, added, names, model, tmp_path
):
    folder = made(kind, added, names, model, tmp_path)
    if kind == "SentencePiece" and added:
        with pytest.raises(DataError, match="im_start") as caught:
            load_tokenizer(folder)
        assert "tokenizer.json" in caught.value.do
        return
    if kind == "tokenizer.json" and names == "no file":
        with pytest.raises(ConfigError, match="end-of-text"):
            load_tokenizer(folder)
        return
    ours = load_tokenizer(folder)
    (ids,) = ours.encode([SPELLED])
    expected = theirs(folder)
    assert (ids, ours.bos, ours.eos, ours.vocab_size) == expected[0]
    assert ours.eos == (ADDED["<|im_end|>"] if added else 2)
    copy = tmp_path / "copy"
    copy.mkdir()
    assert copy_tokenizer(folder, copy)
    assert theirs(copy) == expected
    assert {path.name for path in copy.iterdir()} == {path.name for path in folder.iterdir()}


def prepare(data_dir: Path, tokenizer: Path, inputs: Path) -> int:
    """Return the exit code of `prepare text`."""
    words = ["text", "--input", inputs, "--tokenizer", tokenizer, "--data-dir", data_dir]
    return main([*map(str, words), "--validation-fraction", "0.2", "--processes", "1"])


@pytest.fixture
def inputs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    path = tmp_path / "input.jsonl"
    texts = [f"{SPELLED} {number}</s>" for number in range(40)]
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return path


@pytest.mark.parametrize("kind", ["SentencePiece", "tokenizer.json"])
def test_special_tokens_that_a_text_spells_are_text(kind, model, tmp_path, inputs, capsys):
    folder = made(kind, False, NAMES[0], model, tmp_path)
    assert prepare(tmp_path / "data", folder, inputs) == 0
    for documents in documents_in(tmp_path / "data").values():
        for document in documents:
            assert document[0] == 1 and document[-1] == 2
            assert not {1, 2}.intersection(document[1:-1])
            assert load_tokenizer(folder).decode(document[1:-1]).endswith("</s>")
    (prompt,) = load_tokenizer(folder, control_tokens=True).encode(["</s> x"])
    assert (2 in prompt) == (kind == "tokenizer.json")


def test_prepare_refuses_added_tokens_and_copies_all_files_of_others(
    model, tmp_path, inputs, capsys
):
    added = write_folder(tmp_path / "added", model, True, NAMES[0])
    assert prepare(tmp_path / "data", added, inputs) == DataError.exit_code
    assert "<|im_start|>" in capsys.readouterr().err
    saved = as_tokenizer_json(added, tmp_path / "saved", NAMES[0])
    assert prepare(tmp_path / "data", saved, inputs) == 0
    assert json.loads((tmp_path / "data/text.json").read_text())["eos_token_id"] == SIZE + 1
    for path in saved.iterdir():
        assert (tmp_path / "data" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "data/chat_template.jinja").is_file()


def test_a_tokenizer_with_other_files_beside_it_is_another_one(model, tmp_path, inputs, capsys):
    data = tmp_path / "data"
    assert prepare(data, write_folder(tmp_path / "a", model, False, NAMES[0]), inputs) == 0
    tokens = Index.read(data / "train").num_tokens
    other = write_folder(tmp_path / "b", model, False, NAMES[0], eos_token="<s>")
    assert prepare(data, other, inputs) == StorageError.exit_code
    assert "tokenizer_config.json" in capsys.readouterr().err
    assert Index.read(data / "train").num_tokens == tokens
    assert load_tokenizer(data).eos == 2


def test_the_settings_beside_a_sentencepiece_model_count(model, tmp_path):
    pieces = {"0": {"content": "<unk>"}, "1": {"content": "<s>"}, "2": {"content": "</s>"}}
    for number, (settings, bos, eos) in enumerate(
        (
            ({"add_bos_token": False}, None, 2),
            ({"bos_token": "</s>", "eos_token": {"__type": "AddedToken", "content": "<s>"}}, 2, 1),
            ({"added_tokens_decoder": pieces}, 1, 2),
        )
    ):
        folder = write_folder(tmp_path / f"{number}", model, False, NAMES[0], **settings)
        ours = load_tokenizer(folder)
        assert (ours.bos, ours.eos) == (bos, eos)
        (ids,) = ours.encode([SPELLED])
        assert ids == theirs(folder)[0][0]
    for number, settings in enumerate(
        (
            {"added_tokens_decoder": pieces | {"300": {"content": "<pad>"}}},
            {"added_tokens_decoder": {"2": "</s>"}},
            {"added_tokens_decoder": {"1": {"content": "</s>"}}},
            {"bos_token": "<begin>"},
            {"eos_token": "<end>"},
        )
    ):
        folder = write_folder(tmp_path / f"bad_{number}", model, False, NAMES[0], **settings)
        with pytest.raises(DataError):
            load_tokenizer(folder)
    for content in ("{", "[" * 100_000, "[]"):
        (folder / "tokenizer_config.json").write_text(content)
        with pytest.raises(DataError, match="tokenizer_config"):
            load_tokenizer(folder)


@pytest.mark.parametrize("entry", [True, False, None])
@pytest.mark.parametrize("dummy", [True, False])
def test_a_space_before_the_text_is_as_the_settings_say(entry, dummy, model, tmp_path):
    if not dummy:
        model = tmp_path / "own.model"
        corpus.train_sentencepiece(TEXTS, SIZE, model)
    settings = {} if entry is None else {"add_prefix_space": entry}
    folder = write_folder(tmp_path / "tokenizer", model, False, NAMES[0], **settings)
    if entry is None or entry is dummy:
        assert load_tokenizer(folder).encode(["a"])
    else:
        with pytest.raises(DataError, match="add_prefix_space"):
            load_tokenizer(folder)


def json_tokenizer(path: Path, **changes) -> Path:
    """Write a tokenizer.json of words, with `changes` of its entries."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "<unk>": 1, "</s>": 2}, "<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    content = json.loads(made.to_str())
    content["model"] |= changes.pop("model", {})
    path.write_text(json.dumps(content | changes))
    return path


def template(**token) -> dict:
    """A template that begins each text with a token, whose entries are `token`."""
    begin = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"x": {"id": "x", "ids": [0], "tokens": ["x"]} | token}
    return {"type": "TemplateProcessing", "single": begin, "pair": begin, "special_tokens": tokens}


DAMAGED = {
    "no unknown token": {"model": {"vocab": {"a": 0, "</s>": 2}}},
    "an id of 32 bits": {"model": {"vocab": {"a": 0, "<unk>": 2**31, "</s>": 2}}},
    "an id beyond 32 bits": {"model": {"vocab": {"a": 0, "<unk>": 2**32, "</s>": 2}}},
    "an id of the template beyond the vocabulary": {"post_processor": template(ids=[70_000])},
    "an id of the template beyond 31 bits": {"post_processor": template(ids=[2**32 - 1])},
    "a damaged normalizer": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}
    },
    "an unknown form": {"pre_tokenizer": {"type": "NewSplit"}},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_tokenizer_is_named(kind, tmp_path, inputs, capsys):
    path = json_tokenizer(tmp_path / "tokenizer.json", **DAMAGED[kind])
    (tmp_path / NAMES[0]).write_text('{"eos_token": "</s>"}')
    assert prepare(tmp_path / "data", path, inputs) == DataError.exit_code
    assert "tokenizer.json" in capsys.readouterr().err.split("\n")[-4]


def test_a_sentencepiece_model_with_a_changed_byte_loads_or_is_refused(model, tmp_path):
    """One of these changes made SentencePiece raise UnicodeDecodeError."""
    content = model.read_bytes()
    refused = 0
    for position in range(0, 3000, 23):
        path = tmp_path / "tokenizer.model"
        path.write_bytes(content)
        flip(path, position)
        try:
            load_tokenizer(path).encode(TEXTS[:2])
        except DataError as error:
            assert str(path) in error.what
            refused += 1
    assert refused


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", *NAMES[:2]])
def test_a_pipe_is_no_file_of_a_tokenizer(name, model, tmp_path):
    folder = write_folder(tmp_path / "tokenizer", model, False, NAMES[1])
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(DataError, match="tokenizer"):
        load_tokenizer(folder / name if name.startswith("tokenizer.") else folder)


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_long_text_has_the_ids_of_the_whole(model_type, dummy, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
            model_writer=file,
            vocab_size=120 if model_type == "bpe" else 45,
            model_type=model_type,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=dummy,
            minloglevel=2,
        )
    whole = sentencepiece.SentencePieceProcessor(model_file=str(path))
    calls = []
    encode = sentencepiece.SentencePieceProcessor.encode

    def counted(model, texts, **options):
        calls.append(texts)
        return encode(model, texts, **options)

    text = "\n ".join([*TEXTS, "x  y", "\u2581 a \u00a8 \u0308b", SPELLED, "\u4e2d\u6587 ab"] * 3)
    expected = [whole.bos_id(), *encode(whole, text)]
    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "encode", counted)
    for together in (1, 2, 50):
        monkeypatch.setattr("open_llama.tokenizer.ENCODED_TOGETHER", together)
        assert load_tokenizer(path).encode([text, ""]) == [expected, [whole.bos_id()]]
    assert (max(map(len, calls)) > 100) == (model_type == "bpe")
