"""Job: the benchmark, config, directories and node of one command, and how to start its ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from common import engines
from common.benchmarks import Rules, rules_of
from common.command_line import refuse_without
from common.config import RunConfig
from common.data.preparation import damage_of, require_as_recorded
from common.errors import ConfigError, DataError, WeightsError, file_of
from common.machine.hardware import Probe
from common.machine.host import cpu_count
from common.paths import ROOT, data_folder, results_folder
from common.records.run_record import RunRecord
from common.records.trackers import require_installed
from common.terminal import plural, print_stderr, shown
from common.training.arguments import data_of_run, run_to_continue
from common.training.continuation import (
    CHECKPOINT,
    CHECKPOINTS_FOLDER,
    ENGINES,
    SAVE,
    SavedCheckpoint,
    newest,
    parse_interval,
    require_possible,
    require_same,
    require_same_base,
    require_same_data,
)
from launch.diagnosis import ended_normally, read_result
from launch.processes.ranks import ONE_NODE, cpus_of_ranks, rank_environment, ranks_command
from launch.processes.supervise import GRACE_S, run_module
from launch.selection.check import Choice
from launch.selection.choose import choose
from launch.selection.machine import Machine
from launch.selection.request import Request, step_nodes

AUTO = Path("auto")  # value of --continue: find the run
NO_CHECKPOINT = "none"  # value of --checkpoint
PORT = 29500  # torchrun's default, below the range of ephemeral ports


@dataclass(frozen=True)
class Node:
    """This node's number, the number of nodes, and the address of node 0."""

    rank: int = 0
    count: int = 1
    address: str = "localhost"
    port: int = PORT


def node_from(environment: Mapping[str, str], count: int) -> Node:
    """Return the node that NODE_RANK (or SLURM_NODEID), MASTER_ADDR and MASTER_PORT describe.

    Raise ConfigError if they do not fit `count` nodes.
    """
    rank = environment.get("NODE_RANK", "")
    variable = "NODE_RANK"
    if not rank and environment.get("SLURM_NODEID"):
        started = step_nodes(environment)
        if started not in (0, count):
            raise ConfigError(
                f"the job has {plural(started, 'node')}, but the config is for {count}",
                "each node of the job runs one launcher, and they train together",
                f"submit it with -N {count}, or choose a config by DGXSYSTEM=<GPU>_{started}x8",
            )
        rank = environment["SLURM_NODEID"]
        variable = "SLURM_NODEID"
    if not rank and count == 1:
        rank = "0"
    address = environment.get("MASTER_ADDR", "")
    port = environment.get("MASTER_PORT") or str(PORT)
    if not rank.isdecimal() or int(rank) >= count:
        nodes = plural(count, "node")
        what = f"the config is for {nodes}, but NODE_RANK is not set"
        if rank:
            what = f"{variable}={rank}, but the config is for {nodes}"
        do = "unset NODE_RANK, or use a config with more nodes"
        if variable == "SLURM_NODEID":
            do = "start the job on as many nodes as the config has, or use another config"
        elif count > 1:
            do = f"set it to a different number on each node, from 0 to {count - 1}, or use run.sub"
        raise ConfigError(what, "each node needs a number of its own", do)
    if count == 1:
        return Node()
    if not address:
        raise ConfigError(
            f"the config is for {count} nodes, but MASTER_ADDR is not set",
            "all nodes connect to node 0",
            "set it to the host name of node 0, or use run.sub",
        )
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError(
            f"MASTER_PORT={port} is not a valid port",
            "this port and the next one are used",
            "choose one below 65535, or unset it",
        )
    return Node(int(rank), count, address, int(port))


def note_on_one_node(environment: Mapping[str, str]) -> str:
    """Return a note on variables of several nodes that a run on one node ignores, "" for none."""
    names = [name for name in ("MASTER_ADDR", "NODE_RANK") if environment.get(name)]
    # run.sub sets MASTER_ADDR for any number of nodes.
    if not names or environment.get("SLURM_JOB_ID"):
        return ""
    verb = "is" if len(names) == 1 else "are"
    return (
        f"the config is for 1 node, so {' and '.join(names)} {verb} not used; "
        "DGXSYSTEM or --config selects a config for several nodes"
    )


