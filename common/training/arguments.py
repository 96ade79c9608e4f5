"""What an argument of a command means: a folder of runs, a run, or the weights of a run.

All commands ask here. LOGDIR/<benchmark> may be named by its benchmark, a run by one of its files
or folders, and a model or an adapter by its run. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import benchmarks
from common.errors import ConfigError
from common.model.checkpoint_files import read_json
from common.model.checkpoint_names import ADAPTER_CONFIG, ADAPTER_FOLDER, CONFIG, MODEL_FOLDER
from common.paths import ROOT, results_folder
from common.records import ledger, tracking
from common.records.run_record import EVENTS, RunRecord
from common.training.continuation import CHECKPOINTS_FOLDER

# A directory with one of these files is the directory of a run.
RUN_FILES = (ledger.LOG, EVENTS, "config.toml", "failure.json", tracking.GPU_SAMPLES)
# Parts of errors.
WEIGHTS = "a model is a folder with config.json and safetensors files; a run saves it at its end"
MODEL_HELP = (
    "a run, its model/ or its adapter/, or the folder of a Hugging Face checkpoint; "
    "adapter_config.json names the base of an adapter"
)
NAME_WEIGHTS = "name a run that ended, its model/ or its adapter/"


@dataclass(frozen=True)
class Weights:
    """A model in Hugging Face's format, and the adapter that belongs to it, if any."""

    model: Path
    adapter: Path | None = None


def runs_in(argument: Path) -> Path:
    """Return the path that `argument` names: LOGDIR/<benchmark> for the name of a benchmark.

    The folder of the benchmark's source code is not meant, an existing folder elsewhere is.
    """
    name = str(argument)
    if name not in benchmarks.names():
        return argument
    if argument.exists() and not argument.samefile(ROOT / name):
        return argument
    return results_folder(os.environ) / name


def is_run(folder: Path) -> bool:
    """Return whether `folder` is the directory of a run."""
    return any((folder / name).exists() for name in RUN_FILES)


def run_or_runs(argument: Path) -> Path:
    """Return the directory of a run or of runs: that of `runs_in`, or the one that holds it.

    So a run may be named by report.html, model/ or another of its files, and a folder of runs by
    its page or ledger. Any other file, such as README.md, does not name the folder that holds it.
    """
    path = runs_in(argument)
    folder = path.absolute().parent if path.is_file() else path
    above = folder.absolute().parent
    if folder.name in (MODEL_FOLDER, ADAPTER_FOLDER, CHECKPOINTS_FOLDER) and is_run(above):
        return above
    is_page = path.suffix == ".html" or path.name == ledger.NAME
    return folder if is_page or is_run(folder) or _has_weights(folder) else path


def newest_run(argument: Path, wanted: Callable[[Path], bool]) -> Path:
    """Return the run that `argument` names: of a folder of runs, the newest one that is `wanted`.

    If there is none, return the path, for the caller's error.
    """
    path = run_or_runs(argument)
    if is_run(path) or wanted(path) or not path.is_dir():
        return path
    runs = [run.folder for run in RunRecord.in_folder(path) if wanted(run.folder)]
    return runs[-1] if runs else path


def run_to_continue(argument: Path) -> Path:
    """Return the run that --continue names: of a folder of runs, the newest with a checkpoint."""
    return newest_run(argument, lambda run: (run / CHECKPOINTS_FOLDER).is_dir())


def data_of_run(run_dir: Path) -> Path | None:
    """Return the folder of the run's data that the ledger names, None if there is none any more."""
    data = RunRecord.in_directory(run_dir).series.identity.get("data")
    return Path(data) if isinstance(data, str) and Path(data).is_dir() else None


def weights_of(argument: Path, adapter: Path | None = None) -> Weights:
    """Return the weights that `argument` names.

    `adapter`: of --adapter, an adapter or a run with one. The argument is then its base, which may
    lack config.json.

    It is a model, an adapter, the directory of a run with one of them, or a folder of runs, of
    which the newest one with weights is meant. The base of an adapter is the folder that its
    adapter_config.json names.

    Raises ConfigError if there are no such weights, WeightsError if adapter_config.json is damaged.
    """
    if adapter:
        if not adapter.is_dir():
            raise ConfigError(f"{adapter}: no such folder", WEIGHTS, NAME_WEIGHTS)
        inside = adapter / ADAPTER_FOLDER
        model = _weights_in(argument).model if _has_weights(argument) else argument
        return Weights(model, inside if _is_adapter(inside) else adapter)
    return _weights_in(argument)


def _weights_in(argument: Path) -> Weights:
    """Return the weights that `argument` names. See `weights_of`."""
    folder = runs_in(argument)
    if not _has_weights(folder):
        folder = newest_run(argument, _has_weights)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder", WEIGHTS, NAME_WEIGHTS)
    for path in (folder, folder / MODEL_FOLDER, folder / ADAPTER_FOLDER):
        if (path / CONFIG).is_file():
            return Weights(path)
        if _is_adapter(path):
            return Weights(_base_of(path), path)
    do = NAME_WEIGHTS
    export = f"./run_and_time.sh {benchmarks.open_benchmark()} export"
    if (folder / CHECKPOINTS_FOLDER).is_dir():
        do = f"write the weights of its checkpoint: {export} {folder}"
    raise ConfigError(f"{folder}: no {CONFIG} and no {ADAPTER_CONFIG}", WEIGHTS, do)


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def _has_weights(folder: Path) -> bool:
    models = (folder, folder / MODEL_FOLDER)
    adapters = (folder, folder / ADAPTER_FOLDER)
    return any((path / CONFIG).is_file() for path in models) or any(map(_is_adapter, adapters))


def _base_of(adapter: Path) -> Path:
    """Return the folder of the base that adapter_config.json names. Raises ConfigError."""
    base = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if isinstance(base, str) and base and Path(base).is_dir():
        return Path(base)
    raise ConfigError(
        f"{base}: no such folder",
        f"{adapter / ADAPTER_CONFIG} names it as the base of the adapter",
        f"name the folder of the base, and the adapter with --adapter {adapter}",
    )
