"""RunConfig: the config of a run, one flat TOML per benchmark, GPU kind and number of GPUs.

There are no includes and no inheritance. An unknown key, a wrong type or an impossible batch is a
ConfigError that names the file and the key. Keys that decide convergence (batch, learning rate,
warm-up) have no default. Values that are right everywhere have a default here. Values tuned for a
GPU are in the TOML. Standard library only: the launcher reads the file before it imports torch.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from common.command_line import PROGRAM
from common.errors import ConfigError, failure_of
from common.linear_formats import FORMATS, LinearFormat
from common.suggestions import Meaning, nearest, suggestion
from common.values import gpu_kind, number, seconds, spelled_as, whole_number

# Largest value of a key. The limit of all other keys is 2^31 - 1, the largest C int.
LARGEST = {
    "hang_timeout_s": 604_800.0,  # a week
    "max_samples": 10**8,  # each process holds the order of its samples: 28 bytes per sample
}
# Value of `gpu` in a config that is adapted to the machine (launch/plan/derive_config.py).
ANY_GPU = "any"
# Annotation of a field of RunConfig -> the type of its value, and how an error names the type.
KEY_TYPES = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a string"),
    "bool": (bool, "true or false"),
    "dict[str, str]": (dict, "a table of strings"),
}
# What a key is not, but may be meant by an unknown key.
NO_KEYS = (
    *("SEED", "NEXP", "DATADIR", "LOGDIR", "DGXNGPU", "DGXSYSTEM"),
    *("--print", "--track", "--checkpoint", "--continue"),
)
# Ways to store LoRA's frozen weights (common/sharding/frozen_base.py).
FROZEN_BASE_STORAGE = (
    "sharded",
    "replicated",
    "replicated_both",
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Config keys of every benchmark. A benchmark's `rules.Config` adds its own."""

    # Hardware.
    gpu: str  # a kind of common/gpu_kinds.py, such as MI355X or H200, or CPU
    nodes: int  # number of hosts
    gpus_per_node: int  # processes per node; on a CPU, ranks
    # Keys that decide convergence.
    global_batch_size: int  # sequences per optimizer step
    opt_base_learning_rate: float  # largest learning rate of the schedule
    # training sequences after which a run stops if it has not reached the target
    max_samples: int
    # Keys that decide how the result is computed.
    micro_batch_size: int  # sequences per forward and backward of one process
    eval_micro_batch_size: int  # sequences per evaluation forward of one process
    # processes of a node that share each sequence and its micro-batch
    # (common/sharding/context_parallel.py)
    context_parallel: int = 1
    # Number format of the blocks' linear layers: "bf16" (fp32 on a CPU), "fp8"; see
    # common/linear_formats.py.
    linear: str = "bf16"
    # seconds without progress on any rank before the run stops and names the rank
    hang_timeout_s: float = 600.0
    miniature: bool = False  # the toy model: it has its own rules and is never a submission
    env: dict[str, str] = field(default_factory=dict)  # exported before Python imports torch

    def __post_init__(self) -> None:
        self._require_valid_numbers()
        self.require(
            self.linear in FORMATS,
            "linear",
            "it is not a known number format; only studies emulate others (docs/number_formats.md)",
            f"choose one of {', '.join(FORMATS)}",
        )
        self._require_valid_environment()
        if self.gpu == ANY_GPU and self.gpus_per_node % self.context_parallel:
            return  # the number of GPUs is not known yet
        self.require(
            self.gpus_per_node % self.context_parallel == 0,
            "context_parallel",
            f"it does not divide gpus_per_node = {self.gpus_per_node}, and only processes of one "
            "node can share a sequence",
            "set it to a divisor of gpus_per_node",
        )
        per_pass = self.micro_batch_size * self.data_ranks
        processes = "processes"
        if self.context_parallel > 1:
            processes = f"processes / {self.context_parallel}, which share a sequence"
        self.require(
            self.global_batch_size % per_pass == 0,
            "global_batch_size",
            f"it is not a multiple of micro_batch_size x {processes} = "
            f"{self.micro_batch_size} x {self.data_ranks} = {per_pass}",
            "change global_batch_size or micro_batch_size so that every process gets whole "
            "micro-batches, or let processes share sequences by context_parallel",
        )

    def _require_valid_numbers(self) -> None:
        for key in (
            "nodes",
            "gpus_per_node",
            "global_batch_size",
            "micro_batch_size",
            "eval_micro_batch_size",
            "context_parallel",
            "max_samples",
        ):
            self.require(
                getattr(self, key) >= 1, key, "it must be at least 1", "give a positive number"
            )
        for each in fields(self):
            key = each.name
            value = getattr(self, key)
            if isinstance(value, int | float):
                limit = LARGEST.get(key, 2**31 - 1)
                self.require(
                    math.isfinite(value) and value >= 0,
                    key,
                    "it must be a finite number of at least 0",
                    "give 0 or more",
                )
                self.require(value <= limit, key, "it is too large", f"give at most {limit:,}")
        self.require(
            self.opt_base_learning_rate > 0,
            "opt_base_learning_rate",
            "it must be positive",
            "give a learning rate",
        )
        self.require(
            self.hang_timeout_s > 0,
            "hang_timeout_s",
            "it must be positive",
            "give a number of seconds above 0",
        )

    def _require_valid_environment(self) -> None:
        for name, value in self.env.items():
            both = name + value
            size = len(both.encode())
            self.require(
                name != "" and "=" not in name and "\0" not in both and size < 131_071,
                "env",
                "Linux accepts a name without = and NUL, a value without NUL, and at most 128 KiB "
                "for both together",
                "correct the name or the value",
            )

    def resolved(self) -> Self:
        """Return the config with the paths in its keys made absolute.

        `from_table` calls it, so that __post_init__ does not depend on files. A benchmark whose
        keys name files replaces it.
        """
        return self

    def require(self, good: bool, key: str, why: str, do: str) -> None:
        """Raise a ConfigError that names `key` and its value, unless `good`."""
        if not good:
            raise self.unusable(key, why, do)

    def unusable(self, key: str, why: str, do: str) -> ConfigError:
        """Return a ConfigError that names `key` and its value."""
        return ConfigError(f"{key} = {getattr(self, key)!r} cannot be used", why, do)

    def require_choice(self, key: str, choices: tuple[str, ...]) -> None:
        """Raise a ConfigError unless the value of `key` is one of `choices`."""
        known = ", ".join(f'"{choice}"' for choice in choices)
        self.require(getattr(self, key) in choices, key, f"known are {known}", "choose one of them")

    # Options that change the memory of a rank, turned off. A benchmark that has such an option
    # replaces the property by a key of its Config.

    @property
    def recompute_layers(self) -> int:
        """Number of layers that recompute their activations in the backward."""
        return 0

    @property
    def offload_layers(self) -> int:
        """Number of layers that keep their SwiGLU input in pinned host memory."""
        return 0

    @property
    def frozen_base(self) -> str:
        """Storage of the frozen weights, one of FROZEN_BASE_STORAGE; "" if all weights train."""
        return ""

    @property
    def transposed_layers(self) -> int:
        """Number of layers whose W^T is stored if `frozen_base` is "replicated"."""
        return 0

    @property
    def moment_precision(self) -> str:
        """Format of AdamW's two moments: "fp32" or "bf16"."""
        return "fp32"

    @property
    def reduce_scatter(self) -> str:
        """Engine that reduces the gradients: "nccl" or "copy_engine"."""
        return "nccl"

    @classmethod
    def has_key(cls, name: str) -> bool:
        """Return whether a TOML of this benchmark may have the key `name`."""
        return any(each.name == name for each in fields(cls))

    @property
    def kernels(self) -> str:
        """Engine of common/kernels: plain torch on a CPU, Triton on every GPU."""
        return "reference" if self.gpu == "CPU" else "triton"

    @property
    def precision(self) -> str:
        """Precision of activations, products outside FP8, gathered weights and reduced gradients.

        Master weights are always fp32.
        """
        return "fp32" if self.gpu == "CPU" and not self.linear_format.in_fp8 else "bf16"

    @property
    def linear_format(self) -> LinearFormat:
        """Number format that the key `linear` names."""
        return FORMATS[self.linear]

    @property
    def platform(self) -> str:
        """The default of submission_platform in the log, such as "1x8 H200"."""
        return f"{self.nodes}x{self.gpus_per_node} {self.gpu}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks that read different sequences."""
        return self.world_size // self.context_parallel

    def require_chunks(self, sequence_length: int) -> None:
        """Raise ConfigError unless the ranks can share sequences of this length."""
        chunks = 2 * self.context_parallel
        self.require(
            self.context_parallel == 1 or sequence_length % chunks == 0,
            "context_parallel",
            f"each process holds two of {chunks} equal chunks of a sequence, and "
            f"{sequence_length:,} tokens are not a multiple of {chunks}",
            "choose another context_parallel, or another length of sequences where the rules "
            "leave it free",
        )

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per rank and optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_ranks)

    def as_toml(self, with_defaults: bool = True) -> str:
        """Return the config as the text of a TOML file, without default values if asked."""
        lines = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "env" and (with_defaults or value != each.default):
                lines.append(assignment(each.name, value))
        if self.env:
            lines += ["", "[env]", *(assignment(name, text) for name, text in self.env.items())]
        return "\n".join(lines) + "\n"