@dataclass(frozen=True)
class Job:
    """Settings that all runs of one command share."""

    benchmark: str
    selection: Choice
    machine: Machine
    data_dir: Path
    log_dir: Path
    environment: Mapping[str, str]
    node: Node
    save: bool  # save the trained model after the clock has stopped
    checkpoint: str = ""  # when to save the training state, as given with --checkpoint
    continues: SavedCheckpoint | None = None  # checkpoint that training resumes from
    grace_s: float = GRACE_S  # from a signal to SIGKILL
    trackers: tuple[str, ...] = ()  # names of common/records/trackers.py
    cpus: tuple[str, ...] = ()  # CPUs of each rank of this node; empty: ranks may use all CPUs

    @property
    def config(self) -> RunConfig:
        """The config of the selection."""
        return self.selection.config

    @property
    def rules(self) -> Rules:
        """The benchmark's rules for this config."""
        return rules_of(self.benchmark, self.config)

    @property
    def gpus(self) -> Probe:
        """The visible GPUs of this node."""
        return self.machine.probe

    @property
    def run_gpus(self) -> Probe:
        """The GPUs of this node that the ranks use: rank k uses the k-th visible one.

        There are none in a run on a CPU.
        """
        if self.selection.device != "cuda":
            return Probe("none")
        return replace(self.gpus, devices=self.gpus.devices[: self.config.gpus_per_node])

    @property
    def engines(self) -> engines.EngineChoices:
        """Engines that the ranks will use, given the installed packages.

        Raises ConfigError if the environment or the config pins an engine that cannot be used.
        """
        on_gpus = self.selection.device == "cuda" and self.gpus.devices
        gpu = self.gpus.devices[0].arch if on_gpus else ""
        environment = {**self.environment, **self.config.env}
        operations = engines.operations(self.config.linear_format.in_fp8)
        return engines.choose_engines(gpu, environment, self.config.precision, operations)

    def pinning(self, pins: Mapping[str, str]) -> Job:
        """Return the job with these variables, unless the user or the config sets them."""
        return replace(self, environment={**pins, **self.environment})

    @property
    def data_files(self) -> list[Path]:
        """Paths of the files that a run reads, under the data directory."""
        return [self.data_dir / name for name in self.rules.recorded_files(self.data_dir)]


def job_from(benchmark: str, options: argparse.Namespace, *ignored: str) -> Job:
    """Return the job that `options` and the environment describe.

    A run that --continue names gives its config, its options --checkpoint and --save, and its
    directories of data and results, unless options or the environment set them.

    `ignored`: subjects of objections to the config that do not matter (`Choice.require`).

    Raises the errors of `choose`, and the first other objection. Raises ConfigError for a wrong
    NODE_RANK, for --save if the benchmark has no model to save, and for --checkpoint and --continue
    if it has no checkpoints. Raises ConfigError if the run that --continue names has no checkpoint,
    and WeightsError if the checkpoint's facts are damaged.
    """
    environment = os.environ
    save = getattr(options, "save", False)
    named = getattr(options, "continues", None)
    continues = None
    if named and named != AUTO:
        continues = newest(run_to_continue(named).absolute())
    request = Request.of(benchmark, options, environment, continues)
    machine = Machine.of(environment, options.device, getattr(options, "gpu_kind", None) or "")
    selection = choose(request, machine)
    selection.require(*ignored)
    if save and not rules_of(benchmark, selection.config).saves_model:
        raise ConfigError(
            f"--save does not apply to {benchmark}",
            "it trains no weights of its own, or always saves them",
            "leave out --save",
        )
    checkpoint = _when_to_save(options, rules_of(benchmark, selection.config), continues)
    if checkpoint or named:
        require_possible(selection.config)
    if not checkpoint:
        refuse_without("--checkpoint", {"--grace": getattr(options, "grace", None)})
    data_dir, log_dir = directories(benchmark, selection.config, environment)
    if named == AUTO:
        _require_checkpoint_option(checkpoint)
        continues = last_unfinished(log_dir / benchmark, benchmark, selection.config)
    elif continues:
        save = save or continues.facts.get(SAVE) is True
        data_dir, log_dir = _directories_of(continues.run, environment, data_dir, log_dir)
    node = node_from(environment, selection.config.nodes)
    cpus: tuple[str, ...] = ()
    if selection.device == "cuda":
        cpus = cpus_of_ranks(machine.probe, selection.config.gpus_per_node)
    trackers = tuple(getattr(options, "track", ()))
    for name in trackers:
        require_installed(name)
    job = Job(
        benchmark=benchmark,
        selection=selection,
        machine=machine,
        data_dir=data_dir,
        log_dir=log_dir,
        environment=environment,
        node=node,
        save=save,
        checkpoint=checkpoint,
        continues=continues,
        grace_s=getattr(options, "grace", None) or GRACE_S,
        trackers=trackers,
        cpus=cpus,
    )
    if continues and selection.device == "cuda":
        job = job.pinning(engines.pins(continues.facts[ENGINES]))
    return job


