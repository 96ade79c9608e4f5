"""Config for a number or kind of GPUs that has no file in configs/. A file always takes precedence.

Everything that decides convergence comes from the nearest file. On several nodes, it comes from the
reference's runs (RCPs), at the global batch that reaches the target first. Settings that memory
decides are computed: the micro-batch, at most the file's, and the options that save memory. The
cheapest option comes first: a smaller micro-batch, then layers recomputed or offloaded. The last
option is a storage of the frozen base that takes less memory. With it, the other options are tried
again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from common.benchmarks import divisions, rules_of
from common.config import FROZEN_BASE_STORAGE, ConfigFile, RunConfig
from common.errors import ConfigError, OutOfMemory
from common.estimate.links import NETWORK_GB_S
from common.estimate.memory import Memory, fewest_layers, fits, gib, memory_peak, usable_bytes
from common.estimate.step_time import estimate
from common.estimate.workload import Workload, benchmark_workload
from common.gpu_kinds import KINDS, GpuKind
from common.machine.hardware import MAX_GPUS, config_name, config_names, config_path
from common.records import rcp

Made = TypeVar("Made")
NAME = re.compile(r"(\w+)_([1-9]\d*)x([1-9]\d*)")  # MI300X_2x8, for example: 2 nodes of 8
# GPUs on which torch._scaled_mm multiplies FP8: AMD from gfx942 on, NVIDIA from compute capability
# 8.9 on.
WITH_FP8 = ("gfx94", "gfx95", "gfx12", "sm_89", "sm_9", "sm_10", "sm_12")
SAVING_LAYERS = ("recompute_layers", "offload_layers")  # keys whose value is a number of layers
# Most tokens of a micro-batch of a fitted config. More make no step faster: matrix products are
# large enough.
MICRO_BATCH_TOKENS = 32_768
CPU_MICRO_BATCH_TOKENS = 4_096
# Environment of a fitted config, as in configs/: the reasons are in the comments there.
CPU_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
AMD_NODES_ENV = {"NCCL_NCHANNELS_PER_NET_PEER": "32"}  # on several nodes
NVIDIA_ENV = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_NVLS_ENABLE": "0"}
# Share of a GPU's memory that a derived config may use, since no run has tried it. torch reserves
# up to 5 % more than it allocates if memory is available. `throughput llama` has no such
# margin: Qwen3 8B in bf16 on one H200 would recompute 19 instead of 13 layers with it.
HEADROOM = 0.96


def fit_to_machine(
    benchmark: str,
    config: RunConfig,
    kind: GpuKind | None,
    gpus: int,
    overrides: Mapping[str, str],
    layers: int = 0,
) -> tuple[RunConfig, str]:
    """Return a config of ANY_GPU on this machine, and a description of what was chosen.

    `kind`: None for a CPU. The micro-batches are the largest that fit, up to MICRO_BATCH_TOKENS;
    layers recompute or offload if micro-batches of one sequence do not fit. Raise ConfigError if
    the GPUs cannot share the global batch, OutOfMemory if no option fits.
    """
    per_node = gpus if kind else config.gpus_per_node
    work = _workload_of_layers(benchmark, config, layers)
    batch = config.global_batch_size
    sizes = _context_sizes(config, overrides, batch, work.sequence_length, per_node, config.nodes)
    if not sizes:
        raise _cannot_be_shared(benchmark, config, batch, per_node, config.nodes)

    def fit(size: int) -> tuple[RunConfig, str]:
        gpu = kind.name if kind else "CPU"
        shared = replace(config, gpu=gpu, gpus_per_node=per_node, context_parallel=size)
        return _fit_shared(benchmark, config, shared, work, kind, overrides)

    return _first_that_fits(sizes, fit)


def _fit_shared(
    benchmark: str,
    file: RunConfig,
    config: RunConfig,
    work: Workload,
    kind: GpuKind | None,
    overrides: Mapping[str, str],
) -> tuple[RunConfig, str]:
    """Return what `fit_to_machine` does for `file`, with the machine of `config`."""
    most_tokens = CPU_MICRO_BATCH_TOKENS if kind is None else MICRO_BATCH_TOKENS
    most = max(1, most_tokens * config.context_parallel // work.sequence_length)
    share = config.global_batch_size // config.data_ranks
    divisors = (size for size in range(min(most, share), 0, -1) if share % size == 0)
    evaluated = -(-work.eval_samples // config.data_ranks)
    largest = {"micro_batch_size": next(divisors), "eval_micro_batch_size": min(most, evaluated)}
    changes: dict[str, Any] = {key: size for key, size in largest.items() if key not in overrides}
    if kind is None:
        changes["env"] = CPU_ENV | config.env
        fitted = replace(config, **changes)
        text = f"fitted to a CPU in fp32: {_changes(file, fitted, overrides)}"
        # The format "bf16" means fp32 on a CPU (RunConfig.precision).
        return replace(fitted, linear="bf16"), text
    if not kind.arch.startswith(WITH_FP8):
        changes["linear"] = "bf16"
    if kind.vendor == "nvidia":
        changes["env"] = NVIDIA_ENV | config.env
    limit = replace(config, **changes)
    fitted = _fit_to_gpus(benchmark, limit, work, kind, overrides)
    where = f"{config.gpus_per_node} x {kind.name}"
    return fitted, f"fitted to {where}: {_changes(file, fitted, overrides)}"


def _fit_to_gpus(
    benchmark: str, limit: RunConfig, work: Workload, kind: GpuKind, overrides: Mapping[str, str]
) -> RunConfig:
    """Return the config `limit` with the largest micro-batch, and the options, with which it fits.

    `limit`: config whose micro-batch is the upper limit. Raise OutOfMemory if no option fits.
    """
    kept = {**overrides}
    if work.lora_rank:
        kept["recompute_layers"] = "0"
        limit = replace(limit, frozen_base="replicated")  # type: ignore[call-arg]
    else:
        kept |= {"offload_layers": "0", "frozen_base": ""}
    start = limit if "micro_batch_size" in overrides else replace(limit, micro_batch_size=1)
    return _fitting_with_headroom(benchmark, start, limit, work, kind, kept)


def _fitting_with_headroom(
    benchmark: str,
    start: RunConfig,
    limit: RunConfig,
    work: Workload,
    kind: GpuKind,
    overrides: Mapping[str, str],
) -> RunConfig:
    """Return the config of `fitting`, with HEADROOM if any option allows that.

    Raise OutOfMemory if no option fits.
    """
    roomy = replace(kind, memory_bytes=int(kind.memory_bytes * HEADROOM))
    config = fitting(start, limit, work, roomy, overrides)
    if config is None:
        config = fitting(start, limit, work, kind, overrides)
    if config is None:
        raise _does_not_fit(benchmark, start, work, kind)
    return config


def _context_sizes(
    config: RunConfig,
    overrides: Mapping[str, str],
    batch: int | None,
    sequence_length: int,
    gpus: int,
    nodes: int,
) -> list[int]:
    """Return the numbers of a node's GPUs that could share each sequence, the fewest first.

    A number that the config or --set gives is the only one. `batch`: sequences that the groups of
    GPUs must divide among them, or None. `gpus`: of one node.
    """
    own = _number_in(overrides, "context_parallel", config.context_parallel)
    if own > 1 or "context_parallel" in overrides:
        return [max(1, own)]
    return [
        size
        for size in range(1, gpus + 1)
        if gpus % size == 0
        and (size == 1 or sequence_length % (2 * size) == 0)
        and (batch is None or batch % (nodes * gpus // size) == 0)
    ]


def _number_in(overrides: Mapping[str, str], key: str, otherwise: int) -> int:
    """Return the number that --set gives for `key`, or `otherwise`."""
    text = overrides.get(key, "")
    return int(text) if text.isdecimal() and int(text) else otherwise


def _first_that_fits(sizes: Sequence[int], make: Callable[[int], Made]) -> Made:
    """Return `make` of the first number of GPUs that does not run out of memory.

    Raise the OutOfMemory of the first one if all do.
    """
    failure: OutOfMemory | None = None
    for size in sizes:
        try:
            return make(size)
        except OutOfMemory as error:
            failure = failure or error
    assert failure is not None, "there is a number of GPUs"
    raise failure


def _workload_of_layers(benchmark: str, config: RunConfig, layers: int) -> Workload:
    """Return the benchmark's workload with the first `layers` layers of its model, 0 for all."""
    work = benchmark_workload(benchmark, config)
    if not layers:
        return work
    return replace(work, shape=replace(work.shape, num_layers=layers))


