"""`prepare chat`, the first screen of a run on it, and what runs refuse."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chats import template, write_tokenizer
from in_this_process import InThisProcess
from jobs import job_of
from test_chat import encoded
from test_prepare_text import documents_in

from common.data import text_inputs, text_parts
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_header import stored_documents
from common.data.text_parts import SPLITS
from common.errors import ConfigError, DataError, StorageError
from common.kernels.cross_entropy import IGNORE_INDEX
from common.paths import ROOT
from launch.job import Job, ensure_data
from open_llama.data import Documents, epochs_text, padding_share, sequences_in
from open_llama.prepare import main

QUESTION = {"role": "user", "content": "a question of the model "}
RECORDS = [
    {"messages": [QUESTION, {"role": "assistant", "content": f"the answer {number}"}] * 2}
    for number in range(60)
]
RECORDS += [{"messages": [QUESTION | {"content": f"{number}"}]} for number in range(9)]
LORA = ROOT / "open_llama/examples/lora_8b.toml"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder / "tokenizer", template("ChatML", blocks=False))
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (folder / "a.jsonl").write_text(lines)
    return folder


def prepare(inputs: Path, out: Path, *options: str) -> int:
    """Return the exit code of `prepare chat`."""
    given = ["--input", str(inputs / "a.jsonl"), "--tokenizer", str(inputs / "tokenizer")]
    given += ["--data-dir", str(out), "--validation-fraction", "0.2"]
    return main(["chat", *given, *(options or ("--processes", "1"))])


@pytest.fixture(scope="module")
def complete(inputs) -> Path:
    """A folder of complete files, of many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_inputs, "PART_BYTES", 1000)
        patch.setattr(text_parts, "PROCESSES", InThisProcess)
        assert prepare(inputs, inputs / "out") == 0
    return inputs / "out"


@pytest.fixture
def prepared(complete, tmp_path) -> Path:
    return shutil.copytree(complete, tmp_path / "data")


def test_the_files_hold_the_tokens_and_masks_of_all_conversations(complete, inputs):
    pairs = []
    for split, documents in documents_in(complete).items():
        mask = (complete / f"{split}.mask").read_bytes()
        for ids in documents:
            pairs.append((ids, [*mask[: len(ids)]]))
            mask = mask[len(ids) :]
        assert not mask
    expected = [encoded(inputs / "tokenizer", record) for record in RECORDS]
    assert sorted(pairs) == sorted(expected)
    assert not (complete / "chat_template.jinja").is_symlink()
    assert (complete / "chat_template.jinja").is_file()


@pytest.mark.slow
def test_worker_processes_give_the_same_files(complete, inputs, tmp_path):
    assert prepare(inputs, tmp_path / "out", "--processes", "2") == 0
    for split in SPLITS:
        for suffix in ("bin", "idx", "mask"):
            name = f"{split}.{suffix}"
            assert (tmp_path / "out" / name).read_bytes() == (complete / name).read_bytes()


def test_an_interrupted_preparation_continues(complete, inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_inputs, "PART_BYTES", 1000)
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    with monkeypatch.context() as patch:
        patch.setattr(InThisProcess, "limit", 3)
        assert prepare(inputs, tmp_path / "out") == 130
    assert prepare(inputs, tmp_path / "out") == 0
    assert "continuing: 3 of" in capsys.readouterr().err
    assert (tmp_path / "out/train.mask").read_bytes() == (complete / "train.mask").read_bytes()
    assert prepare(inputs, tmp_path / "out") == 0
    assert "complete and verified" in capsys.readouterr().err