def _when_to_save(
    options: argparse.Namespace, rules: Rules, continues: SavedCheckpoint | None
) -> str:
    """Return the value of --checkpoint, "" for none.

    Its default is that of the run that is continued, or else of the rules.
    """
    given = getattr(options, "checkpoint", NO_CHECKPOINT)
    if given == NO_CHECKPOINT:
        return ""
    if given is None:
        before = continues.facts.get(CHECKPOINT) if continues else None
        given = before or rules.checkpoint
    else:
        parse_interval(given)
    return given


def _require_checkpoint_option(checkpoint: str) -> None:
    """Raise ConfigError if `checkpoint`, the value of --checkpoint, is empty."""
    if not checkpoint:
        raise ConfigError(
            "--continue auto without --checkpoint",
            "a run that saves nothing cannot be continued",
            "add --checkpoint, for example --checkpoint 600s",
        )


def last_unfinished(folder: Path, benchmark: str, config: RunConfig) -> SavedCheckpoint | None:
    """Return the checkpoint that --continue auto resumes from, None for a new run.

    It is the furthest one of the newest run in `folder` and the runs that it continued, directly or
    not, unless one of them reached its target and saved what it was to save. A run whose chain has
    no checkpoint of this config is passed over. Raises WeightsError if a checkpoint is damaged.
    """
    always_saves = not rules_of(benchmark, config).saves_model
    runs = {run.folder.name: run for run in RunRecord.in_folder(folder)}
    links = {name: run.continues for name, run in runs.items()}
    for name in reversed(runs):
        chain = [runs[each] for each in _chain(name, links) if each in runs]
        saved = _checkpoints_of([run.folder for run in chain], benchmark, config)
        if not saved:
            continue
        saves = always_saves or any(checkpoint.facts.get(SAVE) for checkpoint in saved)
        reached = [run.folder for run in chain if read_result(run.path).stands]
        if any(ended_normally(folder) or not saves for folder in reached):
            return None
        return max(saved, key=lambda checkpoint: checkpoint.facts["step"])
    return None


def _chain(run: str, links: Mapping[str, str]) -> list[str]:
    """Return `run`, the runs that it continued, and those that continued it.

    `links`: run -> the run that it continued, or "".
    """
    chain = []
    name = run
    while name and name not in chain:
        chain.append(name)
        name = links.get(name, "")
    # If the clock was set back, a run may seem older than the run that it continued.
    later = [run]
    while later:
        later = [name for name, before in links.items() if before in later and name not in chain]
        chain += later
    return chain


