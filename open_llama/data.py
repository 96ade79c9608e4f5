"""Batches of Megatron's token files: sequences cut from one stream, or one document per sequence.

A stream is read in Megatron's order (common/data/gpt_dataset.py). With one document per sequence,
the documents are shuffled in each epoch (common/data/shuffled_epochs.py). A document longer than a
sequence is cut off, and a shorter one is padded. The loss ignores padding, and of conversations all
but the answers. Documents without a token that counts are left out.

Sequences of an evaluation are spread evenly over the validation file. The first ones could belong
to a few long documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.data.gpt_dataset import TrainData, checked_ids, train_batches
from common.data.indexed_dataset import Index, Tokens
from common.data.indexed_dataset_header import (
    index_path,
    label_counts,
    mask_path,
    tokens_path,
    whole_sequences,
)
from common.data.shuffled_epochs import shuffled_micro_batches
from common.errors import DataError
from common.kernels.cross_entropy import IGNORE_INDEX
from common.text_tables import number
from common.training.loop import next_token_pairs
from open_llama.rules import Config, Rules


def training_batches(
    config: Config, rules: Rules, data_dir: Path, seed: int, rank: int, step: int
) -> Iterator[np.ndarray]:
    """Return this rank's micro-batches from `step` on.

    Each is int32 [micro_batch_size, 2, sequence_length]: tokens and labels. Call this function
    after run_start. Raises DataError if the files are damaged or too short.
    """
    prefix = data_dir / rules.train_data
    vocab_size = rules.shape.vocab_size
    if config.one_document_per_sequence:
        return document_batches(documents_of(prefix, rules), config, seed, rank, step)
    samples = config.steps * config.global_batch_size
    data = TrainData(prefix, rules.sequence_length, samples, seed, vocab_size)
    windows = train_batches(
        data, config.global_batch_size, config.micro_batch_size, rank, config.data_ranks, step
    )
    return map(next_token_pairs, windows)


def validation_pairs(config: Config, rules: Rules, data_dir: Path) -> np.ndarray:
    """Return the sequences of an evaluation, int32 [eval_samples, 2, sequence_length].

    Call this function after run_start. Raises DataError if the file has fewer sequences.
    """
    rules.require_data(config, data_dir)
    prefix = data_dir / rules.validation_data
    if not config.one_document_per_sequence:
        windows = spread_windows(
            prefix, rules.sequence_length, rules.eval_samples, rules.shape.vocab_size
        )
        return next_token_pairs(windows)
    return documents_of(prefix, rules).spread(rules.eval_samples)


def spread(count: int, available: int) -> list[int]:
    """Return `count` different numbers below `available`, spread evenly, in ascending order."""
    return [place * available // count for place in range(count)]


def spread_windows(prefix: Path, sequence_length: int, count: int, vocab_size: int) -> np.ndarray:
    """Return `count` sequences of a token file, spread evenly over it.

    The result is int32 [count, sequence_length + 1]: a sequence of tokens and the token after it.
    `count`: at most the number of whole sequences in the file.
    Raises DataError if a sequence holds an id outside the vocabulary.
    """
    index = Index.read(prefix)
    numbers = spread(count, whole_sequences(index.num_tokens, sequence_length))
    windows = np.empty((count, sequence_length + 1), index.dtype)
    with index.open_tokens() as tokens:
        for window, number in zip(windows, numbers, strict=True):
            window[:] = tokens.read(number * sequence_length, sequence_length + 1)
    return checked_ids(windows, vocab_size, tokens_path(prefix), f"{count} sequences")


class Documents:
    """The documents of a token file that have a label that counts.

    Each is int32 [2, sequence_length]: tokens and labels.
    """

    def __init__(self, prefix: Path, sequence_length: int, vocab_size: int):
        """Open the token file, and read its mask if it has one. Raises DataError."""
        index = Index.read(prefix)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.tokens: Tokens = index.open_tokens()
        self.lengths = index.sequence_lengths
        self.numbers = np.flatnonzero(labels_that_count(index, sequence_length))
        self.mask: np.ndarray | None = None  # of all tokens
        if mask_path(prefix).exists():
            self.mask = np.fromfile(mask_path(prefix), np.uint8)
        if not len(self.numbers):
            what = f"{index_path(prefix)}: no document has a token to predict"
            raise DataError(what, "the loss needs a token and the one after it", "check the data")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> np.ndarray:
        """Return a document. Raises DataError if an id is outside the vocabulary."""
        document = int(self.numbers[number])
        length = min(int(self.lengths[document]), self.sequence_length + 1)
        stored = self.tokens.read_sequence(document, 0, length)
        ids = checked_ids(stored, self.vocab_size, self.tokens.path, f"document {document}")
        pair = np.zeros((2, self.sequence_length), np.int32)
        pair[1] = IGNORE_INDEX
        pair[0, : length - 1] = ids[:-1]
        pair[1, : length - 1] = ids[1:]
        if self.mask is not None:
            index = self.tokens.index
            first = int(index.sequence_offsets[document]) // index.dtype.itemsize
            pair[1, : length - 1][self.mask[first + 1 : first + length] != 1] = IGNORE_INDEX
        return pair

    def spread(self, count: int) -> np.ndarray:
        """Return `count` documents, spread evenly over the file, [count, 2, sequence_length]."""
        return np.stack([self[number] for number in spread(count, len(self))])


def documents_of(prefix: Path, rules: Rules) -> Documents:
    """Open a token file of a run. Raises DataError."""
    return Documents(prefix, rules.sequence_length, rules.shape.vocab_size)


def labels_that_count(index: Index, sequence_length: int) -> np.ndarray:
    """Return the number of labels that count in each document's sequence, int64 [documents].

    Raises DataError.
    """
    if mask_path(index.prefix).exists():
        return np.fromiter(label_counts(index.prefix, sequence_length), np.int64)
    return labels_in(index, sequence_length)


def labels_in(index: Index, sequence_length: int) -> np.ndarray:
    """Return the number of labels in each document's sequence, int64 [documents]."""
    return np.clip(index.sequence_lengths.astype(np.int64) - 1, 0, sequence_length)


