"""Time one kernel that writes both FP8 layouts, against the product's two. One GPU of sm_90.

    PYTHONPATH=.:tests/gpu/studies python3 tests/gpu/studies/transposed_quantize.py [--columns N]

wgrad sums over tokens, so any order of tokens is exact if both factors share it. Here the rows
r and r + 8 of each 16 tokens are one 16-bit word of the transpose, because `stmatrix.trans`
transposes words of 16 bits, and of 8 only from sm_100 on.

Predicted for an H200, before the first run. The new kernel moves 4 bytes per element, today's two
move 5. A copy moves 4.3 TB/s. quantize reaches 89 % of it, transpose 3.9 TB/s, the new kernel 85 %:

    columns    quantize + transpose    new kernel    floor
      4,096          26 + 17 µs            37 µs     31 µs
      6,144          40 + 26               55        47
     14,336          92 + 60              129       109
     28,672         184 + 120             257       219

So it saves 16 % of both, or 40 % of the transpose, and less where the transpose reads from L2 what
quantize has just written (34 MB of 60 at 4,096 columns). The rule for going on is half of the
transpose: the first number in the column "of the transpose" must be at least 50 %.
"""

from __future__ import annotations

import argparse
import math
import statistics
import traceback
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from common.gpu_kinds import GIB
from common.kernels import fp8
from common.kernels.fp8 import AMAX, QuantizedTensor, Quantizer
from common.kernels.quantize import fill_columnwise, quantize_triton
from common.model.linear_layers import DelayedScaling

TOKENS = 8192
COLUMNS = (4096, 6144, 14336, 28672)  # hidden, qkv, ffn and gate_up of the 8B
TILE = 128  # tokens and columns of a block
GROUP = 16  # tokens within which the order changes
THREADS = 256
ROTATED_BYTES = 1 << 30  # several times the L2, so that no input is still there
BLOCK_MS = 60.0  # of one timed block; the variants take turns
ROUNDS = 3
E5M2 = torch.float8_e5m2
SOURCE = r"""
// Return four elements in FP8. 0 * x makes NaN of infinity, as quantize.py does.
__device__ unsigned int quantized(unsigned int first, unsigned int second, float scale) {
    float x[4] = {__uint_as_float(first << 16), __uint_as_float(first & 0xffff0000u),
                  __uint_as_float(second << 16), __uint_as_float(second & 0xffff0000u)};
    unsigned short low, high;
    for (int i = 0; i < 4; ++i) x[i] = fmaf(x[i], scale, 0.0f * x[i]);
    asm("cvt.rn.satfinite.FORMATx2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
    asm("cvt.rn.satfinite.FORMATx2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
    return low | ((unsigned int)high << 16);
}

// Return the larger of two bf16 pairs, by magnitude. Ignores NaN.
__device__ unsigned int larger(unsigned int amax, unsigned int pair) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(amax) : "r"(amax), "r"(pair & 0x7fff7fffu));
    return amax;
}

__device__ uint2 quantized(uint4 x, float scale, unsigned int &amax) {
    amax = larger(larger(larger(larger(amax, x.x), x.y), x.z), x.w);
    return make_uint2(quantized(x.x, x.y, scale), quantized(x.z, x.w, scale));
}

// A warp quantizes 16 tokens of 128 columns. Lane 4 * r + q has columns 8 * q to 8 * q + 7 of each
// 32, of tokens r and r + 8.
extern "C" __global__ void __launch_bounds__(256, 4) quantize_both(
        const uint4 *x, uint2 *rowwise, uint4 *columnwise, float *state, int rows, int columns) {
    __shared__ uint4 tile[128 * 8];  // 8 groups of 16 tokens of each column, swizzled
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const size_t row = blockIdx.y * 128 + warp * 16 + lane / 4;
    const size_t place = (row * columns + blockIdx.x * 128) / 8 + lane % 4;
    const float scale = state[1];
    uint4 upper[4], lower[4];
    for (int step = 0; step < 4; ++step) {
        upper[step] = __ldcs(x + place + 4 * step);
        lower[step] = __ldcs(x + place + 4 * step + columns);  // eight rows further
    }
    unsigned int amax = 0;
    // The 16 bytes that this lane addresses: matrix lane / 8, transposed row lane % 8.
    const int column = 8 * (lane % 8 / 2) + 2 * (lane / 8) + lane % 2;
    unsigned int target = __cvta_generic_to_shared(tile + column * 8 + (warp ^ (lane % 8)));
    for (int step = 0; step < 4; ++step) {
        const uint2 a = quantized(upper[step], scale, amax);
        const uint2 b = quantized(lower[step], scale, amax);
        rowwise[place + 4 * step] = a;
        rowwise[place + 4 * step + columns] = b;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
            :: "r"(target + step * 32 * 128),
               "r"(__byte_perm(a.x, b.x, 0x5140)), "r"(__byte_perm(a.x, b.x, 0x7362)),
               "r"(__byte_perm(a.y, b.y, 0x5140)), "r"(__byte_perm(a.y, b.y, 0x7362)) : "memory");
    }
    __syncthreads();
    for (int step = 0; step < 4; ++step) {
        const int chunk = threadIdx.x + 256 * step;
        const int column = chunk / 8, group = chunk % 8;
        const size_t line = (size_t)(blockIdx.x * 128 + column) * (rows / 16) + blockIdx.y * 8;
        columnwise[line + group] = tile[column * 8 + (group ^ (column / 8 % 4 * 2 + column % 2))];
    }
    amax = max(amax << 16, amax & 0xffff0000u);  // the bits of floats that are not negative
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (lane == 0 && amax > __float_as_uint(__ldcg(state + 2)))
        atomicMax((unsigned int *)(state + 2), amax);
}
"""