def _checkpoints_of(
    runs: Iterable[Path], benchmark: str, config: RunConfig
) -> list[SavedCheckpoint]:
    """Return the checkpoints of this config. Raises WeightsError if a checkpoint is damaged."""
    found = []
    for run in runs:
        if not any((run / CHECKPOINTS_FOLDER).glob("step_*[0-9]")):
            continue
        checkpoint = newest(run)
        with contextlib.suppress(ConfigError):
            require_same(*checkpoint, benchmark, checkpoint.facts["seed"], config)
            found.append(checkpoint)
    return found


def _directories_of(
    run_dir: Path, environment: Mapping[str, str], data_dir: Path, log_dir: Path
) -> tuple[Path, Path]:
    """Return the directories of data and results of the run in `run_dir`, if the ledger has them.

    DATADIR and LOGDIR take precedence. `data_dir`, `log_dir`: returned otherwise.
    """
    if not environment.get("DATADIR"):
        data_dir = data_of_run(run_dir) or data_dir
    if not environment.get("LOGDIR") and RunRecord.in_directory(run_dir).start:
        log_dir = run_dir.resolve().parent.parent
    return data_dir, log_dir


def directories(
    benchmark: str, config: RunConfig | None, environment: Mapping[str, str]
) -> tuple[Path, Path]:
    """Return the directories of data and results: DATADIR and LOGDIR, or their defaults.

    The miniature reads data/<benchmark>-miniature in the repository, where a run may build the
    data. It reads DATADIR only if all of its files are already there. A run never writes to
    DATADIR. `config`: None if no config is selected.
    """
    data = data_folder(benchmark, environment)
    if config is not None and config.miniature:
        files = rules_of(benchmark, config).data_files
        if not environment.get("DATADIR") or not all((data / name).is_file() for name in files):
            data = ROOT / "data" / f"{benchmark}-miniature"
    return data.absolute(), results_folder(environment).absolute()


def ensure_data(job: Job) -> None:
    """Make sure that a run has data and weights. Build the miniature's if necessary.

    Raises DataError if data are missing, damaged or too short and cannot be built, and WeightsError
    if the weights are missing. For a full benchmark, the error says how to get them. Raises
    ConfigError if data or a frozen base differ from the record of the continued run.
    """
    _ensure_data_files(job)
    job.rules.require_data(job.config, job.data_dir)
    _require_weights(job)
    if job.continues:
        folder, facts = job.continues
        require_same_data(folder, facts, job.data_dir, job.rules.recorded_files(job.data_dir))
        base = job.rules.frozen_weights_folder(job.config, job.data_dir, job.environment)
        if base:
            require_same_base(folder, facts, base)


def _ensure_data_files(job: Job) -> None:
    """Make sure that the data of a run can be read. Raises DataError. See `ensure_data`."""
    missing = _missing_data_files(job)
    prepare = f"./run_and_time.sh {job.benchmark} prepare"
    if not job.config.miniature:
        if missing:
            why = f"{len(missing)} of {len(job.data_files)} data files are missing"
            do = f"set DATADIR, or see {prepare} --help"
            raise DataError(f"missing data file: {missing[0]}", why, do)
        for name in job.rules.manifests:
            vocab_size = job.rules.shape.vocab_size
            require_as_recorded(job.data_dir / name, job.data_files, vocab_size, prepare)
        return
    damage = "" if missing else _damage(job)
    if not missing and not damage:
        return
    is_given = data_folder(job.benchmark, job.environment).absolute() == job.data_dir
    if damage and is_given and job.environment.get("DATADIR"):
        do = f"{prepare} miniature --data-dir {job.data_dir}, or unset DATADIR"
        raise DataError(
            f"{job.data_dir} is damaged", f"{damage}; a run never writes to DATADIR", do
        )
    if damage:
        print_stderr(f"rebuilding the miniature's data in {shown(job.data_dir)}: {damage}")
    _build_miniature_data(job, prepare)


def _require_weights(job: Job) -> None:
    """Raise WeightsError if the folder that the run starts from has no safetensors files.

    The ranks check the files before they load them.
    """
    rules = job.rules
    folder = rules.weights_folder(job.config, job.data_dir, job.environment)
    if folder is None or any(folder.glob("*.safetensors")):
        return
    raise WeightsError(
        f"missing weights: {folder} has no safetensors files",
        "the run starts from the weights in this folder",
        rules.missing_weights_help,
    )


