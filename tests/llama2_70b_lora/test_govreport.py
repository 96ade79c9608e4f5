"""GovReport at run time: order, batches, labels as Hugging Face means them, and files that are not what the sidecar says."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import ConfigError, DataError, StorageError
from common.kernels import cross_entropy
from common.model.checkpoint_loader import load_base
from common.model.fused_block import fused_llama
from common.model.shapes import ModelShape
from llama2_70b_lora import data
from llama2_70b_lora.data import GovReport, Split, row_order, tokens_path, train_batches, validation_pairs

VOCAB, LENGTH, ROWS = 61, 12, 10


def write(folder, train=None, validation=None):
    """A data folder; row i of the training set is full of i, unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    same = np.arange(ROWS)[:, None, None] * np.ones((1, 2, LENGTH), np.int64)
    arrays = {"train": same if train is None else train, "validation": same[:3] + 20 if validation is None else validation}
    for split, rows in arrays.items():
        tokens_path(folder, split).write_bytes(rows.astype("<i4").tobytes())
    govreport = GovReport(folder, "test", LENGTH, VOCAB, *(Split(len(rows), "") for rows in arrays.values()))
    govreport.write()
    return govreport


def numbers(batches, count):
    """The row numbers in the next `count` micro-batches."""
    return [batch[:, 0, 0].tolist() for batch in islice(batches, count)]


# ---- order


