"""Selection of the config that a run uses, of the device, and of the config's name in the log.

The result depends only on the command line, the GPUs found, the environment and the config files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import known_issues
from common.benchmarks import config_class, names_mlperf, rules_of
from common.config import RunConfig, load
from common.errors import ConfigError, PreflightError, RunError
from common.gpu_kinds import KINDS, GpuKind
from common.hardware import config_name, config_names
from launch.plan.derive_config import WITH_FP8, load_or_derive, moved, unknown_kind
from launch.selection import NO_GPUS, Machine, Request

# Environment variables that show that the full benchmark is wanted, not the miniature. The
# variables MLPERF_SUBMISSION_* and an NEXP above 1 show it as well.
REAL_RUN_VARIABLES = ("DATADIR", "MODEL", "DGXSYSTEM", "DGXNGPU")
# Reason of an error if a GPU is needed and none is visible.
NO_GPU = "no driver answers, or *_VISIBLE_DEVICES hides all GPUs, or this is another machine"


@dataclass(frozen=True)
class Selection:
    """The config of a run, and how it was selected."""

    config: RunConfig
    path: Path  # of the config file; for a derived config, the path that its file would have
    # config_filename in the log, such as H200_1x8.toml. If the run does not follow a shipped file,
    # +derived or +forced, and +modified, precede the .toml.
    log_name: str
    reason: str  # why this config was selected: the words after "because"
    device: str  # "cpu" or "cuda", which ROCm's torch uses as well
    gpus: str  # the GPUs, for display
    # Reasons why the run cannot be submitted, and known issues of these versions.
    notes: tuple[str, ...] = ()
    derived: str = ""  # how a config that has no file in configs/ was derived; "" for a file


def require_by_rules(benchmark: str, config: RunConfig, whole_run: bool = True) -> None:
    """Raise ConfigError for values that make no sense under the benchmark's rules.

    `whole_run`: False for a measurement, which need not reach an evaluation.
    """
    rules = rules_of(benchmark, config)
    config.require(
        config.eval_micro_batch_size <= rules.eval_samples,
        "eval_micro_batch_size",
        f"an evaluation has {rules.eval_samples:,} sequences",
        f"set it to {rules.eval_samples:,} or less",
    )
    first = rules.first_evaluation(config.global_batch_size)
    config.require(
        not whole_run or config.max_samples >= first,
        "max_samples",
        f"the first evaluation is after {first:,} sequences, so no loss would be measured",
        f"set it to {first:,} or more",
    )


def select_config(
    root: Path, request: Request, machine: Machine, measurement: bool = False
) -> Selection:
    """Read or derive the config that fits the machine.

    `measurement`: whether to accept versions that are known to compute wrongly, and a config that
        reaches no evaluation.

    Raises ConfigError if config and machine do not match. Raises PreflightError if no GPU is
    visible for a real run, or if the GPUs or these versions cannot be used. Raises OutOfMemory if
    no config that fits into the GPU's memory can be derived.
    """
    benchmark = request.benchmark
    if request.device == "cpu":
        machine = NO_GPUS
    require_config(root, request)
    require_gpus(request, machine)
    path, reason = config_file(root, request, machine)
    config, derived = read_or_derive(root, request, machine, path)
    require_by_rules(benchmark, config, whole_run=not measurement)
    kind = machine.kind
    device = "cuda" if kind else "cpu"
    if config.gpu == "CPU" and not request.device:
        device = "cpu"
        kind = None
    notes = _mismatches(config, kind, request)
    if kind:
        _require_visible(config, machine.gpus)
        notes += _notes_on_gpus(kind, machine, request.environment, refuse=not measurement)
    if derived and not path.is_file():
        notes.append("the config is derived, not a file in configs/: not for submission")
    modification = _modification(root, path, request)
    if modification and names_mlperf(benchmark, config):
        notes.append(f"{modification}: not for submission")
    is_forced = config.gpu != _kind_name(kind)
    return Selection(
        config=config,
        path=path,
        log_name=_log_name(path, bool(derived), is_forced, bool(modification)),
        reason=reason,
        device=device,
        gpus=machine.describe(kind),
        notes=tuple(notes),
        derived=derived,
    )


def read_or_derive(
    root: Path, request: Request, machine: Machine, path: Path
) -> tuple[RunConfig, str]:
    """Return the config in `path`, or one derived from the nearest file, and how it was derived.

    The description is "" for a config that was not derived. Raises ConfigError if --set contradicts
    --miniature.
    """
    overrides = {**request.overrides}
    kind = machine.kind
    if request.miniature and kind:
        config, derived = miniature_on_gpu(request.benchmark, path, kind, overrides)
    else:
        count = request.gpus or machine.gpus
        config, derived = load_or_derive(
            root, request.benchmark, path, kind, overrides, request.layers, count
        )
    if request.miniature and not config.miniature:
        raise ConfigError(
            "--miniature with --set miniature=false",
            "the toy model's config with the real model is neither of them",
            "leave out one of them",
        )
    return config, derived


def _log_name(path: Path, is_derived: bool, is_forced: bool, is_modified: bool) -> str:
    """Return the name of the config in the log. See Selection.log_name."""
    suffix = ""
    if is_derived:
        suffix = "+derived"
    elif is_forced:
        suffix = "+forced"
    if is_modified:
        suffix += "+modified"
    return f"{path.stem}{suffix}.toml"


def _modification(root: Path, path: Path, request: Request) -> str:
    """Say how the config in `path` differs from the shipped file of this name, "" if it does not.

    The contents are compared, since the log has only the file's name.
    """
    if request.overrides:
        changes = (f"{key}={text}" for key, text in request.overrides.items())
        return f"changed on the command line ({', '.join(changes)})"
    shipped = root / "configs" / request.benchmark / path.name
    if shipped.is_file() and shipped.read_bytes() != path.read_bytes():
        return f"{path} differs from the file of that name in configs/{request.benchmark}"
    return ""


def require_config(root: Path, request: Request) -> None:
    """Raise ConfigError without --config if configs/ has no file for the benchmark."""
    benchmark = request.benchmark
    if not request.file and not config_names(root, benchmark):
        raise ConfigError(
            f"{benchmark} needs a config",
            "the config sets the rules of the run, and there is no default",
            f"give a file with --config, such as one of {benchmark}/examples",
        )


def require_gpus(request: Request, machine: Machine) -> None:
    """Raise PreflightError if no GPU is visible although --device cuda or a real run is requested.

    Without this check, a machine whose GPUs are hidden would silently train the miniature on its
    CPU. A run is real if DATADIR, MODEL, DGXSYSTEM, DGXNGPU, MLPERF_SUBMISSION_* or an NEXP above 1
    is set. It is not if the user asks for something else with --miniature, --device cpu, --config
    FILE, or a DGXSYSTEM that names a CPU.
    """
    if machine.gpus:
        return
    do = "check nvidia-smi or rocminfo and *_VISIBLE_DEVICES; --miniature trains the toy model"
    if request.device == "cuda":
        raise PreflightError("--device cuda, but no GPU is visible", NO_GPU, do)
    explicit = (
        request.miniature
        or request.device == "cpu"
        or request.file is not None
        or request.system.startswith("CPU_")
    )
    names = variables_of_real_run(request.environment)
    if names and not explicit:
        are = "is" if len(names) == 1 else "are"
        if request.system:
            do += "; `plan` calculates the config of DGXSYSTEM without a GPU"
        raise PreflightError(f"no GPU is visible, but {' and '.join(names)} {are} set", NO_GPU, do)


def variables_of_real_run(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that only a run of the full benchmark needs, NEXP with value.

    They are REAL_RUN_VARIABLES, MLPERF_SUBMISSION_*, and NEXP if it is above 1.
    """
    names = [name for name in REAL_RUN_VARIABLES if environment.get(name)]
    for name in sorted(environment):
        if name.startswith("MLPERF_SUBMISSION_") and environment[name]:
            names.append(name)
    if environment.get("NEXP", "1") not in ("", "0", "1"):
        names.append(f"NEXP={environment['NEXP']}")
    return names


