"""Time the FP8 attention forward of nvidia-cudnn-frontend 1.32.0 on sm_90, output in bf16. One GPU.

    PYTHONPATH=.:tests/gpu/studies python3 tests/gpu/studies/fp8_attention_forward.py

Needs FlashAttention-4 and the package's folder cudnn/block_sparse_attention, which is CuTe DSL
compiled at the first call (its wheel wants nvidia-cutlass-dsl 4.8.0, this kernel 4.6.2).

The kernel is block-sparse: each block of 128 queries attends to a list of blocks of 128 keys, of
one length for all. It has no causal mask and no grouped heads. It wants heads before tokens, V
transposed, and a scale per row of Q, per 16 rows of K, and per channel of V. So it is comparable to
a forward without mask, of twice a causal one's work. Lists of 33 of the 64 blocks are the work of a
causal forward (32.5 on average), without its mask and its uneven rows, so no causal kernel of this
kind is much faster. The casts are timed with 32 heads for q and 8 for k and v.

Predicted for an H200: 800 TFLOP/s, so 1,374 µs for all blocks and 709 µs for 33 of 64; casts of 55
to 80 µs (184 MB at 3.5 TB/s or less). Together 770 µs, above the mark of 563 µs for going on.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from transposed_quantize import in_turns

from common.kernels import flash_attention_4

TOKENS = 8192
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
BLOCK = 128
BLOCKS = TOKENS // BLOCK
CAUSAL_BLOCKS = BLOCKS // 2 + 1  # at least a causal forward's mean of 32.5
MARK_US = 563.0  # of a causal forward with its casts, for going on
TFLOP = 4e-12 * HEADS * TOKENS * TOKENS * HEAD_DIM  # of a forward without mask


def draw(heads: int) -> Tensor:
    return torch.randn(1, TOKENS, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def repeated(x: Tensor) -> Tensor:
    """Return the 8 heads of k or v as 32."""
    return x.repeat_interleave(HEADS // KV_HEADS, 2)


@cache
def lists_of_blocks() -> Tensor:
    """Return every block's list of key blocks, int32 [1, heads, blocks, blocks]."""
    blocks = torch.arange(BLOCKS, device="cuda", dtype=torch.int32)
    return blocks.expand(1, HEADS, BLOCKS, BLOCKS).contiguous()


def sparse_forward(count: int, quantized: tuple[Tensor, ...]) -> Tensor:
    """Return the output, bf16 [1, heads, tokens, 128], of attention to the first `count` blocks."""
    from cudnn.block_sparse_attention import _interface

    return _interface._bsa_attn_fwd_sm90_fp8_blk128(*quantized, lists_of_blocks(), count)[0]


def quantize(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v in FP8 and their scales, as the kernel wants them. Heads first."""
    from cudnn.block_sparse_attention._fp8_quant import _quantize_sage_bhsd

    return _quantize_sage_bhsd(q, k, v, v_layout="bhds")


def kernels_us(work: Callable[[], object], calls: int = 20) -> dict[str, float]:
    """Return name -> microseconds of a call, for each kernel that `work` launches."""
    work()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / calls for event in profile.key_averages()}


def casts_us(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the microseconds of the casts of 32 heads of q and 8 of k and v."""
    few = heads_first(k), heads_first(v)
    of_q = kernels_us(
        partial(quantize, heads_first(q), *(heads_first(repeated(x)) for x in (k, v)))
    )
    of_kv = kernels_us(partial(quantize, few[0], *few))
    for name, us in of_q.items():
        print(f"cast, 32 heads: {us:7.1f} µs, 8 heads: {of_kv.get(name, 0.0):7.1f}  {name[:70]}")
    q_us = sum(us for name, us in of_q.items() if "quantize_q" in name)
    kv_us = sum(us for name, us in of_kv.items() if "quantize_q" not in name)
    return q_us + kv_us


def decibels(out: Tensor, expected: Tensor) -> float:
    error = (out.float() - expected).norm()
    return float(20 * torch.log10(expected.norm() / error))


def exact(q: Tensor, k: Tensor, v: Tensor, heads: int = 2) -> Tensor:
    """Return attention without mask of the first heads in fp32, [tokens, heads, 128]."""
    outs = []
    for head in range(heads):
        scores = q[0, :, head].float() @ k[0, :, head].float().T * HEAD_DIM**-0.5
        outs.append(scores.softmax(1) @ v[0, :, head].float())
    return torch.stack(outs, 1)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    flash_attention_4.require()
    from flash_attn.cute import flash_attn_func

    q, k, v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    all_k, all_v = repeated(k), repeated(v)
    works = {
        "FA4, bf16, causal, 8 kv heads": lambda: flash_attn_func(q, k, v, causal=True)[0],
        "FA4, bf16, no mask, 8 kv heads": lambda: flash_attn_func(q, k, v)[0],
        "FA4, bf16, no mask, 32 kv heads": lambda: flash_attn_func(q, all_k, all_v)[0],
    }
    work_of = dict(zip(works, (TFLOP / 2, TFLOP, TFLOP), strict=True))
    casts = float("nan")
    causal_name = f"cuDNN, FP8, {CAUSAL_BLOCKS} of {BLOCKS} blocks"
    try:
        quantized = quantize(*(heads_first(x) for x in (q, all_k, all_v)))
        expected = exact(q, all_k, all_v)
        of_fp8 = decibels(sparse_forward(BLOCKS, quantized).transpose(1, 2)[0, :, :2], expected)
        of_bf16 = decibels(flash_attn_func(q, all_k, all_v)[0][0, :, :2], expected)
        print(f"two heads against fp32: FP8 {of_fp8:.1f} dB, FlashAttention-4 {of_bf16:.1f} dB")
        works["cuDNN, FP8, all blocks"] = partial(sparse_forward, BLOCKS, quantized)
        works[causal_name] = partial(sparse_forward, CAUSAL_BLOCKS, quantized)
        work_of["cuDNN, FP8, all blocks"] = TFLOP
        work_of[causal_name] = TFLOP * CAUSAL_BLOCKS / BLOCKS
        casts = casts_us(q, k, v)
    except Exception:
        traceback.print_exc()
    us = in_turns(works, 1, graphs=False)
    print(f"{torch.cuda.get_device_name()}: 1 x {TOKENS} tokens, {HEADS} heads of {HEAD_DIM}")
    for name, value in us.items():
        print(f"{name:34} {value:8.1f} µs {1e6 * work_of[name] / value:7.0f} TFLOP/s")
    if causal_name in us:
        both = us[causal_name] + casts
        saved = us["FA4, bf16, causal, 8 kv heads"] - both
        print(f"casts {casts:.1f} µs; with a causal forward's work {both:.1f}, saves {saved:.1f}")
        print(f"the mark is {MARK_US:.0f} µs: {'go on' if both < MARK_US else 'do not go on'}")


if __name__ == "__main__":
    main()
