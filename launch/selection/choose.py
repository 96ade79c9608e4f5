"""Choose the config of a run: `choose(request, machine)`.

Five stages follow each other, and none calls an earlier one: `name` says which file, and why;
`read` reads it, or the nearest one; `override` adds --set; `fit` fits it to the machine; `check`
(check.py) compares it with the rules and the machine. The result depends on nothing but command
line, environment, GPUs and config files. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import config as configs
from common.benchmarks import config_class, example_config
from common.command_line import PROGRAM
from common.config import ANY_GPU, ConfigFile, RunConfig
from common.errors import ConfigError, PreflightError
from common.gpu_kinds import GpuKind
from common.machine.hardware import config_name, config_names, config_path
from common.paths import ROOT
from common.records.run_record import RunRecord
from common.training.continuation import require_benchmark
from launch.plan.derive_config import (
    NAME,
    derive,
    fit_to_machine,
    miniature_on_gpu,
    moved,
    nearest_file,
)
from launch.selection.check import DERIVED, FILE, FITTED, MINIATURE, Choice, Fitted, Named, check
from launch.selection.machine import NO_GPU, NO_GPUS, Machine
from launch.selection.request import Request

# Environment variables that show that the full benchmark is wanted, not the miniature. The
# variables MLPERF_SUBMISSION_* and an NEXP above 1 show it as well.
REAL_RUN_VARIABLES = ("DATADIR", "MODEL", "DGXSYSTEM", "DGXNGPU")


def choose(request: Request, machine: Machine) -> Choice:
    """Return the config that fits the request and the machine.

    Raises ConfigError if there is no such config, and OutOfMemory if none that fits into the GPU's
    memory can be derived. Raises PreflightError if the GPUs cannot be identified, or if none is
    visible although GPUs were asked for. Whatever else is wrong is an objection of the choice.
    """
    if request.device == "cpu":
        machine = NO_GPUS
    require_config(request)
    if request.continues:
        require_benchmark(request.continues, request.benchmark)
    named = name(request, machine)
    file = read(request, machine, named)
    file = override(request, file)
    fitted = fit(request, machine, named, file)
    return check(request, machine, named, fitted)


# --- name: which file, and why --------------------------------------------------------------------


def require_config(request: Request) -> None:
    """Raise ConfigError without --config if configs/ has no file for the benchmark.

    A run that is continued has its config.
    """
    benchmark = request.benchmark
    if not request.file and not request.continues and not config_names(ROOT, benchmark):
        raise ConfigError(
            f"{benchmark} needs a config",
            "the config sets the rules of the run, and there is no default",
            f"give a file with --config, such as {example_config(benchmark, 'pretrain_1b')}",
        )


def require_gpus(request: Request, machine: Machine) -> None:
    """Raise PreflightError if no GPU is visible although --device cuda or a real run is requested,
    or if a variable hides all GPUs.

    Without this check, a machine whose GPUs are hidden would silently train the miniature on its
    CPU. A run is real if DATADIR, MODEL, DGXSYSTEM, DGXNGPU, MLPERF_SUBMISSION_* or an NEXP above 1
    is set. It is not if the user asks for something else with --miniature, --device cpu, --config
    FILE, or a DGXSYSTEM that names a CPU.
    """
    if machine.gpus:
        return
    do = "check nvidia-smi or rocminfo and *_VISIBLE_DEVICES; --miniature trains the toy model"
    hidden = machine.probe.hidden
    # plan has no environment: it calculates, whatever is hidden.
    if hidden and request.environment and not _wants_no_gpu(request):
        why = "an index counts the GPUs that are left, and the list ends at the first invalid entry"
        raise PreflightError(hidden, why, "correct or unset it; --device cpu needs no GPU")
    if request.device == "cuda":
        raise PreflightError("--device cuda, but no GPU is visible", NO_GPU, do)
    names = variables_of_real_run(request.environment)
    if names and not _wants_no_gpu(request):
        are = "is" if len(names) == 1 else "are"
        if request.system:
            do += "; `plan` calculates the config of DGXSYSTEM without a GPU"
        raise PreflightError(f"no GPU is visible, but {' and '.join(names)} {are} set", NO_GPU, do)


def _wants_no_gpu(request: Request) -> bool:
    """Return whether the request may be for a CPU, also where there are GPUs."""
    return (
        request.miniature
        or request.device == "cpu"
        or request.file is not None
        or request.continues is not None
        or request.system.startswith("CPU_")
    )


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


def name(request: Request, machine: Machine) -> Named:
    """Name the config file.

    In order of precedence, --miniature, --config, --continue, DGXSYSTEM, or the kind and number of
    GPUs and the nodes of a Slurm job select it. Raises the errors of `require_gpus`.
    """
    require_gpus(request, machine)
    folder = _shipped(request)
    if request.miniature:
        return Named(folder / "CPU_1x1.toml", "--miniature was given")
    if request.file:
        return Named(Path(request.file), "--config names it")
    if request.continues:
        run = RunRecord.in_directory(request.continues.run)
        logged = str(run.log.value("config_filename") or run.name)
        path = request.continues.run / "config.toml"
        return Named(path, "--continue names its run", logged.removesuffix(".toml"))
    if request.system:
        return Named(folder / f"{request.system}.toml", "DGXSYSTEM names it")
    kind = machine.kind
    count = request.gpus or machine.gpus or 1
    reason = f"{count} x {kind.name} found" if kind else "it runs on a CPU"
    if request.nodes > 1:
        reason += f" on each of {request.nodes} nodes of the Slurm job"
    return Named(folder / f"{config_name(kind, count, request.nodes)}.toml", reason)


def _shipped(request: Request) -> Path:
    """Return the folder of the benchmark's shipped configs."""
    return ROOT / "configs" / request.benchmark


