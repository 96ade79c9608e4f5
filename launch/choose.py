"""Which config, on which device, under which name in the log, and why. Pure functions over a probe and an environment."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import config as configs
from common.config import RunConfig
from common.errors import ConfigError, PreflightError
from common.gpu_kinds import GIB, GpuKind
from common.hardware import Probe, config_name, config_path, identify


@dataclass(frozen=True)
class Choice:
    config: RunConfig
    path: Path
    log_name: str  # config_filename in the log; says so if the run is not what the file says
    reason: str
    device: str  # "cpu" or "cuda"; ROCm's torch calls its device cuda as well
    found: str  # the GPUs, for people
    notes: tuple[str, ...] = ()  # why this is no submission, and other things to say loudly


def benchmarks(root: Path) -> list[str]:
    """Packages beside this one that hold a benchmark: they have rules and a trainer."""
    return sorted(path.parent.name for path in root.glob("*/rules.py") if (path.parent / "train.py").is_file())


def rules_of(benchmark: str, config: RunConfig):
    module = importlib.import_module(f"{benchmark}.rules")
    return module.MINIATURE if config.miniature else module.CLOSED


def choose(root: Path, benchmark: str, wish: argparse.Namespace, environment: Mapping[str, str], found: Probe) -> Choice:
    """Read the config that fits. `wish` has config, set and device from the command line.

    Raises ConfigError if config and machine do not fit, PreflightError if the GPU cannot be used.
    """
    device = wish.device or ("cuda" if found.devices else "cpu")
    if device == "cuda" and not found.devices:
        raise PreflightError(
            "--device cuda, but no GPU is visible", "no driver answers, or *_VISIBLE_DEVICES hides all", "use --device cpu"
        )
    kind = identify(found, environment.get("GPU_KIND", "")) if device == "cuda" else None
    path, reason = _file(root, benchmark, wish, environment, kind, len(found.devices))
    config = configs.load(path, importlib.import_module(f"{benchmark}.rules").Config, dict(key_value(text) for text in wish.set))
    if config.gpu == "CPU" and not wish.device:
        device, kind = "cpu", None
    notes = _misfits(config, kind, wish, environment)
    _require_processes(config, kind, len(found.devices))
    if wish.set:
        notes.append(f"changed on the command line ({', '.join(wish.set)}): not for submission")
    elif _other_than_ours(root, benchmark, path):
        notes.append(f"{path} differs from the file of that name in configs/{benchmark}: not for submission")
    modified = bool(wish.set) or _other_than_ours(root, benchmark, path)
    suffix = ("+forced" if config.gpu != _kind_name(kind) else "") + ("+modified" if modified else "")
    return Choice(config, path, f"{path.stem}{suffix}{path.suffix}", reason, device, describe(found, kind), tuple(notes))


def _file(
    root: Path, benchmark: str, wish: argparse.Namespace, environment: Mapping[str, str], kind: GpuKind | None, visible: int
) -> tuple[Path, str]:
    if wish.config:
        return Path(wish.config), "given with --config"
    if environment.get("DGXSYSTEM"):
        return config_path(root, benchmark, environment["DGXSYSTEM"].removesuffix(".toml")), "named by DGXSYSTEM"
    count = _wanted_gpus(environment) or (visible if kind else 1)
    reason = f"{count} x {kind.name} found" if kind else "it runs on a CPU"
    return config_path(root, benchmark, config_name(kind, count)), reason


def _other_than_ours(root: Path, benchmark: str, path: Path) -> bool:
    """The log names the config by its file name alone: a file elsewhere that bears a name of ours must say what we say."""
    ours = root / "configs" / benchmark / path.name
    return ours.is_file() and ours.read_bytes() != path.read_bytes()


def _misfits(config: RunConfig, kind: GpuKind | None, wish: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Notes about a config for another GPU that was asked for with --config; otherwise that is an error."""
    wanted = _wanted_gpus(environment)
    if wanted and wanted != config.gpus_per_node:
        raise ConfigError(
            f"DGXNGPU={wanted}, but the config is for {config.gpus_per_node}", "both say how many GPUs to use", "drop one of them"
        )
    if config.gpu == _kind_name(kind):
        return []
    if not wish.config:
        raise ConfigError(
            f"the config is for {config.gpu}, this is {_kind_name(kind)}",
            "its numbers were chosen for another GPU, and the log would name a system that was not used",
            "drop DGXSYSTEM, or force it with --config FILE",
        )
    return [f"a config for {config.gpu} forced onto {_kind_name(kind)}: not for submission"]


def _require_processes(config: RunConfig, kind: GpuKind | None, visible: int) -> None:
    if kind and config.gpus_per_node > visible:
        raise ConfigError(
            f"the config needs {config.gpus_per_node} GPUs", f"{visible} are visible", "use a config for fewer GPUs, or show more"
        )


def _wanted_gpus(environment: Mapping[str, str]) -> int:
    """DGXNGPU, 0 if it is not set."""
    text = environment.get("DGXNGPU", "")
    if text and (not text.isdigit() or int(text) < 1):
        raise ConfigError(f"DGXNGPU={text} is not a number of GPUs", "it must be 1 or more", "correct or unset it")
    return int(text or 0)


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text} is not KEY=VALUE", "there is no key or no =", "write, for example, --set micro_batch_size=1")
    return key.strip(), value.strip()


def _kind_name(kind: GpuKind | None) -> str:
    return kind.name if kind else "CPU"


def describe(found: Probe, kind: GpuKind | None) -> str:
    if kind is None:
        return "not used (running on the CPU)" if found.devices else "none"
    first = found.devices[0]
    driver = f", driver {found.driver}" if found.driver else ""
    return f"{len(found.devices)} x {kind.name} ({first.name or first.arch}, {first.memory_bytes / GIB:.0f} GiB each{driver})"
