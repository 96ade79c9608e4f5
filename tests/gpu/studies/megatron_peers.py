"""Time training steps of both benchmarks in Megatron-core and Transformer Engine.

    torchrun --nproc-per-node N tests/gpu/studies/megatron_peers.py llama31_8b
        [--bf16] [--fuse-wgrad] [--fuse-mlp] [--fuse-qkv-rope] [--cuda-graph]
        [--micro-batches 4] [--layers 32] [--context-parallel p2p|a2a|all_gather]
    torchrun --nproc-per-node N tests/gpu/studies/megatron_peers.py open_llama_1b
        [--bf16] [--fuse-wgrad] [--fuse-mlp] [--fuse-qkv-rope] [--micro-batch-size 16]
    python tests/gpu/studies/megatron_peers.py llama2_70b_lora [--fuse-qkv-rope]

These are the peers in docs/results.md. Weights and tokens are random.

The 8B, and the 1B of open_llama/models/llama-1b.json, train data parallel with the distributed
optimizer. Communication of gradients and weights overlaps with computation. The 8B has 4
micro-batches of one sequence of 8,192 tokens, the 1B one micro-batch of 16 sequences of 2,048.

The settings of NVIDIA's own config for the H200 are options, since not all of them help everywhere:

- `--fuse-wgrad`: Transformer Engine adds weight gradients to the gradient buffer directly.
- `--fuse-mlp`: Transformer Engine's operation fuser runs the MLP (use_te_op_fuser).
- `--fuse-qkv-rope`: one kernel rotates q and k of the fused projection (fused_single_qkv_rope).
- `--cuda-graph`: one CUDA graph for the forward and backward of all micro-batches. Tokens then
  start in pinned host memory, because Megatron copies them on a stream of its own, which does not
  wait for a kernel that still writes them on the GPU.

The first three together are the fastest for the 8B in FP8.

With `--context-parallel`, all GPUs share each sequence, and Transformer Engine exchanges keys and
values in the given way.

LoRA trains 4 and then 12 of the 80 layers on one GPU. The adapters are where NeMo has them (qkv and
o, on the normed input) and the base is in FP8. The difference gives the time of a layer, which is
extrapolated to 80 layers. Communication and recomputation are left out, in favor of the peer.

Needs Megatron-core 0.16.1 and Transformer Engine 2.20.2. requirements-test.txt contains only the
first. tests/gpu/studies/against_megatron.sh runs these peers and this package in turn.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor, nn

SEQUENCE, WARMUP, STEPS = 8192, 3, 8
FP8 = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 4,
    "fp8_amax_compute_algo": "most_recent",
}
DEPTHS, ALL_LAYERS = (4, 12), 80


@dataclass(frozen=True)
class Settings:
    """The options of the command line that change how Megatron computes."""

    bf16: bool = False
    fuse_wgrad: bool = False
    fuse_mlp: bool = False
    fuse_qkv_rope: bool = False
    cuda_graph: bool = False

    def __str__(self) -> str:
        names = [name.replace("_", "-") for name, value in vars(self).items() if value]
        return ", ".join(names if self.bf16 else ["FP8", *names])


@dataclass(frozen=True)
class Pretraining:
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    tied_embedding: bool
    sequence: int
    micro_batch_size: int
    micro_batches: int
    context_parallel: str = ""  # how GPUs that share each sequence exchange keys and values


PRETRAINING = {
    "llama31_8b": Pretraining(32, 4096, 14336, 32, 128256, False, SEQUENCE, 1, 4),
    "open_llama_1b": Pretraining(16, 2048, 8192, 32, 32768, True, 2048, 16, 1),
}


def transformer(
    layers: int, hidden: int, ffn: int, heads: int, **options: object
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=hidden // heads,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        apply_rope_fusion=True,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        masked_softmax_fusion=True,
        persist_layer_norm=True,
        init_method_std=0.02,
        **options,
    )


def gpt(
    config: TransformerConfig,
    vocabulary: int,
    rotary_base: int,
    sequence: int = SEQUENCE,
    tied: bool = False,
    fuse_mlp: bool = False,
) -> GPTModel:
    options = {
        "position_embedding_type": "rope",
        "rotary_base": rotary_base,
        "share_embeddings_and_output_weights": tied,
    }
    spec = get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=fuse_mlp)
    return GPTModel(
        config,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=sequence,
        fp16_lm_cross_entropy=False,
        **options,
    ).cuda()


def median_seconds(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(WARMUP + STEPS):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        began = time.monotonic()
        step()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[WARMUP:])


def pretraining(name: str, work: Pretraining, settings: Settings) -> str:
    options: dict[str, object] = {} if settings.bf16 else {**FP8}
    options["fused_single_qkv_rope"] = settings.fuse_qkv_rope
    if settings.cuda_graph:
        options |= {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.full_iteration]}
    sharing = 1  # GPUs that share a sequence
    if work.context_parallel:
        sharing = torch.distributed.get_world_size()
        options |= {"context_parallel_size": sharing, "cp_comm_type": work.context_parallel}
    config = transformer(work.layers, work.hidden, work.ffn, work.heads, **options)
    model = gpt(
        config,
        work.vocabulary,
        500000,
        work.sequence,
        work.tied_embedding,
        settings.fuse_mlp,
    )
    if settings.fuse_wgrad:
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=False,
        average_in_collective=True,
        **overlap,
    )
    model = DistributedDataParallel(config, parallel, model)
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    adam = {
        "optimizer": "adam",
        "lr": 8e-4,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "clip_grad": 1.0,
    }
    precision = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "fp8_recipe": None if settings.bf16 else FP8["fp8_recipe"],
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            **adam, **precision, use_distributed_optimizer=True, overlap_param_gather=True
        ),
        [model],
    )
    forward_backward = get_forward_backward_func()
    if settings.cuda_graph:
        forward_backward = FullCudaGraphWrapper(forward_backward)
    positions = torch.arange(work.sequence, device="cuda")[None].expand(work.micro_batch_size, -1)

    def batches() -> Iterator[dict[str, Tensor]]:
        size = (work.micro_batch_size, work.sequence + 1)
        place = {"pin_memory": True} if settings.cuda_graph else {"device": "cuda"}
        while True:
            yield {"tokens": torch.randint(0, work.vocabulary, size, **place)}

    def forward(iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Callable]:
        tokens = next(iterator)["tokens"]
        batch = {
            "inputs": tokens[:, :-1].contiguous(),
            "positions": positions,
            "labels": tokens[:, 1:].contiguous(),
        }
        batch = get_batch_on_this_cp_rank(batch)
        losses = model(batch["inputs"], batch["positions"], None, labels=batch["labels"])
        return losses, lambda losses: (losses.float().mean(), {})

    data = batches()

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward,
            data_iterator=data,
            model=[model],
            num_microbatches=work.micro_batches,
            seq_length=work.sequence,
            micro_batch_size=work.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()

    gc.disable()  # as Megatron's own training loop does
    seconds = median_seconds(step)
    shape = f"{work.layers} layers, {settings}, {torch.distributed.get_world_size()} GPUs"
    if sharing > 1:
        shape += f", {sharing} a sequence ({work.context_parallel})"
    shape += (
        f", {work.micro_batches} micro-batches of {work.micro_batch_size} x {work.sequence} tokens"
    )
    tokens = work.micro_batches * work.micro_batch_size * work.sequence / sharing
    return (
        f"{name}, {shape}: {tokens / seconds:,.0f} tok/s/GPU, {1e3 * seconds:.1f} ms (median of "
        f"{STEPS})"
    )


class Adapter(nn.Module):
    """A frozen linear layer of Megatron with LoRA beside it, rank 16, alpha 32, dropout 0.1."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int):
        super().__init__()
        options = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.a, self.b = nn.Linear(inputs, 16, **options), nn.Linear(16, outputs, **options)
        nn.init.zeros_(self.b.weight)
        if hasattr(base, "return_layernorm_output"):
            base.return_layernorm_output = True

    def forward(self, x: Tensor, *rest: object, **options: object) -> tuple[Tensor, Tensor | None]:
        result, bias = self.base(x, *rest, **options)
        result, normed = result if isinstance(result, tuple) else (result, x)
        return result + self.b(self.a(self.dropout(normed))) * 2.0, bias


