"""Write data and weights of the real shapes, with other values, to rehearse a whole run.

    python3 -m tests.gpu.full_size_files llama2_70b_lora --data-dir D --weights W
        [--more-weights V --keep BYTES]
    python3 -m tests.gpu.full_size_files llama31_8b --data-dir D [--tokens N]

A run with these files tests speed, memory, file handling and timing. Its loss means nothing.

Base weights of the 70B are drawn from N(0, 0.02) in the fused layout of MLCommons' checkpoint: 29
files, 138 GB. If the disk of W is too small, files after the first BYTES are written to V, such as
/dev/shm, and W holds links to them.

The sequences of the 70B are byte tokens of the texts of this Python's packages, ids 3 to 258 of
Llama 2's vocabulary, packed and masked as GovReport is. The tokens of the 8B are random, with small
ids more frequent than large ones.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.model.checkpoint_names import FUSED, INDEX, tensor_shapes
from common.model.checkpoint_writer import groups_of_equal_size, write_file
from common.model.shapes import ModelShape
from llama2_70b_lora import rules as lora_rules
from llama2_70b_lora.data import IGNORE_INDEX, write_rows
from llama31_8b import rules as pretraining_rules

FILES = 29  # of MLCommons' checkpoint
THREADS = 8
STD = 0.02  # of the weights
FIRST_BYTE = 3  # of Llama 2's byte tokens: <0x00> is id 3
ANSWER = 8  # the last 1 / 8 of a validation sequence counts, as a summary does
DOCUMENT = 2000  # tokens of a document of the 8B


def write_base(
    folder: Path, shape: ModelShape, *, files: int = FILES, more: Path | None = None, keep: int = 0
) -> int:
    """Write the base weights in bf16 as `files` safetensors files. Return their bytes.

    Every tensor is cut out of one pool of values, each at another place. With `more`, files after
    the first `keep` bytes are written to that folder, and `folder` has links to them.
    """
    shapes = tensor_shapes(shape, FUSED)
    sizes = {name: int(np.prod(size)) for name, size in shapes.items()}
    largest = max(sizes.values())
    pool = torch.empty(largest + largest // 8, dtype=torch.bfloat16).normal_(
        0.0, STD, generator=torch.Generator().manual_seed(1)
    )
    ones = torch.ones(shape.hidden_size, dtype=torch.bfloat16)

    def tensor(number: int, name: str) -> torch.Tensor:
        first = number * 9973 * 16 % (len(pool) - sizes[name] + 1)
        return ones if "norm" in name else pool[first : first + sizes[name]].view(shapes[name])

    tensors = {name: tensor(number, name) for number, name in enumerate(shapes)}
    groups = groups_of_equal_size({name: 2 * size for name, size in sizes.items()}, files)
    folder.mkdir(parents=True, exist_ok=True)
    written, paths, weight_map = 0, [], {}
    for number, names in enumerate(groups, start=1):
        path = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        if more is not None and written >= keep:
            more.mkdir(parents=True, exist_ok=True)
            path.symlink_to(more / path.name)
        paths.append(path)
        weight_map.update(dict.fromkeys(names, path.name))
        written += sum(2 * sizes[name] for name in names)

    def write(path: Path, names: list[str]) -> None:
        write_file(path, {name: tensors[name] for name in names}, torch.bfloat16, lambda: None)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(write, paths, groups))
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": written}, "weight_map": weight_map})
    )
    return written


def text_bytes(least: int) -> bytes:
    """Return at least `least` bytes of Python sources, repeated if this machine has fewer."""
    found = bytearray()
    for root in dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))):
        for path in Path(root).rglob("*.py"):
            if len(found) >= least:
                return bytes(found)
            found += path.read_bytes()
    return bytes(found) * -(-least // len(found))


def write_reports(data_dir: Path, rules: lora_rules.Rules) -> None:
    """Write both splits of `llama2_70b_lora`."""
    data_dir.mkdir(parents=True, exist_ok=True)
    count, length = rules.train_samples + rules.eval_samples, rules.sequence_length
    ids = (
        np.frombuffer(text_bytes(count * length), np.uint8)[: count * length]
        .astype(np.int32)
        .reshape(count, length)
        + FIRST_BYTE
    )
    rows = np.stack((ids, ids), axis=1)
    rows[rules.train_samples :, 1, : -length // ANSWER] = IGNORE_INDEX
    write_rows(data_dir, "train", rows[: rules.train_samples])
    write_rows(data_dir, "validation", rows[rules.train_samples :])


def write_tokens(data_dir: Path, rules: pretraining_rules.Rules, tokens: int) -> None:
    """Write both pairs of `llama31_8b`: `tokens` to train on, and enough to evaluate on."""
    data_dir.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    pool = (rules.shape.vocab_size * random.random(min(tokens, 1 << 26) + DOCUMENT) ** 3).astype(
        np.int32
    )
    evaluated = (rules.eval_samples + 1) * rules.sequence_length
    for prefix, wanted in ((rules.train_prefix, tokens), (rules.validation_prefix, evaluated)):
        writer = IndexedDatasetWriter(data_dir / prefix, rules.shape.vocab_size)
        for first in random.integers(0, len(pool) - DOCUMENT, -(-wanted // DOCUMENT)):
            writer.add(pool[first : first + DOCUMENT])
        writer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=["llama2_70b_lora", "llama31_8b"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument(
        "--weights", type=Path, help="folder of the base; without it, no base is written"
    )
    parser.add_argument(
        "--more-weights", type=Path, help="folder on another disk, for the files beyond --keep"
    )
    parser.add_argument(
        "--keep", type=int, default=0, help="bytes in --weights before files go to --more-weights"
    )
    parser.add_argument(
        "--layers", type=int, help="fewer than 80: a base for measurements of loading only"
    )
    parser.add_argument(
        "--tokens", type=int, default=1_000_000_000, help="training tokens of the 8B; 4 bytes each"
    )
    args = parser.parse_args()
    began = time.monotonic()
    if args.benchmark == "llama31_8b":
        write_tokens(args.data_dir, pretraining_rules.CLOSED, args.tokens)
    else:
        write_reports(args.data_dir, lora_rules.CLOSED)
        print(f"sequences: {time.monotonic() - began:.1f} s", flush=True)
        if args.weights:
            shape = replace(
                lora_rules.CLOSED.shape,
                num_layers=args.layers or lora_rules.CLOSED.shape.num_layers,
            )
            written = write_base(args.weights, shape, more=args.more_weights, keep=args.keep)
            print(f"base: {written:,} bytes", flush=True)
    print(f"written in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
