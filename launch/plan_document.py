"""docs/plan.md, made from the code: `python3 -m launch.plan_document > docs/plan.md`. A test compares the two."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from common import config as configs
from common import plan
from common.config import RunConfig
from common.hardware import KINDS, config_path
from common.plan import Estimate, Memory, Workload, gib
from launch import plan as command
from launch.plan import table
from submission import rcp
from submission.published import Published

ROOT = Path(__file__).resolve().parents[1]
PRETRAINING, LORA = "llama31_8b", "llama2_70b_lora"
PUBLISHED_RECOMPUTE = {(LORA, "MI300X"): 21}  # AMD's v5.1 config of the 192 GB card, of 80 layers; no other recomputes


@dataclass(frozen=True)
class Measured:
    """One of our runs on H200 SXM, 2026-11-20 or 21, torch 2.11.0, sequence 8192: torch.cuda.max_memory_allocated.

    `changes`: what the run had otherwise than the config as it is shipped today.
    """

    benchmark: str
    config: str
    gib: float
    changes: dict = field(default_factory=dict)
    layers: int = 0  # 0: all
    tokens_per_s_per_gpu: int = 0  # 0: no number for the whole model

    def settings(self) -> RunConfig:
        kind = command.config_class(self.benchmark)
        return replace(configs.load(config_path(ROOT, self.benchmark, self.config), kind), **self.changes)

    def workload(self) -> Workload:
        work = command.workload(self.benchmark, self.settings())
        return replace(work, shape=replace(work.shape, num_layers=self.layers)) if self.layers else work

    def memory(self) -> Memory:
        return plan.memory_peak(self.settings(), self.workload())

    def estimate(self) -> Estimate:
        config = self.settings()
        return command.estimate(self.benchmark, config, KINDS[config.gpu])


_COMPILED = {"fused_blocks": False, "fp8": "", "compile": True}  # bf16, before the fused blocks
_KEEP_ALL = {**_COMPILED, "recompute_layers": 0, "reshard_after_forward": False}
_SHARDED_BF16 = {**_COMPILED, "reshard_after_forward": True}  # LoRA
_OLD_LORA = {**_SHARDED_BF16, "gpus_per_node": 1, "fp8_swiglu_input": False, "recompute_layers": 0, "kernels": "reference"}  # its dropout
_ONE_GPU = {"gpus_per_node": 1, "global_batch_size": 4}
_ONE_GPU_LORA = {"global_batch_size": 2, "recompute_layers": 0}
MEASURED = (
    Measured(PRETRAINING, "H200_1x4", 123.3, tokens_per_s_per_gpu=15_601),
    Measured(PRETRAINING, "H200_1x4", 35.7, _ONE_GPU, layers=2),
    Measured(PRETRAINING, "H200_1x4", 47.6, _ONE_GPU, layers=4),
    Measured(PRETRAINING, "H200_1x4", 59.4, _ONE_GPU, layers=6),
    Measured(LORA, "H200_1x1", 11.6, _ONE_GPU_LORA, layers=4),
    Measured(LORA, "H200_1x1", 25.8, _ONE_GPU_LORA, layers=12),
    Measured(PRETRAINING, "H200_1x4", 124.1, _COMPILED, tokens_per_s_per_gpu=10_883),
    Measured(PRETRAINING, "H200_1x4", 85.5, {**_COMPILED, "micro_batch_size": 1}, tokens_per_s_per_gpu=10_677),
    Measured(PRETRAINING, "H200_1x2", 115.4, _COMPILED, tokens_per_s_per_gpu=10_596),
    Measured(PRETRAINING, "H200_1x1", 127.7, _COMPILED, tokens_per_s_per_gpu=7_993),
    Measured(PRETRAINING, "H200_1x1", 40.9, _KEEP_ALL, layers=4),
    Measured(PRETRAINING, "H200_1x1", 47.6, {**_KEEP_ALL, "micro_batch_size": 2}, layers=4),
    Measured(PRETRAINING, "H200_1x1", 79.3, _KEEP_ALL, layers=12),
    Measured(LORA, "H200_1x4", 132.6, {**_SHARDED_BF16, "recompute_layers": 4}, tokens_per_s_per_gpu=1_691),
    Measured(LORA, "H200_1x4", 122.4, {**_SHARDED_BF16, "fp8_swiglu_input": False, "recompute_layers": 32}, tokens_per_s_per_gpu=1_492),
    Measured(LORA, "H200_1x4", 18.5, _OLD_LORA, layers=4),
    Measured(LORA, "H200_1x4", 46.7, _OLD_LORA, layers=12),
    Measured(LORA, "H200_1x4", 27.1, {**_OLD_LORA, "recompute_layers": 12}, layers=12),
)
OUT_OF_MEMORY = Measured(LORA, "H200_1x4", 139.8, {**_SHARDED_BF16, "fp8_swiglu_input": False, "recompute_layers": 22})  # it did not run


def predicted(result: Published) -> Estimate:
    """The published stack's time at the RCP's samples, which is what its score is scaled to where it needed fewer."""
    config = replace(
        command.load_all(ROOT, result.benchmark)["H200_1x8"],
        nodes=max(1, result.gpus // 8),
        gpus_per_node=min(8, result.gpus),
        global_batch_size=result.batch,
        eval_micro_batch_size=1,
        recompute_layers=PUBLISHED_RECOMPUTE.get((result.benchmark, result.gpu), 0),
    )
    return command.estimate(result.benchmark, config, KINDS[result.gpu], published_stack=True)


def published_table() -> str:
    rows = []
    for result in command.references():
        found = predicted(result)
        assert found.minutes is not None
        rows.append(
            [
                f"{result.benchmark}, {result.gpus} x {result.gpu}, {result.submitter}",
                f"{plan.EFFICIENCY[result.gpu]:.3f}",
                f"{result.batch * 1e3 / result.samples_per_s:,.0f}",
                f"{found.step_s * 1e3:,.0f}",
                f"{result.evaluation_s:.1f}",
                f"{found.eval_s:.1f}",
                f"{result.score:.2f}",
                f"{found.minutes:.2f}",
                f"{found.minutes / result.score - 1:+.1%}",
            ]
        )
    head = ["published by others", "efficiency", "step ms", "plan", "evaluation s", "plan", "score, minutes", "plan", "difference"]
    return table(head, rows)


def measured_table() -> str:
    rows = []
    for point in MEASURED:
        memory, speed = point.memory(), point.tokens_per_s_per_gpu
        guess = point.estimate().tokens_per_s_per_gpu
        rows.append(
            [
                _words(point),
                f"{point.gib:.1f}",
                f"{gib(memory.allocated):.1f}",
                f"{gib(memory.allocated) / point.gib - 1:+.1%}",
                *([f"{speed:,}", f"{guess:,.0f}", f"{guess / speed - 1:+.1%}"] if speed else ["-"] * 3),
            ]
        )
    return table(["measured by us", "peak GiB", "plan", "difference", "tok/s/GPU", "plan", "difference"], rows)


def _words(point: Measured) -> str:
    config, work = point.settings(), point.workload()
    words = [
        f"{point.benchmark}, {command.computes_in(config)}, {config.world_size} x H200",
        f"{work.shape.num_layers} layers",
        f"micro-batch {config.micro_batch_size}",
        f"{config.recompute_layers} recomputed",
    ]
    words += ["resharded"] * config.reshard_after_forward + ["SwiGLU input in 8 bits"] * config.fp8_swiglu_input
    words += ["plain dropout"] * (point.benchmark == LORA and config.kernels == "reference")
    return ", ".join(words)


def document() -> str:
    """The whole of docs/plan.md."""
    parts = [INTRODUCTION]
    for benchmark in (PRETRAINING, LORA):
        loaded = command.load_all(ROOT, benchmark)
        eight, four = loaded["H200_1x8"], loaded["H200_1x4"]
        memory = plan.memory_peak(four, command.workload(benchmark, four))
        parts += [
            f"## {benchmark}: all configs\n",
            command.all_table(benchmark, loaded) + "\n",
            f"## {benchmark}: 8 GPUs of every kind, settings of `H200_1x8.toml`\n",
            command.kinds_table(benchmark, eight) + "\n",
            f"{rcp.mean_samples(benchmark, eight.global_batch_size):,.0f} sequences to the target at global batch {eight.global_batch_size}; "
            '"published stacks" are the minutes that those behind the published results would need in FP8 with these batches.\n',
            f"## {benchmark}: memory of `H200_1x4.toml`\n",
            memory_and_flops(benchmark, four, memory),
        ]
    unmeasured = sorted(set(KINDS) - {"H200"})
    parts += [
        MEMORY,
        measured_table() + "\n",
        TIME,
        published_table() + "\n",
        LEFT_OUT.format(kinds=", ".join(unmeasured)),
    ]
    return "\n".join(parts)


def memory_and_flops(benchmark: str, config: RunConfig, memory: Memory) -> str:
    work = command.workload(benchmark, config)
    verdict = command.verdict(memory, config, work, KINDS[config.gpu])
    return "\n".join([command.memory_table(memory), "", f"It {verdict}.", "", *command.flops_lines(work), ""])


INTRODUCTION = f"""\
# The plan: will it fit, and how long will it take

