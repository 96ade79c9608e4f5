"""RunConfig: one flat TOML per benchmark, GPU and size, complete in itself. No includes, no inheritance, no dead knobs.

An unknown key, a wrong type or an impossible batch is a ConfigError that names file and key. What decides convergence
(batch, learning rate, warm-up) has no default; what is right everywhere has one here; what was tuned stands in the TOML.
Standard library only: the launcher reads the file before torch is imported.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from common.errors import ConfigError

KERNELS = ("reference", "triton")
FP8_ENGINES = ("", "torch", "te")
FP8_RECIPES = ("delayed", "current")
HOLDINGS = ("sharded", "replicated", "replicated_both")
TRANSPORTS = ("nccl", "copy_engine")
PRECISIONS = {"fp32": "fp32", "bf16": "bfloat16"}  # ours -> the word the MLPerf log wants


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every benchmark's config has; its `rules.Config` adds the keys that only this benchmark knows."""

    # Where it runs.
    gpu: str  # MI300X, MI325X, MI350X, MI355X, H100, H200 or CPU
    nodes: int
    gpus_per_node: int  # processes per node; on a CPU, ranks
    # What decides convergence.
    global_batch_size: int  # sequences per optimizer step
    opt_base_learning_rate: float
    max_samples: int  # train sequences after which a run that has not reached the target gives up
    # How it is computed.
    micro_batch_size: int
    eval_micro_batch_size: int
    precision: str = "bf16"  # of matrix products, attention and gathered weights; master weights are always fp32
    reduce_precision: str = "fp32"  # of the gradient reduce-scatter; accumulation is always fp32
    kernels: str = "reference"  # or "triton": which engine the ops of common/kernels use where they have both
    fused_blocks: bool = False  # hand-written blocks (common/model/fused_block.py) instead of torch's autograd or compiler
    fp8: str = ""  # linear layers of the blocks in FP8: "torch" (torch._scaled_mm) or "te" (Transformer Engine); "" computes in `precision`
    fp8_head: bool = False  # the output projection in FP8 too, with fp8 = "torch"
    fp8_recipe: str = "delayed"  # scales from the last steps' largest values, or from this tensor's ("current")
    fp8_swiglu_input: bool = False  # keep SwiGLU's input for backward in 8 bits: half the memory of a layer's largest activation
    compile: bool = False  # torch.compile of each block and of the head with its loss
    recompute_layers: int = 0  # first n layers recompute their activations in backward
    offload_layers: int = (
        0  # LoRA: of so many others SwiGLU's input waits for backward in the host's memory (common/sharding/activation_offload.py)
    )
    reshard_after_forward: bool = False  # True gathers weights again in backward: slower, less memory
    frozen_base: str = (
        "sharded"  # LoRA, fused: over the node's GPUs, or whole on each as W or as W and W^T (common/sharding/frozen_base.py)
    )
    transport: str = "nccl"  # of gradients (pre-training) or a frozen base's layers (LoRA) in a node: NCCL/RCCL, or the GPUs' copy engines
    gemm_tuning_file: str = ""  # tuned GEMM solutions for this GPU and these libraries, relative to the project (docs/gemm_tuning.md)
    warmup_train_steps: int = 2  # synthetic optimizer steps before the clock
    warmup_eval_steps: int = 1
    log_every_steps: int = 10
    hang_timeout_s: float = 600.0  # no rank makes progress for so long: stop and name who is missing
    miniature: bool = False  # the toy: own rules, never a submission
    env: dict[str, str] = field(default_factory=dict)  # exported before Python imports torch

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    @property
    def weights_stay_whole(self) -> bool:
        """Of the weights that train: gathered once per optimizer step (common/sharding/zero.py), not module by module in every pass by FSDP2.
        Under torch.compile and with Transformer Engine FSDP2 does it in either case: they were tried with it alone.
        """
        return not (self.reshard_after_forward or self.compile or self.fp8 == "te")

    def refuse_unless_default(self, keys: tuple[str, ...], why: str, do: str = "leave it out") -> None:
        """Raises ConfigError for the first of `keys` that is set to something else."""
        for key in keys:
            if (value := getattr(self, key)) != _default(key):
                raise ConfigError(f"{key} = {value!r} cannot be used", why, do)

    def as_toml(self) -> str:
        return "".join(_toml_line(key, value) for key, value in asdict(self).items() if key != "env") + _toml_table("env", self.env)


C = TypeVar("C", bound=RunConfig)


def load(path: Path, kind: type[C], overrides: dict[str, str] | None = None) -> C:
    """Read and check `path` as the benchmark's `rules.Config`; `overrides` are `KEY=VALUE` texts from the command line, parsed as TOML values.

    Raises ConfigError on a missing file, broken TOML, unknown or missing key, wrong type, or an impossible batch.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config", "the file does not exist", "name one of the files under configs/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", "the file cannot be parsed", "correct the line it names") from None
    for key, text in (overrides or {}).items():
        table[key] = _parse_value(key, text)
    return from_table(table, kind, str(path))


def from_table(table: dict, kind: type[C], source: str) -> C:
    known = {f.name: f for f in fields(kind)}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {key}", "no code reads it, so it would be silently ignored", hint)
    for name, f in known.items():
        if name not in table:
            if f.default is MISSING and f.default_factory is MISSING:
                raise ConfigError(
                    f"{source}: key {name} is missing", "it has no default, because it decides the result", f"add a line `{name} = ...`"
                )
            continue
        table[name] = _checked(table[name], str(f.type), name, source)
    config = kind(**table)
    _check_values(config, source)
    return config


def share_of_rank(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Sequences of a global batch that each rank takes. Raises ConfigError unless they are whole micro-batches."""
    if global_batch_size % (micro_batch_size * world_size):
        raise ConfigError(
            f"global batch {global_batch_size} cannot be shared out",
            f"it is no multiple of micro-batch x processes = {micro_batch_size} x {world_size}",
            "change global_batch_size or micro_batch_size",
        )
    return global_batch_size // world_size


