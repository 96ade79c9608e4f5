"""Compare loss curves with Megatron-core + Transformer Engine on the same weights and batches.

    export PYTHONPATH=.:tests/gpu/studies
    python tests/gpu/studies/loss_beside_megatron.py ours --text PREFIX --out ours.json
    python tests/gpu/studies/loss_beside_megatron.py megatron --text PREFIX --out megatron.json
    python tests/gpu/studies/loss_beside_megatron.py plot ours.json megatron.json --out FILE.png

The model has the 8B's width, 16 of its layers (8 on a GPU with less than 100 GiB) and the
miniature's vocabulary. A step is one sequence of 8,192 tokens, and no sequence is repeated.

Both stacks start from the weights that this package draws for SEED, rounded to bf16, including the
master weights. The schedule, AdamW's settings and weight decay (none on norms) are the same. Each
stack uses its own delayed scaling for FP8.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import convergence
import torch
from convergence import SHAPE, config_of, text_batches
from torch import Tensor, nn

from common.model.fused_block import FusedBlock
from common.model.initialization import init_weights
from common.model.linear_layers import linear_layers
from common.model.llama import Head, Llama
from common.model.shapes import ModelShape
from common.sharding.processes import start_processes
from common.training import pretraining
from common.training.schedules import warmup_cosine
from llama31_8b.rules import CLOSED

SEED = 1
RUNS = ("bf16", "FP8", "bf16 again")


def rounded_weights(
    model: nn.Module,
    layers: int,
    seed: int,
    std: float,
    set_weight: Callable[[nn.Parameter, Tensor], None],
) -> None:
    """Initialize as `init_weights` does, with each master weight rounded to bf16."""
    init_weights(model, layers, seed, std, lambda p, full: set_weight(p, full.bfloat16().float()))


# 4e-4 after 20 steps made the loss rise to 26 in the first ten steps.
LEARNING_RATE = 1e-4
WARMUP_STEPS = 50


def learning_rates(steps: int) -> Callable[[int], float]:
    return warmup_cosine(LEARNING_RATE, LEARNING_RATE / 10, WARMUP_STEPS, steps)


def ours(name: str, shape: ModelShape, steps: int, text: Path) -> list[float]:
    pretraining.init_weights = rounded_weights  # type: ignore[attr-defined]
    options = {"linear": "fp8"} if name.startswith("FP8") else {}
    config = config_of(options)
    batches = text_batches(text, steps, shape.vocab_size, SEED)
    return convergence.train_losses(config, batches, steps, PROCESSES[0], SEED, shape)


PROCESSES: list = []


def megatron_names(shape: ModelShape) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """Return the name of each parameter of this package -> (Megatron's name, conversion)."""

    def same(weight: Tensor) -> Tensor:
        return weight

    def grouped(weight: Tensor) -> Tensor:
        """Reorder the rows [q; k; v]: for each key head its query heads, then k, then v."""
        head = shape.head_dim
        sizes = [shape.num_heads * head, shape.num_kv_heads * head, shape.num_kv_heads * head]
        q, k, v = weight.split(sizes)
        groups = shape.num_kv_heads
        parts = [q.view(groups, -1, weight.shape[1])]
        parts += [k.view(groups, -1, weight.shape[1]), v.view(groups, -1, weight.shape[1])]
        return torch.cat(parts, 1).reshape(weight.shape)

    layer = {
        "attention_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", same),
        "ffn_norm.weight": ("mlp.linear_fc1.layer_norm_weight", same),
        "qkv.weight": ("self_attention.linear_qkv.weight", grouped),
        "o.weight": ("self_attention.linear_proj.weight", same),
        "gate_up.weight": ("mlp.linear_fc1.weight", same),
        "down.weight": ("mlp.linear_fc2.weight", same),
    }
    names = {
        "embedding.weight": ("embedding.word_embeddings.weight", same),
        "head.norm.weight": ("decoder.final_layernorm.weight", same),
        "head.output.weight": ("output_layer.weight", same),
    }
    for number in range(shape.num_layers):
        for mine, (theirs, convert) in layer.items():
            names[f"blocks.{number}.{mine}"] = (f"decoder.layers.{number}.{theirs}", convert)
    return names


def meta_model(shape: ModelShape) -> Llama:
    linear = linear_layers(config_of({}).linear_format)
    with torch.device("meta"):
        blocks = [FusedBlock(shape, "reference", linear, False) for _ in range(shape.num_layers)]
        return Llama(shape, convergence.SEQUENCE, blocks, Head(shape, "reference"))


def load_weights(model: nn.Module, shape: ModelShape) -> None:
    """Fill Megatron's model with the weights that `ours` starts from."""
    source = meta_model(shape)
    name_of = {parameter: name for name, parameter in source.named_parameters()}
    names = megatron_names(shape)
    targets = dict(model.named_parameters())
    unfilled = set(targets)

    def set_weight(parameter: nn.Parameter, full: Tensor) -> None:
        target, convert = names[name_of[parameter]]
        with torch.no_grad():
            targets[target].copy_(convert(full))
        unfilled.discard(target)

    rounded_weights(source, shape.num_layers, SEED, CLOSED.init_std, set_weight)
    assert not unfilled, f"without weights: {sorted(unfilled)}"


