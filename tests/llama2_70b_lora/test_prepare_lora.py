"""Preparing GovReport and the base: conversion that refuses what is wrong, pickles that execute nothing, the miniature in small."""

import ast
import hashlib
import os
import pickle
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from common.data import corpus
from common.data.manifest import Manifest, sha256_of
from common.errors import DataError, PreflightError, StorageError, WeightsError
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_writer import save_base
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.shapes import ModelShape
from llama2_70b_lora import miniature, miniature_task, packed_npy, prepare
from llama2_70b_lora.data import GovReport, tokens_path, validation_pairs
from llama2_70b_lora.rules import CLOSED, MINIATURE

HELD_OUT = ("json.decoder", "textwrap")
SMALL = replace(CLOSED, shape=ModelShape(1, 32, 48, 4, 2, 61, 10000.0), sequence_length=12, train_samples=9, eval_samples=3)


@pytest.fixture(autouse=True)
def small_rules(monkeypatch):
    """The closed division in small: 9 and 3 sequences of 12 tokens below 61."""
    monkeypatch.setattr(prepare, "CLOSED", SMALL)


def govreport_rows():
    """{split: int64 [rows, 2, length]}: training counts every token, validation about half of them."""
    random = np.random.default_rng(1)
    rows = {"train": random.integers(61, size=(9, 1, 12)), "validation": random.integers(61, size=(3, 1, 12))}
    rows = {split: np.repeat(ids, 2, axis=1) for split, ids in rows.items()}
    rows["validation"][:, 1][random.random((3, 12)) < 0.5] = -100
    rows["validation"][:, 1, 5] = rows["validation"][:, 0, 5]
    return rows


def write_parquet(folder, rows, kind=None, label_kind=None):
    folder.mkdir(parents=True, exist_ok=True)
    for split, array in rows.items():
        kinds = {"input_ids": kind or pyarrow.list_(pyarrow.int32()), "labels": label_kind or pyarrow.list_(pyarrow.int64())}
        columns = {name: pyarrow.array([list(map(int, row[i])) for row in array], kinds[name]) for i, name in enumerate(kinds)}
        parquet.write_table(pyarrow.table(columns), folder / f"{split}-00000-of-00001.parquet", row_group_size=4)
    return folder


def convert(source, target):
    return prepare.main(["convert", "--parquet-dir", str(source), "--data-dir", str(target)])


def stored(folder):
    return {split: np.fromfile(tokens_path(folder, split), "<i4").reshape(-1, 2, 12) for split in ("train", "validation")}


def tree(folder):
    return {path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in folder.rglob("*") if path.is_file()}


def assert_nothing_to_use(folder):
    assert not (folder / "govreport.json").exists()


# ---- convert


@pytest.mark.parametrize(
    "kind", [None, pyarrow.list_(pyarrow.int64()), pyarrow.large_list(pyarrow.int16()), pyarrow.list_(pyarrow.int32(), 12)]
)
def test_parquet_becomes_flat_int32(tmp_path, kind, capsys):
    rows = govreport_rows()
    assert convert(write_parquet(tmp_path / "p" / "data", rows, kind).parent, tmp_path / "d") == 0
    for split, array in stored(tmp_path / "d").items():
        assert np.array_equal(array, rows[split])
    found = GovReport.read(tmp_path / "d")
    found.check(12, 61, 9, 3)
    assert found.train.sha256 == hashlib.sha256(rows["train"].astype("<i4").tobytes()).hexdigest()
    assert len(validation_pairs(found)) == 3
    out, err = capsys.readouterr()
    assert out == "" and "9 training and 3 validation sequences of 12" in err
    assert {path.name for path in (tmp_path / "d").iterdir()} == {
        ".govreport.lock",
        "govreport.json",
        "govreport-train.bin",
        "govreport-validation.bin",
    }


def test_a_second_conversion_does_nothing_or_is_refused(tmp_path, capsys):
    rows = govreport_rows()
    source = write_parquet(tmp_path / "p", rows)
    assert convert(source, tmp_path / "d") == 0
    before = tree(tmp_path / "d")
    assert convert(source, tmp_path / "d") == 0
    assert "was complete already" in capsys.readouterr().err
    other = write_parquet(tmp_path / "q", {split: array[::-1] for split, array in rows.items()})
    assert convert(other, tmp_path / "d") == StorageError.exit_code
    assert "converted from other files" in capsys.readouterr().err
    assert tree(tmp_path / "d") == before