def _checked(value, type_name: str, key: str, source: str):
    if type_name == "float" and type(value) is int:
        value = float(value)
    wanted = {"int": int, "float": float, "str": str, "bool": bool, "dict[str, str]": dict}[type_name]
    texts = isinstance(value, dict) and all(type(v) is str for v in value.values())
    if type(value) is not wanted or (wanted is dict and not texts):
        raise ConfigError(f"{source}: {key} = {value!r} has the wrong type", f"{key} is a {type_name}", f"write it as {type_name}")
    return value


def _check_values(config: RunConfig, source: str) -> None:
    def require(good: bool, key: str, why: str, do: str) -> None:
        if not good:
            raise ConfigError(f"{source}: {key} = {getattr(config, key)!r} cannot be used", why, do)

    positive = (
        "nodes",
        "gpus_per_node",
        "global_batch_size",
        "micro_batch_size",
        "eval_micro_batch_size",
        "max_samples",
        "log_every_steps",
    )
    for key in positive:
        require(getattr(config, key) >= 1, key, "it must be at least 1", "give a positive number")
    for key, value in asdict(config).items():
        require(not isinstance(value, int | float) or value >= 0, key, "it cannot be negative", "give 0 or more")
    require(config.opt_base_learning_rate > 0, "opt_base_learning_rate", "it must be positive", "give a learning rate")
    require(config.hang_timeout_s > 0, "hang_timeout_s", "it must be positive", "give seconds")
    for key in ("precision", "reduce_precision"):
        require(getattr(config, key) in PRECISIONS, key, f"known are {', '.join(PRECISIONS)}", "choose one of them")
    require(config.kernels in KERNELS, "kernels", f"known are {', '.join(KERNELS)}", "choose one of them")
    require(config.fp8 in FP8_ENGINES, "fp8", 'known are "torch", "te" and, for none, ""', "choose one of them")
    require(config.fp8_recipe in FP8_RECIPES, "fp8_recipe", f"known are {', '.join(FP8_RECIPES)}", "choose one of them")
    require(config.frozen_base in HOLDINGS, "frozen_base", f"known are {', '.join(HOLDINGS)}", "choose one of them")
    require(config.transport in TRANSPORTS, "transport", f"known are {', '.join(TRANSPORTS)}", "choose one of them")
    travels = config.frozen_base == "sharded" and config.gpus_per_node > 1
    require(travels or config.transport == _default("transport"), "transport", "nothing travels: each GPU holds all", "leave it out")
    require(not config.fp8 or config.precision == "bf16", "fp8", "what FP8 leaves is computed in bf16", 'set precision = "bf16"')
    require(not config.fp8_head or config.fp8 == "torch", "fp8_head", "it is a product of that engine", 'set fp8 = "torch"')
    require(config.fp8 != "torch" or config.fused_blocks, "fp8", "this engine lives in the fused blocks", "set fused_blocks = true")
    require(config.fp8 != "te" or not config.fused_blocks, "fused_blocks", "Transformer Engine has its own layers", "set it to false")
    require(config.fp8 != "te" or not config.compile, "compile", "Transformer Engine's layers are not traced", "set it to false")
    require(
        config.fp8 != "te" or not config.recompute_layers,
        "recompute_layers",
        "a layer of Transformer Engine that runs again in backward would do so outside of its FP8 region",
        'set it to 0, or fp8 = "torch"',
    )
    require(
        not config.offload_layers or config.fp8_swiglu_input,
        "offload_layers",
        "what waits in the host's memory is SwiGLU's input in 8 bits",
        "set fp8_swiglu_input = true",
    )
    require(not (config.fused_blocks and config.compile), "compile", "fused blocks leave nothing to compile", "set compile = false")
    per_pass = config.micro_batch_size * config.world_size
    require(
        config.global_batch_size % per_pass == 0,
        "global_batch_size",
        f"it is not a multiple of micro_batch_size x processes = {config.micro_batch_size} x {config.world_size} = {per_pass}",
        "change global_batch_size or micro_batch_size so that every process gets whole micro-batches",
    )


def _default(key: str):
    return next(f.default for f in fields(RunConfig) if f.name == key)


def _parse_value(key: str, text: str):
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # an unquoted word is a string


def _toml_line(key: str, value) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{key} = {text}\n"


def _toml_table(name: str, table: dict[str, str]) -> str:
    return f"\n[{name}]\n" + "".join(_toml_line(key, value) for key, value in table.items()) if table else ""
