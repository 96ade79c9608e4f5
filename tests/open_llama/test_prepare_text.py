"""Test `open_llama prepare text`: equal tokens from every kind of input and number of processes."""

import gzip
import json
import os
import re
import sysconfig
import tomllib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from in_this_process import InThisProcess
from pyarrow import parquet

from common.data import corpus, text_documents, text_inputs, text_parts
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_header import whole_sequences
from common.data.text_parts import SPLITS
from common.errors import ConfigError, DataError, StorageError
from open_llama import text_tokenizer
from open_llama.prepare import main
from open_llama.text import PARTS, TOKEN_FILES, Settings, prepare_text
from open_llama.tokenizer import RECORD, copy_tokenizer, load_tokenizer, recorded_token_ids

TEXTS = [
    f"Document {number} has {number * 37 % 101} words, and a line.\nIt ends here.\n"
    for number in range(200)
]
VALIDATION = 0.1
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    corpus.train_sentencepiece(TEXTS, 300, path)
    return path


def prepare(
    data_dir: Path, inputs: list[Path], tokenizer: Path, processes: int = 1, **changes
) -> dict:
    """Return the documents of each split as lists of ids."""
    settings = Settings(
        **{"tokenizer": str(tokenizer), "eos": "", "key": "text", "validation_fraction": VALIDATION}
        | changes
    )
    prepare_text(inputs, data_dir, settings, processes)
    return documents_in(data_dir)


def documents_in(data_dir: Path) -> dict[str, list[list[int]]]:
    found = {}
    for split in SPLITS:
        index = Index.read(data_dir / split)
        with index.open_tokens() as tokens:
            found[split] = [
                tokens.read_sequence(number, 0, int(length)).tolist()
                for number, length in enumerate(index.sequence_lengths)
            ]
    return found


def lines(key: str = "text") -> bytes:
    return "".join(json.dumps({key: each, "other": 1}) + "\n" for each in TEXTS).encode()


def write_folder(folder: Path) -> list[Path]:
    folder.mkdir()
    for number, each in enumerate(TEXTS):
        (folder / f"{number:03d}.txt").write_text(each)
    (folder / "image.png").write_bytes(b"\x89")
    (folder / "dataset_info.json").write_text("{}")
    return [folder]


def write_arrow(folder: Path) -> list[Path]:
    folder.mkdir()
    table = pyarrow.table({"text": TEXTS})
    path = str(folder / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return [folder]


def write_inputs(kind: str, folder: Path) -> list[Path]:
    if kind == "folder of text":
        return write_folder(folder / "texts")
    if kind == "data set on disk":
        return write_arrow(folder / "set")
    name = {"lines": "a.jsonl", "compressed lines": "a.jsonl.gz", "parquet": "a.parquet"}[kind]
    path = folder / name
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=30)
    else:
        path.write_bytes(gzip.compress(lines()) if name.endswith("gz") else lines())
    return [path]


@pytest.fixture(scope="module")
def expected(tokenizer, tmp_path_factory) -> dict:
    """The documents, as the tokenizer itself gives them."""
    model = corpus.load_sentencepiece(tokenizer)
    found = {split: [] for split in SPLITS}
    for each in TEXTS:
        ids = [model.bos_id(), *model.encode(each), model.eos_id()]
        found[text_parts.split_of(text_inputs.draw_of(each), VALIDATION)].append(ids)
    assert 5 < len(found["validation"]) < 50
    return found


