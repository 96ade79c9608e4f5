"""Last stage of a selection: compare the config with the rules and the machine.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import known_issues
from common.benchmarks import names_mlperf, rules_of
from common.config import RunConfig
from common.errors import ConfigError, PreflightError, RunError
from common.gpu_kinds import KINDS, GpuKind
from common.paths import ROOT
from launch.selection.machine import NO_GPU, Machine, unknown_kind
from launch.selection.request import Request

# Choice.source
FILE = "file"
DERIVED = "derived"  # from the nearest file, for GPUs that configs/ has no file for
FITTED = "fitted"  # a config of gpu = "any"
MINIATURE = "miniature"  # on one GPU
# Objection.about
RULES = "rules"  # values that make no sense under the benchmark's rules
LENGTH = "max_samples"  # too few for an evaluation, which a measurement does not need
REQUESTED = "DGXNGPU"
GPUS = "GPUs"  # their kind and their number
VERSIONS = "versions"  # known to compute wrongly
# Objections that a measurement ignores, because it reaches no target.
MEASURED_ANYWAY = (LENGTH, VERSIONS)

NO_SUBMISSION = "not for submission"  # in notes


@dataclass(frozen=True)
class Objection:
    """A reason not to use a choice. The command decides what follows from it."""

    about: str  # RULES, LENGTH, REQUESTED, GPUS or VERSIONS
    error: RunError


@dataclass(frozen=True)
class Choice:
    """The config of a run, and how it was chosen."""

    config: RunConfig
    path: Path  # of the config file; for a derived config, the path that its file would have
    # config_filename in the log, such as H200_1x8.toml. If the run does not follow a shipped file,
    # +derived or +forced, and +modified, precede the .toml.
    log_name: str
    reason: str  # why the file was chosen: the words after "because"
    device: str  # "cpu" or "cuda", which ROCm's torch uses as well
    gpus: str  # the GPUs, for display
    source: str = FILE  # FILE, DERIVED, FITTED or MINIATURE
    derived: str = ""  # how the config was made from a file, "" if it is the file's own
    # Reasons why the run cannot be submitted, and known issues of these versions.
    notes: tuple[str, ...] = ()
    objections: tuple[Objection, ...] = ()

    @property
    def stem(self) -> str:
        """The name of the config without suffixes, for names of directories."""
        return self.log_name.removesuffix(".toml").partition("+")[0]

    def require(self, *ignored: str) -> None:
        """Raise the first objection that is not about one of `ignored`."""
        for objection in self.objections:
            if objection.about not in ignored:
                raise objection.error


@dataclass(frozen=True)
class Named:
    """The path of a config file, which need not exist, and why it was selected."""

    path: Path
    reason: str
    stem: str = ""  # the name of the config in the log, if it is not the file's


@dataclass(frozen=True)
class Fitted:
    """A config, and how it was made. See `Choice`."""

    config: RunConfig
    derived: str
    source: str


def check(request: Request, machine: Machine, named: Named, fitted: Fitted) -> Choice:
    """Return the choice, with notes and objections. Raises ConfigError if its rules do."""
    config = fitted.config
    kind = machine.kind
    if config.gpu == "CPU" and not request.device:
        kind = None
    versions = {}
    if kind and not machine.is_imagined:
        versions = known_issues.installed(machine.probe.driver)
    is_other_kind = config.gpu != _kind_name(kind)
    stem = named.stem or named.path.stem
    is_forced = is_other_kind or (kind is not None and machine.is_forced)
    modification = _modification(request, named.path)
    notes = []
    if is_other_kind and request.file:
        notes.append(f"a config for {config.gpu} forced onto {_kind_name(kind)}: {NO_SUBMISSION}")
    if kind and machine.is_forced:
        name = machine.probe.devices[0].name or "no name"
        notes.append(f"--gpu-kind {kind.name}; the driver reports {name}: {NO_SUBMISSION}")
    objections = _about_rules(request.benchmark, config)
    objections += _about_gpus(request, machine, kind, config)
    if kind:
        notes += _notes_on_gpus(kind, versions, request.environment)
        for error in known_issues.refusals(kind, versions, request.environment):
            objections.append(Objection(VERSIONS, error))
    if fitted.source == DERIVED:
        notes.append(f"the config is derived, not a file in configs/: {NO_SUBMISSION}")
    if modification and names_mlperf(request.benchmark, config):
        notes.append(f"{modification}: {NO_SUBMISSION}")
    return Choice(
        config=config,
        path=named.path,
        source=fitted.source,
        derived=fitted.derived,
        reason=named.reason,
        log_name=_log_name(stem, fitted.source != FILE, is_forced, bool(modification)),
        device="cuda" if kind else "cpu",
        gpus=machine.describe(kind),
        notes=tuple(notes),
        objections=tuple(objections),
    )


def _about_rules(benchmark: str, config: RunConfig) -> list[Objection]:
    """Return objections to values that make no sense under the benchmark's rules."""
    rules = rules_of(benchmark, config)
    objections = []
    if config.eval_micro_batch_size > rules.eval_samples:
        error = config.unusable(
            "eval_micro_batch_size",
            f"an evaluation has {rules.eval_samples:,} sequences",
            f"set it to {rules.eval_samples:,} or less",
        )
        objections.append(Objection(RULES, error))
    try:
        config.require_chunks(rules.sequence_length)
    except ConfigError as not_divisible:
        objections.append(Objection(RULES, not_divisible))
    first = rules.first_evaluation(config.global_batch_size)
    if config.max_samples < first:
        error = config.unusable(
            "max_samples",
            f"the first evaluation is after {first:,} sequences, so no loss would be measured",
            f"set it to {first:,} or more",
        )
        objections.append(Objection(LENGTH, error))
    return objections


