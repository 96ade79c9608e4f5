"""Prepared text is complete, or no command calls it so, and no run reads it."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from in_this_process import InThisProcess
from jobs import job_of
from test_open_run import CONFIG, MODEL, launch

from common.data import corpus, manifest, text_inputs, text_parts
from common.data.indexed_dataset import Index
from common.data.manifest import FileFacts, facts_of
from common.errors import DataError, StorageError
from common.paths import ROOT
from launch.job import ensure_data
from open_llama.prepare import main

TEXTS = [f"Document {number} has {number * 37 % 101} words.\nIt ends." for number in range(300)]
PIECES = 300


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory) -> Path:
    """A folder with a tokenizer and JSON lines."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus.train_sentencepiece(TEXTS, PIECES, folder / "tokenizer.model")
    lines = "".join(json.dumps({"text": each}) + "\n" for each in TEXTS)
    (folder / "a.jsonl").write_text(lines)
    return folder


@pytest.fixture
def inputs(corpus_folder, tmp_path, monkeypatch) -> Path:
    """A copy of the folder whose text is cut into about 18 parts, tokenized in this process."""
    monkeypatch.setattr(text_inputs, "PART_BYTES", 1000)
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    return shutil.copytree(corpus_folder, tmp_path / "inputs")


def prepare(inputs: Path, out: Path, *options: str) -> int:
    """Return the exit code of `prepare text`."""
    given = ["--input", str(inputs / "a.jsonl"), "--tokenizer", str(inputs / "tokenizer.model")]
    given += ["--data-dir", str(out), "--validation-fraction", "0.2", "--processes", "1"]
    return main(["text", *given, *options])


@pytest.fixture
def prepared(inputs, tmp_path) -> Path:
    """A folder of complete token files."""
    assert prepare(inputs, tmp_path / "out") == 0
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json"])
def test_a_disk_that_fails_is_a_storage_error(inputs, tmp_path, name, capsys):
    (inputs / name).unlink(missing_ok=True)
    (inputs / name).symlink_to("/proc/self/mem")  # whose first byte is an error to read: EIO
    assert prepare(inputs, tmp_path / "out") == StorageError.exit_code
    assert str(inputs / name) in capsys.readouterr().err


def documents_in(out: Path) -> int:
    return sum(Index.read(out / split).num_documents for split in text_parts.SPLITS)


def test_files_of_other_options_are_refused(inputs, prepared):
    assert prepare(inputs, prepared, "--eos", "<s>") == StorageError.exit_code


def content_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def after_task(monkeypatch, number: int, action) -> None:
    """Call `action` when the worker has finished its task `number`, counted from 1."""
    send = InThisProcess.send

    def send_after(worker, message):
        if message is None and worker.done + 1 == number:
            action()
        send(worker, message)

    monkeypatch.setattr(InThisProcess, "send", send_after)


# ---- the preparation