def nearest_file(
    root: Path, benchmark: str, kind: GpuKind | None, gpus: int, nodes: int = 1
) -> Path:
    """Return the config file of the same GPU kind, or else of the most similar kind.

    A kind of the same vendor comes first, then one with similar memory. Among the files of a kind,
    the nearest number of nodes decides, then that of GPUs per node. `kind`: None for a CPU. Raises
    ConfigError if no file exists.
    """
    if kind is None:
        return config_path(root, benchmark, config_name(None, 1))

    def distance(name: str) -> tuple:
        gpu, of_nodes, count = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        other = KINDS[gpu]
        return (
            gpu != kind.name,
            other.vendor != kind.vendor,
            abs(other.memory_bytes - kind.memory_bytes),
            abs(int(of_nodes) - nodes),
            abs(int(count) - gpus),
        )

    names = []
    for name in config_names(root, benchmark):
        match = NAME.fullmatch(name)
        if match and match[1] in KINDS:
            names.append(name)
    wanted = config_name(kind, gpus, nodes)
    return config_path(root, benchmark, min(names, key=distance, default=wanted))


def derive(
    benchmark: str,
    file: ConfigFile,
    kind: GpuKind | None,
    gpus: int,
    nodes: int = 1,
    layers: int = 0,
    network_gb_s: float = NETWORK_GB_S,
) -> tuple[RunConfig, str]:
    """Return a config of `file` for these GPUs, and a description of what was chosen.

    `kind`: None for a CPU. `gpus`: of one node. --set takes precedence over `gpus` and `nodes`.
    `layers`: number of the model's layers, 0 for all. `network_gb_s`: of one GPU between nodes.

    On several nodes the global batch is the one that reaches the target first, with the learning
    rate, the warm-up and twice the sequences of the reference's runs. Benchmarks without such runs
    keep the file's batch. GPUs share sequences if there are fewer sequences than GPUs, or if no
    option fits otherwise.

    Raises ConfigError if the GPUs cannot share the global batch, OutOfMemory if no option fits.
    """
    given = file.config
    gpus = _number_in(file.overrides, "gpus_per_node", gpus)
    nodes = _number_in(file.overrides, "nodes", nodes)
    changes = _start(benchmark, given, kind, gpus, nodes)
    configs = []
    for keys in _keys_of_batches(benchmark, file, gpus, nodes):

        def make(size: int, keys: dict[str, int | float] = keys) -> RunConfig:
            start = file.changed(changes | keys | {"context_parallel": size})
            work = _workload_of_layers(benchmark, start, layers)
            if kind is None:
                return next(_candidates(start, given, file.overrides))[0]
            return _fitting_with_headroom(benchmark, start, given, work, kind, file.overrides)

        batch = int(keys.get("global_batch_size", given.global_batch_size))
        length = rules_of(benchmark, given).sequence_length
        sizes = _context_sizes(given, file.overrides, batch, length, gpus, nodes)
        configs.append(_first_that_fits(sizes, make))
    config = configs[0]
    if len(configs) > 1:
        config = min(configs, key=lambda each: _rank_of(benchmark, each, kind, network_gb_s))
    where = f"{gpus} x {config.gpu}"
    text = f"from {file.path.name}: {_changes(given, config, file.overrides)}"
    rates = rules_of(benchmark, config).reference_learning_rates
    if nodes > 1:
        where = f"{nodes} nodes of {where}"
        if rates and "opt_base_learning_rate" not in file.overrides:
            text += f"; the learning rate is {rcp.at_batch(rates, config.global_batch_size)[1]}"
    return config, f"derived for {where} {text}"