def _missing_data_files(job: Job) -> list[Path]:
    """Return the data files that do not exist.

    Raises DataError if the existence of a file cannot be checked. If all exist, raises DataError if
    one cannot be opened.
    """
    try:
        missing = [path for path in job.data_files if not path.is_file()]
        if not missing:
            for path in job.data_files:
                path.open("rb").close()
    except OSError as error:
        raise DataError(
            f"{file_of(error)} cannot be read",
            error.strerror or str(error),
            "let this user read the files and enter their directories, or set DATADIR",
        ) from error
    return missing


def _build_miniature_data(job: Job, prepare: str) -> None:
    """Run `prepare miniature` for the data directory. Raises DataError if that fails.

    `prepare`: the user's command, for the error.
    """
    code = run_module([f"{job.benchmark}.prepare", "miniature", "--data-dir", str(job.data_dir)])
    if code or not all(path.is_file() for path in job.data_files) or _damage(job):
        raise DataError(
            "the miniature's data could not be built",
            "see the message above",
            f"try {prepare} miniature --data-dir DIR",
        )


def _damage(job: Job) -> str:
    """Describe the first damage of the miniature's data by their manifests, "" if there is none."""
    for name in job.rules.manifests:
        manifest = job.data_dir / name
        damage = damage_of(manifest) if manifest.is_file() else ""
        if damage:
            return f"{manifest}: {damage}"
    return ""


def torchrun_command(job: Job, folder: Path, arguments: list[str]) -> list[str]:
    """Return the torchrun command that starts `arguments` (-m MODULE ...) on the job's ranks.

    `folder`: where torchrun writes its log. Several nodes use the static rendezvous, since rank 0
    must be on node 0 and the c10d rendezvous numbers nodes by host name.
    """
    config = job.config
    node = job.node
    rendezvous = ONE_NODE
    if config.nodes > 1:
        rendezvous = ["--nnodes", str(config.nodes), "--rdzv-backend", "static"]
        rendezvous += ["--master-addr", node.address, "--master-port", str(node.port)]
        rendezvous += ["--node-rank", str(node.rank)]
    return ranks_command(folder, config.gpus_per_node, arguments, rendezvous, job.cpus)


def trainer_command(job: Job, run_dir: Path, seed: int) -> list[str]:
    """Return the torchrun command of a run in `run_dir`."""
    arguments = ["--run-dir", str(run_dir), "--data-dir", str(job.data_dir)]
    arguments += ["--config-name", job.selection.log_name]
    arguments += ["--seed", str(seed), "--device", job.selection.device]
    if job.save:
        arguments.append("--save")
    if job.checkpoint:
        arguments += ["--checkpoint", job.checkpoint]
    if job.continues:
        arguments += ["--continue", str(job.continues.run)]
    return torchrun_command(job, run_dir, ["-m", f"{job.benchmark}.train", *arguments])


def trainer_environment(job: Job, cleared: str) -> dict[str, str]:
    """Return the environment of the trainer: the user's variables, the config's [env] and others.

    The config's [env] takes precedence over the user's variables, because it is part of what is
    measured. `cleared`: how the page cache was cleared, for CACHE_CLEARED.
    """
    config = job.config
    for name, value in config.env.items():
        if job.environment.get(name, value) != value:
            print_stderr(f"note: {name}={value} from the config replaces {job.environment[name]}")
    recorder = {}
    threads = max(1, cpu_count() // config.gpus_per_node)
    if job.selection.device == "cuda":
        # Keep records of 2,000 collectives, from which a hang is diagnosed.
        recorder = {"TORCH_FR_BUFFER_SIZE": "2000"}
        threads = 1
    return {
        **recorder,
        **rank_environment(job.environment, config.env, threads),
        "CACHE_CLEARED": cleared,
    }
