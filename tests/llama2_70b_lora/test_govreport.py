"""Test reading GovReport: order, batches, labels as in Hugging Face, and invalid files."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from common.data.shuffled_epochs import shuffled_epochs
from common.errors import DataError
from common.kernels import cross_entropy
from common.model.checkpoint_loader import load_base
from common.model.fused_block import fused_llama
from common.model.shapes import ModelShape
from common.paths import ROOT
from llama2_70b_lora import data
from llama2_70b_lora.data import next_token_labels, read_rows, train_batches, write_rows
from llama2_70b_lora.rules import CLOSED, DATA_FILES

pytestmark = pytest.mark.quick

VOCAB, LENGTH, ROWS = 61, 12, 10
RULES = replace(
    CLOSED,
    shape=ModelShape(1, 32, 48, 4, 2, VOCAB, 10000.0),
    sequence_length=LENGTH,
    train_samples=ROWS,
    eval_samples=3,
)


def write(folder, train=None, validation=None):
    """A data folder; row i of the training set is full of i, unless given. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    same = np.arange(ROWS)[:, None, None] * np.ones((1, 2, LENGTH), np.int64)
    write_rows(folder, "train", same if train is None else train)
    write_rows(folder, "validation", same[:3] + 20 if validation is None else validation)
    return folder


def train_rows(folder):
    return read_rows(write(folder), "train", RULES)


def numbers(batches, count):
    """The row numbers in the next `count` micro-batches."""
    return [batch[:, 0, 0].tolist() for batch in islice(batches, count)]


# ---- order


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_global_batch_is_the_same_for_any_ranks(tmp_path, world, micro):
    """Six steps of 4 of 10 rows include batches that span two epochs."""
    rows = train_rows(tmp_path)
    per_rank = [
        numbers(train_batches(rows, 7, 4, micro, rank, world), 24 // (world * micro))
        for rank in range(world)
    ]
    passes = 4 // (world * micro)
    steps = [
        [n for rank in per_rank for part in rank[s * passes : (s + 1) * passes] for n in part]
        for s in range(6)
    ]
    expected = list(islice(shuffled_epochs(ROWS, 7), 24))
    assert steps == [expected[i : i + 4] for i in range(0, 24, 4)]


# ---- labels


def test_labels_move_left_by_one(tmp_path):
    rows = np.zeros((1, 2, LENGTH), np.int64)
    rows[0, 0] = np.arange(LENGTH)
    rows[0, 1] = [-100, -100, 2, 3, -100, 5, *[-100] * 5, 11]
    stored = read_rows(write(tmp_path, train=rows), "train", replace(RULES, train_samples=1))
    assert np.array_equal(stored, rows) and stored.dtype == np.int32
    pairs = next_token_labels(stored)
    assert pairs.dtype == np.int32 and pairs.shape == (1, 2, LENGTH)
    assert pairs[0, 0].tolist() == list(range(LENGTH))
    assert pairs[0, 1].tolist() == [-100, 2, 3, -100, 5, *[-100] * 5, 11, -100]
    assert next(train_batches(stored, 1, 1, 1, 0, 1)).tolist() == pairs.tolist()


def test_the_loss_is_that_of_hugging_face(tmp_path):
    """The loss is the mean over unmasked labels per sequence, as in LlamaForCausalLM."""
    transformers = pytest.importorskip("transformers")
    shape = ModelShape(1, 32, 48, 4, 2, VOCAB, 10000.0)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, rms_norm_eps=1e-5, initializer_range=0.5, **sizes
        )
    )
    theirs.save_pretrained(tmp_path / "model")
    ours = fused_llama(shape, LENGTH)
    load_base(ours, tmp_path / "model")
    random = np.random.default_rng(0)
    rows = np.repeat(random.integers(VOCAB, size=(4, 1, LENGTH)), 2, axis=1)
    rows[:3, 1][random.random((3, LENGTH)) < 0.6] = -100
    pairs = torch.from_numpy(next_token_labels(rows.astype(np.int32)))
    with torch.no_grad():
        loss_sum, count = ours(*pairs.unbind(1))
        expected = [
            theirs(torch.tensor(ids)[None], labels=torch.tensor(labels)[None]).loss
            for ids, labels in rows
        ]
    torch.testing.assert_close(loss_sum / count, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_the_ignored_label_is_that_of_the_loss():
    assert data.IGNORE_INDEX == cross_entropy.IGNORE_INDEX


# ---- files


def test_reading_needs_no_torch():
    code = "import sys; import llama2_70b_lora.data; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


# What MLCommons' files are, in types that other writers choose.
@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.list_(pyarrow.int64()),
        pyarrow.large_list(pyarrow.int16()),
        pyarrow.list_(pyarrow.int32(), LENGTH),
    ],
    ids=str,
)
def test_every_type_of_integer_lists_is_read(tmp_path, kind):
    rows = np.repeat(np.random.default_rng(0).integers(VOCAB, size=(ROWS, 1, LENGTH)), 2, axis=1)
    rows[3, 1, :6] = -100
    columns = {
        name: pyarrow.array([list(map(int, row[i])) for row in rows], kind)
        for i, name in enumerate(data.COLUMNS)
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / DATA_FILES["train"], row_group_size=4)
    assert np.array_equal(read_rows(tmp_path, "train", RULES), rows)