def _keys_of_batches(
    benchmark: str, file: ConfigFile, gpus: int, nodes: int
) -> list[dict[str, int | float]]:
    """Return, for each global batch that these GPUs could use, the keys that depend on it.

    On one node, and without reference runs, the file's other keys hold. Raise
    ConfigError if the GPUs cannot share the file's global batch, or the one of --set.
    """
    given = file.config
    rules = rules_of(benchmark, given)
    length = rules.sequence_length
    by_reference = nodes > 1 and bool(rules.reference_runs)
    text = file.overrides.get("global_batch_size", "")
    if by_reference and not text:
        batches: set[int] = set()
        for size in _context_sizes(given, file.overrides, None, length, gpus, nodes):
            batches.update(rcp.batches(rules, max(1, nodes * gpus // size)))
        return [rcp.keys_at(rules, batch) for batch in sorted(batches)]
    batch = text or str(given.global_batch_size)
    if batch.isdecimal() and not _context_sizes(
        given, file.overrides, int(batch), length, gpus, nodes
    ):
        raise _cannot_be_shared(benchmark, given, int(batch), gpus, nodes)
    if not batch.isdecimal():
        return [{}]
    return [rcp.keys_at(rules, int(batch)) if by_reference else {"global_batch_size": int(batch)}]


def _rank_of(
    benchmark: str, config: RunConfig, kind: GpuKind | None, network_gb_s: float
) -> tuple[int, float]:
    """Return a key that orders the configs of several global batches, the best one first.

    It is the minutes to the target. On GPUs whose speed is unknown, it is the number of GPUs that
    share a sequence, and then the sequences to the target.
    """
    samples, _ = rcp.samples_to_target(rules_of(benchmark, config), config.global_batch_size)
    if kind is None or not (kind.efficiency and kind.description):
        return config.context_parallel, samples
    work = benchmark_workload(benchmark, config)
    minutes = estimate(config, work, kind, samples, network_gb_s).minutes
    assert minutes is not None, "the number of sequences is given"
    return 0, minutes


def miniature_on_gpu(file: ConfigFile, kind: GpuKind) -> tuple[RunConfig, str]:
    """Return the miniature of `file` for one GPU of `kind`, and a description of it.

    --set may give another number of GPUs. Linear layers are in FP8 where the GPU multiplies FP8,
    otherwise in bf16. Raise ConfigError for overrides that request FP8 on a GPU without it.
    """
    linear = "fp8" if kind.arch.startswith(WITH_FP8) else "bf16"
    config = file.changed(moved(file.config, kind, 1, linear))
    config.require(
        linear == "fp8" or not config.linear_format.in_fp8,
        "linear",
        f"{kind.name} ({kind.arch}) does not multiply FP8",
        "leave out --set linear=..., which selects bf16",
    )
    return (
        config,
        f"the miniature for {config.gpus_per_node} x {kind.name} from {file.path.name}: "
        f"linear {config.linear}",
    )


def _start(
    benchmark: str, file: RunConfig, kind: GpuKind | None, gpus: int, nodes: int
) -> dict[str, Any]:
    """Return the keys of the file that change for these GPUs, with micro-batch 1.

    No layer is offloaded or recomputed. The evaluation's micro-batch is the largest one, up to the
    file's, that needs no padding.
    """
    eval_samples = benchmark_workload(benchmark, file).eval_samples
    sizes = range(file.eval_micro_batch_size, 0, -1)
    unpadded = (size for size in sizes if eval_samples % (size * nodes * gpus) == 0)
    has_fp8 = kind is None or kind.arch.startswith(WITH_FP8)
    changes: dict[str, Any] = {
        **moved(file, kind, gpus, file.linear if has_fp8 else "bf16", nodes),
        "micro_batch_size": 1,
        "eval_micro_batch_size": next(unpadded, 1),
    }
    if nodes > 1 and kind is not None and kind.vendor == "amd":
        changes["env"] = AMD_NODES_ENV | file.env
    return changes | {key: 0 for key in (*SAVING_LAYERS, "transposed_layers") if file.has_key(key)}


def moved(
    file: RunConfig, kind: GpuKind | None, gpus: int, linear: str, nodes: int = 1
) -> dict[str, str | int]:
    """Return the keys of `file` that change with the GPUs' number and kind and with `linear`.

    `kind`: None for a CPU. `gpus`: of one node. `linear`: format of the linear layers.
    """
    changes: dict[str, str | int] = {"nodes": nodes, "gpus_per_node": gpus, "linear": linear}
    if kind is not None:
        changes["gpu"] = kind.name
    if gpus == 1 or nodes > 1 or (kind is not None and kind.vendor != KINDS[file.gpu].vendor):
        # Copy engines need a second GPU of the same node, and were run on NVIDIA only.
        changes["reduce_scatter"] = "nccl"
    if linear == "bf16":
        changes["offload_layers"] = 0
        if file.frozen_base == "replicated_both":
            changes["frozen_base"] = "replicated"  # only FP8 has a transposed copy
    return {key: value for key, value in changes.items() if file.has_key(key)}


def _candidates(
    start: RunConfig, limit: RunConfig, overrides: Mapping[str, str]
) -> Iterator[list[RunConfig]]:
    """Yield the configs of each storage of a frozen base, the fastest storage first.

    The configs of a storage differ in their micro-batch, the largest first.
    """
    share = start.global_batch_size // start.data_ranks
    sizes: Sequence[int] = range(limit.micro_batch_size, 0, -1)
    if "micro_batch_size" in overrides:
        sizes = [start.micro_batch_size]
    storages: list[dict] = [{}]
    if start.has_key("frozen_base") and "frozen_base" not in overrides:
        fastest = FROZEN_BASE_STORAGE.index(start.frozen_base)
        storages = [{"frozen_base": storage} for storage in FROZEN_BASE_STORAGE[fastest::-1]]
    for storage in storages:
        yield [
            replace(start, micro_batch_size=size, **storage) for size in sizes if share % size == 0
        ]


def fitting(
    start: RunConfig, limit: RunConfig, work: Workload, kind: GpuKind, overrides: Mapping[str, str]
) -> RunConfig | None:
    """Return the first of `_candidates` that fits, None if nothing does.

    If none of a storage's candidates fits, its smallest is tried with as few layers offloaded or
    recomputed as possible. `start`: config without such layers. `limit`: config whose micro-batch
    is the upper limit. `overrides`: keys that must not change.
    """
    for configs_of_storage in _candidates(start, limit, overrides):
        for config in configs_of_storage:
            if fits(memory_peak(config, work), kind):
                return config
        smallest = configs_of_storage[-1]
        if "eval_micro_batch_size" not in overrides:
            smallest = replace(smallest, eval_micro_batch_size=1)
        for key in SAVING_LAYERS:
            if key in overrides:
                continue
            layers = fewest_layers(smallest, work, kind, key)
            if layers is not None:
                return replace(smallest, **{key: layers})  # type: ignore[arg-type]
    return None


def _changes(file: RunConfig, config: RunConfig, overrides: Mapping[str, str]) -> str:
    """Describe the micro-batch and the differences from the file."""
    omitted = ("gpu", "nodes", "gpus_per_node", "env", *overrides)
    changes = []
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        if name in omitted:
            continue
        if name == "micro_batch_size" or value != getattr(file, name):
            changes.append(f"{name} {'none' if value == '' else value}")
    return ", ".join(changes) or "nothing else changes"


def _cannot_be_shared(
    benchmark: str, config: RunConfig, batch: int, gpus: int, nodes: int
) -> ConfigError:
    """Return the error for a global batch that is not a multiple of the number of GPUs.

    It names the next larger batch that is one, with the learning rate of the RCPs. `gpus`: of one
    node.
    """
    ranks = nodes * gpus
    larger = -(-batch // ranks) * ranks
    do = f"use --set global_batch_size={larger} and its learning rate"
    with contextlib.suppress(ConfigError):  # the reference has no such batch
        rates = rules_of(benchmark, config).reference_learning_rates
        rate, source = rcp.at_batch(rates, larger)
        do = f"use --set global_batch_size={larger} --set opt_base_learning_rate={rate:.3g} "
        do += f"({source})"
    if nodes == 1:
        counts = [str(count) for count in range(1, MAX_GPUS + 1) if batch % count == 0]
        do = f"set DGXNGPU to {' or '.join(counts)}, or {do}"
    why = "all must get the same number of sequences"
    if gpus < config.gpus_per_node:
        why += (
            f"; a whole node has {config.gpus_per_node}: if fewer are visible, dmesg says whether "
            "one has fallen off the bus"
        )
    unit = "processes" if config.gpu == "CPU" else "GPUs"
    return ConfigError(
        f"{ranks} {unit} cannot share a global batch of {batch}",
        why,
        do,
    )


def _does_not_fit(benchmark: str, start: RunConfig, work: Workload, kind: GpuKind) -> OutOfMemory:
    """Return the error, with the memory that all saving options need and with what would fit."""
    gpus = start.gpus_per_node
    all_layers = work.shape.num_layers

    def thrifty(layers: int) -> dict:
        options = {
            "recompute_layers": 0 if work.lora_rank else layers,
            "offload_layers": layers if work.lora_rank and start.linear_format.in_fp8 else 0,
            "frozen_base": "sharded",
        }
        return {key: value for key, value in options.items() if start.has_key(key)}

    def needed(count: int, layers: int) -> Memory:
        config = replace(start, gpus_per_node=count, eval_micro_batch_size=1, **thrifty(layers))
        return memory_peak(config, replace(work, shape=replace(work.shape, num_layers=layers)))

    tried = {"micro_batch_size": start.micro_batch_size, **thrifty(all_layers)}
    options = ", ".join(f"{key} {value}" for key, value in tried.items())
    needed_gib = gib(needed(gpus, all_layers).needed)
    sizes = f"{needed_gib:.1f} GiB of {gib(usable_bytes(kind)):.1f} usable"
    share = start.global_batch_size * start.context_parallel // start.micro_batch_size
    counts = (
        n
        for n in range(gpus + 1, MAX_GPUS + 1)
        if share % n == 0 and fits(needed(n, all_layers), kind)
    )
    fewer = (n for n in range(all_layers - 1, 0, -1) if fits(needed(gpus, n), kind))
    ways = []
    if enough := next(counts, None):
        ways.append(f"use {enough} GPUs")
    if layers := next(fewer, None):
        ways.append(f"measure fewer layers (bench --layers {layers})")
    if "miniature" in divisions(benchmark):
        ways.append("run the miniature with --device cpu")
    do = "; or ".join(ways or ["use GPUs with more memory"])
    return OutOfMemory(
        f"{benchmark} does not fit into {gpus} x {kind.name}",
        f"with {options} each GPU needs {sizes}",
        do,
    )
