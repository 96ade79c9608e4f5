"""Jobs of the launcher with small data files, for tests that start no rank."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import config as configs
from common.benchmarks import config_class
from common.data.indexed_dataset_header import (
    HEADER,
    MAGIC,
    VERSION,
    index_path,
    tokens_path,
)
from launch.job import Job, Node
from launch.selection.check import Choice
from launch.selection.machine import NO_GPUS

INT32 = 4  # dtype codes
INT64 = 5
DOCUMENTS = (2,) * 64


def job_of(benchmark, path, folder, environment=None, data=None, **changes) -> Job:
    """Return a job on a CPU whose data files are in `folder`/data.

    `data`: name of token files -> tokens of each document (default: DOCUMENTS). `changes`: of the
    config.
    """
    config = replace(configs.load(path, config_class(benchmark)), **changes)
    selection = Choice(config, path, path.name, "a test", "cpu", "CPU")
    data_dir = folder / "data"
    job = Job(
        benchmark,
        selection,
        NO_GPUS,
        data_dir,
        folder / "results",
        environment or {},
        Node(),
        False,
    )
    for file in job.data_files:
        file.parent.mkdir(parents=True, exist_ok=True)
        prefix = file.with_suffix("")
        if file.suffix == ".bin":
            write_pair(prefix, (data or {}).get(prefix.name, DOCUMENTS))
        elif file.suffix != ".idx":
            file.touch()
    return job


def write_pair(prefix: Path, lengths: Sequence[int]) -> None:
    """Write an `.idx`, and a `.bin` of int32 that takes no space on the disk."""
    write_index(prefix, lengths, INT32)
    tokens_path(prefix).touch()
    os.truncate(tokens_path(prefix), 4 * sum(lengths))


def write_int64(prefix: Path, documents: Sequence[Sequence[int]]) -> None:
    """Write an `.idx` and a `.bin` of int64, whose ids need not fit into 32 bits."""
    write_index(prefix, [len(ids) for ids in documents], INT64)
    tokens_path(prefix).write_bytes(np.concatenate(documents).astype("<i8").tobytes())


def write_index(prefix: Path, lengths: Sequence[int], dtype_code: int) -> None:
    """Write an `.idx` of INT32 or INT64 for documents of these lengths, in tokens."""
    documents = len(lengths)
    sizes = np.array(lengths, "<i8") * (4 if dtype_code == INT32 else 8)
    with index_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, dtype_code, documents, documents + 1))
        file.write(np.array(lengths, "<i4").tobytes())
        file.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