def assignment(name: str, value: bool | int | float | str) -> str:
    """Return the line of TOML that sets `name`.

    JSON writes these values and quoted names as TOML does, except for the control character DEL.
    """
    texts = [json.dumps(each, ensure_ascii=False) for each in (name, value)]
    key, text = (each.replace("\x7f", "\\u007f") for each in texts)
    return f"{name if re.fullmatch(r'[A-Za-z0-9_-]+', name) else key} = {text}"


AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


@dataclass(frozen=True)
class ConfigFile(Generic[AnyConfig]):
    """A config file: its keys, the config that they make, and the values of --set."""

    path: Path
    table: dict[str, Any]
    config: AnyConfig  # without `overrides`
    overrides: Mapping[str, str] = field(default_factory=dict)  # key -> text of --set KEY=VALUE

    def changed(self, changes: Mapping[str, Any] | None = None) -> AnyConfig:
        """Return the config with `changes`, and with the overrides, which take precedence.

        Raises ConfigError if a key is unknown, a value has the wrong type, or the batch is
        impossible. The error names the overrides.
        """
        table = self.table | dict(changes or {})
        if not self.overrides:
            return from_table(table, type(self.config), str(self.path))
        for key, text in self.overrides.items():
            table[key] = _parse_value(text)
        given = " ".join(f"--set {key}={text}" for key, text in self.overrides.items())
        return from_table(table, type(self.config), f"{self.path.name} with {given}")


