"""Selection of the config, its device and its name in the log, with the reason.

The functions depend only on the GPUs found, the environment and the config files.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import known_issues
from common.benchmarks import config_class, rules_of
from common.config import RunConfig, load
from common.errors import ConfigError, PreflightError
from common.gpu_kinds import GIB, GpuKind
from common.hardware import Probe, config_name, identify, require_known
from launch.plan.derive_config import load_or_derive


@dataclass(frozen=True)
class Selection:
    config: RunConfig
    path: Path  # of a derived config: the path that its file would have
    # config_filename in the log. It ends in +derived, +forced or +modified if the run does not
    # follow a shipped file.
    log_name: str
    reason: str
    device: str  # "cpu" or "cuda", which ROCm's torch uses as well
    found: str  # the GPUs, for display
    # Reasons why the run cannot be submitted, and known issues of these versions.
    notes: tuple[str, ...] = ()
    derived: str = ""  # source of a config that has no file in configs/


def require_by_rules(benchmark: str, config: RunConfig, whole_run: bool = True) -> None:
    """Raise ConfigError for values that the benchmark's rules make useless.

    `whole_run`: False for a bench, which need not reach an evaluation.
    """
    rules = rules_of(benchmark, config)
    why = f"an evaluation has {rules.eval_samples:,} sequences"
    config.require(
        config.eval_micro_batch_size <= rules.eval_samples,
        "eval_micro_batch_size",
        why,
        "give at most so many",
    )
    first = rules.first_evaluation(config.global_batch_size)
    why = f"the first evaluation is after {first:,} sequences, so that no loss would be measured"
    config.require(
        not whole_run or config.max_samples >= first, "max_samples", why, "give at least so many"
    )


def select_config(
    root: Path,
    benchmark: str,
    options: argparse.Namespace,
    environment: Mapping[str, str],
    found: Probe,
    any_kind: bool = False,
) -> Selection:
    """Read or derive the config that fits the machine.

    `options`: command-line options with config, set and device, and optionally layers. `any_kind`:
    for a measurement, also accept GPUs that common/gpu_kinds.py lacks, and versions that are known
    to compute wrongly. The miniature also accepts any GPU.

    Raise ConfigError if config and machine do not fit. Raise PreflightError if the GPU or these
    versions cannot be used. Raise OutOfMemory if no config that fits the GPU's memory can be
    derived.
    """
    device = options.device or ("cuda" if found.devices else "cpu")
    if device == "cuda" and not found.devices:
        why = "no driver answers, or *_VISIBLE_DEVICES hides all"
        raise PreflightError("--device cuda, but no GPU is visible", why, "use --device cpu")
    kind = (
        identify(found, environment.get("GPU_KIND", ""), any_kind=True)
        if device == "cuda"
        else None
    )
    path, reason = config_file(root, benchmark, options, environment, kind, len(found.devices))
    if not any_kind and not _is_miniature(benchmark, path):
        require_known(kind, found)
    layers = getattr(options, "layers", None) or 0
    config, derived = load_or_derive(
        root, benchmark, path, kind, dict(key_value(text) for text in options.set), layers
    )
    require_by_rules(benchmark, config, whole_run=not any_kind)
    if config.gpu == "CPU" and not options.device:
        device, kind = "cpu", None
    notes = _mismatches(config, kind, options, environment)
    if kind and config.gpus_per_node > (visible := len(found.devices)):
        do = "use a config for fewer GPUs, or make more visible"
        raise ConfigError(
            f"the config needs {config.gpus_per_node} GPUs", f"{visible} are visible", do
        )
    if kind:
        notes += known_issues.notes(
            kind, known_issues.installed(found.driver), environment, refuse=not any_kind
        )
    # The contents must be equal, since the log has only the file name.
    shipped = root / "configs" / benchmark / path.name
    modified = bool(options.set)
    if derived:
        notes.append(f"{path.name} is no file in configs/{benchmark}: not for submission")
    if options.set:
        notes.append(f"changed on the command line ({', '.join(options.set)}): not for submission")
    elif shipped.is_file() and shipped.read_bytes() != path.read_bytes():
        modified = True
        notes.append(
            f"{path} differs from the file of that name in configs/{benchmark}: not for submission"
        )
    suffix = "+derived" if derived else "+forced" if config.gpu != _kind_name(kind) else ""
    name = f"{path.stem}{suffix}{'+modified' if modified else ''}.toml"
    return Selection(
        config, path, name, reason, device, describe(found, kind), tuple(notes), derived
    )


def _is_miniature(benchmark: str, path: Path) -> bool:
    """Return whether `path` is a config of the miniature.

    The miniature runs on any GPU, because nothing in it depends on a peak or on memory.
    """
    # os.path.isfile: Path.is_file raises for long names.
    return os.path.isfile(path) and load(path, config_class(benchmark)).miniature


def config_file(
    root: Path,
    benchmark: str,
    options: argparse.Namespace,
    environment: Mapping[str, str],
    kind: GpuKind | None,
    visible: int,
) -> tuple[Path, str]:
    """Return the path of the config file and the reason for it; the file need not exist.

    --config selects it, then DGXSYSTEM, then the kind and number of GPUs. Raise ConfigError for an
    empty --config.
    """
    folder = root / "configs" / benchmark
    if options.config == "":
        raise ConfigError(
            "--config names no file", "its value is empty", "give a file, or leave --config out"
        )
    if options.config:
        return Path(options.config), "given with --config"
    if environment.get("DGXSYSTEM"):
        return (
            folder / f"{environment['DGXSYSTEM'].removesuffix('.toml')}.toml",
            "named by DGXSYSTEM",
        )
    count = requested_gpus(environment) or (visible if kind else 1)
    reason = f"{count} x {kind.name} found" if kind else "it runs on a CPU"
    return folder / f"{config_name(kind, count)}.toml", reason


def _mismatches(
    config: RunConfig,
    kind: GpuKind | None,
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> list[str]:
    """Return a note if --config forces a config for another GPU onto this machine.

    Raise ConfigError if the number of GPUs differs from DGXNGPU, or if a config for another GPU was
    selected without --config.
    """
    requested = requested_gpus(environment)
    if requested and requested != config.gpus_per_node:
        what = f"DGXNGPU={requested}, but the config is for {config.gpus_per_node}"
        raise ConfigError(what, "both say how many GPUs to use", "unset one of them")
    if config.gpu == _kind_name(kind):
        return []
    if not options.config:
        why = "its numbers were chosen for another GPU, and the log would name a system that was not used"
        do = "unset DGXSYSTEM, or force it with --config FILE"
        raise ConfigError(f"the config is for {config.gpu}, this is {_kind_name(kind)}", why, do)
    return [f"a config for {config.gpu} forced onto {_kind_name(kind)}: not for submission"]


def requested_gpus(environment: Mapping[str, str]) -> int:
    """Return DGXNGPU, 0 if it is not set. Raise ConfigError if it is not a number of GPUs."""
    text = environment.get("DGXNGPU", "")
    if text and (not text.isdigit() or int(text) < 1):
        raise ConfigError(
            f"DGXNGPU={text} is not a number of GPUs", "it must be 1 or more", "correct or unset it"
        )
    return int(text or 0)


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--set {text} is not KEY=VALUE",
            "there is no key or no =",
            "write, for example, --set micro_batch_size=1",
        )
    return key.strip(), value.strip()


def _kind_name(kind: GpuKind | None) -> str:
    return kind.name if kind else "CPU"


def describe(found: Probe, kind: GpuKind | None) -> str:
    if kind is None:
        return "not used (running on the CPU)" if found.devices else "none"
    first = found.devices[0]
    driver = f", driver {found.driver}" if found.driver else ""
    return f"{len(found.devices)} x {kind.name} ({first.name or first.arch}, {first.memory_bytes / GIB:.0f} GiB each{driver})"
