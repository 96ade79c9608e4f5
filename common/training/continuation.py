"""Find the checkpoint that a run continues from, and check that the run may continue it.

A run with --checkpoint keeps its newest checkpoint in RUN/checkpoints/step_<number>/. The folder
has a safetensors file per rank, and facts.json, which identifies the run. While the folder is being
written or removed, its name ends in .partial.

Standard library only: the launcher checks before it starts any process.
"""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from common.config import RunConfig
from common.data.manifest import sampled_facts_of
from common.errors import ConfigError, DataError, RunError, WeightsError, listed
from common.model.checkpoint_files import weight_files
from common.values import count, seconds

CHECKPOINTS_FOLDER = "checkpoints"
# A file in the run directory by which the launcher asks the ranks to save a checkpoint and end.
STOP_REQUEST = "ranks/save_and_stop"
FACTS = "facts.json"
PARTIAL_SUFFIX = ".partial"
# Keys of the records of data and of frozen weights.
DATA_FILES = "sampled_data_files"
BASE_FILES = "base_files"
ENGINES = "engines"  # operation -> name of the engine
DEVICE = "device"  # type of the device, "cpu" or "cuda"
FACT_TYPES = {  # the required keys of facts.json
    "benchmark": str,
    "seed": int,
    "config": dict,
    "step": int,
    "samples": int,
    "ranks": int,
    "digest": str,
    DATA_FILES: dict,
    BASE_FILES: dict,
    ENGINES: dict,
    DEVICE: str,
}
# Options of the run, which checkpoints of 0.2.0 lack. A run that continues it has them as well.
CHECKPOINT = "checkpoint"  # --checkpoint
SAVE = "save"  # whether --save was given
# Config keys that may change when a run is continued. All others decide what is computed, or in
# which order data are read.
MAY_DIFFER = {
    "nodes",
    "gpus_per_node",
    "context_parallel",
    "micro_batch_size",
    "eval_micro_batch_size",
    "hang_timeout_s",
    "env",
    "recompute_layers",
    "reduce_scatter",
    "frozen_base",
    "transposed_layers",
    "offload_layers",
}