def read(path: Path, config_class: type[AnyConfig]) -> ConfigFile[AnyConfig]:
    """Read and check the TOML at `path`. `config_class`: the `rules.Config` of the benchmark.

    Raises ConfigError if the file is missing or is not valid TOML. Raises it too if a key is
    unknown or missing, a value has the wrong type, or the batch is impossible. Raises StorageError
    if the disk fails.
    """
    path = Path(path)
    try:
        table = read_table(path)
    except FileNotFoundError:
        neighbors = [each.stem for each in path.parent.glob("*.toml")]
        near = nearest(path.stem, neighbors)
        do = "check the path, or name one of the files under configs/"
        if near:
            do = f"did you mean {path.with_name(near.ours)}.toml?"
        why = f"{path.absolute()} does not exist"
        raise ConfigError(f"{path}: no such config", why, do) from None
    return ConfigFile(path, table, from_table(dict(table), config_class, str(path)))


def load(
    path: Path, config_class: type[AnyConfig], overrides: Mapping[str, str] | None = None
) -> AnyConfig:
    """Return the config at `path`, changed by `overrides`. Raises the errors of `read`.

    `overrides`: key -> text of `--set KEY=VALUE`, parsed as a TOML value.
    """
    file = read(path, config_class)
    return replace(file, overrides=overrides).changed() if overrides else file.config


