"""Settings that `tune` varies, and the values to try on this machine.

A candidate is a dict of changes to the base config. It names config keys or, otherwise, variables
in [env]. The value None removes a variable. Keys that decide convergence (global batch, learning
rate, ...) and `linear` never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from common import engines
from common.config import FROZEN_BASE_STORAGE, RunConfig
from common.errors import ConfigError
from common.estimate.memory import fewest_layers, fits, memory_peak
from common.estimate.step_time import estimate
from common.estimate.workload import Workload
from common.gpu_kinds import GpuKind
from launch.plan.derive_config import CPU_ENV, HEADROOM, SAVING_LAYERS

Value = str | int | None
Changes = dict[str, Value]

# A memory candidate is not tried if `plan` expects its step to take more than this many times as
# long as the fastest one's. A larger micro-batch gains less, and `plan` does not count it.
SLOWER_BY_PLAN = 1.15
EXPANDABLE = "expandable_segments:True"
# Variable -> values to try, None for unset, by vendor ("" for a CPU). Variables that prevent hangs
# or failures, such as HSA_NO_SCRATCH_RECLAIM and NCCL_NVLS_ENABLE, are not listed: they stay.
VARIABLES: dict[str, dict[str, tuple[Value, ...]]] = {
    "": {name: (value, None) for name, value in CPU_ENV.items()},
    "nvidia": {"PYTORCH_CUDA_ALLOC_CONF": (EXPANDABLE, None)},
    # From AMD's documents and MLPerf configs.
    "amd": {"HIP_FORCE_DEV_KERNARG": ("1", None), "TORCH_BLAS_PREFER_HIPBLASLT": ("1", None)},
}
# Further variables for several GPUs. Their effect depends on how much communication overlaps with
# compute.
COLLECTIVE_VARIABLES: dict[str, dict[str, tuple[Value, ...]]] = {
    "": {},
    "nvidia": {"NCCL_MAX_NCHANNELS": (None, "16")},
    "amd": {
        # HIP's default is 4 queues. AMD's MLPerf configs set 2, which may put compute and RCCL into
        # one queue. In training on an MI355X, 8 queues were 7.5 % faster than 4 with one revision
        # of torchtitan, and equal with another (pytorch/torchtitan#4032).
        "GPU_MAX_HW_QUEUES": (None, "2", "4", "8"),
        # RCCL's default on gfx950 is 112 channels (ROCm/rccl#1596); ROCm's documentation sets 112
        # on an MI300X.
        "NCCL_MAX_NCHANNELS": (None, "32"),
        "NCCL_MIN_NCHANNELS": (None, "112"),
    },
}
STREAM_PRIORITY = "ZERO_STREAM_PRIORITY"  # common/sharding/zero.py


def changed(base: RunConfig, changes: Mapping[str, Value]) -> RunConfig:
    """Return `base` with `changes`. Raise ConfigError if the resulting config is not valid."""
    keys = {name: value for name, value in changes.items() if base.has_key(name)}
    env = {name: value for name, value in base.env.items() if name not in changes}
    for name, value in changes.items():
        if name not in keys and value is not None:
            env[name] = str(value)
    return replace(base, env=env, **keys)  # type: ignore[arg-type]


def value_of(config: RunConfig, name: str) -> Value:
    """Return the value of a key or, if there is no such key, of a variable of [env]."""
    return getattr(config, name) if config.has_key(name) else config.env.get(name)


def reduced(base: RunConfig, changes: Mapping[str, Value]) -> Changes:
    """Return the changes that differ from `base`, sorted by name."""
    return {name: value for name, value in sorted(changes.items()) if value_of(base, name) != value}


def is_possible(base: RunConfig, changes: Mapping[str, Value]) -> bool:
    """Return whether `base` with `changes` is a valid config."""
    try:
        changed(base, changes)
    except ConfigError:
        return False
    return True


# --- settings that decide the memory --------------------------------------------------------------


def memory_candidates(base: RunConfig, work: Workload, kind: GpuKind | None) -> list[Changes]:
    """Return candidates that use the memory in other ways and fit, the fastest by `plan` first.

    They differ in the micro-batch, the storage of a frozen base, the precision of AdamW's moments,
    and the numbers of layers that recompute or offload. `kind`: None for a CPU, whose memory is not
    limited here. The base config itself is left out.
    """
    candidates = _combinations(base, work, kind)
    if kind is None or not kind.efficiency:
        return candidates
    planned = []
    for index, changes in enumerate(candidates):
        step_s = estimate(changed(base, changes), work, kind, None).step_s
        planned.append((step_s, index))
    planned.sort()
    limit_s = SLOWER_BY_PLAN * planned[0][0] if planned else 0.0
    return [candidates[index] for step_s, index in planned if step_s <= limit_s]


def _combinations(base: RunConfig, work: Workload, kind: GpuKind | None) -> list[Changes]:
    """Return all combinations of the memory settings that fit, without the base config's own."""
    combinations: list[Changes] = []
    for storage in _storages(base, work):
        for size in _micro_batch_sizes(base):
            changes = {**storage, "micro_batch_size": size}
            if not is_possible(base, changes):
                continue
            for moments in _moments(changed(base, changes), work, kind):
                for layers in _layers(changed(base, changes | moments), work, kind):
                    combination = reduced(base, changes | moments | layers)
                    if combination and combination not in combinations:
                        combinations.append(combination)
    return combinations