def source(dtype: torch.dtype) -> str:
    """Return the CUDA C++ of the kernel for a format of FP8."""
    return SOURCE.replace("FORMAT", "e5m2" if dtype == E5M2 else "e4m3")


@cache
def kernel(dtype: torch.dtype) -> Callable[..., None]:
    """Return the compiled kernel for a format of FP8."""
    import cupy

    return cupy.RawKernel(source(dtype), "quantize_both")


def quantize_both(x: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """Return `x` in both layouts, tokens of the transpose permuted. Records the amax.

    Counts no saturated elements. `x`: bf16 [rows, columns], multiples of 128.
    """
    import cupy

    rows, columns = x.shape
    assert rows % TILE == 0
    assert columns % TILE == 0
    rowwise = x.new_empty(rows, columns, dtype=quantizer.dtype)
    columnwise = x.new_empty(columns, rows, dtype=quantizer.dtype)
    pointers = [np.uintp(t.data_ptr()) for t in (x, rowwise, columnwise, quantizer.state)]
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel(quantizer.dtype)(
            (columns // TILE, rows // TILE),
            (THREADS,),
            (*pointers, np.int32(rows), np.int32(columns)),
        )
    return QuantizedTensor(rowwise, columnwise, quantizer.inverse_scale)


def permuted(columnwise: Tensor) -> Tensor:
    """Return [columns, tokens] with tokens 0, 8, 1, 9, ..., 7, 15 of each 16."""
    columns, tokens = columnwise.shape
    groups = columnwise.view(torch.uint8).view(columns, tokens // GROUP, 2, GROUP // 2)
    return groups.transpose(2, 3).reshape(columns, tokens).view(columnwise.dtype)


def emulated(tile: np.ndarray) -> np.ndarray:
    """Return what the kernel's index arithmetic makes of a tile of bytes [128, 128], on the CPU."""
    shared = np.zeros((TILE, 8, GROUP), np.uint8)  # column, chunk, byte
    for warp, step, lane in np.ndindex(8, 4, 32):
        # Byte pairs of a lane: four registers, of two columns each.
        rows = tile[[16 * warp + lane // 4, 16 * warp + lane // 4 + 8]]
        registers = rows[:, 32 * step + 8 * (lane % 4) :][:, :8].T.reshape(4, 2, 2)
        for matrix, half in np.ndindex(4, 2):
            # stmatrix.trans: the half goes to word lane / 4 of the row that another lane addresses.
            other = 8 * matrix + 2 * (lane % 4) + half
            column = 8 * (other % 8 // 2) + 2 * (other // 8) + other % 2
            word = 2 * (lane // 4)
            shared[32 * step + column, warp ^ (other % 8), word : word + 2] = registers[
                matrix, half
            ]
    out = np.zeros((TILE, TILE), np.uint8)
    for column, group in np.ndindex(TILE, 8):
        chunk = group ^ (column // 8 % 4 * 2 + column % 2)
        out[column, 16 * group : 16 * group + 16] = shared[column, chunk]
    return out


def check_emulation() -> None:
    """Raise AssertionError unless the index arithmetic gives the permuted transpose."""
    tile = np.random.default_rng(0).integers(0, 256, (TILE, TILE), dtype=np.uint8)
    expected = permuted(torch.from_numpy(tile).t().contiguous()).numpy()
    assert np.array_equal(emulated(tile), expected)


def quantizers() -> tuple[Quantizer, Quantizer]:
    """Return quantizers of an activation (e4m3) and a gradient (e5m2)."""
    scaling = DelayedScaling()
    both = scaling.quantizer(), scaling.quantizer(gradient=True)
    scaling.allocate(torch.device("cuda"))
    return both


def set_scale(quantizer: Quantizer, x: Tensor) -> None:
    """Set the scale that delayed scaling would have after a step with `x`."""
    quantizer.two_pass = False
    scale = quantizer.largest / (fp8.HEADROOM * x.abs().max().float())
    quantizer.state.copy_(torch.stack((1 / scale, scale, scale * 0, scale * 0)))


def wgrad(g: QuantizedTensor, x: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return g^T x. In fp32, it is summed in fp32 too."""
    return torch._scaled_mm(
        g.columnwise,
        x.columnwise.t(),
        scale_a=g.inverse_scale,
        scale_b=x.inverse_scale,
        out_dtype=dtype,
        use_fast_accum=dtype != torch.float32,
    )


def differing_bytes(a: Tensor, b: Tensor) -> int:
    return int((a.view(torch.uint8) != b.view(torch.uint8)).sum())


def check(columns: int) -> None:
    """Compare the bits of both layouts, the amax and wgrad, and print one line each."""
    g = torch.randn(TOKENS, columns, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(TOKENS, 4096, device="cuda", dtype=torch.bfloat16)
    for value, place in ((math.inf, 3), (math.nan, 777), (1e3, 5000)):  # and one that saturates
        g[place, place % columns] = value
    results = []
    for tensor, quantizer in zip((x, g), quantizers(), strict=True):
        set_scale(quantizer, tensor.nan_to_num(0, 1, -1).clamp(-6, 6))
        outcome = []
        for function in (quantize_triton, quantize_both):
            quantizer.state[AMAX] = 0
            result = function(tensor, quantizer)
            outcome.append((result, float(quantizer.state[AMAX])))
        (today, amax), (new, new_amax) = outcome
        rowwise = differing_bytes(today.rowwise, new.rowwise)
        columnwise = differing_bytes(permuted(today.columnwise), new.columnwise)
        print(
            f"check {columns}, {quantizer.dtype}: differing bytes {rowwise} rowwise, "
            f"{columnwise} transposed; amax {amax:g} and {new_amax:g}"
        )
        results.append((today, new))
    (x, new_x), (g, new_g) = results
    finite = torch.isfinite(g.columnwise.float()).all(1)  # rows of d_W without a NaN
    d_w, new_d_w = (wgrad(*pair)[finite].float() for pair in ((g, x), (new_g, new_x)))
    exact = wgrad(g, x, torch.float32)[finite]
    distances = (new_d_w - d_w, d_w - exact, new_d_w - exact)
    between, of_today, of_new = (float(distance.norm() / exact.norm()) for distance in distances)
    print(
        f"check {columns}, wgrad: permuted and unpermuted differ by {between:.1e}; "
        f"from sums in fp32 they differ by {of_new:.1e} and {of_today:.1e}"
    )


def captured(work: Callable[[], object]) -> tuple[Callable[[], None], object]:
    """Return the replay of a CUDA graph of `work`, and the results, which must stay allocated."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph.replay, results


def in_turns(
    variants: dict[str, Callable[[], object]], launches: int, graphs: bool = True
) -> dict[str, float]:
    """Return the median microseconds of a launch of each variant, in blocks of BLOCK_MS.

    A call of a variant is `launches` launches. The blocks of the variants take turns, after an
    untimed round. With `graphs`, CUDA graphs replay the calls, for launches of less than 0.1 ms.
    """
    calls = {name: captured(work) if graphs else (work, work()) for name, work in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 + ROUNDS):
        for name, (call, _) in calls.items():
            count = 3 if number == 0 else max(3, int(1e3 * BLOCK_MS / (launches * times[name][0])))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            begin.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / count / launches)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def transposed_only(quantized: QuantizedTensor) -> Tensor:
    columnwise = torch.empty_like(quantized.columnwise)
    fill_columnwise(quantized._replace(columnwise=columnwise))
    return columnwise


def rowwise_only(x: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    quantizer.transposed = False
    try:
        return quantize_triton(x, quantizer)
    finally:
        quantizer.transposed = True


def then_wgrad(function: Callable, g: Tensor, quantizer: Quantizer, x: QuantizedTensor) -> Tensor:
    """Quantize `g` and multiply it, as a backward does: clock and L2 are those of a step."""
    return wgrad(function(g, quantizer), x)


def measure(columns: int, copy: float) -> str:
    """Return a line of the table. `copy`: bytes/s of a copy."""
    quantizer, other = quantizers()
    sets = max(2, math.ceil(ROTATED_BYTES / (2 * TOKENS * columns)))
    size = (TOKENS, columns)
    inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    set_scale(quantizer, inputs[0])
    factor = torch.randn(TOKENS, 4096, device="cuda", dtype=torch.bfloat16)
    set_scale(other, factor)
    x = quantize_triton(factor, other)
    today = [quantize_triton(value, quantizer) for value in inputs]
    functions = {
        "quantize": partial(rowwise_only, quantizer=quantizer),
        "both": partial(quantize_triton, quantizer=quantizer),
        "new": partial(quantize_both, quantizer=quantizer),
        "both, wgrad": lambda value: then_wgrad(quantize_triton, value, quantizer, x),
        "new, wgrad": lambda value: then_wgrad(quantize_both, value, quantizer, x),
    }
    variants = {
        name: partial(lambda function: [function(value) for value in inputs], function)
        for name, function in functions.items()
    }
    variants["transpose"] = lambda: [transposed_only(value) for value in today]
    us = in_turns(variants, sets)
    floor = 1e6 * 4 * TOKENS * columns / copy
    saved = us["both"] - us["new"]
    saved_before_wgrad = us["both, wgrad"] - us["new, wgrad"]
    share = (saved / us["transpose"], saved_before_wgrad / us["transpose"], saved / us["both"])
    return (
        f"{columns:7} {us['quantize']:9.1f} {us['transpose']:10.1f} {us['both']:8.1f} "
        f"{us['new']:8.1f} {floor:8.1f} {us['both, wgrad']:10.1f} {us['new, wgrad']:9.1f} "
        f"{share[0]:13.0%} {share[1]:12.0%} {share[2]:10.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--columns", type=int, nargs="+", default=COLUMNS, help="columns (default: the 8B's four)"
    )
    parser.add_argument(
        "--emulate", action="store_true", help="only check the index arithmetic, on the CPU"
    )
    args = parser.parse_args()
    check_emulation()
    print("index arithmetic: right in the emulation")
    if args.emulate:
        return
    copied = torch.randn(GIB // 4, device="cuda")
    target = torch.empty_like(copied)
    copy = 1e6 * 2 * GIB / in_turns({"copy": lambda: target.copy_(copied)}, 1)["copy"]
    lines = []
    for work in (check, partial(measure, copy=copy)):
        for columns in args.columns:
            try:
                lines.append(work(columns))
            except Exception:
                traceback.print_exc()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s; µs for {TOKENS} tokens")
    print(
        "columns  quantize  transpose     both      new    floor  both+wgrad new+wgrad"
        "  of transpose  with wgrad    of both"
    )
    print("\n".join(line for line in lines if line))


if __name__ == "__main__":
    main()