class Killed(BaseException):
    """Stands for the power switch."""


def test_a_conversion_after_a_kill(tmp_path, monkeypatch):
    source = write_parquet(tmp_path / "p", govreport_rows())
    for moment in range(3):
        replaced = 0
        original = Path.replace

        def die(self, target, moment=moment, original=original):
            nonlocal replaced
            if replaced == moment:
                raise Killed
            replaced += 1
            return original(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", die)
            with pytest.raises(Killed):
                convert(source, tmp_path / f"{moment}")
        assert_nothing_to_use(tmp_path / f"{moment}")
        assert convert(source, tmp_path / f"{moment}") == 0
        assert convert(source, tmp_path / f"{moment}") == 0


def changed(split, place, value):
    def change(rows):
        rows[split] = rows[split].copy()
        rows[split][place] = value

    return change


def both(split, place, value):
    """Ids and labels alike."""
    return changed(split, (place[0], slice(None), place[1]), value)


WRONG = {
    "all masked": (changed("validation", (1, 1), -100), "all labels are masked in 1 validation sequences", "parquet: row 1"),
    "many all masked": (changed("train", (slice(None), 1), -100), "all labels are masked in 9 train sequences", "row 7 and 1 more"),
    "first label only": (changed("train", (4, 1, slice(1, None)), -100), "all labels are masked in 1 train sequences", "row 4"),
    "id too high": (both("train", (4, 2), 61), "row 4: expected a token id from 0 to 60, got 61", ""),
    "id negative": (both("train", (4, 2), -3), "row 4: expected a token id from 0 to 60, got -3", ""),
    "label not a token": (changed("train", (4, 1, 2), -1), "row 4: expected a label from 0 to 60 or -100, got -1", ""),
    "labels shifted": (
        lambda rows: rows["train"][:, 1].__setitem__(..., np.roll(rows["train"][:, 1], -1, 1)),
        "position 0: expected the label",
        "",
    ),
    "in both": (lambda rows: rows["train"].__setitem__(2, rows["validation"][1, 0]), "row 1: the same sequence is in train", ""),
    "too few": (lambda rows: rows.update(train=rows["train"][:-1]), "train: expected 9 sequences, got 8", ""),
    "too many": (
        lambda rows: rows.update(validation=np.tile(rows["validation"], (2, 1, 1))),
        "validation: expected 3 sequences, got 6",
        "",
    ),
    "too short": (lambda rows: rows.update(train=rows["train"][:, :, :-1]), "row 0: expected 12 tokens, got 11", ""),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_rows_are_refused_and_named(tmp_path, kind, capsys):
    change, *messages = WRONG[kind]
    rows = govreport_rows()
    change(rows)
    assert convert(write_parquet(tmp_path / "p", rows), tmp_path / "d") == DataError.exit_code
    err = capsys.readouterr().err
    assert all(message in err for message in messages)
    assert_nothing_to_use(tmp_path / "d")


def truncated(path):
    os.truncate(path, path.stat().st_size - 40)


def rewritten(path):
    raw = bytearray(path.read_bytes())
    raw[100:300] = bytes(200)
    path.write_bytes(raw)


FILES = {
    "truncated": (truncated, "train-00000-of-00001.parquet: cannot be read as parquet"),
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), "cannot be read as parquet"),
    "empty": (lambda path: os.truncate(path, 0), "cannot be read as parquet"),
    "overwritten": (rewritten, "cannot be read as parquet"),
    "text": (lambda path: path.write_text("input_ids,labels\n"), "cannot be read as parquet"),
    "missing": (lambda path: path.unlink(), "there is no train-00000-of-00001.parquet"),
    "no labels": (lambda path: parquet.write_table(parquet.read_table(path).drop_columns("labels"), path), "there is no column labels"),
    "text column": (
        lambda path: parquet.write_table(pyarrow.table({"input_ids": ["a"], "labels": ["b"]}), path),
        "column input_ids is string",
    ),
    "holes": (
        lambda path: parquet.write_table(pyarrow.table({"input_ids": [[1, None]], "labels": [[1, 2]]}), path),
        "column input_ids has missing values",
    ),
    "unequal": (
        lambda path: parquet.write_table(pyarrow.table({"input_ids": [[1, 2]], "labels": [[1]]}), path),
        "row 0: 2 input_ids and 1 labels",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_damaged_parquet_is_named(tmp_path, kind, capsys):
    damage, message = FILES[kind]
    source = write_parquet(tmp_path / "p", govreport_rows())
    damage(source / "train-00000-of-00001.parquet")
    assert convert(source, tmp_path / "d") == DataError.exit_code
    assert message in capsys.readouterr().err
    assert_nothing_to_use(tmp_path / "d")


# ---- convert-npy


def as_dicts(array, kind):
    """Rows as AMD's converter stores them (lists), or with arrays or numpy numbers inside."""
    wrap = {"lists": list, "arrays": np.asarray, "numbers": lambda row: [np.int64(x) for x in row]}[kind]
    return [
        {"input_ids": wrap([int(x) for x in ids]), "loss_mask": wrap([int(x != -100) for x in labels]), "seq_start_id": [0]}
        for ids, labels in array
    ]


def write_npy(folder, rows, kind="lists"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, array in rows.items():
        np.save(folder / f"{split}.npy", np.array(as_dicts(array, kind), dtype=object), allow_pickle=True)
    return folder


def convert_npy(source, target):
    return prepare.main(["convert-npy", "--npy-dir", str(source), "--data-dir", str(target)])


@pytest.mark.parametrize("kind", ["lists", "arrays", "numbers"])
def test_packed_files_give_the_same_bytes(tmp_path, kind):
    rows = govreport_rows()
    assert convert(write_parquet(tmp_path / "p", rows), tmp_path / "d") == 0
    assert convert_npy(write_npy(tmp_path / "n", rows, kind), tmp_path / "e") == 0
    for split in ("train", "validation"):
        assert tokens_path(tmp_path / "d", split).read_bytes() == tokens_path(tmp_path / "e", split).read_bytes()
    assert prepare.main(["verify", "--data-dir", str(tmp_path / "e")]) == 0


def test_a_file_of_numpy_1_is_read(tmp_path):
    """numpy 1 calls the same function by another module's name; AMD's files were written with it."""
    source = write_npy(tmp_path, govreport_rows(), "arrays") / "train.npy"
    raw = source.read_bytes()
    assert b"numpy._core.multiarray" in raw
    source.write_bytes(
        raw.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray").replace(b"cnumpy._core.", b"cnumpy.core.")
    )
    assert b"numpy.core.multiarray" in source.read_bytes()
    shift = source.read_bytes()
    if b"\x80\x04\x95" in shift:  # protocol 4 frames state their length
        at = shift.index(b"\x80\x04\x95") + 3
        length = int.from_bytes(shift[at : at + 8], "little") - (len(raw) - len(shift))
        source.write_bytes(shift[:at] + length.to_bytes(8, "little") + shift[at + 8 :])
    assert len(list(packed_npy.read_packed(source))) == 9


class Payload:
    """Creates a marker file when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


class Loaded(np.ndarray):
    """A class of one's own that only looks like numpy's."""


PAYLOADS = {
    "command": lambda marker: Payload(os.system, f"touch {marker}"),
    "open": lambda marker: Payload(open, str(marker), "w"),
    "eval": lambda marker: Payload(eval, f"open({str(marker)!r}, 'w')"),
    "path": lambda marker: Payload(Path.touch, marker),
    "exec in a row": lambda marker: {"input_ids": Payload(exec, f"open({str(marker)!r}, 'w')"), "loss_mask": [1], "seq_start_id": [0]},
    "numpy function": lambda marker: Payload(np.save, str(marker), [1]),
    "subclass": lambda marker: np.zeros(3).view(Loaded),
    "structured array": lambda marker: np.zeros(3, [("a", "i4")]),
    "dates": lambda marker: np.zeros(3, "datetime64[s]"),
}


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_payload_is_refused_and_not_executed(tmp_path, kind, protocol, capsys):
    source, marker = write_npy(tmp_path / "n", govreport_rows()), tmp_path / "marker"
    content = np.array([PAYLOADS[kind](marker), None], dtype=object)
    with (source / "train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (2,)})
        pickle.dump(content, file, protocol=protocol)
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert "refused, nothing was executed" in capsys.readouterr().err
    assert not marker.exists()
    assert_nothing_to_use(tmp_path / "d")


def test_a_bare_payload_without_an_array(tmp_path, capsys):
    source, marker = write_npy(tmp_path / "n", govreport_rows()), tmp_path / "marker"
    with (source / "train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": ()})
        file.write(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert "contains os.system" in capsys.readouterr().err or not marker.exists()
    assert not marker.exists()


NPY = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 10), "not a packed array"),
    "no npy": (lambda path: path.write_bytes(b"PK\x03\x04" * 10), "not a packed array"),
    "plain numbers": (lambda path: np.save(path, np.zeros(3)), "expected an array of dicts, got one of float64"),
    "no dicts": (lambda path: np.save(path, np.array([1, None], dtype=object), allow_pickle=True), "expected an array of dicts"),
    "no mask": (lambda path: np.save(path, np.array([{"input_ids": [1]}] * 2, dtype=object), allow_pickle=True), "loss_mask is no list"),
    "text": (
        lambda path: np.save(path, np.array([{"input_ids": ["a"], "loss_mask": [1]}] * 2, dtype=object), allow_pickle=True),
        "input_ids is no list of whole numbers",
    ),
    "ragged": (
        lambda path: np.save(path, np.array([{"input_ids": [1, [2]], "loss_mask": [1]}] * 2, dtype=object), allow_pickle=True),
        "input_ids is no list of whole numbers",
    ),
    "fractions": (
        lambda path: np.save(path, np.array([{"input_ids": [0.5], "loss_mask": [1]}] * 2, dtype=object), allow_pickle=True),
        "input_ids is no list of whole numbers",
    ),
    "mask of 2": (
        lambda path: np.save(path, np.array([{"input_ids": [1], "loss_mask": [2]}] * 2, dtype=object), allow_pickle=True),
        "1 input_ids and 1 loss_mask, values [2]",
    ),
}


@pytest.mark.parametrize("kind", NPY)
def test_a_damaged_packed_file_is_named(tmp_path, kind, capsys):
    damage, message = NPY[kind]
    source = write_npy(tmp_path / "n", govreport_rows())
    damage(source / "train.npy")
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert message in capsys.readouterr().err


# ---- verify, write-manifest, fetch


@pytest.fixture
def whole(tmp_path):
    """Converted data, and weights of the rules' shape."""
    convert(write_parquet(tmp_path / "p", govreport_rows()), tmp_path / "d")
    model = fused_llama(SMALL.shape, 12)
    init_weights(model, SMALL.shape.num_layers, 1, 0.02, copy_weight)
    save_base(model, tmp_path / "w", dtype=torch.bfloat16)
    return tmp_path


def verify(folder, *options):
    return prepare.main(["verify", "--data-dir", str(folder / "d"), *options])


def flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def test_verify_of_good_data_and_weights(whole, capsys):
    weights = ["--weights", str(whole / "w")]
    assert verify(whole) == 0 and verify(whole, *weights) == 0
    err = capsys.readouterr().err
    assert "everything checked is correct" in err and "fused layout, 10 tensors" in err and "--manifest is needed" in err
    assert prepare.main(["write-manifest", *weights, "--output", str(whole / "m.json")]) == 0
    assert set(Manifest.read(whole / "m.json").files) == {path.name for path in (whole / "w").glob("*.safetensors")}
    manifest = ["--manifest", str(whole / "m.json")]
    assert verify(whole, *weights, *manifest) == 0
    assert "for which --full is needed" in capsys.readouterr().err
    assert verify(whole, *weights, *manifest, "--full") == 0
    assert "not checked" not in capsys.readouterr().err
    flip(whole / "w" / "model-00002-of-00003.safetensors", -1)
    assert verify(whole, *weights, *manifest) == 0
    assert verify(whole, *weights, *manifest, "--full") == WeightsError.exit_code
    assert "SHA-256 of model-00002-of-00003.safetensors differs" in capsys.readouterr().err


def same_sequence_in_both(folder):
    rows = stored(folder)
    rows["train"][0] = rows["validation"][0, 0]
    tokens_path(folder, "train").write_bytes(rows["train"].tobytes())
    found = GovReport.read(folder)
    replace(found, train=replace(found.train, sha256=sha256_of(tokens_path(folder, "train")))).write()


DAMAGE = {
    "flipped": (lambda d: set_both(d, 20, 7), "govreport-train.bin: SHA-256: expected"),
    "ids and labels differ": (lambda d: flip(tokens_path(d, "train"), 0), "row 0: position 0: expected the label"),
    "id": (lambda d: flip(tokens_path(d, "train"), 3 + 96), "row 1: expected a token id from 0 to 60, got"),
    "truncated": (lambda d: os.truncate(tokens_path(d, "validation"), 100), "expected 288 bytes (3 rows), got 100"),
    "missing": (lambda d: tokens_path(d, "train").unlink(), "cannot be opened"),
    "sidecar": (lambda d: (d / "govreport.json").write_text("{}"), "not a sidecar"),
    "leak": (same_sequence_in_both, "row 0: the same sequence is in train"),
    "all masked": (lambda d: mask(d, 2), "all labels are masked in 1 validation sequences"),
}


def set_both(folder, token, value):
    rows = stored(folder)["train"]
    rows[0, :, token % 12] = value
    tokens_path(folder, "train").write_bytes(rows.tobytes())


def mask(folder, row):
    rows = stored(folder)["validation"]
    rows[row, 1] = -100
    tokens_path(folder, "validation").write_bytes(rows.tobytes())


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_names_the_damage_and_changes_nothing(whole, kind, capsys):
    damage, message = DAMAGE[kind]
    damage(whole / "d")
    before = tree(whole)
    assert verify(whole, "--weights", str(whole / "w")) == DataError.exit_code
    err = capsys.readouterr().err
    assert message in err and "fused layout" in err  # the weights are looked at all the same
    assert tree(whole) == before


def test_verify_of_missing_weights(whole, capsys):
    (whole / "w" / "model-00001-of-00003.safetensors").unlink()
    assert verify(whole, "--weights", str(whole / "w")) == WeightsError.exit_code
    assert "1 of 3 shards are missing" in capsys.readouterr().err


def fetch(folder):
    return prepare.main(["fetch", "--data-dir", str(folder / "d"), "--weights", str(folder / "w")])


def test_fetch_downloads_nothing_and_says_what_to_get(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "WEIGHTS_BYTES", 1)
    monkeypatch.setattr(prepare, "DATA_BYTES", 1)
    assert fetch(tmp_path) == 0
    err = capsys.readouterr().err
    assert "Nothing has been downloaded" in err and "Community License" in err and "| bash" not in err
    for text in (prepare.DATA_REPOSITORY, prepare.DATA_REVISION, prepare.WEIGHTS_REPOSITORY, prepare.WEIGHTS_REVISION):
        assert text in err
    assert list(tmp_path.iterdir()) == []


def test_fetch_checks_the_room_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "WEIGHTS_BYTES", 10**18)
    assert fetch(tmp_path) == PreflightError.exit_code
    assert "needs 1000000000 GB" in capsys.readouterr().err


def test_fetch_where_all_is_there(whole, capsys):
    assert fetch(whole) == 0
    assert "data and weights are there" in capsys.readouterr().err


# ---- miniature


@pytest.fixture(scope="module")
def built(documents, tmp_path_factory):
    """The whole miniature, its base trained for two steps only."""
    folder = tmp_path_factory.mktemp("miniature")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miniature, "BASE_STEPS", 2)
        patch.setattr(corpus, "documents", lambda: documents)
        assert prepare.main(["miniature", "--data-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(built, tmp_path, monkeypatch):
    monkeypatch.setattr(miniature, "train_base", lambda *args: pytest.fail("the base must not be trained again"))
    return Path(shutil.copytree(built, tmp_path / "copy"))


def test_the_miniature_serves_the_training(built, capsys):
    found = GovReport.read(built)
    found.check(MINIATURE.sequence_length, MINIATURE.shape.vocab_size, MINIATURE.train_samples, MINIATURE.eval_samples)
    assert prepare.main(["verify", "--miniature", "--data-dir", str(built), "--weights", str(built / "base")]) == 0
    model = fused_llama(MINIATURE.shape, MINIATURE.sequence_length)
    report = load_base(model, built / "base", built / "base" / "manifest.json")
    assert report.layout == "fused" and report.bytes == 2 * MINIATURE.shape.num_parameters
    tokenizer = corpus.load_sentencepiece(built / "base" / "tokenizer.model")
    with found.open_rows("train") as rows:
        text = tokenizer.decode(np.concatenate([rows[i][0] for i in range(8)]).tolist())
    assert "### Document the following source:\ndef " in text and "### Docstring:\n" in text
    pairs = validation_pairs(found)
    counts = (pairs[:, 1] != -100).sum(axis=1)
    assert counts.min() > 0 and 0.05 < counts.mean() / pairs.shape[2] < 0.5
    assert not np.isin(pairs[:, 1], tokenizer.eos_id()).any()


def test_the_miniature_is_built_once(built, copy, capsys):
    before = tree(copy)
    assert prepare.main(["miniature", "--data-dir", str(copy)]) == 0
    assert tree(copy) == before
    assert capsys.readouterr().err.count("complete and verified") == 2


@pytest.mark.parametrize("name", ["govreport-train.bin", "govreport.json"])
def test_damaged_data_are_built_again_without_training(built, copy, name, capsys):
    (copy / "mine.txt").write_text("keep me")
    flip(copy / name, 100)
    assert prepare.main(["miniature", "--data-dir", str(copy)]) == 0
    assert f"{name} is missing or damaged" in capsys.readouterr().err
    assert (copy / name).read_bytes() == (built / name).read_bytes() and (copy / "mine.txt").read_text() == "keep me"


def test_a_foreign_checkpoint_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("somebody's")
    assert prepare.main(["miniature", "--data-dir", str(tmp_path)]) == StorageError.exit_code
    assert "config.json: exists already" in capsys.readouterr().err


def test_packing_is_that_of_the_reference():
    class Letters:
        """A tokenizer of one id per character."""

        def bos_id(self):
            return 1

        def eos_id(self):
            return 2

        def encode(self, texts):
            return [[ord(letter) for letter in text] for text in texts]

    head = list(map(ord, miniature_task.PROMPT.format(source="xy")))
    long = len(head) + 10
    ids = [*[1, *head, *map(ord, "abc"), 2], *[1, *head, *map(ord, "de"), 2]]
    masked = [*[-100] * (1 + len(head)), *map(ord, "abc"), -100, *[-100] * (1 + len(head)), *map(ord, "de"), -100]
    pairs = [("xy", "abc"), ("xy", "far too long" * 9), ("xy", "de")]
    rows = len(ids) // long
    packed = miniature_task.pack(pairs, Letters(), long, mask_prompts=True)
    assert packed.dtype == np.int32
    assert packed[:, 0].ravel().tolist() == ids[: rows * long] and packed[:, 1].ravel().tolist() == masked[: rows * long]
    assert miniature_task.pack(pairs, Letters(), long, mask_prompts=False)[0, 1].tolist() == ids[:long]


def test_code_of_held_out_modules_is_not_in_training(monkeypatch):
    texts = miniature_task.library_texts()  # the whole library: parsed for `built` already
    assert len(texts.train) > 3000 and len(texts.validation) > 5
    assert not {source for source, _ in texts.train} & {source for source, _ in texts.validation}
    library = Path(textwrap.__file__).parent
    trees = [
        (name, "", ast.parse((library / f"{name.replace('.', '/')}.py").read_text())) for name in (*HELD_OUT, "json.encoder", "shutil")
    ]
    monkeypatch.setattr(corpus, "modules", lambda: iter(trees))
    train, validation = miniature_task.documented_code(set(HELD_OUT))
    assert len(validation) > 5 and any(source.startswith("def shorten(") for source, _ in validation)
    assert any(source.startswith("def copyfile(") for source, _ in train)
    assert not {source for source, _ in train} & {source for source, _ in validation}
    assert all('"""' not in source.split("\n")[1] for source, _ in validation)