def megatron(name: str, shape: ModelShape, steps: int, text: Path) -> list[float]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron_peers import FP8, transformer

    config = transformer(
        shape.num_layers,
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_heads,
        **(FP8 if name.startswith("FP8") else {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=shape.vocab_size,
        max_sequence_length=convergence.SEQUENCE,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        rope_scaling=True,
        rope_scaling_factor=8.0,
        share_embeddings_and_output_weights=False,
        fp16_lm_cross_entropy=False,
    ).cuda()
    load_weights(model, shape)
    parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=False, average_in_collective=True
    )
    model = DistributedDataParallel(config, parallel, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=CLOSED.weight_decay,
            adam_beta1=CLOSED.adam_beta_1,
            adam_beta2=CLOSED.adam_beta_2,
            adam_eps=CLOSED.adam_epsilon,
            clip_grad=CLOSED.gradient_clip_norm,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            fp8_recipe="delayed" if name.startswith("FP8") else None,
        ),
        [model],
    )
    forward_backward = get_forward_backward_func()
    positions = torch.arange(convergence.SEQUENCE, device="cuda")[None]
    found: list[Tensor] = []

    def forward(iterator: Iterator, model: nn.Module) -> tuple[Tensor, Callable]:
        pair = torch.from_numpy(next(iterator)).cuda().long()
        losses = model(pair[:, 0].contiguous(), positions, None, labels=pair[:, 1].contiguous())

        def mean(losses: Tensor) -> tuple[Tensor, dict]:
            loss = losses.float().mean()
            found.append(loss.detach().clone())
            return loss, {}

        return losses, mean

    batches = text_batches(text, steps, shape.vocab_size, SEED)
    lr_at = learning_rates(steps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
            group["weight_decay"] = CLOSED.weight_decay * group.get("wd_mult", 1.0)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward,
            data_iterator=batches,
            model=[model],
            num_microbatches=1,
            seq_length=convergence.SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
    return torch.stack(found).tolist()


def run(stack: str, args: argparse.Namespace) -> None:
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    layers = args.layers or (16 if gib > 100 else 8)
    shape = replace(SHAPE, num_layers=layers)
    began = time.monotonic()
    if stack == "ours":
        PROCESSES.append(start_processes("cuda", 600.0))
    else:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": args.port, "RANK": "0"}
        for name, value in (defaults | {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}).items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(0)
        torch.distributed.init_process_group("nccl")
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
    curves: dict[str, list[float]] = {}
    longest = 0.0
    for name in args.only or RUNS:
        left = 60 * args.minutes - (time.monotonic() - began)
        if longest and left < 1.15 * longest:
            print(f"{stack}: {name} left out, {left:.0f} s are left", flush=True)
            break
        started = time.monotonic()
        try:
            curves[name] = (ours if stack == "ours" else megatron)(
                name, shape, args.steps, args.text
            )
        except Exception:
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - started)
        losses = curves.get(name, [float("nan")])
        print(
            f"{stack}, {name}, {layers} layers: first {losses[0]:.5f}, step 10 "
            f"{losses[min(9, len(losses) - 1)]:.5f},"
            f" last {losses[-1]:.5f}; {time.monotonic() - started:.0f} s",
            flush=True,
        )
        device = torch.cuda.get_device_name()
        args.out.write_text(
            json.dumps(
                {"device": device, "layers": layers, "torch": torch.__version__, "losses": curves}
            )
        )


def differences(a: list[float], b: list[float]) -> str:
    gaps = [x - y for x, y in zip(a, b, strict=False)]
    largest = max(range(len(gaps)), key=lambda step: abs(gaps[step]))
    late = gaps[-50:]
    return (
        f"step 1 {gaps[0]:+.5f}; largest {gaps[largest]:+.4f} at step {largest + 1};"
        f" mean of the last {len(late)} {statistics.mean(late):+.4f} (their standard deviation "
        f"{statistics.pstdev(late):.4f})"
    )


def plot(files: list[Path], out: Path) -> None:
    from matplotlib.figure import Figure

    stacks = {path.stem: json.loads(path.read_text())["losses"] for path in files}
    curves = {
        f"{stack}, {name}": losses
        for stack, runs in stacks.items()
        for name, losses in runs.items()
    }
    base = next(name for name in curves if name.startswith("megatron") and name.endswith("bf16"))
    pairs = [
        (a, b)
        for a, b in (
            ("ours, bf16", "megatron, bf16"),
            ("ours, FP8", "megatron, FP8"),
            ("ours, FP8", "ours, bf16"),
            ("megatron, FP8", "megatron, bf16"),
            ("ours, bf16 again", "ours, bf16"),
            ("megatron, bf16 again", "megatron, bf16"),
        )
        if a in curves and b in curves
    ]
    for a, b in pairs:
        print(f"{a} minus {b}: {differences(curves[a], curves[b])}")
    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for name, losses in curves.items():
        if name.endswith("again"):
            continue
        upper.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1)
        gaps = [a - b for a, b in zip(losses, curves[base], strict=False)]
        lower.plot(range(1, len(gaps) + 1), gaps, label=name, linewidth=1)
    upper.set(ylabel="training loss")
    upper.legend(fontsize="small")
    lower.set(xlabel="step", ylabel=f"minus {base}")
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stack", choices=("ours", "megatron", "plot"))
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--port", default="29533")
    parser.add_argument("--only", action="append", choices=RUNS)
    args = parser.parse_args()
    convergence.SEQUENCE, convergence.BATCH = 8192, 1
    convergence.LEARNING_RATE, convergence.WARMUP_STEPS = LEARNING_RATE, WARMUP_STEPS
    if args.stack == "plot":
        plot(args.files, args.out)
    else:
        run(args.stack, args)


if __name__ == "__main__":
    main()
