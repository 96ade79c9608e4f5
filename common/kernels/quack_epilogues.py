"""SwiGLU in the epilogues of two FP8 products on sm_90, written for QuACK.

Imported only if common/engines.py chooses QuACK. QuACK behaves as follows (source code of
quack-kernels 0.6.5):

- A decorated function is traced for one element of the product, or for a pair of elements.
  `acc_pair` with `concat_layout` pairs column i of the first half with column i of the second: gate
  with up.
- `ColVecReduce` writes one partial result for each row of each tile. "max_abs" ignores NaN.
- A conversion to FP8 saturates, even for infinity. NaN stays NaN.
- Compiled kernels are kept in QUACK_CACHE_DIR, which is read when the package is imported.
"""

from __future__ import annotations

from pathlib import Path

import cutlass
import quack.cache
import torch
from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.experimental import primitives
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecReduce, TileStore, setup_epi_tensor
from torch import Tensor

from common.kernels.fp8 import QuantizedTensor

# The fastest tiles of an H200. For 8,192 tokens of the 8B, both products of a layer are 0.065 and
# 0.117 ms faster than cuBLASLt and a separate kernel. Without SwiGLU they take 1.446 and 0.724 ms,
# as in cuBLASLt. With gate and up in alternate columns they would be 0.078 and 0.136 ms faster, but
# weights and checkpoints would need another order.
FORWARD_COLUMNS = 192
# From 8-bit gate_up, 336 bytes of registers spill on an H100. Smaller tiles were not tried.
BACKWARD_COLUMNS = 160

# FP8 products sum in the tensor cores' own precision, with the registers that QuACK's class for
# such products uses. Kernels do not overlap: each starts when the one before it has ended.
ATTRIBUTES = (
    ("fp8_slow_accum", False),
    ("num_regs_load", 40),
    ("num_regs_mma", 232),
    ("use_pdl", False),
)
TILE = {"tile_M": 128, "cluster_M": 2, "cluster_N": 1, "pingpong": True}

# If this file changes, compiled kernels must not be taken from the cache.
quack.cache.EXTRA_SOURCE_DIRS.append(Path(__file__).parent)


class NarrowStore(TileStore):
    """A store of a paired result in 8 bits, which QuACK's own class refuses on sm_90."""

    def to_params(self, gemm, args):
        tensor = getattr(args, self.name)
        assert gemm.cta_tile_shape_mnk[1] % 32 == 0
        layout = cutlass.utils.LayoutEnum.from_tensor(tensor)
        setattr(gemm, self._layout_gemm_attr(), layout)
        setattr(gemm, self._dtype_gemm_attr(), tensor.element_type)
        halved = self.epi_tile_fn(gemm, gemm.epi_tile)
        atom, tma_tensor, smem_layout, epi_tile = setup_epi_tensor(gemm, tensor, epi_tile=halved)
        return {
            self._tma_atom_key(): atom,
            self.name: tma_tensor,
            self._smem_layout_key(): smem_layout,
            self._epi_tile_key(): epi_tile,
            self._dtype_field(): tensor.element_type,
        }


def largest_of(a, b):
    return cutlass.cute.arch.fmax(a, b, abs=True)