`./run_and_time.sh <benchmark> plan [--config FILE | --all] [--set KEY=VALUE]` needs no GPU and no torch (where torch is not installed at
all, `python3 -m launch <benchmark> plan` is the same). It exits with 0 if everything fits, 12 if something does not, 2 for a wrong command.

This page is made by `python3 -m launch.plan_document`; do not edit it. The formulae are in `common/plan.py`.

{command.WHOSE}
"""

MEMORY = f"""\
## Memory: where the numbers come from, and how good they are

Counted, not fitted: each kind is a tensor that the code holds when the peak is reached, in the head's backward (8B), in the forward (LoRA in
FP8) or the backward (in bf16) of the last block, or in an evaluation.

- Weights, gradients and Adam moments: 16 bytes per trained parameter, sharded over the GPUs (8B) or whole on each (adapters). Gathered: all
  weights in bf16, or with `reshard_after_forward` the embedding, the module at work and, with more than one GPU, the next one on its way.
  Gradients in flight: the head's (or a block's) in bf16 and its copy in `reduce_precision`.
- 8B in FP8: the blocks' matrices cast to FP8, rows and columns, 2 bytes per parameter on each GPU beside the gathered ones in bf16.
- LoRA in FP8: the frozen matrices, W and W^T sharded over the node, or W or both whole on each GPU (`frozen_base`); the embedding and the head
  in bf16; a ring of {plan.RING_LAYERS} layers that are gathered or transposed. In bf16: the base sharded.