def test_every_row_once_per_epoch():
    order = list(islice(row_order(ROWS, seed=3), 5 * ROWS))
    epochs = [order[i : i + ROWS] for i in range(0, len(order), ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    random = np.random.RandomState(3)
    assert epochs[:2] == [random.permutation(ROWS).tolist(), random.permutation(ROWS).tolist()]


def test_seeds_differ_and_repeat():
    orders = [list(islice(row_order(100, seed), 300)) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_global_batch_is_the_same_for_any_ranks(tmp_path, world, micro):
    """Six steps of 4 of 10 rows: batches hold the end of one epoch and the beginning of the next."""
    govreport = write(tmp_path)
    per_rank = [
        numbers(train_batches(govreport.open_rows("train"), 7, 4, micro, rank, world), 24 // (world * micro)) for rank in range(world)
    ]
    passes = 4 // (world * micro)
    steps = [[n for rank in per_rank for part in rank[s * passes : (s + 1) * passes] for n in part] for s in range(6)]
    expected = list(islice(row_order(ROWS, 7), 24))
    assert steps == [expected[i : i + 4] for i in range(0, 24, 4)]


def test_going_on_in_the_middle(tmp_path):
    rows = write(tmp_path).open_rows("train")
    whole = numbers(train_batches(rows, 7, 4, 2, 1, 2), 8)
    assert numbers(train_batches(rows, 7, 4, 2, 1, 2, start_sample=12), 5) == whole[3:]


def test_ranks_that_cannot_share(tmp_path):
    with pytest.raises(ConfigError, match="global batch 4 cannot be shared out"):
        next(train_batches(write(tmp_path).open_rows("train"), 7, 4, 3, 0, 1))


# ---- labels


def test_labels_move_left_by_one(tmp_path):
    rows = np.zeros((1, 2, LENGTH), np.int64)
    rows[0, 0] = np.arange(LENGTH)
    rows[0, 1] = [-100, -100, 2, 3, -100, 5, *[-100] * 5, 11]
    pairs = validation_pairs(write(tmp_path, validation=rows))
    assert pairs.dtype == np.int32 and pairs.shape == (1, 2, LENGTH)
    assert pairs[0, 0].tolist() == list(range(LENGTH))
    assert pairs[0, 1].tolist() == [-100, 2, 3, -100, 5, *[-100] * 5, 11, -100]
    assert next(train_batches(write(tmp_path, train=rows).open_rows("train"), 1, 1, 1, 0, 1)).tolist() == pairs.tolist()


def test_the_loss_is_that_of_hugging_face(tmp_path):
    """Mean over the labels that count, per sequence, as LlamaForCausalLM computes it from the unshifted labels."""
    transformers = pytest.importorskip("transformers")
    shape = ModelShape(1, 32, 48, 4, 2, VOCAB, 10000.0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, rms_norm_eps=1e-5, initializer_range=0.5, **sizes))
    theirs.save_pretrained(tmp_path / "model")
    ours = fused_llama(shape, LENGTH)
    load_base(ours, tmp_path / "model")
    random = np.random.default_rng(0)
    rows = np.repeat(random.integers(VOCAB, size=(4, 1, LENGTH)), 2, axis=1)
    rows[:3, 1][random.random((3, LENGTH)) < 0.6] = -100
    pairs = torch.from_numpy(validation_pairs(write(tmp_path, validation=rows)))
    with torch.no_grad():
        loss_sum, count = ours(*pairs.unbind(1))
        expected = [theirs(torch.tensor(ids)[None], labels=torch.tensor(labels)[None]).loss for ids, labels in rows]
    torch.testing.assert_close(loss_sum / count, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_the_ignored_label_is_that_of_the_loss():
    assert data.IGNORE_INDEX == cross_entropy.IGNORE_INDEX


# ---- files


def test_counts_come_from_the_sidecar_alone(tmp_path):
    write(tmp_path)
    for split in ("train", "validation"):
        tokens_path(tmp_path, split).unlink()
    found = GovReport.read(tmp_path)
    assert (found.train.rows, found.validation.rows) == (ROWS, 3)
    found.check(LENGTH, VOCAB, ROWS, 3)
    for wrong, message in (((8192, VOCAB, ROWS, 3), "sequence length: expected 8192, got 12"), ((LENGTH, VOCAB, 9, 3), "train sequences")):
        with pytest.raises(DataError, match=message):
            found.check(*wrong)
    with pytest.raises(DataError, match=r"train.bin: cannot be opened"):
        found.open_rows("train")


def test_reading_needs_no_torch():
    code = "import sys; import llama2_70b_lora.data; print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def edit(folder, **changes):
    path = folder / data.SIDECAR
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SIDECARS = {
    "missing": (lambda d: (d / data.SIDECAR).unlink(), "cannot be opened: No such file"),
    "no JSON": (lambda d: (d / data.SIDECAR).write_text("{"), "not a sidecar"),
    "a list": (lambda d: (d / data.SIDECAR).write_text("[]"), "not a sidecar"),
    "another key": (lambda d: edit(d, more=1), "not a sidecar"),
    "another format": (lambda d: edit(d, format=2), "expected format 1 of <i4, got"),
    "another dtype": (lambda d: edit(d, dtype="<i8"), "expected format 1 of <i4, got"),
    "no count": (lambda d: edit(d, train={"rows": "10", "sha256": ""}), "cannot be lengths and counts"),
}


@pytest.mark.parametrize("kind", SIDECARS)
def test_broken_sidecar(tmp_path, kind):
    write(tmp_path)
    damage, message = SIDECARS[kind]
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        GovReport.read(tmp_path)


@pytest.mark.parametrize("size", [0, ROWS * 2 * LENGTH * 4 - 1, ROWS * 2 * LENGTH * 4 + 8])
def test_a_file_of_another_size(tmp_path, size):
    govreport = write(tmp_path)
    os.truncate(tokens_path(tmp_path, "train"), size)
    with pytest.raises(DataError, match=rf"train.bin: expected 960 bytes \(10 rows\), got {size}"):
        govreport.open_rows("train")


def test_a_file_that_shrinks_and_a_disk_that_fails(tmp_path, monkeypatch):
    rows = write(tmp_path).open_rows("train")
    os.truncate(tokens_path(tmp_path, "train"), 100)
    with pytest.raises(DataError, match="ends in row 9"):
        rows[9]
    with pytest.raises(IndexError):
        rows[10]

    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(data.os, "pread", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        rows[0]


ROWS_WRONG = {
    "id too high": ((0, 3), VOCAB, "row 4: expected a token id from 0 to 60, got 61"),
    "id negative": ((0, 3), -1, "row 4: expected a token id from 0 to 60, got -1"),
    "label too high": ((1, 3), 32000, "row 4: expected a label from 0 to 60 or -100, got 32000"),
    "label negative": ((1, 3), -1, "row 4: expected a label from 0 to 60 or -100, got -1"),
    "all masked": ((1, slice(None)), -100, "row 4: all labels are masked"),
    "all masked but the first": ((1, slice(1, None)), -100, "row 4: all labels are masked"),
}


@pytest.mark.parametrize("kind", ROWS_WRONG)
def test_a_bad_row_is_named_when_it_is_read(tmp_path, kind):
    place, value, message = ROWS_WRONG[kind]
    rows = np.ones((ROWS, 2, LENGTH), np.int64)
    rows[(4, *place)] = value
    found = write(tmp_path, train=rows).open_rows("train")
    assert found[3].tolist() == [[1] * LENGTH, [*[1] * (LENGTH - 1), -100]]
    with pytest.raises(DataError, match=message):
        found[4]