def miniature_on_gpu(
    benchmark: str, path: Path, kind: GpuKind, overrides: Mapping[str, str]
) -> tuple[RunConfig, str]:
    """Return the miniature's config for one GPU of `kind`, and a description of how it was derived.

    Linear layers are in FP8 where the GPU multiplies FP8, otherwise in bf16. Raises ConfigError for
    `overrides` that request FP8 on a GPU without it.
    """
    if not path.is_file():
        raise ConfigError(
            f"{benchmark} has no miniature",
            f"configs/{benchmark} has no {path.name}",
            "leave out --miniature",
        )
    file = load(path, config_class(benchmark))
    linear = "fp8" if kind.arch.startswith(WITH_FP8) else "bf16"
    config = load(path, config_class(benchmark), overrides, moved(file, kind, 1, linear))
    config.require(
        linear == "fp8" or not config.linear_format.in_fp8,
        "linear",
        f"{kind.name} ({kind.arch}) does not multiply FP8",
        "leave out --set linear=..., which selects bf16",
    )
    return config, f"the miniature for 1 x {kind.name} from {path.name}: linear {config.linear}"


def _require_visible(config: RunConfig, visible: int) -> None:
    if config.gpus_per_node > visible:
        raise ConfigError(
            f"the config needs {config.gpus_per_node} GPUs",
            "1 is visible" if visible == 1 else f"{visible} are visible",
            "use a config for fewer GPUs, or make more visible",
        )


