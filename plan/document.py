"""docs/plan.md, made from the code: `python3 -m plan.document > docs/plan.md`. A test compares the two."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from common import config as configs
from common.config import RunConfig
from common.hardware import KINDS, config_path
from plan import command
from plan import estimate as plan
from plan.command import table
from plan.estimate import Estimate, Memory, Workload, gib
from records import rcp
from records.published import Published

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
    reserved: float = 0.0  # GiB, torch.cuda.max_memory_reserved; 0: not noted
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


def _sequences(micro_batch: int) -> dict[str, int]:
    """Of one GPU, in two accumulation steps."""
    return {"micro_batch_size": micro_batch, "global_batch_size": 2 * micro_batch}


_NCCL = {"transport": "nccl"}
_COMPILED = {"fused_blocks": False, "fp8": "", "compile": True, **_NCCL}  # bf16, before the fused blocks
_SHARDED = {"frozen_base": "sharded", "offload_layers": 0}  # LoRA, before anything waited in the host's memory
_RECOMPUTED = {**_SHARDED, "recompute_layers": 16}
_OFFLOADED = {"global_batch_size": 4, "frozen_base": "sharded"}
_KEEP_ALL = {**_COMPILED, "micro_batch_size": 1, "recompute_layers": 0, "reshard_after_forward": False}
_SHARDED_BF16 = {**_COMPILED, **_SHARDED, "reshard_after_forward": True}
_BF16_SWIGLU = {**_SHARDED_BF16, "fp8_swiglu_input": False}
_OLD_LORA = {**_BF16_SWIGLU, "gpus_per_node": 1, "recompute_layers": 0, "kernels": "reference"}  # its dropout
_ONE_GPU = {"gpus_per_node": 1, "global_batch_size": 4, **_NCCL}
_ONE_GPU_LORA = {"global_batch_size": 2, **_SHARDED}
MEASURED = (
    Measured(PRETRAINING, "H200_1x4", 123.3, _NCCL, reserved=126.8, tokens_per_s_per_gpu=15_601),
    # Of these three 1.0 are mailboxes.
    Measured(PRETRAINING, "H200_1x2", 121.6, {"global_batch_size": 8}, reserved=122.6, tokens_per_s_per_gpu=15_829),
    Measured(PRETRAINING, "H200_1x2", 124.5, {"global_batch_size": 8, "fp8_head": True}, reserved=125.6, tokens_per_s_per_gpu=16_221),
    Measured(PRETRAINING, "H200_1x2", 113.1, {"global_batch_size": 8, "fp8": ""}, reserved=114.0, tokens_per_s_per_gpu=11_223),
    Measured(PRETRAINING, "H200_1x2", 120.6, {"global_batch_size": 8, **_NCCL}, reserved=122.4, tokens_per_s_per_gpu=15_556),
    Measured(PRETRAINING, "H200_1x4", 35.7, _ONE_GPU, layers=2),
    Measured(PRETRAINING, "H200_1x4", 47.6, _ONE_GPU, layers=4),
    Measured(PRETRAINING, "H200_1x4", 59.4, _ONE_GPU, layers=6),
    Measured(LORA, "H200_1x2", 129.6, {"global_batch_size": 4}, reserved=133.9, tokens_per_s_per_gpu=3_079),
    Measured(LORA, "H200_1x1", 129.6, {"global_batch_size": 2}, reserved=133.9, tokens_per_s_per_gpu=3_109),
    Measured(LORA, "H200_1x2", 129.6, _OFFLOADED, reserved=133.9, tokens_per_s_per_gpu=2_939),
    Measured(LORA, "H200_1x1", 133.1, {"global_batch_size": 2, **_RECOMPUTED}, reserved=137.7, tokens_per_s_per_gpu=2_844),
    Measured(LORA, "H200_1x2", 133.2, {"global_batch_size": 4, **_RECOMPUTED}, reserved=137.7, tokens_per_s_per_gpu=2_730),
    Measured(LORA, "H200_1x1", 11.6, _ONE_GPU_LORA, layers=4),
    Measured(LORA, "H200_1x1", 25.8, _ONE_GPU_LORA, layers=12),
    Measured(PRETRAINING, "H200_1x4", 124.1, _COMPILED, reserved=129.6, tokens_per_s_per_gpu=10_883),
    Measured(PRETRAINING, "H200_1x4", 85.5, {**_COMPILED, "micro_batch_size": 1}, reserved=89.0, tokens_per_s_per_gpu=10_677),
    Measured(PRETRAINING, "H200_1x2", 115.4, _COMPILED, reserved=120.0, tokens_per_s_per_gpu=10_596),
    Measured(PRETRAINING, "H200_1x1", 131.9, {"global_batch_size": 4}, reserved=136.8, tokens_per_s_per_gpu=8_514),
    Measured(PRETRAINING, "H200_1x1", 127.8, {"micro_batch_size": 1, "global_batch_size": 4}, reserved=132.2, tokens_per_s_per_gpu=8_155),
    Measured(PRETRAINING, "H200_1x1", 127.7, {**_COMPILED, "micro_batch_size": 1}, reserved=132.2, tokens_per_s_per_gpu=7_993),
    Measured(PRETRAINING, "H200_1x1", 131.9, {**_COMPILED, **_sequences(2)}, reserved=136.8, tokens_per_s_per_gpu=8_368),
    Measured(PRETRAINING, "H200_1x1", 136.1, {**_COMPILED, **_sequences(3)}, reserved=137.5, tokens_per_s_per_gpu=8_447),
    Measured(PRETRAINING, "H200_1x1", 40.9, _KEEP_ALL, layers=4),
    Measured(PRETRAINING, "H200_1x1", 47.6, {**_KEEP_ALL, "micro_batch_size": 2}, layers=4),
    Measured(PRETRAINING, "H200_1x1", 79.3, _KEEP_ALL, layers=12),
    Measured(LORA, "H200_1x4", 132.6, {**_SHARDED_BF16, "recompute_layers": 4}, reserved=138.2, tokens_per_s_per_gpu=1_691),
    Measured(LORA, "H200_1x4", 122.4, {**_BF16_SWIGLU, "recompute_layers": 32}, reserved=125.7, tokens_per_s_per_gpu=1_492),
    Measured(LORA, "H200_1x4", 18.5, _OLD_LORA, layers=4),
    Measured(LORA, "H200_1x4", 46.7, _OLD_LORA, layers=12),
    Measured(LORA, "H200_1x4", 27.1, {**_OLD_LORA, "recompute_layers": 12}, layers=12),
)
# What did not run, in its config's expandable segments too; `gib` is what was allocated and the request that failed, if noted.
OUT_OF_MEMORY = (
    Measured(PRETRAINING, "H200_1x1", 131.16 + 7.83, {**_COMPILED, **_sequences(4)}),
    Measured(LORA, "H200_1x4", 0.0, {**_BF16_SWIGLU, "recompute_layers": 22}),
)


def predicted(result: Published) -> Estimate:
    """The published stack's time at the RCP's samples, which is what its score is scaled to where it needed fewer."""
    config = replace(
        command.load_all(ROOT, result.benchmark)["H200_1x8"],
        nodes=max(1, result.gpus // 8),
        transport="nccl",
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
        assert found.minutes and result.score and result.samples_per_s
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
                f"{point.reserved:.1f}" if point.reserved else "-",
                *([f"{speed:,}", f"{guess:,.0f}", f"{guess / speed - 1:+.1%}"] if speed else ["-"] * 3),
            ]
        )
    return table(["measured by us", "peak GiB", "plan", "difference", "reserved", "tok/s/GPU", "plan", "difference"], rows)


def _words(point: Measured) -> str:
    config, work = point.settings(), point.workload()
    words = [
        f"{point.benchmark}, {command.computes_in(config)}, {config.world_size} x H200",
        f"{work.shape.num_layers} layers",
        f"micro-batch {config.micro_batch_size}",
        f"{config.recompute_layers} recomputed",
    ]
    words += ["head in FP8"] * config.fp8_head + ["by copy engines"] * (config.transport == "copy_engine")
    words += [f"{plan.offloaded_layers(config, work)} offloaded"] * bool(config.offload_layers)
    words += [f"base {config.frozen_base}"] * (point.benchmark == LORA and config.fused_blocks and config.world_size > 1)
    words += ["resharded"] * config.reshard_after_forward + ["SwiGLU input in 8 bits"] * config.fp8_swiglu_input
    words += ["plain dropout"] * (point.benchmark == LORA and config.kernels == "reference")
    return ", ".join(words)


def _nearest() -> Measured:
    """The run that came nearest to the limit."""
    return max(MEASURED, key=lambda point: point.gib)


def _evaluation_s(sequences: int) -> float:
    """The plan's, of LoRA on 2 H200s."""
    point = next(point for point in MEASURED if (point.benchmark, point.config) == (LORA, "H200_1x2"))
    return point.estimate().eval_s * -(-sequences // 2) / -(-point.workload().eval_samples // 2)


def _refused() -> str:
    return "\n".join(
        f"- {_words(point)}: {gib(point.memory().allocated):.1f} GiB allocated, {gib(point.memory().needed):.1f} needed."
        for point in OUT_OF_MEMORY
    )


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

This page is made by `python3 -m plan.document`; do not edit it. The formulae are in `plan/estimate.py`.

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
- 8B by copy engines: two mailboxes for what the node's other ranks send of the largest module's gradient.
- LoRA in FP8: the frozen matrices, W and W^T sharded over the node, or W or both whole on each GPU (`frozen_base`); the embedding and the head
  in bf16; a ring of {plan.RING_LAYERS} layers that are gathered or transposed. In bf16: the base sharded.
- Activations of a fused block, per token: residual streams, qkv, attention output, SwiGLU's input (bf16, or e4m3), and where matrices train
  the input of each product (in FP8 one layout). LoRA's are those of `saved_bytes_per_token` (common/model/fused_lora_block.py). Compiled blocks keep
  the rotated q and k and the norm's output too. A recomputed block keeps its input; of the blocks that leave SwiGLU's input in the host's
  memory (`offload_layers`), one's is on the GPU.
- Logits once, in bf16: their gradient is written over them.

Needed is more than is allocated, and must be within what the driver offers (usable: 139.8 of an H200's 141 GiB, the same share assumed for the
others):

- {gib(plan.CONTEXT_BYTES):.1f} GiB for the process's context and loaded libraries. An H200's number, read off the message with which a fourth sequence of the 8B on one
  GPU was refused, and assumed for the others. NCCL's buffers are in it: a run on 4 GPUs that reserved 138.6 GiB left it 1.2 at most.
- {plan.LEAST_RESERVE - 1:.0%} of what is allocated, in pieces too small to be of use. torch *reserves* {plan.USUAL_RESERVE - 1:.0%} more where it can (2.7 to 4.5 % in our runs), but gives
  back what it can before it gives up, and the run that came nearest to the limit had 136.1 GiB allocated and 137.5 reserved. All this
  with `expandable_segments`; the configs of AMD's GPUs do not set it, and have more room.

Where {plan.USUAL_RESERVE - 1:.0%} do not fit, `plan` says that torch may have to give memory back and ask for it again. With those 136.1 GiB that cost nothing that showed:
{_nearest().tokens_per_s_per_gpu:,} tok/s/GPU with three sequences at a time, 8,368 with two.

These two ran out of memory, and the plan refuses them:

{_refused()}

The points in bf16 are those of compiled blocks, but for 8,514, 8,155 and 11,223 tok/s. Those with 4 and 12 layers of the 8B are older than the Triton SwiGLU; it keeps the same bytes.
Those of LoRA are older than `kernels/lora_down.py` and are planned with `kernels = "reference"`, whose dropout keeps what it lets through.
"""

TIME = f"""\
## Time: one efficiency per GPU kind

A step takes (FLOPs of the linears / dense FP8 peak + FLOPs of attention, head and adapters / dense bf16 peak) / efficiency + traffic.
Linears: forward, data gradient, weight gradient unless frozen, and a second forward in recomputed layers. Attention's backward is
{plan.ATTENTION_BACKWARD} forwards. Traffic of the published layouts is not hidden: bf16 gradients and FP8 weights once per step at {plan.COLLECTIVE_BYTES_PER_S / 1e9:.0f} GB/s (8B), adapter
gradients (LoRA). An evaluation is a forward of each GPU's sequences. To the target: sequences of the RCP / (sequences per second), and the evaluations on the way.

The efficiency of a kind is fitted so that the mean logarithm of plan / score is zero over the kind's results below, which are **published by
others**; H100 takes the H200's. HPE's 64 GPUs with half a sequence each pull the H200's down (Dell's LoRA alone would give 0.47), and HPE's runs needed some 12 % more
sequences than the RCP.

