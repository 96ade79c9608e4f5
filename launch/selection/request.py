"""Request: the config that a command line and the environment ask for. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.command_line import pairs_of
from common.machine.hardware import config_names, config_path
from common.paths import ROOT
from common.training.continuation import SavedCheckpoint
from common.values import config_name, count, of_variable, path

OF_CONFIG = ("DGXSYSTEM", "DGXNGPU", "GPU_KIND")  # variables that choose the config


def add_config_option(group: Any, benchmark: str, default: str) -> None:
    """Add --config, a path, or the name of a file in the benchmark's folder of configs/."""

    def config_file(text: str) -> str:
        file = path(text)
        name = config_name(text)
        folders = (Path(), Path("configs"), Path("configs", benchmark))
        is_named = file.parent in folders and name in config_names(ROOT, benchmark)
        if is_named and not file.exists():
            file = config_path(ROOT, benchmark, name)
        return str(file)

    group.add_argument(
        "--config", type=config_file, metavar="FILE", help=f"config file ({default})"
    )


@dataclass(frozen=True)
class Request:
    """The config that a command line asks for, whatever files and GPUs there are."""

    benchmark: str
    file: str | None = None  # --config
    continues: SavedCheckpoint | None = None  # --continue RUN, if it gives the config
    system: str = ""  # DGXSYSTEM
    gpus: int = 0  # DGXNGPU, 0 if it is not set
    nodes: int = 1  # of the Slurm step that run.sub started
    miniature: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)  # key -> text of --set
    layers: int = 0  # --layers, 0 for all layers of the model
    device: str = ""  # --device, "" for the GPUs if there are any
    # Variables that show that the full benchmark is wanted, or that allow known issues.
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        benchmark: str,
        options: argparse.Namespace,
        environment: Mapping[str, str],
        continues: SavedCheckpoint | None = None,
    ) -> Request:
        """Return the request of `options`, which has config and perhaps the other fields.

        `continues`: the checkpoint of --continue. It gives the config unless an option names one.

        Raises ConfigError for a DGXNGPU that is not a number of GPUs, and for a wrong --set.
        """
        miniature = getattr(options, "miniature", False)
        return cls(
            benchmark,
            file=options.config,
            continues=None if miniature or options.config is not None else continues,
            system=of_variable(environment, "DGXSYSTEM", config_name) or "",
            gpus=of_variable(environment, "DGXNGPU", count) or 0,
            nodes=step_nodes(environment) or 1,
            miniature=miniature,
            overrides=pairs_of("--set", getattr(options, "set", ())),
            layers=getattr(options, "layers", None) or 0,
            device=getattr(options, "device", None) or "",
            environment=environment,
        )


def step_nodes(environment: Mapping[str, str]) -> int:
    """Return the number of nodes that Slurm started this command on together, 0 if unknown.

    Without MASTER_ADDR, which run.sub sets, each node works for itself.
    """
    text = environment.get("SLURM_STEP_NUM_NODES", "")
    return int(text) if text.isdecimal() and environment.get("MASTER_ADDR") else 0
