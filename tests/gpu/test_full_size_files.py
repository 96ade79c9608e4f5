"""Test that a run's own readers accept the files of full_size_files.py, made small."""

import numpy as np
from full_size_files import write_base, write_reports, write_tokens

from common.data.gpt_dataset import validation_tokens
from common.data.indexed_dataset import Index
from common.model.checkpoint_reader import open_checkpoint
from llama2_70b_lora.data import IGNORE_INDEX, next_token_labels, read_rows
from llama2_70b_lora.rules import MINIATURE
from llama31_8b.rules import MINIATURE as PRETRAINING


def test_base_on_two_disks_is_one_checkpoint(tmp_path):
    size = write_base(tmp_path / "base", MINIATURE.shape, files=4, more=tmp_path / "more", keep=1)
    checkpoint = open_checkpoint(tmp_path / "base", MINIATURE.shape)
    assert (
        checkpoint.layout == "fused"
        and sum(stored.bytes for stored in checkpoint.tensors.values()) == size
    )
    assert [path.is_symlink() for path in checkpoint.files] == [False, True, True, True]
    assert len(list((tmp_path / "more").iterdir())) == 3


def test_sequences_are_read_as_the_benchmarks_own(tmp_path):
    write_reports(tmp_path, MINIATURE)
    train, validation = (read_rows(tmp_path, split, MINIATURE) for split in ("train", "validation"))
    assert bytes((train[0, 0] - 3).astype(np.uint8)).isascii()
    counted = (next_token_labels(validation)[:, 1] != IGNORE_INDEX).sum(axis=1)
    assert (counted == MINIATURE.sequence_length // 8).all()


def test_tokens_are_read_as_megatrons(tmp_path):
    write_tokens(tmp_path, PRETRAINING, 50_000)
    assert Index.read(tmp_path / PRETRAINING.train_prefix).num_tokens >= 50_000
    tokens = validation_tokens(
        tmp_path / PRETRAINING.validation_prefix,
        PRETRAINING.sequence_length,
        PRETRAINING.eval_samples,
        2048,
    )
    assert len(tokens) == PRETRAINING.eval_samples