def test_a_part_that_vanishes_never_costs_documents(inputs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    part = out / ".parts/000000.npz"
    with monkeypatch.context() as once:
        after_task(once, 5, part.unlink)
        assert prepare(inputs, out) == DataError.exit_code
    assert f"{part} is missing" in capsys.readouterr().err
    assert not (out / "text.json").exists()
    kept = (out / ".parts/000001.npz").stat().st_mtime_ns
    with monkeypatch.context() as once:
        seen = []
        after_task(once, 1, lambda: seen.append((out / ".parts/000001.npz").stat().st_mtime_ns))
        assert prepare(inputs, out) == 0
    assert documents_in(out) == len(TEXTS) and seen == [kept]


@pytest.mark.parametrize("damage", ["cut", "folder removed"])
def test_damaged_parts_are_named(inputs, tmp_path, monkeypatch, capsys, damage):
    out = tmp_path / "out"
    part = out / ".parts/000000.npz"

    def spoil():
        if damage == "cut":
            os.truncate(part, part.stat().st_size // 2)
        else:
            shutil.rmtree(part.parent)

    with monkeypatch.context() as once:
        after_task(once, 3, spoil)
        assert prepare(inputs, out) == DataError.exit_code
    named = part if damage == "cut" else part.parent
    assert f"error: {named} " in capsys.readouterr().err
    part.unlink(missing_ok=True)
    assert prepare(inputs, out) == 0
    assert documents_in(out) == len(TEXTS)


@pytest.mark.parametrize("change", ["PART_BYTES", "PARTS_VERSION"])
def test_parts_of_another_version_are_not_continued(inputs, tmp_path, monkeypatch, capsys, change):
    out = tmp_path / "out"
    with monkeypatch.context() as once:
        once.setattr(InThisProcess, "limit", 4)
        assert prepare(inputs, out) == 130
    if change == "PART_BYTES":
        monkeypatch.setattr(text_inputs, "PART_BYTES", 3000)
    else:
        monkeypatch.setattr(text_parts, "PARTS_VERSION", text_parts.PARTS_VERSION + 1)
    assert prepare(inputs, out) == 0
    assert documents_in(out) == len(TEXTS)
    err = capsys.readouterr().err
    assert "version" in err and "continuing" not in err


@pytest.mark.parametrize("change", ["cut", "removed", "touched"])
def test_an_input_that_changes_while_it_is_read(inputs, tmp_path, monkeypatch, capsys, change):
    out = tmp_path / "out"
    source = inputs / "a.jsonl"
    content = source.read_bytes()

    def alter():
        if change == "cut":
            source.write_bytes(content[: content.index(b"\n", 5000) + 1])
        elif change == "removed":
            source.unlink()
        else:
            os.utime(source, ns=(1, 1))

    with monkeypatch.context() as once:
        after_task(once, 3, alter)
        assert prepare(inputs, out) == DataError.exit_code
    assert f"{source} was changed while it was read" in capsys.readouterr().err
    assert not (out / "text.json").exists()
    source.write_bytes(content)
    assert prepare(inputs, out) == 0
    assert documents_in(out) == len(TEXTS)


# ---- the record


def test_the_record_has_sizes_checksums_and_the_largest_id(prepared):
    record = json.loads((prepared / "text.json").read_text())
    for split in text_parts.SPLITS:
        for name in (f"{split}.bin", f"{split}.idx"):
            content = (prepared / name).read_bytes()
            facts = record["files"][name]
            assert facts["size"] == len(content)
            assert facts["sha256"] == hashlib.sha256(content).hexdigest()
        ids = np.fromfile(prepared / f"{split}.bin", np.uint16)
        assert record["pairs"][split]["largest_id"] == ids.max()
        assert record["pairs"][split]["tokens"] == len(ids)
    assert record["vocab_size"] == PIECES and record["eos_token_id"] == 2


DAMAGE = {
    "removed": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["train.bin", "validation.idx"])
def test_damaged_files_are_not_called_complete(inputs, prepared, capsys, name, damage):
    assert prepare(inputs, prepared) == 0
    assert main(["verify", "--data-dir", str(prepared), "--full"]) == 0
    DAMAGE[damage](prepared / name)
    before = content_of(prepared)
    capsys.readouterr()
    assert prepare(inputs, prepared) == DataError.exit_code
    said = capsys.readouterr().err
    assert name in said and "complete" not in said
    assert main(["verify", "--data-dir", str(prepared), "--full"]) == DataError.exit_code
    assert name in capsys.readouterr().err
    assert content_of(prepared) == before, "nothing is overwritten"


@pytest.mark.parametrize("command", ["text", "verify"])
def test_a_record_without_the_facts_is_refused(inputs, prepared, capsys, command):
    record = json.loads((prepared / "text.json").read_text())
    del record["files"]
    (prepared / "text.json").write_text(json.dumps(record))
    before = content_of(prepared)
    options = ["verify", "--data-dir", str(prepared)]
    code = prepare(inputs, prepared) if command == "text" else main(options)
    assert code == DataError.exit_code and "text.json" in capsys.readouterr().err
    assert before.items() <= content_of(prepared).items(), "nothing is overwritten"


def test_verify_of_a_folder_without_a_record_names_it(tmp_path, capsys):
    assert main(["verify", "--data-dir", str(tmp_path)]) == DataError.exit_code
    assert str(tmp_path / "text.json") in capsys.readouterr().err


# ---- the run


def run(prepared: Path, folder: Path, vocab_size: int = 512):
    """Start a run, which must be refused before a rank starts."""
    (folder / "config.json").write_text(json.dumps(MODEL | {"vocab_size": vocab_size}))
    (folder / "my_run.toml").write_text(CONFIG.format(folder=folder))
    arguments = ["--config", str(folder / "my_run.toml"), "--device", "cpu"]
    done = launch(folder, "open_llama", *arguments, DATADIR=str(prepared))
    assert not (folder / "results").exists()
    return done


def test_a_run_on_a_changed_file_is_refused(prepared, tmp_path):
    content = bytearray((prepared / "train.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (prepared / "train.bin").write_bytes(content)
    done = run(prepared, tmp_path)
    assert done.returncode == DataError.exit_code, done.stderr
    assert f"{prepared / 'train.bin'} " in done.stderr and "prepare verify" in done.stderr


def test_a_run_with_ids_beyond_the_vocabulary_is_refused(prepared, tmp_path):
    record = json.loads((prepared / "text.json").read_text())
    largest = record["pairs"]["train"]["largest_id"]
    done = run(prepared, tmp_path, vocab_size=largest)
    assert done.returncode == DataError.exit_code, done.stderr
    assert "train.bin" in done.stderr and f"id {largest}" in done.stderr


def test_eval_on_a_changed_file_is_refused(prepared, tmp_path, monkeypatch, capsys):
    evaluation = pytest.importorskip("open_llama.evaluation")
    monkeypatch.setattr(evaluation, "load_model", lambda *_: pytest.fail("evaluated"))
    (prepared / "validation.bin").write_bytes(bytes((prepared / "validation.bin").stat().st_size))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    from open_llama.eval import main as evaluate

    options = ["--data", str(prepared / "validation"), "--sequence-length", "16"]
    options += ["--device", "cpu"]
    assert evaluate([str(tmp_path / "model"), *options]) == DataError.exit_code
    assert "validation.bin" in capsys.readouterr().err


STREAM = ROOT / "open_llama/examples/pretrain_1b.toml"


def job_with_record(folder: Path, record: dict):
    data = {"train": [2049], "validation": [128 * 2048 + 1]}
    job = job_of("open_llama", STREAM, folder, data=data, weights="", lora_rank=0)
    (job.data_dir / "text.json").write_text(json.dumps(record))
    return job


def test_a_run_refuses_a_record_without_the_facts(tmp_path):
    with pytest.raises(DataError, match=r"text\.json"):
        ensure_data(job_with_record(tmp_path, {"inputs": []}))


def test_a_run_compares_only_the_files_that_it_reads(tmp_path):
    record = {"source": "", "vocab_size": 9, "pairs": {}}
    other = {"other.bin": {"size": 5}}
    ensure_data(job_with_record(tmp_path, record | {"files": other}))
    with pytest.raises(DataError, match=r"train\.bin"):
        ensure_data(
            job_with_record(tmp_path, record | {"files": other | {"train.bin": {"size": 5}}})
        )


def test_large_files_are_compared_by_their_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "WHOLE_BYTES", 1 << 20)
    path = tmp_path / "train.bin"
    content = bytearray(os.urandom(3 << 20))
    path.write_bytes(content)
    facts = facts_of(path)
    assert facts.sample and facts.sample != facts.sha256
    monkeypatch.setattr(manifest, "sha256_of", lambda *_: pytest.fail("read as a whole"))
    assert facts.difference(path, whole=False) == ""
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert facts.difference(path, whole=False)
    small = tmp_path / "small"
    small.write_bytes(b"x")
    assert FileFacts(1).difference(small) == "" and FileFacts(2).difference(small)