# --- read: the file, or the nearest one -----------------------------------------------------------


def read(request: Request, machine: Machine, named: Named) -> ConfigFile:
    """Read the named file, or the nearest one if configs/ has no file for these GPUs.

    Raises ConfigError if the file cannot be read or belongs to another benchmark, and if configs/
    has no such file and its name stands for no known GPUs.
    """
    benchmark = request.benchmark
    path = named.path
    if request.continues:
        # The checkpoint's copy, whose digest is checked before it is loaded.
        table = dict(request.continues.facts["config"])
        config = configs.from_table(dict(table), config_class(benchmark), str(path))
        return ConfigFile(path, table, config)
    if path.parent != _shipped(request) or path.is_file():
        _require_own(benchmark, path)
    elif request.miniature:
        raise ConfigError(
            f"{benchmark} has no miniature",
            f"configs/{benchmark} has no {path.name}",
            "leave out --miniature",
        )
    elif gpus := _gpus_in(path.stem, machine):
        path = nearest_file(ROOT, benchmark, *gpus)
    else:
        config_path(ROOT, benchmark, path.stem)  # raises ConfigError: it does not exist
    return configs.read(path, config_class(benchmark))


def _gpus_in(name: str, machine: Machine) -> tuple[GpuKind | None, int, int] | None:
    """Return kind of GPU, GPUs per node and nodes that a config name such as MI300X_2x8 stands for.

    A CPU's kind is None. Return None for a name of another form or with an unknown kind.
    """
    match = NAME.fullmatch(name)
    kind = machine.kind_named(match[1]) if match else None
    if not match or (kind is None and match[1] != "CPU"):
        return None
    return kind, int(match[3]), int(match[2])


def _require_own(benchmark: str, path: Path) -> None:
    """Raise ConfigError if `path` is a config of another benchmark.

    A file in configs/ belongs to the benchmark of its folder, any other file to `benchmark`.
    """
    folder = path.absolute().parent
    # os.path, unlike Path, has an answer for a name that is too long.
    exists = os.path.exists(path)
    if exists and folder.parent == ROOT / "configs" and folder.name != benchmark:
        raise ConfigError(
            f"{path} is a config of {folder.name}",
            f"it is in configs/{folder.name}, and the command is for {benchmark}",
            f"{PROGRAM} {folder.name} ... --config {path}",
        )


# --- override: the keys of --set ------------------------------------------------------------------