def _about_gpus(
    request: Request, machine: Machine, kind: GpuKind | None, config: RunConfig
) -> list[Objection]:
    """Return objections to a config that is not for the GPUs that were asked for or are visible.

    --config may force a config for another GPU onto this machine, and --device cpu onto the CPU.
    """
    objections = []
    if request.gpus and request.gpus != config.gpus_per_node:
        what = f"DGXNGPU={request.gpus}, but the config is for {config.gpus_per_node}"
        error = ConfigError(what, "the two disagree", "unset one of them")
        objections.append(Objection(REQUESTED, error))
    if config.gpu != _kind_name(kind) and not (request.file or request.continues):
        objections.append(Objection(GPUS, _other_kind(request, kind, config)))
    elif config.gpu != "CPU" and kind is None and request.device != "cpu":
        objections.append(Objection(GPUS, _no_gpu_for(config)))
    if kind and config.gpus_per_node > machine.gpus:
        error = ConfigError(
            f"the config needs {config.gpus_per_node} GPUs",
            "1 is visible" if machine.gpus == 1 else f"{machine.gpus} are visible",
            "use a config for fewer GPUs, or make more visible",
        )
        objections.append(Objection(GPUS, error))
    return objections


def _other_kind(request: Request, kind: GpuKind | None, config: RunConfig) -> ConfigError:
    """Return the error for a config for another GPU than this machine's, without --config."""
    here = f"this machine has {kind.name}" if kind else "the run would be on the CPU"
    undo = "unset DGXSYSTEM" if request.system else "leave out --set gpu"
    return ConfigError(
        f"the config is for {config.gpu}, but {here}",
        "its values were chosen for another GPU, and the log would name the wrong system",
        f"{undo}, or force it with --config FILE",
    )


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


def _notes_on_gpus(
    kind: GpuKind, versions: Mapping[str, str], environment: Mapping[str, str]
) -> list[str]:
    """Return notes on an unknown GPU kind, and on known issues of the installed versions."""
    notes = []
    if kind.name not in KINDS:
        notes.append(
            f"derived GPU kind: {kind.name} is not in common/gpu_kinds.py; memory and architecture "
            "come from the driver, and there is no MFU, since the peak is unknown"
        )
    return notes + known_issues.notes(kind, versions, environment)


def _modification(request: Request, path: Path) -> str:
    """Say how the config in `path` differs from the shipped file of this name, "" if it does not.

    The contents are compared, since the log has only the file's name.
    """
    if request.overrides:
        changes = (f"{key}={text}" for key, text in request.overrides.items())
        return f"changed on the command line ({', '.join(changes)})"
    shipped = ROOT / "configs" / request.benchmark / path.name
    if shipped.is_file() and shipped.read_bytes() != path.read_bytes():
        return f"{path} differs from the file of that name in configs/{request.benchmark}"
    return ""


def _log_name(stem: str, is_derived: bool, is_forced: bool, is_modified: bool) -> str:
    """Return the name of the config in the log. See Choice.log_name.

    `stem`: may have suffixes already, if a run is continued.
    """
    suffixes = []
    if is_derived:
        suffixes.append("+derived")
    elif is_forced:
        suffixes.append("+forced")
    if is_modified:
        suffixes.append("+modified")
    return f"{stem}{''.join(each for each in suffixes if each not in stem)}.toml"


def _kind_name(kind: GpuKind | None) -> str:
    return kind.name if kind else "CPU"