def lora_step_seconds(layers: int, fuse_qkv_rope: bool) -> float:
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import fp8_model_init

    hidden, vocabulary = 8192, 32000
    options = {**FP8, "fp8_param": True, "fused_single_qkv_rope": fuse_qkv_rope}
    config = transformer(layers, hidden, 28672, 64, **options)
    with fp8_model_init(
        enabled=True, recipe=DelayedScaling(), preserve_high_precision_init_val=False
    ):
        model = gpt(config, vocabulary, 10000)
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.linear_qkv = Adapter(attention.linear_qkv, hidden, hidden + 2 * 8 * 128)
        attention.linear_proj = Adapter(attention.linear_proj, hidden, hidden)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=4e-4,
        fused=True,
    )
    positions = torch.arange(SEQUENCE, device="cuda")[None]
    tokens = torch.randint(0, vocabulary, (1, SEQUENCE + 1), device="cuda")

    def step() -> None:
        model(
            tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()
        ).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return median_seconds(step)


def lora(settings: Settings) -> str:
    seconds = []
    for layers in DEPTHS:
        seconds.append(lora_step_seconds(layers, settings.fuse_qkv_rope))
        gc.collect()
        torch.cuda.empty_cache()
    layer = (seconds[1] - seconds[0]) / (DEPTHS[1] - DEPTHS[0])
    whole = seconds[0] + (ALL_LAYERS - DEPTHS[0]) * layer
    return (
        f"llama2_70b_lora, {settings}, 1 GPU: {1e3 * layer:.2f} ms a layer; 80 layers would make "
        f"{SEQUENCE / whole:,.0f} tok/s/GPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=[*PRETRAINING, "llama2_70b_lora"])
    for setting in fields(Settings):
        parser.add_argument(f"--{setting.name.replace('_', '-')}", action="store_true")
    for option in ("--micro-batches", "--micro-batch-size", "--layers"):
        parser.add_argument(option, type=int)
    parser.add_argument("--context-parallel", choices=("p2p", "a2a", "all_gather"))
    args = parser.parse_args()
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    sharing = torch.distributed.get_world_size() if args.context_parallel else 1
    parallel_state.initialize_model_parallel(context_parallel_size=sharing)
    model_parallel_cuda_manual_seed(1)
    settings = Settings(
        **{setting.name: getattr(args, setting.name) for setting in fields(Settings)}
    )
    if args.benchmark == "llama2_70b_lora":
        text = lora(settings)
    else:
        given = {
            "layers": args.layers,
            "micro_batches": args.micro_batches,
            "micro_batch_size": args.micro_batch_size,
            "context_parallel": args.context_parallel,
        }
        changes = {key: value for key, value in given.items() if value is not None}
        work = replace(PRETRAINING[args.benchmark], **changes)
        text = pretraining(args.benchmark, work, settings)
    if torch.distributed.get_rank() == 0:
        print(
            f"Megatron-core + Transformer Engine: {text}, peak "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
            flush=True,
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