def test_a_refused_conversation_ends_the_preparation(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    shutil.copytree(inputs / "tokenizer", tmp_path / "tokenizer")
    record = {"messages": [QUESTION | {"role": "bot"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORDS[0]) + "\n" + json.dumps(record))
    assert prepare(tmp_path, tmp_path / "out") == DataError.exit_code
    assert "line 2: message 1: unknown role 'bot'" in capsys.readouterr().err
    assert not (tmp_path / "out/train.mask").exists()


def test_a_folder_without_a_template_is_refused_before_it_is_copied(inputs, tmp_path, capsys):
    write_tokenizer(tmp_path / "tokenizer", None)
    shutil.copyfile(inputs / "a.jsonl", tmp_path / "a.jsonl")
    assert prepare(tmp_path, tmp_path / "out") == DataError.exit_code
    assert "no chat template" in capsys.readouterr().err
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_plain_text_holds_no_conversations(complete, inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    shutil.copytree(inputs / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").mkdir()  # a folder, as of a data set with a page about it
    (tmp_path / "a.jsonl/README.md").write_text("# A data set")
    assert prepare(tmp_path, tmp_path / "out") == ConfigError.exit_code
    shutil.copyfile(inputs / "a.jsonl", tmp_path / "a.jsonl/train.jsonl")
    assert prepare(tmp_path, tmp_path / "out") == 0
    assert "1 file of plain text left out" in capsys.readouterr().err
    assert (tmp_path / "out/train.mask").read_bytes() == (complete / "train.mask").read_bytes()


def test_text_and_conversations_are_not_mixed(prepared, inputs, capsys):
    given = ["--input", str(inputs / "a.jsonl"), "--tokenizer", str(inputs / "tokenizer")]
    given += ["--data-dir", str(prepared), "--validation-fraction", "0.2"]
    assert main(["text", *given]) == StorageError.exit_code
    # text.json of conversations records an empty key, which no command line may name.
    assert main(["text", *given, "--key", ""]) == ConfigError.exit_code
    (prepared / "text.json").unlink()
    assert main(["chat", *given]) == StorageError.exit_code


@pytest.mark.parametrize("full", [True, False])
def test_a_changed_mask_is_found(full, prepared, capsys):
    path = prepared / "train.mask"
    content = path.read_bytes()
    path.write_bytes(b"\1" * len(content) if full else content[:-1])
    verify = ["verify", "--data-dir", str(prepared), *(["--full"] if full else [])]
    assert main(verify) == DataError.exit_code
    assert "train.mask" in capsys.readouterr().err


def job_on(data_dir: Path, folder: Path, **changes) -> Job:
    few = {"eval_samples": 4, "sequence_length": 64, "weights": "", "lora_rank": 0}
    job = job_of("open_llama", LORA, folder / "job", **few | changes)
    return replace(job, data_dir=data_dir)


def test_a_run_on_conversations_starts(prepared, tmp_path):
    ensure_data(job_on(prepared, tmp_path))


def test_a_stream_of_conversations_is_refused(prepared, tmp_path):
    with pytest.raises(ConfigError, match="one_document_per_sequence"):
        ensure_data(job_on(prepared, tmp_path, one_document_per_sequence=False))


@pytest.mark.parametrize("names", [["train.mask"], ["train.mask", "validation.mask"]])
def test_a_run_does_not_train_on_questions_if_masks_are_missing(names, prepared, tmp_path):
    for name in names:
        (prepared / name).unlink()
    with pytest.raises(DataError, match=r"train\.mask"):
        ensure_data(job_on(prepared, tmp_path))


def test_a_run_refuses_a_changed_mask(prepared, tmp_path):
    path = prepared / "train.mask"
    path.write_bytes(b"\1" * path.stat().st_size)
    with pytest.raises(DataError, match=r"train\.mask"):
        ensure_data(job_on(prepared, tmp_path))
    (prepared / "text.json").unlink()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train\.mask"):
        ensure_data(job_on(prepared, tmp_path))


def test_labels_are_the_answers_only(prepared, inputs):
    length = 48
    documents = Documents(prepared / "train", length, 500)
    index = Index.read(prepared / "train")
    kept = 0
    for number, ids in enumerate(documents_in(prepared)["train"]):
        text, mask = next(each for each in map_of(inputs) if each[0] == ids)
        counted = [place for place in range(1, min(len(ids), length + 1)) if mask[place]]
        if not counted:
            continue
        tokens, labels = documents[kept]
        assert documents.numbers[kept] == number
        assert tokens[: len(ids[:length])].tolist() == ids[:length]
        assert np.flatnonzero(labels != IGNORE_INDEX).tolist() == [each - 1 for each in counted]
        assert all(labels[place - 1] == text[place] for place in counted)
        kept += 1
    assert kept == len(documents) < index.num_documents
    assert stored_documents(prepared / "train", length, 10**6) == kept
    assert stored_documents(prepared / "train", 1, 10**6) == 0, "an answer begins later"


def map_of(inputs: Path) -> list[tuple[list[int], list[int]]]:
    return [encoded(inputs / "tokenizer", record) for record in RECORDS]


def test_the_first_screen_names_answers_padding_and_what_is_cut(prepared, tmp_path):
    config = job_on(prepared, tmp_path, sequence_length=40).config
    index = Index.read(prepared / "train")
    text = epochs_text(config, index)
    documents = Documents(prepared / "train", 40, 500)
    labels = np.stack([documents[number][1] for number in range(len(documents))])
    counted = np.count_nonzero(labels != IGNORE_INDEX)
    stored = np.minimum(index.sequence_lengths[documents.numbers] - 1, 40)
    left_out = index.num_documents - len(documents)
    assert f"answers: {counted:,} tokens ({counted / stored.sum():.1%}" in text
    assert f"{left_out} conversations" in text and left_out > 0
    assert sequences_in(config, index) == len(documents)
    padding = 1 - stored.mean() / 40
    assert padding_share(config, index) == pytest.approx(padding)
    assert "cut off" in text
