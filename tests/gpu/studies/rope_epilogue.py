"""Time RoPE in the epilogue of qkv's product, by QuACK 0.6.5, against today's two kernels.

    PYTHONPATH=.:tests/gpu/studies python3 tests/gpu/studies/rope_epilogue.py

One GPU of sm_90, with QuACK. The shape is the 8B's: FP8, 8,192 x 6,144 x 4,096, 32 + 8 heads.

What QuACK has (quack/epilogue/rotary.py): `rope_table_epi` reads cos and sin from a table, and
`rope_posfreq_epi` computes them. Both pair adjacent columns, where ours pairs column i of a head
with column i + 64. So the rows of W_qkv are interleaved here, inside each head of q and k, which
changes no sum. Both rotate unrounded sums. The table repeats for every head, so it would rotate v
too; the computed angles of v are 0. The table needs tiles of 64, 128 or 256 columns.

The epilogues here take FP8, keep v by a row of flags, and can round the sums to bf16 before the
rotation, as today's kernel sees them, with its order of multiplications and additions.

Predicted for an H200: the product takes 310 µs (1,330 TFLOP/s), RoPE's kernel 45 µs. The epilogue
costs twice QuACK's 2 % of a bf16 product, 12 µs, so it saves 33 µs a layer and sequence, 4 ms of a
step of 1,863 ms (32 layers, 4 sequences). With tiles of 192 x 128 or smaller, the product itself
may be slower than by cuBLASLt, which may cost more than that. Rounded and with the table: the bits
of today.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transposed_quantize import in_turns, quantizers, set_scale

from common.kernels import cublaslt, quack_swiglu
from common.kernels.fp8 import QuantizedTensor
from common.kernels.quantize import quantize_triton
from common.kernels.rope import rope_frequencies, rope_packed_triton_, rope_tables
from common.model.shapes import LLAMA31_8B

TOKENS = 8192
HEADS = LLAMA31_8B.num_heads
KV_HEADS = LLAMA31_8B.num_kv_heads
HEAD_DIM = LLAMA31_8B.head_dim
ROTATED = (HEADS + KV_HEADS) * HEAD_DIM  # columns of q and k
# Rows and columns of a tile, for which epilogues.
TILES = {
    "none": ((128, 192), (192, 128), (128, 128)),
    "table": ((192, 128), (128, 128)),
    "table, rounded": ((192, 128), (128, 128)),
    "angles": ((128, 192), (192, 128)),
    "angles, rounded": ((128, 192), (192, 128)),
}


def epilogues() -> dict[str, Any]:
    """Return name -> epilogue of QuACK. Its decorator reads the source of the functions."""
    fused = quack_swiglu.require()
    from cutlass import cute
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import ColVecLoad, RowVecLoad
    from quack.epilogue.rotary import _angle_turns, _sincos_turns, rotary_cos_sin_load

    fma = cute.math.fma
    rounded = fused.rounded
    table = {"cs": rotary_cos_sin_load("cs"), "flag": RowVecLoad("flag")}
    angles = {"pos": ColVecLoad("pos"), "freq": RowVecLoad("freq")}

    def scaled(acc, alpha):
        first, second = unpack(acc)
        return first * alpha, second * alpha

    def rotated(first, second, c, s):  # as Triton's compiler orders it for sm_90
        return pack(fma(first, c, -(second * s)), fma(first, s, second * c))

    def of_table(cs, flag):
        c, s = unpack(cs)
        turned, _ = unpack(flag)  # 1, or 0 for v, whose cos is then 1 and sin 0
        return fma(c, turned, 1.0 - turned), s * turned

    def of_angles(pos, freq):
        s, c = _sincos_turns(*_angle_turns(pos, freq))
        return c, s

    @gemm_epilogue(mode="acc_pair")
    def none(acc, scale_x, scale_weight):
        return {"D": pack(*scaled(acc, scale_x * scale_weight))}

    @gemm_epilogue(ops=table, mode="acc_pair")
    def by_table(acc, cs, flag, scale_x, scale_weight):
        return {"D": rotated(*scaled(acc, scale_x * scale_weight), *of_table(cs, flag))}

    @gemm_epilogue(ops=table, mode="acc_pair")
    def by_table_rounded(acc, cs, flag, scale_x, scale_weight):
        first, second = rounded(*scaled(acc, scale_x * scale_weight))
        return {"D": rotated(first, second, *of_table(cs, flag))}

    @gemm_epilogue(ops=angles, mode="acc_pair")
    def by_angles(acc, pos, freq, scale_x, scale_weight):
        return {"D": rotated(*scaled(acc, scale_x * scale_weight), *of_angles(pos, freq))}

    @gemm_epilogue(ops=angles, mode="acc_pair")
    def by_angles_rounded(acc, pos, freq, scale_x, scale_weight):
        first, second = rounded(*scaled(acc, scale_x * scale_weight))
        return {"D": rotated(first, second, *of_angles(pos, freq))}

    found = (none, by_table, by_table_rounded, by_angles, by_angles_rounded)
    return dict(zip(TILES, found, strict=True))


def operands(name: str, device: str) -> dict[str, Tensor]:
    """Return the tensors that an epilogue reads beside the scales."""
    from quack.epilogue.rotary import make_interleaved_cos_sin, make_interleaved_inv_freq

    if name.startswith("table"):
        flag = torch.zeros(1, LLAMA31_8B.qkv_size, device=device)
        flag[:, :ROTATED] = 1
        return {
            "cs": make_interleaved_cos_sin(*rope_tables(LLAMA31_8B, TOKENS, device)),
            "flag": flag,
        }
    if name.startswith("angles"):
        frequencies = rope_frequencies(LLAMA31_8B)
        row = make_interleaved_inv_freq(frequencies, ROTATED, LLAMA31_8B.qkv_size - ROTATED)
        positions = torch.arange(TOKENS, dtype=torch.float32, device=device)
        return {"pos": positions[None], "freq": row[None].to(device)}
    return {}


def interleaved(rows: Tensor) -> Tensor:
    """Return W_qkv's rows with i and i + 64 of each head of q and k side by side."""
    heads = rows[:ROTATED].unflatten(0, (HEADS + KV_HEADS, 2, HEAD_DIM // 2))
    return torch.cat((heads.transpose(1, 2).flatten(0, 2), rows[ROTATED:])).contiguous()


def in_halves(qkv: Tensor) -> Tensor:
    """Return columns of the product with the interleaved rows in today's order."""
    heads = qkv[:, :ROTATED].unflatten(1, (HEADS + KV_HEADS, HEAD_DIM // 2, 2))
    return torch.cat((heads.transpose(2, 3).flatten(1), qkv[:, ROTATED:]), 1)


def fused(
    epilogue: Any,
    tile: tuple[int, int],
    extra: dict,
    weight: QuantizedTensor,
    x: QuantizedTensor,
    launch: bool = True,
) -> Tensor:
    """Return QuACK's product, bf16, with an epilogue."""
    from common.kernels.quack_epilogues import ATTRIBUTES

    out = x.rowwise.new_empty(TOKENS, LLAMA31_8B.qkv_size, dtype=torch.bfloat16)
    epilogue.gemm(
        x.rowwise,
        weight.rowwise,
        out,
        epi_args=extra | {"scale_x": x.inverse_scale, "scale_weight": weight.inverse_scale},
        tile_M=tile[0],
        tile_N=tile[1],
        cluster_M=2,
        cluster_N=1,
        pingpong=True,
        post_init_attrs=ATTRIBUTES,
        _launch=launch,
    )
    return out


def product(x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """Return the product by the engine of eight algorithms, as shipped."""
    factors = x.rowwise, weight.rowwise.t()
    return cublaslt.product(*factors, x.inverse_scale, weight.inverse_scale)


def today(cos: Tensor, sin: Tensor, weight: QuantizedTensor, x: QuantizedTensor) -> Tensor:
    return rope_packed_triton_(product(x, weight), cos, sin, HEADS, KV_HEADS)


def compared(name: str, out: Tensor, expected: Tensor) -> str:
    """Return how `out` differs from `expected`: share of other bits, and signal-to-noise in dB."""
    other = out.view(torch.int16) != expected.view(torch.int16)
    of_v = float(other[:, ROTATED:].float().mean())
    error = out.double() - expected.double()
    decibels = 20 * torch.log10(expected.double().norm() / error.norm())
    return (
        f"{name:28} other bits: q and k {float(other[:, :ROTATED].float().mean()):.2e}, "
        f"v {of_v:.2e}; {float(decibels):6.1f} dB"
    )


def factors(device: str) -> tuple[list[QuantizedTensor], QuantizedTensor, QuantizedTensor]:
    """Return two x, W_qkv, and W_qkv interleaved, all in FP8."""
    of_x, of_weight = quantizers()
    of_weight.dtype = of_x.dtype
    for quantizer in (of_x, of_weight):
        quantizer.transposed = False
    tensors = [torch.randn(TOKENS, 4096, device=device, dtype=torch.bfloat16) for _ in range(2)]
    weight = 0.02 * torch.randn(6144, 4096, device=device, dtype=torch.bfloat16)
    set_scale(of_x, tensors[0])
    set_scale(of_weight, weight)
    xs = [quantize_triton(x, of_x) for x in tensors]
    quantized = quantize_triton(weight, of_weight)
    rows = interleaved(quantized.rowwise.view(torch.uint8)).view(quantized.rowwise.dtype)
    return xs, quantized, quantized._replace(rowwise=rows)


def compile_only() -> None:
    """Compile every epilogue on a machine without a GPU: QUACK_ARCH=90 CUTE_DSL_ARCH=sm_90a."""
    from quack.gemm_runtime import host

    host.get_max_active_clusters = lambda size: 132 // size  # asks the driver
    one: Any = 1.0  # QuACK takes scales in tensors only on a GPU
    x = QuantizedTensor(torch.zeros(TOKENS, 4096).to(torch.float8_e4m3fn), None, one)
    weight = QuantizedTensor(torch.zeros(6144, 4096).to(torch.float8_e4m3fn), None, one)
    for name, epilogue in epilogues().items():
        for tile in TILES[name]:
            fused(epilogue, tile, operands(name, "cpu"), weight, x, launch=False)
            print(f"compiled: {name}, {tile}", flush=True)


def variants_of(weight: QuantizedTensor) -> dict[str, Callable[[QuantizedTensor], Tensor]]:
    """Return title -> function of x, for every epilogue and tile that compiles."""
    found = {}
    for name, epilogue in epilogues().items():
        extra = operands(name, "cuda")
        for tile in TILES[name]:
            found[f"{name}, {tile[0]} x {tile[1]}"] = partial(fused, epilogue, tile, extra, weight)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--compile-only", action="store_true", help="only compile, on a machine without a GPU"
    )
    if parser.parse_args().compile_only:
        compile_only()
        return
    xs, weight, interleaved_weight = factors("cuda")
    tables = rope_tables(LLAMA31_8B, TOKENS, "cuda")
    works = {
        "product": partial(product, weight=weight),
        "product + RoPE": partial(today, *tables, weight),
    }
    works |= variants_of(interleaved_weight)
    plain, expected = (works[name](xs[0]) for name in ("product", "product + RoPE"))
    lines = []
    for name in list(works)[2:]:
        try:
            out = in_halves(works[name](xs[0]))
            lines.append(compared(name, out, plain if name.startswith("none") else expected))
        except Exception:
            traceback.print_exc()
            del works[name]
    calls = {
        name: partial(lambda work: [work(x) for x in xs], work) for name, work in works.items()
    }
    us = in_turns(calls, len(xs), graphs=False)
    print("\n".join(lines))
    print(f"{torch.cuda.get_device_name()}: 8,192 x 6,144 x 4,096")
    for name, value in us.items():
        print(f"{name:28} {value:7.1f} µs, saves {us['product + RoPE'] - value:6.1f}")


if __name__ == "__main__":
    main()
