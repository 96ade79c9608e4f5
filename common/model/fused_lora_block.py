"""The transformer block of LoRA fine-tuning: frozen matrices with trainable adapters.

The block computes the same as fused_block.py, with the same names. W_qkv and W_o have adapters
(model/lora.py):

    qkv    = W_qkv n_1 + scale * B_qkv t_qkv,  t_qkv = A_qkv dropout(n_1)
    branch = W_o o     + scale * B_o t_o,      t_o   = A_o dropout(o)

Forward and backward are straight lists of kernel launches. The frozen matrices come from a
`FrozenBase`, in FP8 or not. They have no gradient, so the backward does not need their inputs. It
recomputes the inputs of the adapters: n_1 from x, and the dropout masks from a seed
(kernels/lora.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.kernels import lora
from common.kernels.attention import AttentionGraph
from common.kernels.fp8 import QuantizedTensor
from common.kernels.lora import Dropout, Norm, up_
from common.model.block_ops import KERNEL_ENGINES, SavedTensors
from common.model.fused_block import FusedBlockFunction, attend, rotary_embedding
from common.model.linear_layers import BlockQuantizers, FrozenWeights, LinearLayers
from common.model.llama import RMSNorm
from common.model.lora import Adapter, AdapterSettings
from common.model.shapes import ModelShape
from common.sharding.activation_offload import ActivationOffloader
from common.sharding.context_parallel import ALONE, ContextAttention, ContextGroup


@dataclass
class SavedByLoraBlock(SavedTensors):
    """Tensors that a block keeps for its backward.

    Bytes per token of Llama 2 70B at rank 16, with activations in bf16:

        x, attention's output, residual          49,152
        q, k, v                                  20,480
        gate_up in 8 bits                        57,344 (114,688 in bf16)
        t_qkv, t_o                                   64
        log-sum-exp of attention, fp32              256
        rstd of the norms, fp32                       8
        total                                   127,304

    The total is 83.4 GB for 80 layers of a sequence of 8,192.
    """

    x: Tensor  # [M, D], the block's input
    rstd_1: Tensor  # fp32 [M], 1 / RMS of x
    t_qkv: Tensor  # [M, rank]
    # Query and key heads before their norms, [M, (heads + kv_heads) * head_dim]. None without
    # qk_norm.
    qk_before_norm: Tensor | None
    attention: AttentionGraph | ContextAttention
    t_o: Tensor  # [M, rank]
    residual: Tensor  # [M, D]
    rstd_2: Tensor  # fp32 [M], 1 / RMS of the residual
    gate_up: Tensor | QuantizedTensor  # [M, 2 F]; `rowwise` is empty while it is offloaded
    dropouts: tuple[Dropout | None, Dropout | None]  # of the adapters of qkv and o


class FusedLoraBlock(nn.Module):
    """A transformer block with frozen matrices and two trainable adapters."""

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        base: FrozenWeights,
        kernels: str,
        adapters: AdapterSettings,
        linear: LinearLayers,
        offloader: ActivationOffloader | None = None,
        offloads: bool = False,
        context: ContextGroup = ALONE,
    ):
        """Create a block with undefined adapters.

        `layer`: number of the layer in `base`.
        `base`: the frozen matrices of all layers.
        `kernels`: "reference" or "triton".
        `linear`: the linear layers' format, shared by all blocks.
        `offloader`: shared by all blocks; None if no block offloads.
        `offloads`: keep this block's gate_up in host memory until the backward.
        `context`: the ranks that share each sequence.
        """
        super().__init__()
        self.context = context
        self.linear = linear
        self.shape = shape
        self.layer = layer
        self.base = base
        self.ops = KERNEL_ENGINES[kernels]
        self.lora = lora.IMPLEMENTATIONS[kernels]
        self.scale = adapters.alpha / adapters.rank
        self.dropout = adapters.dropout
        self.quantizers = BlockQuantizers.frozen(linear)
        self.offloader = offloader
        self.offloads = offloads
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps).requires_grad_(False)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps).requires_grad_(False)
        self.qkv = Adapter(shape.hidden_size, shape.qkv_size, adapters.rank)
        self.rotation = rotary_embedding(shape, kernels).requires_grad_(False)
        self.o = Adapter(shape.attention_size, shape.hidden_size, adapters.rank)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's output, shaped like `x_BSD`. Dropout is applied only with gradients.

        `cos`, `sin`: RoPE's tables of these positions, fp32 [sequence, head_dim / 2].
        """
        adapters = [self.qkv.lora_a, self.qkv.lora_b, self.o.lora_a, self.o.lora_b]
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_BSD, *adapters))
        return FusedBlockFunction.apply(self, keep, False, x_BSD, cos, sin, *adapters)

    def draw_dropouts(self, x_BSD: Tensor) -> tuple[Dropout | None, Dropout | None]:
        """Return the dropouts of qkv and o, with new seeds from the generator of x's device.

        Ranks that share sequences draw the same seeds.
        """
        if not (self.training and self.dropout):
            return None, None
        seeds = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=x_BSD.device)
        batch, length, _ = x_BSD.shape
        numbers = self.context.token_numbers(batch, length, x_BSD.device)
        qkv, o = (Dropout(seed, self.dropout, numbers) for seed in seeds.split(1))
        return qkv, o

    def cast_adapters(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A and B of qkv, then A and B of o, in the dtype in which the kernels compute."""
        return (
            self.qkv.lora_a.detach().to(dtype),
            self.qkv.lora_b.detach().to(dtype),
            self.o.lora_a.detach().to(dtype),
            self.o.lora_b.detach().to(dtype),
        )

    def run(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, keep: bool
    ) -> tuple[Tensor, SavedByLoraBlock | None]:
        """Compute the forward. With `keep`, also return the tensors that the backward needs."""
        ops = self.ops
        linear = self.linear
        shape = self.shape
        weights = self.base.forward_weights(self.layer)
        quantizers = linear.active_quantizers(self.quantizers)
        dropouts = self.draw_dropouts(x_BSD) if keep else (None, None)
        x = x_BSD.flatten(0, 1)
        a_qkv, b_qkv, a_o, b_o = self.cast_adapters(x.dtype)

        # Attention. `lora.down` computes n_1 from x again, because the one above may be in FP8.
        _, n_1, rstd_1 = ops.add_rms_norm(
            x, None, self.attention_norm.weight, shape.norm_eps, quantizers.n_1
        )
        qkv = linear.fprop(n_1, weights["qkv"])
        del n_1
        t_qkv = self.lora.down(x, Norm(rstd_1, self.attention_norm.weight), a_qkv, dropouts[0])
        up_(qkv, t_qkv, b_qkv, self.scale)
        qk_before_norm = self.rotation.rotate_(qkv, cos, sin, keep)
        attention = attend(shape, qkv.view(*x_BSD.shape[:2], -1), keep, self.context)
        del qkv
        o = attention.out.detach().flatten(2).flatten(0, 1)
        branch = linear.fprop(ops.quantize(o, quantizers.o), weights["o"])
        t_o = self.lora.down(o, None, a_o, dropouts[1])
        up_(branch, t_o, b_o, self.scale)
        del o

        # Feed-forward. The norm's kernel also computes residual = x + branch.
        residual, n_2, rstd_2 = ops.add_rms_norm(
            x, branch, self.ffn_norm.weight, shape.norm_eps, quantizers.n_2
        )
        del branch
        gate_up, h = linear.gate_up_swiglu(
            ops, n_2, weights["gate_up"], quantizers.h, quantizers.kept_gate_up, keep
        )
        del n_2
        out = residual.view_as(x_BSD) + linear.fprop(h, weights["down"]).view_as(x_BSD)
        self.base.release(self.layer)

        if not keep:
            return out, None
        assert gate_up is not None
        saved = SavedByLoraBlock(
            x=x,
            rstd_1=rstd_1,
            t_qkv=t_qkv,
            qk_before_norm=qk_before_norm,
            attention=attention,
            t_o=t_o,
            residual=residual,
            rstd_2=rstd_2,
            gate_up=self._offloaded(gate_up) if self.offloads else gate_up,
            dropouts=dropouts,
        )
        return out, saved

    def _offloaded(self, gate_up: Tensor | QuantizedTensor) -> QuantizedTensor:
        """Start to copy gate_up to host memory. Return it without its values."""
        assert self.offloader is not None and isinstance(gate_up, QuantizedTensor)
        self.offloader.offload(gate_up.rowwise)
        return gate_up._replace(rowwise=gate_up.rowwise.new_empty(0))

    def _reloaded(self, gate_up: Tensor | QuantizedTensor) -> QuantizedTensor:
        """Return gate_up with its values, copied back from host memory."""
        assert self.offloader is not None and isinstance(gate_up, QuantizedTensor)
        return gate_up._replace(rowwise=self.offloader.reload())

    def run_backward(
        self, saved: SavedByLoraBlock, d_out_BSD: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of the input, of A and B of qkv, and of A and B of o.

        The gradients of the adapters are in fp32. Removes the members of `saved` as soon as they
        are used.
        """
        linear = self.linear
        weights = self.base.backward_weights(self.layer)
        quantizers = linear.active_quantizers(self.quantizers)
        a_qkv, b_qkv, a_o, b_o = self.cast_adapters(d_out_BSD.dtype)
        if self.offloader is not None:
            # Also in blocks that do not offload, so that the copy can take as long as a block.
            self.offloader.prefetch()
        d_residual, d_branch = self._feed_forward_backward(
            saved, d_out_BSD.flatten(0, 1), weights, quantizers
        )

        # Attention. d_branch equals d_residual, because residual = x + branch.
        d_o = linear.dgrad(d_branch, weights["o"])
        del d_branch
        p, d_b_o, _ = self.lora.up_backward(
            d_residual, saved.t_o, b_o, self.scale, saved.dropouts[1], None
        )
        attention = saved.pop("attention")
        o = attention.out.detach().flatten(2).flatten(0, 1)
        # Also adds the adapter's part to d_o.
        d_a_o = self.lora.down_backward_(d_o, o, None, p, a_o, saved.dropouts[1])
        gradients = attention.backward(d_o)
        del attention, o, d_o
        d_qkv_unquantized, _ = self.rotation.backward(
            gradients, saved.pop("qk_before_norm"), cos, sin, None
        )
        d_qkv = d_qkv_unquantized.rowwise
        del gradients, d_qkv_unquantized
        # Also quantizes d_qkv.
        p, d_b_qkv, g = self.lora.up_backward(
            d_qkv, saved.t_qkv, b_qkv, self.scale, saved.dropouts[0], quantizers.d_qkv
        )
        del d_qkv
        d_n = linear.dgrad(g, weights["qkv"])
        del g
        norm = Norm(saved.rstd_1, self.attention_norm.weight)
        # Also adds the adapter's part to d_n.
        d_a_qkv = self.lora.down_backward_(d_n, saved.x, norm, p, a_qkv, saved.dropouts[0])
        d_x, _, _ = self.ops.rms_norm_backward(
            d_n,
            saved.x,
            saved.rstd_1,
            self.attention_norm.weight,
            d_residual,
            None,
            weight_grad=False,
        )
        self.base.release(self.layer)
        return d_x.view_as(d_out_BSD), d_a_qkv, d_b_qkv, d_a_o, d_b_o

    def _feed_forward_backward(
        self,
        saved: SavedByLoraBlock,
        d_out: Tensor,
        weights: dict[str, QuantizedTensor],
        quantizers: BlockQuantizers,
    ) -> tuple[Tensor, QuantizedTensor]:
        """Return (d_residual [M, D], d_residual as an operand of matrix products)."""
        ops = self.ops
        linear = self.linear
        g = ops.quantize(d_out, quantizers.d_out)
        gate_up = saved.pop("gate_up")
        if self.offloads:
            gate_up = self._reloaded(gate_up)
        d_gate_up = linear.down_swiglu_backward(
            ops, g, weights["down"], gate_up, quantizers.d_gate_up
        )
        del g, gate_up
        d_n = linear.dgrad(d_gate_up, weights["gate_up"])
        del d_gate_up
        # The norm's kernel also adds d_out, the gradient that bypasses the feed-forward, and
        # quantizes the sum.
        d_residual, quantized, _ = ops.rms_norm_backward(
            d_n,
            saved.pop("residual"),
            saved.rstd_2,
            self.ffn_norm.weight,
            d_out,
            quantizers.d_branch,
            weight_grad=False,
        )
        if quantized is None:
            quantized = QuantizedTensor(d_residual)
        return d_residual, quantized