This package is planned with its traffic hidden and on H200s with an efficiency of its own, {plan.OWN_EFFICIENCY["H200"]}, fitted in the same way to all our FP8 runs of whole models in the table above; on
H100s with the same, which nobody has measured; on AMD's GPUs with the published stacks', an assumption. One number for both benchmarks plans the 8B up to 6 % too fast and LoRA up to 6 %
too slow. A bf16 step is {plan.BF16_OVER_FP8} times the FP8 one: Megatron-core + TE's ratio on 4 H200s, 8B (15,227 / 10,893 tok/s/GPU), and on 2 also ours (15,829 / 11,223); what was compiled, sharded by FSDP or
recomputed in bf16 was slower than that. Evaluations of LoRA are planned too slow: 16 sequences took 8.7 s on 2 H200s, planned {_evaluation_s(16):.1f}.
"""

LEFT_OUT = """\
## What is left out

- Transformer Engine (`fp8 = "te"`): its memory is planned as that of compiled bf16 blocks.
- Not tried on a GPU: the largest micro-batches of the tables (but the 8B's on one H200: 3 ran, 4 did not), fewer recomputed layers than the
  configs set, LoRA in FP8 on 4 GPUs, anything on 8, and any memory number on {kinds}.
- With neither fused nor compiled blocks more is kept than counted.
- `transport = "copy_engine"` holds LoRA's base, or the mailboxes of the 8B's gradients, in memory that torch does not count as allocated; the plan does.
- What memory in pieces costs without `expandable_segments`, and what context and libraries take on other GPUs than an H200.
"""


if __name__ == "__main__":
    print(document(), end="")
