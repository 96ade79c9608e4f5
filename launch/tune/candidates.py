"""Settings that `tune` varies, and the values to try on this machine.

A candidate is what it changes in the base config: names of config keys, or else of variables of
[env]. The value None removes a variable. Keys that decide convergence (batches, learning rate, ...)
and `linear` never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from common import engines
from common.config import FROZEN_BASE_STORAGE, RunConfig
from common.errors import ConfigError
from common.gpu_kinds import GpuKind
from launch.job import engine_operations
from launch.plan import estimate as plan
from launch.plan.derive_config import CPU_ENV, HEADROOM, SAVING_LAYERS
from launch.plan.estimate import Workload

Value = str | int | None
Changes = dict[str, Value]

# A way to use the memory is not tried if `plan` expects its step to be so much longer than the
# fastest: larger micro-batches gain less than recomputing so many layers costs.
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
# The same for several GPUs. The effect depends on how much communication overlaps with compute.
COLLECTIVE_VARIABLES: dict[str, dict[str, tuple[Value, ...]]] = {
    "": {},
    "nvidia": {"NCCL_MAX_NCHANNELS": (None, "16")},
    "amd": {
        # HIP's default is 4 queues. AMD's MLPerf configs set 2, which may put compute and RCCL into
        # one queue. 8 were 7.5 % faster than 4 on one revision of a training on MI355X, and equal
        # on another (pytorch/torchtitan#4032).
        "GPU_MAX_HW_QUEUES": (None, "2", "4", "8"),
        # RCCL's default on gfx950 is 112 channels (ROCm/rccl#1596); ROCm's documentation sets 112
        # on an MI300X.
        "NCCL_MAX_NCHANNELS": (None, "32"),
        "NCCL_MIN_NCHANNELS": (None, "112"),
    },
}
STREAM_PRIORITY = "ZERO_STREAM_PRIORITY"  # common/sharding/zero.py


def changed(base: RunConfig, changes: Mapping[str, Value]) -> RunConfig:
    """Return `base` with `changes`. Raise ConfigError if its class refuses the combination."""
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
    try:
        changed(base, changes)
    except ConfigError:
        return False
    return True


# --- settings that decide the memory --------------------------------------------------------------


def arrangements(base: RunConfig, work: Workload, kind: GpuKind | None) -> list[Changes]:
    """Return the ways to use the memory that fit by calculation, the fastest by `plan` first.

    They differ in micro-batch, storage of a frozen base, precision of AdamW's moments, and layers
    that recompute or offload. `kind`: None for a CPU, whose memory is not limited here. The base
    config itself is left out.
    """
    found = []
    for storage in _storages(base, work):
        for size in _micro_batch_sizes(base):
            changes = {**storage, "micro_batch_size": size}
            if not is_possible(base, changes):
                continue
            for moments in _moments(changed(base, changes), work, kind):
                for layers in _layers(changed(base, changes | moments), work, kind):
                    found.append(reduced(base, changes | moments | layers))
    distinct = [changes for index, changes in enumerate(found) if changes not in found[:index]]
    others = [changes for changes in distinct if changes]
    if kind is None or not kind.efficiency:
        return others
    planned = [plan.estimate(changed(base, each), work, kind, None).step_s for each in others]
    return [
        others[index]
        for index in sorted(range(len(others)), key=planned.__getitem__)
        if planned[index] <= SLOWER_BY_PLAN * min(planned)
    ]


def _storages(base: RunConfig, work: Workload) -> list[Changes]:
    """Return the ways to store a frozen base, the fastest first. One GPU cannot shard it."""
    if not (work.lora_rank and base.has_key("frozen_base")):
        return [{}]
    fastest_first = list(FROZEN_BASE_STORAGE[::-1])
    if base.gpus_per_node == 1:
        whole = ("replicated_both", base.frozen_base)
        fastest_first = [storage for storage in fastest_first if storage in whole]
    return [{"frozen_base": storage} for storage in fastest_first]


def _micro_batch_sizes(base: RunConfig) -> list[int]:
    share = base.global_batch_size // base.world_size
    return [size for size in range(share, 0, -1) if share % size == 0]


def _moments(config: RunConfig, work: Workload, kind: GpuKind | None) -> list[Changes]:
    """Return the precisions of AdamW's moments to try.

    bf16 is tried if the base config has it, or if moments in fp32 leave too little memory.
    """
    if not config.has_key("moment_precision"):
        return [{}]
    fp32 = _without_saving(replace(config, moment_precision="fp32"))  # type: ignore[call-arg]
    tries_bf16 = config.moment_precision == "bf16" or not _fits(fp32, work, kind)
    return [{"moment_precision": name} for name in ("fp32", *(["bf16"] if tries_bf16 else []))]


def _layers(config: RunConfig, work: Workload, kind: GpuKind | None) -> Iterator[Changes]:
    """Yield the numbers of layers to recompute or offload: the fewest with which the config fits.

    They are counted with and without HEADROOM, since the plan may err. Half of the layers are
    offloaded as well: then each copy has the time of two layers.
    """
    start = _without_saving(config)
    none: Changes = {key: 0 for key in SAVING_LAYERS if config.has_key(key)}
    if kind is None:
        yield none
        return
    key = "offload_layers" if work.lora_rank else "recompute_layers"
    counts = set()
    for gpu in (kind, replace(kind, memory_bytes=int(kind.memory_bytes * HEADROOM))):
        fewest = 0 if _fits(start, work, gpu) else plan.fewest_layers(start, work, gpu, key)
        if fewest is not None:
            counts.add(fewest)
    half = work.shape.num_layers // 2
    if key == "offload_layers" and counts and 0 < max(counts) < half:
        counts.add(half)
    for count in sorted(counts):
        yield none | ({key: count} if count else {})


def _without_saving(config: RunConfig) -> RunConfig:
    keys = {key: 0 for key in SAVING_LAYERS if config.has_key(key)}
    return replace(config, **keys)  # type: ignore[arg-type]


def _fits(config: RunConfig, work: Workload, kind: GpuKind | None) -> bool:
    return kind is None or plan.fits(plan.memory_peak(config, work), kind)


# --- settings that leave the memory as it is ------------------------------------------------------


def settings(
    base: RunConfig, work: Workload, kind: GpuKind | None, environment: Mapping[str, str]
) -> dict[str, list[Value]]:
    """Return name -> values to try, the recommended one first.

    They are the reduction of gradients, the engines that are installed, and variables. A variable
    that `environment`, the user's, sets is left out: it stays as it is.
    """
    vendor = kind.vendor if kind else ""
    values: dict[str, tuple[Value, ...]] = {}
    if base.has_key("reduce_scatter"):
        values["reduce_scatter"] = ("copy_engine", "nccl")
    if kind is not None:
        for operation in engine_operations(base, work.lora_rank):
            variable = engines.VARIABLES[operation]
            values[variable] = _engines(operation, kind.arch, base, environment)
    values |= VARIABLES[vendor]
    if base.world_size > 1:
        values |= COLLECTIVE_VARIABLES[vendor]
        if vendor and not work.lora_rank:
            values[STREAM_PRIORITY] = (None, "-1")
    found = {}
    for name, choices in values.items():
        own = value_of(base, name)
        possible = [value for value in choices if is_possible(base, {name: value})]
        if own not in possible:
            possible.append(own)
        if len(possible) > 1 and name not in environment:
            found[name] = possible
    return found


def _engines(
    operation: str, gpu: str, base: RunConfig, environment: Mapping[str, str]
) -> tuple[Value, ...]:
    """Return the engines that can be pinned here, and None for the one that is used unpinned."""
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
