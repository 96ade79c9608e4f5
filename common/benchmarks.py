"""The interface between a benchmark and everything else: class Rules and the one registry.

A benchmark is a folder at the top of the repository with `rules.py` and `train.py`.
Its `rules.py` defines four names:

    Config              subclass of RunConfig: the keys of a TOML in configs/<benchmark>/
    Rules               subclass of Rules: the rules of its divisions, and where its files are
    DIVISIONS           tuple of Rules, one for each division that a log can name; empty if each
                        run's config sets its rules
    rules_of(config)    the Rules of a run with this Config; it may take anything from the config

Standard library only: the launcher and the log checks import it without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import ModuleType

from common import config as configs
from common.config import RunConfig
from common.errors import ConfigError
from common.gpu_kinds import KINDS
from common.machine.hardware import config_names, config_path
from common.model.shapes import ModelShape, TokenFlops
from common.paths import ROOT

OPEN = "open"  # the division of rules that a config sets
LogValue = int | float | str
ReferenceRuns = Mapping[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Download:
    """Files that a run reads and that its user must get from their owner."""

    what: str
    size_bytes: int
    source: str
    license: str


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a run: model, data, evaluation, optimizer and log. A sample is a sequence."""

    # In the log: "closed", "open", or "miniature" for the toy model, which cannot be submitted.
    division: str
    shape: ModelShape
    sequence_length: int  # tokens
    eval_samples: int  # validation sequences of each evaluation, always the same ones
    # Training sequences between evaluations, before rounding up to the global batch.
    eval_interval_samples: int
    # Cross entropy per token, in nats. A run ends at the first evaluation at or below it. 0: no
    # target; the run succeeds after max_samples.
    target_loss: float
    adam_beta_1: float
    adam_beta_2: float
    adam_epsilon: float
    weight_decay: float  # decoupled
    gradient_clip_norm: float
    log_name: str = ""  # the benchmark as logged (default: its folder)
    opt_name: str = "adamw"
    init_limit_s: float = 1800.0  # largest time from init_start to init_stop
    init_std: float = 0.02  # standard deviation of random weights
    lora_rank: int = 0  # rank of the adapters on a frozen base; 0: all weights train
    lora_alpha: int = 32  # the adapters' output is multiplied by alpha / rank
    lora_dropout: float = 0.0  # applied to the adapters' input
    # Manifests under DATADIR. The files that they list are checked before a run. They may be
    # missing.
    manifests: tuple[str, ...] = ()
    missing_weights_help: str = ""  # what to do if `weights_folder` has no weights
    downloads: tuple[Download, ...] = ()
    saves_model: bool = False  # whether `run --save` can write the trained model
    checkpoint: str = ""  # --checkpoint of a run that does not set it; "": none
    # "full" or "lora": the mode in which `throughput` trains models of any shape by this
    # benchmark's code; "": it does not.
    throughput_mode: str = ""
    # Runs of the reference, by global batch: (sequences to the target, number of runs); learning
    # rates, and training sequences of the warm-up.
    reference_runs: ReferenceRuns = field(default_factory=dict, hash=False)
    reference_learning_rates: Mapping[int, float] = field(default_factory=dict, hash=False)
    reference_warmup_samples: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def data_files(self) -> tuple[str, ...]:
        """Files under DATADIR that a run reads."""
        raise NotImplementedError

    def recorded_files(self, data_dir: Path) -> tuple[str, ...]:
        """Return the files under DATADIR that identify the data of a run in its checkpoints."""
        return self.data_files

    def weights_folder(
        self, config: RunConfig, data_dir: Path, environment: Mapping[str, str]
    ) -> Path | None:
        """Return the folder of the safetensors files that a run starts from, if it has any."""
        return None

    def frozen_weights_folder(
        self, config: RunConfig, data_dir: Path, environment: Mapping[str, str]
    ) -> Path | None:
        """Return the folder of the weights that stay frozen in a run, if there are any.

        Checkpoints do not hold them.
        """
        return self.weights_folder(config, data_dir, environment) if self.lora_rank else None

    def require_data(self, config: RunConfig, data_dir: Path) -> None:
        """Raise DataError if the data files hold too few sequences for a run.

        The launcher calls it, so it reads sizes and headers only.
        """

    @property
    def target_text(self) -> str:
        """The target, for display beside a loss."""
        return f"target {self.target_loss}" if self.target_loss else "no target"

    @property
    def training_flops(self) -> TokenFlops:
        """Training FLOPs per token as MFU counts them (formulas: common/model/shapes.py)."""
        return self.shape.training_flops(self.sequence_length, self.lora_rank)

    def eval_interval(self, global_batch_size: int) -> int:
        """Return the training sequences between evaluations: a whole number of steps."""
        return -(-self.eval_interval_samples // global_batch_size) * global_batch_size

    def first_evaluation(self, global_batch_size: int) -> int:
        """Return the training sequences before the first evaluation."""
        return self.eval_interval(global_batch_size)

    def end_learning_rate(self, base_learning_rate: float) -> float | None:
        """Return the learning rate at the end of the schedule, or None if it is not logged."""
        return None

    def fixed_log_values(self) -> dict[str, LogValue]:
        """Return log key -> the only value that this division allows."""
        return {
            "submission_division": self.division,
            "max_sequence_length": self.sequence_length,
            "eval_samples": self.eval_samples,
            "opt_name": self.opt_name,
            **dict(self.optimizer_log_keys()),
            "opt_gradient_clip_norm": self.gradient_clip_norm,
            "target_accuracy": self.target_loss,
        }

    def optimizer_log_keys(self) -> list[tuple[str, LogValue]]:
        """Return the (key, value) pairs that the update rule `opt_name` logs."""
        return [
            ("opt_adamw_beta_1", self.adam_beta_1),
            ("opt_adamw_beta_2", self.adam_beta_2),
            ("opt_adamw_epsilon", self.adam_epsilon),
            ("opt_adamw_weight_decay", self.weight_decay),
        ]

    def own_log_keys(self, config: RunConfig) -> list[tuple[str, LogValue]]:
        """Return the (key, value) pairs that only this benchmark logs, such as its schedule."""
        return []


@cache
def names() -> tuple[str, ...]:
    """Return the names of all benchmarks, sorted."""
    folders = [path.parent for path in ROOT.glob("*/rules.py")]
    return tuple(sorted(folder.name for folder in folders if (folder / "train.py").is_file()))


def split(arguments: list[str]) -> tuple[str, list[str]]:
    """Return (benchmark, remaining arguments). The benchmark is "" if the first is another word."""
    if not arguments or arguments[0] not in names():
        return "", arguments
    return arguments[0], arguments[1:]


def config_class(name: str) -> type[RunConfig]:
    """Return the `rules.Config` of benchmark `name`."""
    return _module(name).Config


def config_keys(name: str) -> list[str]:
    """Return the config keys of benchmark `name`, each with "=", for completion of --set."""
    return [f"{field.name}=" for field in fields(config_class(name))]


def rules_of(name: str, config: RunConfig) -> Rules:
    """Return the rules of a run of benchmark `name` with `config`."""
    return _module(name).rules_of(config)


def divisions(name: str) -> dict[str, Rules]:
    """Return division -> rules, for every division of benchmark `name` that a log can name."""
    return {rules.division: rules for rules in _module(name).DIVISIONS}


def closed() -> tuple[str, ...]:
    """Return the names of the benchmarks that have a closed division, sorted."""
    return tuple(name for name in names() if "closed" in divisions(name))


def example_config(name: str, *preferred: str) -> str:
    """Return the path of a config of benchmark `name` from the root, for an example in a help.

    It is in configs/, or else among the benchmark's examples. `preferred`: stems of file names,
    best first. Return "FILE" if there is none.
    """
    shipped = sorted((ROOT / "configs" / name).glob("*.toml"))
    paths = {
        path.stem: path for path in shipped or sorted((ROOT / name / "examples").glob("*.toml"))
    }
    stem = next((each for each in (*preferred, *paths) if each in paths), None)
    return paths[stem].relative_to(ROOT).as_posix() if stem else "FILE"


def open_benchmark() -> str:
    """Return the name of the benchmark whose configs set the rules; "" if there is none."""
    return next((name for name in names() if not divisions(name)), "")


def names_mlperf(name: str, config: RunConfig) -> bool:
    """Return whether the log of a run names a benchmark of MLPerf, so that it may be submitted."""
    return (rules_of(name, config).log_name or name) != open_benchmark()


def rules_of_log(name: str, division: str, folder: Path | None) -> Rules | None:
    """Return the rules of a log that names this benchmark and division, or None if there are none.

    `folder`: the folder of the log. In the open division, its config.toml sets the rules.
    """
    if division != OPEN:
        return divisions(name).get(division) if name in names() else None
    benchmark = open_benchmark()
    path = folder / "config.toml" if folder else None
    if not benchmark or not path or not path.is_file():
        return None
    try:
        return rules_of(benchmark, configs.load(path, config_class(benchmark)))
    except ConfigError:  # the config of another benchmark
        return None


def measured_in(throughput_mode: str) -> str:
    """Return the benchmark whose code trains models of any shape in this mode of `throughput`.

    Raises ConfigError if no benchmark does.
    """
    for name in names():
        if any(rules.throughput_mode == throughput_mode for rules in divisions(name).values()):
            return name
    raise ConfigError(
        f"no benchmark trains models in mode {throughput_mode}",
        f"none has throughput_mode = {throughput_mode!r} in its rules",
        "use a checkout that has such a benchmark",
    )


def require_layers(layers: int, most: int) -> None:
    """Raise ConfigError if `layers`, of --layers, is larger than the model's number of layers."""
    if layers > most:
        raise ConfigError(
            f"--layers {layers} is too large",
            f"the model has {most} layers",
            f"use --layers {most} or less",
        )


def load_all(
    root: Path, name: str, overrides: dict[str, str] | None = None
) -> dict[str, RunConfig]:
    """Return config name -> config of every file in configs/<name>/.

    They are sorted by GPU kind and number of GPUs. Raises ConfigError.
    """
    loaded = []
    for config_name in config_names(root, name):
        path = config_path(root, name, config_name)
        config = configs.load(path, config_class(name), overrides)
        loaded.append((config_name, config))
    order = [*KINDS, "CPU"]
    order += {config.gpu for _, config in loaded} - {*order}  # an unknown kind of --set gpu
    loaded.sort(key=lambda item: (order.index(item[1].gpu), item[1].world_size))
    return dict(loaded)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{name}.rules")