@pytest.mark.parametrize(
    "kind", ["lines", "compressed lines", "parquet", "folder of text", "data set on disk"]
)
def test_every_kind_of_input_gives_the_same_documents(
    kind, tokenizer, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(text_inputs, "PART_BYTES", 1000)  # many parts, cut within lines
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    inputs = write_inputs(kind, tmp_path)
    assert prepare(tmp_path / "out", inputs, tokenizer) == expected
    assert (tmp_path / "out/tokenizer.model").read_bytes() == tokenizer.read_bytes()
    assert not (tmp_path / "out" / PARTS).exists()


def test_the_command_with_two_processes_gives_the_same_documents(tokenizer, expected, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines("body"))
    arguments = ["text", "--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer)]
    arguments += ["--data-dir", str(tmp_path / "out"), "--key", "body", "--processes", "2"]
    assert main([*arguments, "--validation-fraction", str(VALIDATION)]) == 0
    assert documents_in(tmp_path / "out") == expected


def test_a_preparation_that_was_stopped_goes_on(tokenizer, expected, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines())
    monkeypatch.setattr(text_inputs, "PART_BYTES", 1000)
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    monkeypatch.setattr(InThisProcess, "limit", 3)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer)
    parts = sorted((tmp_path / "out" / PARTS).glob("*.npz"))
    assert len(parts) == 3
    before = [path.stat().st_mtime_ns for path in parts]
    seen = []
    monkeypatch.setattr(InThisProcess, "limit", 10**9)
    join = text_parts.join

    def watched(folder, *arguments):
        seen.extend(path.stat().st_mtime_ns for path in parts)
        return join(folder, *arguments)

    monkeypatch.setattr(text_parts, "join", watched)
    assert prepare(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer) == expected
    assert seen == before, "complete parts are kept"


def test_a_second_call_does_nothing_and_other_options_are_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    (tmp_path / "a.jsonl").write_bytes(lines())
    prepare(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer)
    before = (tmp_path / "out/train.bin").stat().st_mtime_ns
    prepare(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer)
    assert (tmp_path / "out/train.bin").stat().st_mtime_ns == before
    with pytest.raises(StorageError) as caught:
        prepare(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer, validation_fraction=0.5)
    assert "validation_fraction" in caught.value.why and "inputs" not in caught.value.why
    assert recorded_token_ids(tmp_path / "out") == {"bos_token_id": 1, "eos_token_id": 2}


def test_token_files_of_others_are_not_overwritten(tokenizer, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train.idx").write_text("another's")
    (tmp_path / "a.jsonl").write_bytes(lines())
    with pytest.raises(StorageError):
        prepare(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer)
    assert (tmp_path / "out/train.idx").read_text() == "another's"


def test_bad_input_raises_an_error_that_names_the_file(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "no_key.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    parquet.write_table(pyarrow.table({"body": TEXTS}), tmp_path / "no_column.parquet")
    for name, kind in {
        "a.png": ConfigError,
        "absent.txt": ConfigError,
        "latin.txt": DataError,
        "no_key.jsonl": DataError,
        "broken.parquet": DataError,
        "no_column.parquet": DataError,
    }.items():
        with pytest.raises(kind, match=name):
            prepare(tmp_path / f"out_{name}", [tmp_path / name], tokenizer)


def test_a_tokenizer_json_needs_its_end_of_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<end>": 2}, "a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    with pytest.raises(ConfigError, match="end-of-text"):
        load_tokenizer(path)
    assert load_tokenizer(path, "<end>").eos == 2
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    found = load_tokenizer(tmp_path)
    assert (found.eos, found.vocab_size, found.encode(["b a b"])) == (2, 3, [[1, 0, 1]])
    assert found.token_ids == {"bos_token_id": None, "eos_token_id": 2}
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="b $A <end>", special_tokens=[("b", 1), ("<end>", 2)]
    )
    made.save(str(path))
    assert load_tokenizer(path).token_ids == {"bos_token_id": 1, "eos_token_id": 2}


def test_a_long_plain_text_becomes_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(text_documents, "LONGEST_TEXT", 100)
    content = "".join(f"line {number}\n" for number in range(50))
    parts = list(text_documents.plain_documents([content.encode()], tmp_path, True))
    assert "".join(parts) == content
    assert len(parts) > 3 and all(part.endswith("\n") and len(part) <= 100 for part in parts)


def test_about_the_given_share_of_documents_is_for_validation():
    draws = [text_inputs.draw_of(f"{number}") for number in range(2000)]
    shares = [text_parts.split_of(draw, 0.25) == "validation" for draw in draws]
    assert 0.2 < np.mean(shares) < 0.3


def test_the_five_minutes_have_enough_validation_without_the_tests_of_the_library(
    tmp_path, monkeypatch
):
    """As with Debian's Python, whose packages have no folders of tests."""
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    page = (ROOT / "docs/train_your_own_model.md").read_text()
    options = re.search(
        r"--train-tokenizer (\d+) --validation-fraction (\S+) .*?LIB/{(\S+)}", page, re.DOTALL
    )
    library = Path(sysconfig.get_path("stdlib"))
    for name in options[3].split(","):
        for path in (library / name).rglob("*.py"):
            target = tmp_path / "lib" / path.relative_to(library)
            if not {"test", "tests"}.intersection(target.parts):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    settings = Settings("", "", "text", float(options[2]))
    prepare_text([tmp_path / "lib"], tmp_path / "out", settings, 1, int(options[1]))
    config = tomllib.loads((ROOT / "open_llama/examples/stdlib_10m.toml").read_text())
    stored = Index.read(tmp_path / "out/validation").num_tokens
    assert whole_sequences(stored, config["sequence_length"]) >= config["eval_samples"]


def write_two(folder: Path) -> list[Path]:
    """Write documents at 0.2405 and 0.4450 of the range of the hashes."""
    for number in (41, 44):
        (folder / f"{number}.txt").write_text(f"{number}")
    return [folder / "41.txt", folder / "44.txt"]


def test_an_empty_split_leaves_nothing_that_refuses_the_next_try(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    inputs = write_two(tmp_path)
    for fraction in (0.01, 0.9):
        with pytest.raises(DataError, match="no document"):
            prepare(tmp_path / "out", inputs, tokenizer, validation_fraction=fraction)
    found = prepare(tmp_path / "out", inputs, tokenizer, validation_fraction=0.3)
    assert len(found["train"]) == len(found["validation"]) == 1


def test_an_empty_split_says_which_fraction_fills_it(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    inputs = write_two(tmp_path)
    for fraction, words in (
        (0.01, ("validation among 2", "0.2405", "--validation-fraction to 0.25 or more")),
        (0.9, ("train among 2", "0.4450", "--validation-fraction to 0.44 or less")),
    ):
        with pytest.raises(DataError) as caught:
            prepare(tmp_path / "out", inputs, tokenizer, validation_fraction=fraction)
        for word in words:
            assert word in caught.value.lines()
    with pytest.raises(DataError, match="among 1") as caught:
        prepare(tmp_path / "out", inputs[:1], tokenizer)
    assert "--validation-fraction" not in caught.value.do and "more files" in caught.value.do
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="among the inputs"):
        prepare(tmp_path / "out", [tmp_path / "blank.txt"], tokenizer)


def test_a_tokenizer_that_cannot_be_trained_says_which_size_can(tmp_path):
    path = tmp_path / "a.txt"
    target = tmp_path / "tokenizer.model"
    path.write_text("abc def ghi " * 50)
    with pytest.raises(ConfigError, match="5000") as caught:
        text_tokenizer.train_tokenizer([path], "text", 5000, target)
    size = int(re.search(r"(\d+) or less", caught.value.do)[1])
    text_tokenizer.train_tokenizer([path], "text", size, target)
    path.write_text("".join(map(chr, range(0x4E00, 0x5000))))
    with pytest.raises(ConfigError, match="300") as caught:
        text_tokenizer.train_tokenizer([path], "text", 300, target)
    assert int(re.search(r"(\d+) or more", caught.value.do)[1]) > 700
    for blank in ("", " \n"):
        path.write_text(blank)
        with pytest.raises(DataError, match="no document"):
            text_tokenizer.train_tokenizer([path], "text", 300, target)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_transformers_gives_the_ids_of_a_trained_tokenizer(tmp_path, model_type):
    """For Qwen3, transformers would choose a class that does not read SentencePiece."""
    transformers = pytest.importorskip("transformers")
    text = "def f(x):\n    return x + 1\n\n\tHe  said: caf\u00e9 \u2603\n"
    (tmp_path / "a.txt").write_text(text * 20)
    data = tmp_path / "data"
    data.mkdir()
    text_tokenizer.train_tokenizer([tmp_path / "a.txt"], "text", 290, data / "tokenizer.model")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    copy_tokenizer(data, model)
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    ours = load_tokenizer(data)
    (ids,) = ours.encode([text])
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids, skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eos)


def test_a_tokenizer_sees_every_kind_of_text(tmp_path, monkeypatch):
    """The second of two languages in one file, and those of many files, in any order."""
    monkeypatch.setattr(text_tokenizer, "VOCABULARY_CHARACTERS", 50_000)
    first = [f"first {number} " + "a" * 300 for number in range(1500)]
    second = [f"second {number} " + "b" * 300 for number in range(500)]
    mixed = [each for four in zip(*[iter(first)] * 3, second, strict=True) for each in four]
    for name, documents in (("one after another", first + second), ("in turns", mixed)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
        (tmp_path / f"{name}.txt").write_text("\n".join(documents))
        folder = tmp_path / name
        folder.mkdir()
        for number, each in enumerate(documents):
            (folder / f"{number:04d}.txt").write_text(each)
        for files in ([path], [path.with_suffix(".txt")], sorted(folder.iterdir())):
            found = "".join(text_tokenizer.vocabulary_texts(files, "text"))
            assert 45_000 < len(found) <= 50_000
            assert 0.15 < found.count("b") / len(found) < 0.35
        with monkeypatch.context() as small:  # only some places of a large file are read
            small.setattr(text_inputs, "PART_BYTES", 100_000)
            small.setattr(text_tokenizer, "PLACE_BYTES", 1000)
            small.setattr(text_tokenizer, "VOCABULARY_BYTES", path.stat().st_size // 5)
            read = sum(source.end - source.begin for source in text_tokenizer._places([path]))
            assert 0.15 < read / path.stat().st_size < 0.25
            found = "".join(text_tokenizer.vocabulary_texts([path], "text"))
            assert 0.15 < found.count("b") / len(found) < 0.35
    few = ["a line\nand more ", "b"]
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in few))
    assert text_tokenizer.vocabulary_texts([path], "text") == few, "less text is used as it is"


def test_another_size_of_the_trained_tokenizer_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    inputs = write_folder(tmp_path / "texts")
    settings = Settings("", "", "text", VALIDATION)
    prepare_text(inputs, tmp_path / "out", settings, 1, 300)
    assert "300" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(StorageError):
        prepare_text(inputs, tmp_path / "out", settings, 1, 310)
    (tmp_path / "out" / RECORD).unlink()  # as after an interruption
    for name in TOKEN_FILES:
        (tmp_path / "out" / name).unlink()
    with pytest.raises(StorageError, match="300 pieces, not 310"):
        prepare_text(inputs, tmp_path / "out", settings, 1, 310)


@pytest.mark.parametrize("name", ["A.JSONL", "A.JSONL.GZ", "A.PARQUET", "A.TXT.GZ", "A.Arrow"])
def test_names_in_capitals_are_read_like_others(name, tmp_path):
    path = tmp_path / name
    if name.endswith("PARQUET"):
        parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    elif name.endswith("Arrow"):
        (write_arrow(tmp_path / "set")[0] / "data-00000-of-00001.arrow").rename(path)
    else:
        content = "".join(TEXTS).encode() if "TXT" in name else lines()
        path.write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    (tmp_path / "INFO.JSON").write_text("{}")
    ((source,),) = text_inputs.divide(text_inputs.input_files([tmp_path]))
    assert "".join(text_inputs.documents(source, "text")) == "".join(TEXTS)


def test_a_folder_is_named_for_its_tokenizer(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    inputs = write_folder(tmp_path / "texts")
    by_file = prepare(tmp_path / "a", inputs, tokenizer)
    assert prepare(tmp_path / "b", inputs, tokenizer.parent) == by_file
    assert (tmp_path / "b/tokenizer.model").read_bytes() == tokenizer.read_bytes()
    with pytest.raises(DataError, match="no tokenizer"):
        prepare(tmp_path / "c", inputs, tmp_path / "texts")


def test_a_line_without_the_key_names_its_keys_and_the_option(tmp_path):
    path = tmp_path / "a.jsonl"
    for line, words in (
        ('{"txt": "a", "url": "b"}', ("line 1", 'no key "text"', "it has txt, url", " --key")),
        ("[1]", ("element 1", "int, not an object")),
        ('{"text": "a"}\n[1]', ("line 2", "list, not an object")),
        ("{", ("line 1", "not JSON")),
    ):
        path.write_text(line)
        with pytest.raises(DataError) as caught:
            list(text_inputs.documents(text_inputs.Source(str(path), 0, len(line)), "text"))
        for word in words:
            assert word in caught.value.lines()
        assert "Error" not in caught.value.what


def test_an_error_counts_the_lines_from_the_beginning_of_the_file(tmp_path, monkeypatch):
    """Also if another process reads a later part of the file, or only some places are read."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines() + b"{}\n" + lines())
    monkeypatch.setattr(text_inputs, "PART_BYTES", 1000)
    with pytest.raises(DataError) as caught:
        for source in text_inputs.sources_of(path):
            list(text_inputs.documents(source, "text"))
    assert f"line {len(TEXTS) + 1}:" in caught.value.what
    monkeypatch.setattr(text_tokenizer, "PLACE_BYTES", 100)
    with pytest.raises(DataError) as caught:
        text_tokenizer.vocabulary_texts([path], "text")
    assert f"line {len(TEXTS) + 1}:" in caught.value.what


def test_a_folder_or_tokenizer_that_cannot_be_used_is_named(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines())
    given = ["text", "--input", str(tmp_path / "a.jsonl")]
    out = tmp_path / "out"
    for named, code, words in (
        (tmp_path / "absent.model", DataError.exit_code, "absent.model: no such file"),
        (tmp_path / "a.jsonl", DataError.exit_code, "a.jsonl: expected a SentencePiece"),
    ):
        assert main([*given, "--tokenizer", str(named), "--data-dir", str(out)]) == code
        assert words in capsys.readouterr().err
    with_tokenizer = [*given, "--tokenizer", str(tokenizer), "--data-dir"]
    assert main([*with_tokenizer, str(tmp_path / "a.jsonl")]) == ConfigError.exit_code
    assert "a.jsonl is not a folder" in capsys.readouterr().err
    for other in ("{", "[]"):
        (out / RECORD).write_text(other)
        assert main([*with_tokenizer, str(out)]) == DataError.exit_code
        assert f"{out / RECORD}: not a manifest" in capsys.readouterr().err
    for value in ("x", "1"):
        words = [*with_tokenizer, str(out), "--validation-fraction", value]
        assert main(words) == ConfigError.exit_code
        assert f"--validation-fraction: '{value}' is not" in capsys.readouterr().err


def test_another_tokenizer_may_be_removed_unless_token_files_were_made_with_it(
    tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    (tmp_path / "a.jsonl").write_bytes(lines())
    another = tmp_path / "another.model"
    corpus.train_sentencepiece(TEXTS, 310, another)
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.model").write_bytes(another.read_bytes())
    with pytest.raises(StorageError) as caught:
        prepare(out, [tmp_path / "a.jsonl"], tokenizer)
    assert "remove it" in caught.value.do and "made" not in caught.value.why
    prepare(out, [tmp_path / "a.jsonl"], another)
    with pytest.raises(StorageError) as caught:
        prepare(out, [tmp_path / "a.jsonl"], tokenizer)
    assert "remove it" not in caught.value.do and "made with" in caught.value.why


def test_a_tokenizer_that_an_earlier_try_trained_is_kept_and_noted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    (folder,) = write_folder(tmp_path / "texts")
    settings = Settings("", "", "text", 1e-9)
    out = tmp_path / "out"
    with pytest.raises(DataError, match="validation"):
        prepare_text([folder], out, settings, 1, 300)
    assert "note:" not in capsys.readouterr().err
    trained = (out / "tokenizer.model").read_bytes()
    (folder / "more.txt").write_text("other words in another text " * 50)
    settings = Settings("", "", "text", VALIDATION)
    for notes in (1, 0):  # the second time the data are complete
        prepare_text([folder], out, settings, 1, 300)
        assert (out / "tokenizer.model").read_bytes() == trained
        assert capsys.readouterr().err.count(f"because {out / 'tokenizer.model'} exists") == notes


def test_a_record_that_cannot_be_read_is_named(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / f"out/{RECORD}").mkdir(parents=True)
    with pytest.raises(DataError, match=f"/out/{RECORD}: cannot be opened"):
        prepare(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer)
    assert not (tmp_path / "out/train.bin").exists()


def test_a_folder_that_has_only_json_files_asks_for_their_names(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    for words in ("another folder", "its .json files"):
        with pytest.raises(ConfigError, match="nothing to read") as caught:
            text_inputs.input_files([tmp_path])
        assert words in caught.value.do and ".json," not in caught.value.why
        (tmp_path / "a.JSON.gz").write_bytes(gzip.compress(lines()))
    assert text_inputs.input_files([tmp_path / "a.JSON.gz"]) == [tmp_path / "a.JSON.gz"]


def test_the_metadata_of_a_parquet_file_are_read_once(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=1)
    opened = []
    read = parquet.ParquetFile
    monkeypatch.setattr(parquet, "ParquetFile", lambda path: opened.append(path) or read(path))
    monkeypatch.setattr(text_inputs, "PART_BYTES", path.stat().st_size // 20)
    parts = text_inputs.divide([path])
    sources = [source for part in parts for source in part]
    assert 20 <= len(sources) < len(TEXTS)
    assert sum(map(text_inputs.bytes_of, sources)) <= path.stat().st_size
    texts = [text for source in sources for text in text_inputs.documents(source, "text")]
    assert texts == TEXTS and len(opened) == 1


def test_the_byte_order_mark_of_a_plain_text_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("a line\n".encode("utf-8-sig"))
    ((source,),) = text_inputs.divide([tmp_path / "a.txt"])
    assert list(text_inputs.documents(source, "text")) == ["a line\n"]


def test_the_vocabulary_of_a_tokenizer_json_ends_at_its_largest_id(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 70_000, "<end>": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, "<end>").vocab_size == 70_001


def test_files_left_out_are_counted_and_unreadable_folders_refused(tmp_path, monkeypatch, capsys):
    (folder,) = write_folder(tmp_path / "texts")
    (folder / "below").mkdir()
    (folder / "below" / "a.txt").write_text("a")
    assert len(text_inputs.input_files([folder])) == len(TEXTS) + 1
    said = capsys.readouterr().err
    assert f"{len(TEXTS) + 1} files" in said and "2 of other types" in said
    scandir = os.scandir

    def closed(path):  # permissions do not stop root, which tests may run as
        if Path(path).name == "below":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ConfigError, match=r"texts/below: .*denied"):
        text_inputs.input_files([folder])