def read_table(path: Path) -> dict:
    """Return the keys of a TOML file, unchecked.

    Raises FileNotFoundError, ConfigError if the file cannot be read or is not valid TOML, and
    StorageError if the disk fails.
    """
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise
    except OSError as error:
        do = "name a file that this user may read, or one under configs/"
        why = error.strerror or str(error)
        known = failure_of(error)
        raise known or ConfigError(f"{path}: the config cannot be read", why, do) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not valid TOML: {error}",
            "the file cannot be parsed",
            "correct the line it names",
        ) from None


def from_table(table: dict, config_class: type[AnyConfig], source: str) -> AnyConfig:
    """Return the resolved config of a parsed TOML.

    `source`: its name, for errors. Raises ConfigError.
    """
    known = {f.name: f for f in fields(config_class)}
    for key in table:
        if key not in known:
            raise _unknown_key(key, table[key], list(known), source)
    for name, f in known.items():
        if name not in table:
            if f.default is MISSING and f.default_factory is MISSING:
                raise ConfigError(
                    f"{source}: key {name} is missing",
                    "it has no default, because it decides the result",
                    f"add a line `{name} = ...`",
                )
            continue
        table[name] = _checked(table[name], str(f.type), name, source)
    try:
        return config_class(**table).resolved()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.what}", error.why, error.do) from None


def _unknown_key(key: str, value: object, known: list[str], source: str) -> ConfigError:
    do = f"the keys are: {', '.join(known)}"
    meaning = nearest(key, [*known, *NO_KEYS])
    if key.startswith("env."):
        meaning = Meaning(key.removeprefix("env."))
    if meaning:
        do = suggestion(*meaning)
        if meaning.ours.isupper():
            do = f"no key, but a variable, sets it: {meaning.ours}={value} {PROGRAM} ..."
        elif meaning.ours.startswith("--"):
            do = f"no key, but an option, sets it: {meaning.ours}"
    return ConfigError(
        f"{source}: unknown key {key}", "no code reads it, so it would be silently ignored", do
    )


def _checked(value, type_name: str, key: str, source: str):
    """Return `value` if it has the type of the key. Raises ConfigError.

    For a key of type float, an int becomes a float.
    """
    why = f"{key} must be {KEY_TYPES[type_name][1]}"
    do = f"write {key} = ..., {KEY_TYPES[type_name][1]}"
    try:
        value = _converted(value, type_name, key)
    except argparse.ArgumentTypeError as error:
        why = str(error)
        if "," in value and "=" in value:
            do = f"give --set once for each key: --set {key}={value.replace(',', ' --set ')}"
    fits = type(value) is KEY_TYPES[type_name][0]
    if isinstance(value, dict):
        fits = fits and all(type(item) is str for item in value.values())
    if not fits:
        raise ConfigError(f"{source}: {key} = {value!r} has the wrong type", why, do)
    return value


def _converted(value, type_name: str, key: str):
    """Return `value` as the parsers of options read its text. Raises ArgumentTypeError.

    A whole number may be written as 8k or 1e6, and a duration as 10m.
    """
    if type_name == "float" and isinstance(value, str):
        return seconds(value) if key.endswith("_s") else number(value)
    # A larger integer may exceed every float.
    if type_name == "float" and type(value) is int and abs(value) < 2**63:
        return float(value)
    if type_name == "int" and isinstance(value, str):
        return whole_number(0)(value)
    if type_name == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    if type_name == "bool" and value in ("True", "False"):  # of --set, in Python's spelling
        return value == "True"
    if key == "gpu" and isinstance(value, str):
        return gpu_kind(value)
    if key == "linear" and isinstance(value, str):
        return spelled_as(value, FORMATS)
    return value


def _parse_value(text: str):
    """Return the value of `--set KEY=text`, parsed as TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text  # an unquoted word is a string
