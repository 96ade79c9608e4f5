"""Sequences shared by ranks: each attention engine, blocks of two processes, several GPUs."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import fused_lora as lora
import pytest
import torch
import torch.distributed as dist
from plain_block import Block
from ranks import call_on_ranks, free_port, rank_environment
from signal_to_noise import sqnr_db
from tiny import TINY

from common import engines
from common.engines import REPEATED_HEADS, SDPA
from common.errors import ConfigError
from common.kernels.attention import attention_backends, attention_engine, causal_attention
from common.kernels.lora import Dropout
from common.kernels.rope import rope_tables
from common.model.fused_block import FusedBlock
from common.model.linear_layers import DelayedScaling, LinearLayers
from common.self_test.attention import _attention_truth
from common.self_test.kernel_cases import Draw
from common.self_test.results import decibels
from common.sharding.context_parallel import (
    ALONE,
    ContextAttention,
    ContextGroup,
    context_group,
)
from common.sharding.processes import start_processes
from llama2_70b_lora import rules as lora_rules
from llama31_8b import rules as pretraining_rules

VARIABLE = engines.VARIABLES[engines.ATTENTION]
ENGINES = [engine.name for engine in engines.ENGINES[engines.ATTENTION]]
# Engines that compute a prefix apart (common/kernels/prefix_attention.py). Each value is then the
# sum of two that were rounded to bf16, and rounded again. Independent roundings of two equal parts
# and of their sum are twice the variance of one rounding, 3 dB.
IN_PARTS = ("aiter", REPEATED_HEADS, SDPA)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


# --- attention of one chunk of queries ------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 8], ids=["c=2", "c=8"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("rules", [pretraining_rules.CLOSED, lora_rules.CLOSED], ids=["8b", "70b"])
def test_a_chunk_is_as_exact_as_in_sdpa_of_the_whole_sequence(rules, name, size, monkeypatch):
    """Compare out, dQ, dK and dV of a chunk of queries with fp32: shortest and longest prefix.

    SDPA computes the whole sequence up to the chunk's end, and only the chunk has a gradient. Keys
    and values have tokens outermost, as in ContextAttention.
    """
    shape = rules.shape
    chunk = rules.sequence_length // (2 * size)
    for keys in (2 * chunk, 2 * size * chunk):
        draw = Draw(torch.device("cuda"))
        projection = draw(2, keys, shape.qkv_size).unflatten(-1, (-1, shape.head_dim))
        d_out = draw(2, chunk, shape.num_heads, shape.head_dim)
        q, kv = projection.split([shape.num_heads, 2 * shape.num_kv_heads], 2)
        kv = kv.transpose(0, 1).contiguous().transpose(0, 1)
        q, k, v = (x.detach().requires_grad_() for x in (q, *kv.chunk(2, 2)))
        own = q.detach()[:, -chunk:].requires_grad_()
        monkeypatch.setenv(VARIABLE, SDPA)
        with attention_backends("cuda"):
            out = causal_attention(q, k, v)
            whole_d_out = torch.cat([torch.zeros_like(out[:, :-chunk]), d_out], 1)
            reference = [out, *torch.autograd.grad(out, (q, k, v), whole_d_out)]
        reference[:2] = [x[:, -chunk:] for x in reference[:2]]
        monkeypatch.setenv(VARIABLE, name)
        try:
            backends = attention_backends("cuda")
        except ConfigError as error:
            pytest.skip(f"{error.what}: {error.why}")
        with backends:
            out = causal_attention(own, k, v)
            found = [out, *torch.autograd.grad(out, (own, k, v), d_out)]
        group = shape.num_heads // shape.num_kv_heads
        truth = _attention_truth(
            own[-1, :, -group:], k[-1, :, -1], v[-1, :, -1], d_out[-1, :, -group:]
        )
        ratios = []
        for true, values, of_sdpa in zip(truth, found, reference, strict=True):
            count = true.shape[1]
            ratios.append([decibels(true, x[-1, :, -count:]) for x in (values, of_sdpa)])
        print(f"{chunk} of {keys}: " + ", ".join(f"{a:.1f} (SDPA {b:.1f})" for a, b in ratios))
        margin = 3 if name in IN_PARTS else 1
        assert all(ours > sdpa - margin for ours, sdpa in ratios), ratios


# --- attention of several GPUs, through NCCL ------------------------------------------------------

GPUS = min(4, torch.cuda.device_count())
TURNS = 5  # each with other numbers, so that a race between the streams shows


def parts_of_attention(processes, folder):
    """Return the decibels of this rank's out, dQ, dK and dV, [turns, 4], for batches of 1 and 2.

    The truth is attention of the whole sequence by the same engine, in the same rounding.
    """
    context = context_group(processes.rank, GPUS, GPUS, 120.0)
    shape = pretraining_rules.CLOSED.shape
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    found = []
    with attention_backends("cuda"):
        for turn in range(TURNS):
            draw = torch.Generator(processes.device).manual_seed(turn)
            size = (1 + turn % 2, 2048, heads + 2 * kv_heads, shape.head_dim)
            qkv = torch.randn(size, generator=draw, device=processes.device).bfloat16()
            q, k, v = (
                x.clone().requires_grad_() for x in qkv.split([heads, kv_heads, kv_heads], 2)
            )
            d_out = torch.randn(q.shape, generator=draw, device=processes.device).bfloat16()
            out = causal_attention(q, k, v)
            whole = [out, *torch.autograd.grad(out, (q, k, v), d_out)]
            own = context.cut(qkv, 1)
            shared = ContextAttention(own[:, :, :heads], own[:, :, heads:], True, context)
            parts = [shared.out, *shared.backward(context.cut(d_out, 1))]
            truths = [context.cut(x.detach(), 1) for x in whole]
            found.append([decibels(*pair) for pair in zip(truths, parts, strict=True)])
    return found


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_gpus_that_share_sequences_compute_attention_of_the_whole_sequence(tmp_path):
    """Sums over the ranks are rounded to bf16 at every rank, 2^-9 each."""
    ranks = call_on_ranks(
        GPUS,
        "test_context_parallel_gpu:parts_of_attention",
        tmp_path,
        timeout_s=300,
        device="cuda",
    )
    for rank, turns in enumerate(ranks):
        print(rank, [[round(value, 1) for value in turn] for turn in turns])
    assert min(value for turns in ranks for turn in turns for value in turn) > 40


# --- blocks of two processes on this GPU ----------------------------------------------------------

LENGTH = 1024
WIDE = replace(TINY.shape, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_kv_heads=8)
BLOCKS = ("bf16", "fp8", "lora bf16", "lora fp8")


@contextmanager
def through_host_memory():
    """Make the collectives of a context group copy through host memory, for gloo.

    NCCL refuses two processes on one GPU. Sums are rounded once, as NCCL rounds those of two ranks.
    """
    done = mock.Mock()
    gather = dist.all_gather_into_tensor
    reduce = dist.reduce_scatter_tensor

    def staged_gather(into, part, group, async_op):
        host = torch.empty(into.shape, dtype=torch.float32)
        gather(host, part.float().cpu(), group=group)
        into.copy_(host)
        return done

    def staged_reduce(into, whole, group, async_op):
        host = torch.empty(into.shape, dtype=torch.float32)
        reduce(host, whole.float().cpu(), group=group)
        into.copy_(host)
        return done

    with (
        mock.patch.object(dist, "all_gather_into_tensor", staged_gather),
        mock.patch.object(dist, "reduce_scatter_tensor", staged_reduce),
    ):
        yield


def block_results(kind: str, context: ContextGroup, exact: bool = False) -> dict:
    """Return the outputs and gradients of a block's third step, each [tokens, ...] or a weight's.

    `context`: the ranks that share the sequences. The output and the gradient of the input are then
        those of this rank's tokens.
    `exact`: in fp32 and plain torch.
    """
    fp8 = kind.endswith("fp8") and not exact
    scaling = DelayedScaling() if fp8 else LinearLayers()
    dtype = torch.float32 if exact else torch.bfloat16
    kernels = "reference" if exact else "triton"
    torch.manual_seed(0)
    if kind.startswith("lora"):
        shape = lora.WIDE
        plain = lora.plain_block(shape, torch.bfloat16).to("cuda", dtype)
        block = lora.fused_block(plain, lora.P, fp8, kernels=kernels).to("cuda")
        scaling = block.base.scaling
        block.draw_dropouts = lambda x: tuple(
            Dropout(
                torch.tensor([seed], device="cuda"),
                lora.P,
                context.token_numbers(*x.shape[:2], x.device),
            )
            for seed in (31, 2**50 + 3)
        )
    else:
        shape = WIDE
        block = Block(shape) if exact else FusedBlock(shape, kernels, scaling)
        for name, parameter in block.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.02)
            parameter.data = parameter.data.bfloat16()
        block.to("cuda", dtype)
        scaling.allocate(torch.device("cuda"))
    block.context = context
    scaling.context = context
    tables = [context.cut(table, 0) for table in rope_tables(shape, LENGTH, "cuda")]
    for step in range(3):
        generator = torch.Generator("cuda").manual_seed(step)
        size = (2, LENGTH, shape.hidden_size)
        x, d_out = (torch.randn(size, generator=generator, device="cuda") for _ in range(2))
        leaf = context.cut(x.bfloat16(), 1).to(dtype).requires_grad_()
        trained = {name: p for name, p in block.named_parameters() if p.requires_grad}
        out = block(leaf, *tables)
        gradient = 1e-4 * context.cut(d_out.bfloat16(), 1).to(dtype)
        gradients = torch.autograd.grad(out, [leaf, *trained.values()], gradient)
        if fp8:
            scaling.step_done()
    results = {"output": out.detach(), "d_x": gradients[0]}
    results |= dict(zip(trained, gradients[1:], strict=True))
    return {name: value.float().cpu() for name, value in results.items()}


def one_of_two(folder, environment: dict[str, str]) -> None:
    """Be one of two processes on the GPU: save the results of its part of each block."""
    os.environ.update(environment)
    processes = start_processes("cpu", 120.0)  # by gloo
    torch.cuda.set_device(0)
    context = context_group(processes.rank, 2, 2, 120.0)
    results = {}
    with attention_backends("cuda"), through_host_memory():
        attention_engine(torch.device("cuda"), torch.bfloat16)
        for kind in BLOCKS:
            results[kind] = block_results(kind, context)
    torch.save(results, folder / f"rank_{processes.rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return, by rank, the results of two processes that share the sequences."""
    folder = tmp_path_factory.mktemp("shared")
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=one_of_two, args=(folder, rank_environment(rank, 2, port)))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
        process.kill()
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_of_two_processes_is_as_near_to_fp32_as_one_of_whole_sequences(shared, kind):
    """No result of the two is 1 dB further from fp32; for weights of norms, which are few, 2 dB.

    Gradients of weights are summed over the two.
    """
    with attention_backends("cuda"):
        whole = block_results(kind, ALONE)
    exact = block_results(kind, ALONE, exact=True)
    too_far = []
    for name, truth in exact.items():
        parts = [of_rank[kind][name] for of_rank in shared]
        found = sum(parts)
        if name in ("output", "d_x"):
            found = torch.empty_like(truth)
            chunks = found.chunk(4, 1)
            for rank, part in enumerate(parts):
                for number, chunk in zip(
                    ContextGroup(2, rank).chunks, part.chunk(2, 1), strict=True
                ):
                    chunks[number].copy_(chunk)
        ours = sqnr_db(found, truth)
        alone = sqnr_db(whole[name], truth)
        print(f"{kind:10} {name:22} shared {ours:5.1f} dB, whole sequences {alone:5.1f}")
        if ours < alone - (1 if truth.ndim > 1 else 2):
            too_far.append(name)
    assert not too_far