@dsl_user_op
def rounded(a, b, *, loc=None, ip=None):
    """Return (a, b) in fp32, rounded to bf16. One instruction rounds both.

    The DSL's conversion of one value would load the unit that also computes exp2 twice as much.
    """
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b)]
    packed = llvm.inline_asm(
        T.i32(),
        operands,
        "cvt.rn.bf16x2.f32 $0, $1, $2;",  # a in the upper half
        "=r,f,f",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    bits = Uint32(packed)
    upper = primitives.mov_b32(bits & Uint32(0xFFFF0000), target_type=Float32)
    lower = primitives.mov_b32(bits << Uint32(16), target_type=Float32)
    return upper, lower


def sigmoid(z):
    """Return 1 / (1 + exp(-z)), by the instructions of `_sigmoid` in swiglu.py."""
    power = cutlass.cute.math.exp2(z * -1.4426950408889634, fastmath=True)
    root = cutlass.cute.math.rsqrt(1.0 + power, fastmath=True)
    return root * root


def gate_and_up(acc, alpha):
    """Return gate and up of a pair of sums, rounded to bf16 as the separate kernel does.

    Unrounded, 14 pairs of 500 steps on H200s needed 0.53 ± 0.43 % more samples. The limit is 0.3 %.
    """
    gate, up = unpack(acc)
    return rounded(gate * alpha, up * alpha)


def swiglu(gate, up):
    return gate * sigmoid(gate) * up


def gradients(d_h, gate, up):
    """Return the gradients of gate and up."""
    s = sigmoid(gate)
    d_h_s = d_h * s
    return d_h_s * up * (1.0 + gate * (1.0 - s)), d_h_s * gate


def row_amax(name):
    return ColVecReduce(name, combine="max_abs")


@gemm_epilogue(
    outputs=("gate", "up", NarrowStore("h", gated=True)),
    reduces={"amax": row_amax("amax")},
    mode="acc_pair",
)
def forward_epilogue(acc, scale_x, scale_weight, scale):
    gate, up = gate_and_up(acc, scale_x * scale_weight)
    h = swiglu(gate, up)
    return {"gate": gate, "up": up, "h": h * scale, "amax": pack(h, h)}


@gemm_epilogue(
    outputs=(
        NarrowStore("gate", gated=True),
        NarrowStore("up", gated=True),
        NarrowStore("h", gated=True),
    ),
    reduces={"amax": row_amax("amax"), "kept_amax": row_amax("kept_amax")},
    mode="acc_pair",
)
def forward_in_8_bits_epilogue(acc, scale_x, scale_weight, scale, kept_scale):
    gate, up = gate_and_up(acc, scale_x * scale_weight)
    h = swiglu(gate, up)
    return {
        "gate": gate * kept_scale,
        "up": up * kept_scale,
        "h": h * scale,
        "amax": pack(h, h),
        "kept_amax": pack(gate, up),
    }


@gemm_epilogue(
    outputs=(NarrowStore("h", gated=True),), reduces={"amax": row_amax("amax")}, mode="acc_pair"
)
def forward_keeping_nothing_epilogue(acc, scale_x, scale_weight, scale):
    h = swiglu(*gate_and_up(acc, scale_x * scale_weight))
    return {"h": h * scale, "amax": pack(h, h)}


@gemm_epilogue(outputs=("d_gate", "d_up"), reduces={"amax": row_amax("amax")})
def backward_epilogue(acc, gate, up, scale_g, scale_weight, scale):
    d_h, _ = rounded(acc * (scale_g * scale_weight), 0.0)
    d_gate, d_up = gradients(d_h, gate, up)
    return {"d_gate": d_gate * scale, "d_up": d_up * scale, "amax": largest_of(d_gate, d_up)}


@gemm_epilogue(outputs=("d_gate", "d_up"), reduces={"amax": row_amax("amax")})
def backward_from_8_bits_epilogue(acc, gate, up, scale_g, scale_weight, scale, kept_inverse_scale):
    d_h, _ = rounded(acc * (scale_g * scale_weight), 0.0)
    d_gate, d_up = gradients(d_h, gate * kept_inverse_scale, up * kept_inverse_scale)
    return {"d_gate": d_gate * scale, "d_up": d_up * scale, "amax": largest_of(d_gate, d_up)}


def forward(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    scale: Tensor,
    h: Tensor,
    gate_up: Tensor | None,
    kept_scale: Tensor | None,
) -> tuple[Tensor, Tensor | None, int]:
    """Write h = silu(gate) * up, and gate_up = x W^T unless None.

    `x`: FP8 [M, D].
    `weight`: FP8 [2 * ffn, D], gate first.
    `scale`: fp32 [1]. h is stored as h * scale.
    `h`: output, FP8 [M, ffn].
    `gate_up`: output, [M, 2 * ffn], in bf16 or FP8.
    `kept_scale`: fp32 [1], if gate_up is in FP8. It is stored as gate_up * kept_scale.

    Returns (amax of h for each row and tile, fp32 [M, tiles]; the same of gate_up in FP8, or None;
    columns of h in a tile).
    """
    amax = _partial_amax(x, weight, FORWARD_COLUMNS)
    arguments = {"scale_x": x.inverse_scale, "scale_weight": weight.inverse_scale}
    arguments |= {"scale": scale, "h": h, "amax": amax}
    kept_amax = None
    if gate_up is not None:
        arguments["gate"], arguments["up"] = gate_up.chunk(2, 1)
    if gate_up is None:
        epilogue = forward_keeping_nothing_epilogue
    elif kept_scale is None:
        epilogue = forward_epilogue
    else:
        epilogue = forward_in_8_bits_epilogue
        kept_amax = torch.empty_like(amax)
        arguments |= {"kept_scale": kept_scale, "kept_amax": kept_amax}
    epilogue.gemm(
        x.rowwise,
        weight.rowwise,
        None,
        epi_args=arguments,
        concat_layout=("B",),
        tile_N=FORWARD_COLUMNS,
        post_init_attrs=ATTRIBUTES,
        **TILE,
    )
    return amax, kept_amax, FORWARD_COLUMNS // 2


def backward(
    g: QuantizedTensor,
    weight: QuantizedTensor,
    scale: Tensor,
    gate_up: QuantizedTensor,
    d_gate_up: Tensor,
) -> tuple[Tensor, int]:
    """Write the gradient of gate_up, from d_h = g W^T.

    `g`: FP8 [M, D].
    `weight`: FP8 [ffn, D].
    `scale`: fp32 [1]. The gradient is stored as gradient * scale.
    `gate_up`: [M, 2 * ffn], in bf16 or FP8.
    `d_gate_up`: output, FP8 [M, 2 * ffn].

    Returns (amax for each row and tile, fp32 [M, tiles]; columns of d_h in a tile).
    """
    amax = _partial_amax(g, weight, BACKWARD_COLUMNS)
    arguments = {"scale_g": g.inverse_scale, "scale_weight": weight.inverse_scale}
    arguments |= {"scale": scale, "amax": amax}
    arguments["gate"], arguments["up"] = gate_up.rowwise.chunk(2, 1)
    arguments["d_gate"], arguments["d_up"] = d_gate_up.chunk(2, 1)
    epilogue = backward_epilogue
    if gate_up.inverse_scale is not None:
        arguments["kept_inverse_scale"] = gate_up.inverse_scale
        epilogue = backward_from_8_bits_epilogue
    epilogue.gemm(
        g.rowwise,
        weight.rowwise,
        None,
        epi_args=arguments,
        tile_N=BACKWARD_COLUMNS,
        post_init_attrs=ATTRIBUTES,
        **TILE,
    )
    return amax, BACKWARD_COLUMNS


def _partial_amax(x: QuantizedTensor, weight: QuantizedTensor, columns: int) -> Tensor:
    """Allocate the amax of each row and tile, fp32 [M, tiles]."""
    tiles = -(-weight.rowwise.shape[0] // columns)
    return x.rowwise.new_empty(x.rowwise.shape[0], tiles, dtype=torch.float32)
