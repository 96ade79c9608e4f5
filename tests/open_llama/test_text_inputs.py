"""Test through the command which files of a folder `open_llama prepare text` reads."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest
from in_this_process import InThisProcess
from pyarrow import parquet
from test_prepare_text import documents_in

from common.data import corpus, text_parts
from open_llama.prepare import main

TEXTS = [f"Document {number} has {number * 37 % 101} words.\n" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    corpus.train_sentencepiece(TEXTS, 300, path)
    return path


@pytest.fixture
def read(tokenizer, tmp_path, monkeypatch):
    """Run `prepare text` on inputs. Return its exit code and the number of documents."""
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)

    def run(*inputs) -> tuple[int, int]:
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        names = [str(path) for path in inputs]
        options = ["--data-dir", str(out), "--tokenizer", str(tokenizer), "--processes", "1"]
        code = main(["text", "--input", *names, *options, "--validation-fraction", "0.2"])
        return code, sum(map(len, documents_in(out).values())) if code == 0 else 0

    return run


def lines(path: Path, some: list[str] = TEXTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"text": each}) + "\n" for each in some).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def table(path: Path, columns: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(made, path)
        return path
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, made.schema) as out:
        out.write_table(made)
    return path


def saved(folder: Path, some: list[str] = TEXTS) -> Path:
    """Write what save_to_disk of Hugging Face's datasets writes: two files and their names."""
    half = len(some) // 2
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (some[:half], some[half:]), strict=True):
        table(folder / name, {"text": part})
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("column", ["text", "indices"])  # what map and filter leave behind
def test_the_files_of_a_data_set_on_disk_are_those_of_its_state(column, read, tmp_path, capsys):
    folder = saved(tmp_path / "set")
    table(folder / "cache-0123456789abcdef.arrow", {column: TEXTS})
    table(folder / "data-00000-of-00003.arrow", {"text": TEXTS})  # of an earlier save
    assert read(folder) == (0, len(TEXTS))
    assert "not listed in state.json: 2" in capsys.readouterr().err


def test_a_cache_is_not_read_without_a_state_either(read, tmp_path, capsys):
    lines(tmp_path / "texts/a.jsonl")
    table(tmp_path / "texts/cache-0123456789abcdef.arrow", {"text": TEXTS})
    assert read(tmp_path / "texts") == (0, len(TEXTS))
    assert "cache of datasets: 1" in capsys.readouterr().err


def test_a_data_set_whose_files_are_missing_or_whose_state_is_damaged_is_refused(
    read, tmp_path, capsys
):
    folder = saved(tmp_path / "set")
    (folder / "data-00001-of-00002.arrow").unlink()
    assert read(folder) == (2, 0)
    assert "data-00001-of-00002.arrow" in capsys.readouterr().err
    (folder / "state.json").write_text('{"_data_files": [')
    assert read(folder) == (2, 0) and "state.json" in capsys.readouterr().err
    (folder / "state.json").write_text('{"epoch": 3}')  # of another program
    assert read(folder) == (0, len(TEXTS) // 2)


def dataset_dict(folder):
    (folder / "dataset_dict.json").parent.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    saved(folder / "train")
    saved(folder / "test", TEXTS[:4])


def parquet_files(folder):
    for split, some in {"train": TEXTS, "test": TEXTS[:4]}.items():
        table(folder / f"data/{split}-00000-of-00001-0123abc.parquet", {"text": some})


def cached(folder):
    for split, some in {"train": TEXTS, "test": TEXTS[:4]}.items():
        table(folder / f"wikitext-{split}.arrow", {"text": some})


def folders(folder):
    for split, some in {"train": TEXTS, "validation": TEXTS[:4]}.items():
        lines(folder / split / "part" / "0.jsonl.gz", some)


def plain_text(folder):
    folder.mkdir()
    for split in ("train", "valid"):
        (folder / f"ptb.{split}.txt").write_text(TEXTS[0])


@pytest.mark.parametrize("write", [dataset_dict, parquet_files, cached, folders, plain_text])
def test_several_splits_are_refused_with_their_names(write, read, tmp_path, capsys):
    folder = tmp_path / "set"
    write(folder)
    assert read(folder) == (2, 0)
    said = capsys.readouterr().err
    assert "splits" in said and "train" in said and ("test" in said or "valid" in said)
    assert not (tmp_path / "out0").exists()
    if write is not plain_text:
        train = next(path for path in sorted(folder.rglob("*train*")) if "lock" not in path.name)
        assert read(train) == (0, len(TEXTS))


def test_names_like_those_of_splits_in_a_program_are_no_splits(read, tmp_path):
    for name in ("train.py", "test.py", "train/a.md", "test/b.md", "test-of-time.txt"):
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(TEXTS[len(name)])
    lines(tmp_path / "code/train-0.jsonl", TEXTS[20:])
    assert read(tmp_path / "code") == (0, 5 + len(TEXTS[20:]))


def test_linked_folders_are_read_and_each_file_once(read, tmp_path, capsys):
    folder = tmp_path / "texts"
    lines(folder / "z/a.jsonl", TEXTS[:20])
    lines(tmp_path / "archive/b.jsonl", TEXTS[20:])
    (folder / "a_linked").symlink_to(tmp_path / "archive")
    (folder / "linked_again").symlink_to(tmp_path / "archive")
    (folder / "loop").symlink_to(folder)
    (folder / "again.jsonl").symlink_to(folder / "z/a.jsonl")
    os.link(folder / "z/a.jsonl", folder / "z/hard.jsonl")
    (folder / "gone.jsonl").symlink_to("nowhere")
    assert read(folder) == (0, len(TEXTS))
    said = capsys.readouterr().err
    assert "folder linked again: 2" in said and "broken link or device: 1" in said
    assert "2 files named or linked more than once" in said


def test_hidden_files_and_folders_are_counted(read, tmp_path, capsys):
    folder = tmp_path / ".cache" / "texts"  # a hidden folder that is named is read
    lines(folder / "a.jsonl")
    lines(folder / ".ipynb_checkpoints/a-checkpoint.jsonl")
    lines(folder / "__MACOSX/._a.jsonl")
    (folder / "._a.txt").write_bytes(b"\0\5\x16\7Mac OS X")
    assert read(folder) == (0, len(TEXTS))
    assert "hidden: 3" in capsys.readouterr().err


def test_a_file_beside_its_compressed_copy_is_refused(read, tmp_path, capsys):
    path = lines(tmp_path / "texts/a.jsonl")
    copy = lines(tmp_path / "texts/a.jsonl.gz")
    assert read(tmp_path / "texts") == (2, 0) and "a.jsonl.gz" in capsys.readouterr().err
    assert read(path, copy) == (2, 0)
    assert read(copy) == (0, len(TEXTS))


def test_a_file_named_twice_is_read_once(read, tmp_path, capsys):
    path = lines(tmp_path / "texts/a.jsonl")
    assert read(path, tmp_path / "texts", path) == (0, len(TEXTS))
    assert "2 files named or linked more than once" in capsys.readouterr().err
