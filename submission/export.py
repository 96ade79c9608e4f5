"""Export of a run's events.jsonl to TensorBoard or Weights & Biases.

Both packages are optional. The export happens after the run and sends nothing over the network.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError, PreflightError
from common.records import json_lines
from common.records.json_lines import is_number

# Folder inside the run directory -> module that writes it.
SINKS = {
    "tensorboard": "tensorboard.summary",
    "wandb": "wandb",
}


def export(folder: Path, sink: str) -> str:
    """Write folder/<sink>; return its path with the command that opens or uploads it.

    Raises ConfigError if there are no events or folder/<sink> exists, PreflightError if the package
    `sink` cannot be imported.
    """
    rows, target = list(scalars(folder)), folder / sink
    if not rows:
        raise ConfigError(
            f"{folder} has nothing to export",
            "events.jsonl is missing, or has no step",
            "name the directory of a run",
        )
    if target.exists():
        raise ConfigError(
            f"{target} exists",
            "an export is never overwritten",
            f"remove it to export again: rm -r {target}",
        )
    try:
        module: Any = importlib.import_module(SINKS[sink])
    except ImportError as error:
        raise PreflightError(
            f"{sink} cannot be imported", str(error), f"pip install {sink}"
        ) from None
    if sink == "wandb":
        with module.init(
            project="mlperf-llama-training",
            name=folder.resolve().name,
            dir=str(folder),
            mode="offline",
        ) as run:
            for step, name, value in rows:
                run.log({name: value}, step=step)  # wandb merges the values of one step
        return f"{target}: wandb sync {target}/offline-run-*"
    writer = module.Writer(str(target))
    for step, name, value in rows:
        writer.add_scalar(name, value, step)
    writer.close()
    return f"{target}: tensorboard --logdir {target}"


def scalars(folder: Path) -> Iterator[tuple[int, str, float]]:
    """Yield (step, name, value) for each number in the events. Names are <event>/<key>."""
    for record in json_lines.read(folder / "events.jsonl")[0]:
        if isinstance(step := record.get("step"), int):
            yield from (
                (step, f"{record.get('event')}/{key}", float(value))
                for key, value in record.items()
                if is_number(value) and key != "step"
            )