def _storages(base: RunConfig, work: Workload) -> list[Changes]:
    """Return the ways to store a frozen base, the fastest first. One GPU cannot shard it."""
    if not (work.lora_rank and base.has_key("frozen_base")):
        return [{}]
    fastest_first = list(FROZEN_BASE_STORAGE[::-1])
    if base.gpus_per_node == 1:
        on_one_gpu = ("replicated_both", base.frozen_base)
        fastest_first = [storage for storage in fastest_first if storage in on_one_gpu]
    return [{"frozen_base": storage} for storage in fastest_first]


def _micro_batch_sizes(base: RunConfig) -> list[int]:
    """Return the divisors of a GPU's share of the global batch, the largest first.

    The number of GPUs that share a sequence stays that of the config.
    """
    share = base.global_batch_size // base.data_ranks
    return [size for size in range(share, 0, -1) if share % size == 0]


def _moments(config: RunConfig, work: Workload, kind: GpuKind | None) -> list[Changes]:
    """Return the precisions of AdamW's moments to try.

    bf16 is tried if the base config has it, or if moments in fp32 leave too little memory.
    """
    if not config.has_key("moment_precision"):
        return [{}]
    fp32 = _without_saving(replace(config, moment_precision="fp32"))  # type: ignore[call-arg]
    precisions = ["fp32"]
    if config.moment_precision == "bf16" or not _fits(fp32, work, kind):
        precisions.append("bf16")
    return [{"moment_precision": name} for name in precisions]


def _layers(config: RunConfig, work: Workload, kind: GpuKind | None) -> Iterator[Changes]:
    """Yield changes with the fewest layers to recompute or offload with which the config fits.

    The fewest are counted with and without HEADROOM, since the plan may err. For offloading, half
    of the layers is tried as well: each copy then has the time of two layers.
    """
    start = _without_saving(config)
    no_layers: Changes = {key: 0 for key in SAVING_LAYERS if config.has_key(key)}
    if kind is None:
        yield no_layers
        return
    key = "offload_layers" if work.lora_rank else "recompute_layers"
    counts = set()
    for gpu in (kind, replace(kind, memory_bytes=int(kind.memory_bytes * HEADROOM))):
        fewest = 0 if _fits(start, work, gpu) else fewest_layers(start, work, gpu, key)
        if fewest is not None:
            counts.add(fewest)
    half = work.shape.num_layers // 2
    if key == "offload_layers" and counts and 0 < max(counts) < half:
        counts.add(half)
    for count in sorted(counts):
        yield no_layers | ({key: count} if count else {})


def _without_saving(config: RunConfig) -> RunConfig:
    """Return `config` with no layer recomputed or offloaded."""
    keys = {key: 0 for key in SAVING_LAYERS if config.has_key(key)}
    return replace(config, **keys)  # type: ignore[arg-type]


def _fits(config: RunConfig, work: Workload, kind: GpuKind | None) -> bool:
    return kind is None or fits(memory_peak(config, work), kind)


# --- settings that leave the memory as it is ------------------------------------------------------


def settings(
    base: RunConfig, work: Workload, kind: GpuKind | None, environment: Mapping[str, str]
) -> dict[str, list[Value]]:
    """Return setting -> values to try, the recommended one first.

    The settings are the reduction of gradients, the installed engines that apply, and variables.
    `environment`: the user's. A variable that it sets is not varied.
    """
    vendor = kind.vendor if kind else ""
    values: dict[str, tuple[Value, ...]] = {}
    if base.has_key("reduce_scatter"):
        values["reduce_scatter"] = ("copy_engine", "nccl")
    if kind is not None:
        for operation in engines.operations(base.linear_format.in_fp8):
            variable = engines.VARIABLES[operation]
            values[variable] = _engines(operation, kind.arch, base, environment)
    values |= VARIABLES[vendor]
    if base.world_size > 1:
        values |= COLLECTIVE_VARIABLES[vendor]
        if vendor and not work.lora_rank:
            values[STREAM_PRIORITY] = (None, "-1")
    varied = {}
    for name, choices in values.items():
        own = value_of(base, name)
        possible = [value for value in choices if is_possible(base, {name: value})]
        if own not in possible:
            possible.append(own)
        if len(possible) > 1 and name not in environment:
            varied[name] = possible
    return varied


def _engines(
    operation: str, gpu: str, base: RunConfig, environment: Mapping[str, str]
) -> tuple[Value, ...]:
    """Return None, for the engine that is used without a pin, and the others that can be pinned."""
    variable = engines.VARIABLES[operation]
    unpinned = {
        name: value for name, value in {**environment, **base.env}.items() if name != variable
    }
    automatic = engines.choose(operation, gpu, unpinned, base.precision).engine.name
    names: list[Value] = [None]
    for engine in engines.ENGINES[operation]:
        if engine.name == automatic or engine.name in names:
            continue
        try:
            engines.choose(operation, gpu, {variable: engine.name}, base.precision)
        except ConfigError:
            continue
        names.append(engine.name)
    return tuple(names)