def override(request: Request, file: ConfigFile) -> ConfigFile:
    """Return the file with the keys of --set, which no later stage changes."""
    return replace(file, overrides=request.overrides)


# --- fit: to the GPUs and their memory ------------------------------------------------------------


def fit(request: Request, machine: Machine, named: Named, file: ConfigFile) -> Fitted:
    """Return the config of `file`, fitted to the GPUs if the file was not made for them.

    Raises ConfigError for impossible values, and if the GPUs cannot share the global batch. Raises
    OutOfMemory if no option fits into the memory.
    """
    benchmark = request.benchmark
    kind = machine.kind
    if request.miniature and kind:
        config, text = miniature_on_gpu(file, kind)
        source = MINIATURE
    elif file.path != named.path and (gpus := _gpus_in(named.path.stem, machine)):
        config, text = derive(benchmark, file, *gpus, request.layers, machine.network_gb_s)
        source = DERIVED
    elif (config := file.changed()).gpu == ANY_GPU:
        count = _gpus_to_use(request, machine, config)
        config, text = fit_to_machine(
            benchmark, config, kind, count, request.overrides, request.layers
        )
        text = f"{file.path.name} {text}"
        source = FITTED
    elif request.continues and _on_other_gpus(request, machine, config):
        config, text = _fit_continued(request, machine, file)
        source = FITTED
    else:
        text = ""
        source = FILE
    if request.miniature and not config.miniature:
        raise ConfigError(
            "--miniature with --set miniature=false",
            "the toy model's config does not fit the real model",
            "leave out one of them",
        )
    return Fitted(config, text, source)


def _gpus_to_use(request: Request, machine: Machine, config: RunConfig) -> int:
    """Return the GPUs of a node: those of --set, else of DGXNGPU, else all of the machine.

    `config`: the file's, with the keys of --set.
    """
    if "gpus_per_node" in request.overrides:
        return config.gpus_per_node
    return request.gpus or machine.gpus


def _on_other_gpus(request: Request, machine: Machine, config: RunConfig) -> bool:
    """Return whether a run with `config` is continued on GPUs of another kind or number.

    It uses as many GPUs as before, if there are so many and DGXNGPU is not set.
    """
    if machine.kind is None or config.gpu == "CPU":
        return False
    gpus = request.gpus or min(config.gpus_per_node, machine.gpus)
    return (config.gpu, config.gpus_per_node) != (machine.kind.name, gpus)


def _fit_continued(request: Request, machine: Machine, file: ConfigFile) -> tuple[RunConfig, str]:
    """Return the config of the run that is continued, fitted to this machine. See `fit`."""
    benchmark = request.benchmark
    config = file.changed()
    count = _gpus_to_use(request, machine, config)
    if config_names(ROOT, benchmark):
        return derive(benchmark, file, machine.kind, count, 1, request.layers)
    config = replace(config, gpu=ANY_GPU, gpus_per_node=1, micro_batch_size=1)
    config, text = fit_to_machine(
        benchmark, config, machine.kind, count, request.overrides, request.layers
    )
    return config, f"{file.path} {text}"


def nearest_config(
    benchmark: str, kind: GpuKind | None, gpus: int, linear: str
) -> tuple[RunConfig, str]:
    """Return the nearest file's config for `gpus` GPUs of `kind`, and its origin.

    `kind`: None for a CPU. `linear`: format of the linear layers. The origin is "" if configs/ has
    a file for these GPUs. Memory is not considered, since another model needs a different amount.
    """
    path = config_path(ROOT, benchmark, "CPU_1x1")
    if kind:
        path = nearest_file(ROOT, benchmark, kind, gpus)
    file = configs.load(path, config_class(benchmark))
    changes: dict[str, Any] = {**moved(file, kind, gpus, linear)}
    if file.gpus_per_node != gpus:
        changes["global_batch_size"] = file.micro_batch_size * gpus
    if file.gpu != (kind.name if kind else "CPU"):
        changes["env"] = {}
    is_own = path.stem == config_name(kind, gpus)
    return replace(file, **changes), "" if is_own else f"settings from {path.name}"