def _notes_on_gpus(
    kind: GpuKind, machine: Machine, environment: Mapping[str, str], refuse: bool
) -> list[str]:
    """Return notes on an unknown GPU kind, and on known issues of the installed versions.

    Raises PreflightError if `refuse`, and these versions are known to compute wrongly.
    """
    notes = []
    if kind.name not in KINDS:
        notes.append(
            f"derived GPU kind: {kind.name} is not in common/gpu_kinds.py; memory and architecture "
            "are those that the driver reports, and there is no MFU, since the peak is unknown"
        )
    versions = known_issues.installed(machine.probe.driver)
    return notes + known_issues.notes(kind, versions, environment, refuse=refuse)


def config_file(root: Path, request: Request, machine: Machine) -> tuple[Path, str]:
    """Return the path of the config file, which need not exist, and why it was selected.

    In order of precedence, --miniature, --config, DGXSYSTEM, or the kind and number of GPUs select
    the file. Raises ConfigError for an empty --config.
    """
    folder = root / "configs" / request.benchmark
    if request.miniature:
        return folder / "CPU_1x1.toml", "--miniature was given"
    if request.file == "":
        raise ConfigError(
            "--config names no file", "its value is empty", "name a file, or leave out --config"
        )
    if request.file:
        return Path(request.file), "--config names it"
    if request.system:
        return folder / f"{request.system}.toml", "DGXSYSTEM names it"
    kind = machine.kind
    count = request.gpus or machine.gpus or 1
    reason = f"{count} x {kind.name} found" if kind else "it runs on a CPU"
    return folder / f"{config_name(kind, count)}.toml", reason


def _mismatches(config: RunConfig, kind: GpuKind | None, request: Request) -> list[str]:
    """Return a note if --config forces a config for another GPU onto this machine, else [].

    Raises ConfigError if the number of GPUs differs from DGXNGPU, or if a config for another GPU
    was selected without --config. Raises PreflightError for a config for GPUs where none is
    visible, unless --device cpu forces it.
    """
    if request.gpus and request.gpus != config.gpus_per_node:
        what = f"DGXNGPU={request.gpus}, but the config is for {config.gpus_per_node}"
        raise ConfigError(what, "both say how many GPUs to use", "unset one of them")
    if config.gpu == _kind_name(kind):
        return []
    if not request.file:
        here = f"this machine has {kind.name}" if kind else "the run would be on the CPU"
        undo = "unset DGXSYSTEM" if request.system else "leave out --set gpu"
        raise ConfigError(
            f"the config is for {config.gpu}, but {here}",
            "its values were chosen for another GPU, and the log would name the wrong system",
            f"{undo}, or force it with --config FILE",
        )
    if kind is None and config.gpu != "CPU" and request.device != "cpu":
        raise _no_gpu_for(config)
    return [f"a config for {config.gpu} forced onto {_kind_name(kind)}: not for submission"]


def _no_gpu_for(config: RunConfig) -> RunError:
    """Return the error for a config for GPUs where none is visible."""
    if config.gpu not in KINDS:
        return unknown_kind(config.gpu)
    do = "run it on a machine with these GPUs, or calculate it with `plan --config FILE`"
    if config.miniature:
        do += ", or force it with --device cpu"
    return PreflightError(
        f"the config is for {config.gpus_per_node} x {config.gpu}, and no GPU is visible",
        NO_GPU,
        do,
    )


def _kind_name(kind: GpuKind | None) -> str:
    return kind.name if kind else "CPU"