@dataclass(frozen=True)
class CheckpointInterval:
    """The interval between checkpoints. One of the two fields is 0."""

    evaluations: int  # save after this many evaluations
    seconds: float  # save at the first logged step after this many seconds


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint and the content of its facts.json."""

    folder: Path
    facts: dict

    @property
    def run(self) -> Path:
        """The directory of the run that saved it."""
        return self.folder.parent.parent


def parse_interval(text: str) -> CheckpointInterval:
    """Parse --checkpoint: "2" (every second evaluation), "600s" or "10m".

    The launcher alone reads "none". Raises ConfigError.
    """
    try:
        if text[-1:].isalpha():
            return CheckpointInterval(evaluations=0, seconds=seconds(text))
        return CheckpointInterval(evaluations=count(text), seconds=0.0)
    except ArgumentTypeError as error:
        raise ConfigError(
            f"--checkpoint: cannot parse {text!r}",
            f"{error}; without a unit it counts evaluations, and none saves nothing",
            "use --checkpoint 1 for every evaluation, or --checkpoint 10m for every ten minutes",
        ) from None


def require_possible(config: RunConfig) -> None:
    """Raise ConfigError if this config does not support checkpoints."""
    if config.nodes > 1:
        raise ConfigError(
            f"checkpoints are supported on one node only, not on {config.nodes}",
            "it is not certain that all nodes share a directory",
            "leave out --checkpoint and --continue",
        )


def newest(run_dir: Path) -> SavedCheckpoint:
    """Return the complete checkpoint of `run_dir` with the most steps.

    Raises ConfigError if there is none, WeightsError if its facts are damaged.
    """
    folders = [
        path
        for path in (run_dir / CHECKPOINTS_FOLDER).glob("step_*")
        if path.suffix != PARTIAL_SUFFIX and path.is_dir()
    ]
    if not folders:
        why = f"{run_dir / CHECKPOINTS_FOLDER} contains no complete checkpoint"
        if not run_dir.is_dir():
            why = f"the directory {run_dir} does not exist"
        raise ConfigError(
            f"{run_dir} has no checkpoint",
            why,
            "use the directory of a run that was started with --checkpoint",
        )
    folder = max(folders, key=lambda path: path.name)
    if (folder / FACTS).exists() and not (folder / FACTS).is_file():
        raise damaged(folder, f"{FACTS} is not a regular file")
    try:
        facts = json.loads((folder / FACTS).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{FACTS}: {error}") from error
    defect = _defect(folder, facts)
    if defect:
        raise damaged(folder, f"{FACTS}: {defect}")
    return SavedCheckpoint(folder, facts)


def _defect(folder: Path, facts: object) -> str:
    """Return why facts.json of the checkpoint `folder` cannot be right, or "" if it can."""
    if not isinstance(facts, dict):
        return "it is not a JSON object"
    wrong = [key for key, kind in FACT_TYPES.items() if type(facts.get(key)) is not kind]
    wrong += [CHECKPOINT] if type(facts.get(CHECKPOINT, "")) is not str else []
    if wrong:
        return f"{', '.join(wrong)} missing, or of the wrong type"
    step = facts["step"]
    samples = facts["samples"]
    if step < 1:
        return f"step is {step}, but must be at least 1"
    batch = facts["config"].get("global_batch_size")
    if type(batch) is not int or samples != step * batch:
        return f"samples is {samples}, but step x global_batch_size is {step} x {batch}"
    files = len(list(folder.glob("rank_*.safetensors")))
    if files != facts["ranks"]:
        return f"ranks is {facts['ranks']}, but there are {files} rank files"
    return ""


def damaged(folder: Path, why: str) -> WeightsError:
    """Return the error for a damaged checkpoint."""
    return WeightsError(
        f"the checkpoint {folder} is damaged",
        why,
        "restore it from a copy, or start a new run without --continue",
    )


def require_benchmark(checkpoint: SavedCheckpoint, benchmark: str) -> None:
    """Raise ConfigError unless the checkpoint is of a run with this benchmark."""
    before = checkpoint.facts["benchmark"]
    if before != benchmark:
        raise ConfigError(
            f"{checkpoint.folder} cannot be continued: its benchmark is {before}, not {benchmark}",
            "another benchmark trains another model",
            f"./run_and_time.sh {before} --continue {shlex.quote(str(checkpoint.run))}",
        )


def require_same(folder: Path, facts: dict, benchmark: str, seed: int, config: RunConfig) -> None:
    """Raise ConfigError unless the checkpoint is of a run with this benchmark, seed and config."""
    require_benchmark(SavedCheckpoint(folder, facts), benchmark)
    before = facts["config"]
    now = asdict(config)
    differences = []
    if facts["seed"] != seed:
        differences.append(f"seed was {facts['seed']}, now {seed}")
    if not differences:
        for key in sorted((before.keys() | now.keys()) - MAY_DIFFER):
            if before.get(key) != now.get(key):
                differences.append(f"{key} was {before.get(key)}, now {now.get(key)}")
    if differences:
        raise ConfigError(
            f"{folder} cannot be continued: {'; '.join(differences)}",
            "these keys decide what is trained or the order of the data",
            "undo the change, or start a run without --continue",
        )


def require_same_device(folder: Path, facts: dict, device: str) -> None:
    """Raise ConfigError if the checkpoint is of another type of `device`, "cpu" or "cuda"."""
    before = facts[DEVICE]
    if before != device:
        raise ConfigError(
            f"{folder} cannot be continued with --device {device}",
            f"it was saved with --device {before}, which has other random generators",
            f"continue it with --device {before}",
        )


def data_record(data_dir: Path, files: Iterable[str]) -> dict[str, list]:
    """Return the record of each of `files` in `data_dir` that exists (see `_record_of`)."""
    return _record_of(data_dir, files, DataError)


def base_record(folder: Path | None) -> dict[str, list]:
    """Return the record of the checkpoint's files in `folder` (see `_record_of`). None: empty."""
    if folder is None:
        return {}
    names = [path.name for path in weight_files(folder)]
    return _record_of(folder, names, WeightsError)


def _record_of(folder: Path, names: Iterable[str], unreadable: type[RunError]) -> dict[str, list]:
    """Return name -> [size in bytes, SHA-256 of a sample] of each file of these names.

    Raises `unreadable` if a file cannot be read.
    """
    record = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        try:
            facts = sampled_facts_of(path)
        except OSError as error:
            raise unreadable(
                f"{path} cannot be read",
                error.strerror or str(error),
                "let this user read the file, or check the disk",
            ) from error
        record[name] = [facts.size, facts.sha256]
    return record


def changed_files(before: dict[str, list], now: dict[str, list]) -> list[str]:
    """Return the names of the files in the record `before` that differ in `now`, or lack there."""
    return [name for name, identity in before.items() if now.get(name) != identity]


def require_same_data(folder: Path, facts: dict, data_dir: Path, files: Iterable[str]) -> None:
    """Raise ConfigError if the data files differ from those that the checkpoint records."""
    changed = changed_files(facts[DATA_FILES], data_record(data_dir, files))
    if changed:
        raise ConfigError(
            f"{folder} cannot be continued with the data in {data_dir}",
            f"{listed(changed)} changed, so samples, evaluations or the tokenizer would differ",
            "set DATADIR to the data of that run, or start a run without --continue",
        )


def require_same_base(folder: Path, facts: dict, base: Path) -> None:
    """Raise ConfigError if the frozen weights in `base` differ from the checkpoint's."""
    changed = changed_files(facts[BASE_FILES], base_record(base))
    if changed:
        raise ConfigError(
            f"{folder} cannot be continued with the base weights in {base}",
            f"{listed(changed)} changed, and the saved adapters fit only the base of their run",
            "use the base weights of that run, or start a run without --continue",
        )