def rewritten(path):
    raw = bytearray(path.read_bytes())
    raw[4:300] = bytes(296)
    path.write_bytes(raw)


def other_columns(ids, labels):
    return lambda path: parquet.write_table(
        pyarrow.table({"input_ids": ids, "labels": labels}), path
    )


FILES = {
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size - 40),
        "GovReport",
    ),
    "empty": (lambda path: os.truncate(path, 0), "GovReport"),
    "overwritten": (rewritten, "GovReport|position|tokens|input_ids"),
    "text": (lambda path: path.write_text("input_ids,labels\n"), "GovReport"),
    "missing": (lambda path: path.unlink(), "No such file"),
    "no labels": (
        lambda path: parquet.write_table(parquet.read_table(path).drop_columns("labels"), path),
        "GovReport",
    ),
    "text column": (other_columns(["a"], ["b"]), "GovReport"),
    "texts": (
        other_columns([["1"] * LENGTH], [["1"] * LENGTH]),
        "input_ids .*string",
    ),
    "holes": (other_columns([[None] * LENGTH], [[1] * LENGTH]), "input_ids"),
    "missing rows": (
        other_columns([None, [1] * LENGTH], [[1] * LENGTH] * 2),
        "row 0: .*12 input_ids.* nan",
    ),
    "unequal": (
        other_columns([[1] * LENGTH], [[1] * (LENGTH - 1)]),
        "row 0: .*12 labels.* 11",
    ),
    "too wide": (
        other_columns([[2**32 + 1] * LENGTH], [[1] * LENGTH]),
        "4294967297",
    ),
    "too few": (
        other_columns([[1] * LENGTH] * 9, [[1] * LENGTH] * 9),
        "10 sequences.* 9",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_named(tmp_path, kind):
    damage, message = FILES[kind]
    path = write(tmp_path) / DATA_FILES["train"]
    damage(path)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(tmp_path, "train", RULES)
    assert str(path) in caught.value.what


ROWS_WRONG = {
    "id too high": (
        (slice(None), 3),
        VOCAB,
        "row 4, position 3: .*0 to 60.* 61",
    ),
    "id negative": (
        (slice(None), 3),
        -1,
        "row 4, position 3: .*0 to 60.* -1",
    ),
    "label of another token": (
        (1, 3),
        2,
        "row 4, position 3: .*-100.* 2",
    ),
    "label negative": (
        (1, 3),
        -1,
        "row 4, position 3: .*-100.* -1",
    ),
    "all masked": (
        (1, slice(None)),
        -100,
        "masked.* row 4",
    ),
    "all masked but the first": (
        (1, slice(1, None)),
        -100,
        "masked.* row 4",
    ),
}


@pytest.mark.parametrize("kind", ROWS_WRONG)
def test_a_bad_row_is_named(tmp_path, kind):
    place, value, message = ROWS_WRONG[kind]
    rows = np.ones((ROWS, 2, LENGTH), np.int64)
    rows[(4, *place)] = value
    with pytest.raises(DataError, match=message):
        read_rows(write(tmp_path, train=rows), "train", RULES)