- Activations of a fused block, per token: residual streams, qkv, attention output, SwiGLU's input (bf16, or e4m3), and where matrices train
  the input of each product (in FP8 one layout). LoRA's are those of `saved_bytes_per_token` (common/fused_lora_block.py). Compiled blocks keep
  the rotated q and k and the norm's output too. A recomputed block keeps its input.
- Logits once, in bf16: their gradient is written over them.

torch must also *reserve* more than it hands out: 2.7 to 4.5 % in our runs, planned with {plan.RESERVED_PER_ALLOCATED - 1:.0%}. Usable is what torch
reports of an H200, 139.8 of 141 GiB; the same share is assumed for the others.

The points in bf16 are those of compiled blocks. Those with 4 and 12 layers of the 8B are older than the Triton SwiGLU; it keeps the same bytes.
Those of LoRA are older than `kernels/lora_down.py` and are planned with `kernels = "reference"`, whose dropout keeps what it lets through. In
bf16, SwiGLU's input included, and with 22 recomputed layers 4 H200s ran out of memory; the plan says {gib(OUT_OF_MEMORY.memory().allocated):.1f} GiB allocated and {gib(OUT_OF_MEMORY.memory().reserved):.1f}
reserved of 139.8.
"""

TIME = f"""\
## Time: one efficiency per GPU kind

A step takes (FLOPs of the linears / dense FP8 peak + FLOPs of attention, head and adapters / dense bf16 peak) / efficiency + traffic.
Linears: forward, data gradient, weight gradient unless frozen, and a second forward in recomputed layers. Attention's backward is
{plan.ATTENTION_BACKWARD} forwards. Traffic of the published layouts is not hidden: bf16 gradients and FP8 weights once per step at {plan.COLLECTIVE_BYTES_PER_S / 1e9:.0f} GB/s (8B), adapter
gradients (LoRA). An evaluation is a forward of each GPU's sequences. To the target: sequences of the RCP / (sequences per second), and the evaluations on the way.

The efficiency of a kind is fitted so that the mean logarithm of plan / score is zero over the kind's results below, which are **published by
others**; H100 takes the H200's. This package in FP8 is planned with the same, traffic hidden: an assumption on AMD GPUs, and slower than what
we measured on 4 H200s (table above). A bf16 step is {plan.BF16_OVER_FP8} times the FP8 one: Megatron-core + TE's ratio on 4 H200s, 8B (15,227 / 10,893
tok/s/GPU). It errs on the slow side for the 8B, because HPE's 64 GPUs with half a sequence each pull the H200's efficiency down (Dell's LoRA
alone would give 0.47). HPE's runs needed some 12 % more sequences than the RCP. LoRA in FP8 took 34.6 ms a layer on one H200 without any
communication (docs/results.md), 2,950 tok/s/GPU if 80 layers were like the 12 measured; the plan is below that too.
"""

LEFT_OUT = """\
## What is left out

- Transformer Engine (`fp8 = "te"`): its memory is planned as that of compiled bf16 blocks.
- Not tried on a GPU: the largest micro-batches of the tables, LoRA in FP8 with all 80 layers or on more than one GPU, the 8B in FP8 on 2 or 8
  GPUs, and any memory number on {kinds}.
- With neither fused nor compiled blocks more is kept than counted.
- `gather = "copy_engine"` holds the base in memory that torch does not count as allocated; the plan does.
- Reserved memory near the limit: torch can give unused blocks back before it gives up, so a config a little above the limit may still run.
"""


if __name__ == "__main__":
    print(document(), end="")