def document_batches(
    documents: Documents, config: Config, seed: int, rank: int, step: int
) -> Iterator[np.ndarray]:
    """Yield this rank's micro-batches without end, from `step` on.

    Each is int32 [micro_batch_size, 2, sequence_length]. A step holds the same documents for any
    number of processes.
    """
    micro_batches = shuffled_micro_batches(
        len(documents),
        seed,
        config.global_batch_size,
        config.micro_batch_size,
        rank,
        config.data_ranks,
        step,
    )
    for numbers in micro_batches:
        yield np.stack([documents[number] for number in numbers])


def counted_tokens(
    config: Config, rules: Rules, data_dir: Path, seed: int, step: int
) -> Iterator[int]:
    """Yield the number of tokens that count in each global batch, from `step` on, without end."""
    index = Index.read(data_dir / rules.train_data)
    counts = labels_that_count(index, rules.sequence_length)
    counts = counts[counts > 0]
    batch = config.global_batch_size
    for numbers in shuffled_micro_batches(len(counts), seed, batch, batch, 0, 1, step):
        yield int(counts[numbers].sum())


def sequences_in(config: Config, index: Index) -> int:
    """Return the number of training sequences in one epoch. `index`: of the training data."""
    if config.one_document_per_sequence:
        return int(np.count_nonzero(labels_that_count(index, config.sequence_length)))
    return whole_sequences(index.num_tokens, config.sequence_length)


def padding_share(config: Config, index: Index) -> float:
    """Return the share of padding in the training sequences of one epoch.

    `index`: of the training data.
    """
    if not config.one_document_per_sequence:
        return 0.0
    length = config.sequence_length
    labels = labels_in(index, length)[labels_that_count(index, length) > 0]
    if not len(labels):
        return 0.0  # reading the data fails
    return 1 - float(labels.mean()) / length


def epochs_text(config: Config, index: Index) -> str:
    """Describe how often the run reads the training text, and which tokens it never reads.

    `index`: of the training data.
    """
    length = config.sequence_length
    available = sequences_in(config, index)
    epochs = config.steps * config.global_batch_size / max(1, available)
    limit = "up to " if config.target_loss else ""
    lines = [
        f"training text: {index.num_tokens:,} tokens in {index.num_documents:,} documents,"
        f" {available:,} sequences; the run reads {limit}{number(epochs, ',.3g')} epochs"
    ]
    if epochs > 1:
        lines[0] += ": it repeats the text"
    if padding := padding_share(config, index):
        lines[0] += f"; {padding:.1%} of the positions are padding"
    if mask_path(index.prefix).exists():
        counts = labels_that_count(index, length)
        share = counts.sum() / max(1, labels_in(index, length)[counts > 0].sum())
        lines.append(
            f"answers: {counts.sum():,} tokens ({share:.1%} of the text) count in the loss;"
            f" {np.count_nonzero(counts == 0):,} conversations without one are left out"
        )
    if config.one_document_per_sequence:
        # A sequence also reads the token after it, as its last label.
        cut = np.maximum(index.sequence_lengths.astype(np.int64) - length - 1, 0)
        if documents := np.count_nonzero(cut):
            share = cut.sum() / index.num_tokens
            lines.append(
                f"cut off: {cut.sum():,} tokens ({share:.1%}), which are beyond the first"
                f" {length + 1:,} of {documents:,} documents"
            )
    return "\n".join(lines)
