"""The second FP8 engine of pre-training, to compare the first (fused_block.py) with: Transformer Engine's linear layers and recipes.

Parameters are named and shaped as in `FusedBlock`. The package is optional and NVIDIA's (docs.nvidia.com/deeplearning/transformer-engine); what is
said of it here was read in the sources of VERSION. Where it differs from the first engine: delayed scales follow the last HISTORY
micro-batches instead of optimizer steps, and the largest values of all ranks; they begin at 1, so that gradients below e5m2's range are lost
in the first two backward passes of a run; weights are cast in every forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from common.kernels.attention import causal_attention
from common.kernels.fp8 import HISTORY
from common.kernels.rope import rope_reference
from common.model.llama import RMSNorm
from common.model.shapes import ModelShape

VERSION = "2.20.2"


def load() -> tuple[Any, Any]:
    """(transformer_engine.pytorch, its module of recipes). Raises ConfigError where the package is missing or does not load."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # its loader raises all of these
        raise ConfigError(
            'fp8 = "te" needs Transformer Engine, which cannot be imported',
            f"{type(error).__name__}: {error}",
            f'pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]=={VERSION}" (core_cu12 for CUDA 12), or fp8 = "torch"',
        ) from error
    return te, recipe


class TransformerEngine:
    """The package, its delayed scaling recipe (e4m3 forward, e5m2 gradients), and the layers of a model made with both, which hold the scales."""

    def __init__(self) -> None:
        self.te, recipes = load()
        hybrid = recipes.Format.HYBRID
        self.recipe = recipes.DelayedScaling(margin=0, fp8_format=hybrid, amax_history_len=HISTORY, amax_compute_algo="max")
        self.linears: list[Any] = []

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """A layer without bias, in the default dtype and on the default device; values undefined."""
        like = torch.empty(0)
        made = self.te.Linear(inputs, outputs, bias=False, params_dtype=like.dtype, device=like.device.type)
        self.linears.append(made)  # the device as text: only "meta" itself defers its initialization
        return made

    def block(self, shape: ModelShape, kernels: str) -> nn.Module:
        if shape.qk_norm:
            why = "this block has no norms of query and key heads"
            raise ConfigError('fp8 = "te" cannot train this shape', why, 'set fp8 = "torch"')
        return TEBlock(shape, kernels, self)

    @torch.no_grad()
    def allocate(self, device: torch.device) -> None:
        """Make the scales. The layers would do so at their first forward; a warm-up has to know them before."""
        with torch.device(device), self.te.autocast(enabled=True, recipe=self.recipe):
            for linear in self.linears:
                linear.init_fp8_metadata()

    def attach(self, model: nn.Module) -> None:
        """Run every forward of `model` inside the package's FP8 region. What an evaluation records is taken back."""
        open_regions: list[tuple[Any, list[Tensor]]] = []

        def enter(model: nn.Module, args: tuple) -> None:
            region = self.te.autocast(enabled=True, recipe=self.recipe)
            open_regions.append((region, [] if model.training else [tensor.clone() for tensor in self.tensors()]))
            region.__enter__()

        def leave(model: nn.Module, args: tuple, result: object) -> None:
            region, before = open_regions.pop()
            region.__exit__(None, None, None)
            if before:
                torch._foreach_copy_(self.tensors(), before)

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)

    def tensors(self) -> list[Tensor]:
        """Scales [n] and histories [HISTORY, n], fp32, changed in place."""
        return [tensor for scales in self._scales() for tensor in (scales.scale, scales.amax_history)]

    def reset(self) -> None:
        """As `allocate` left them."""
        for scales in self._scales():
            scales.scale.fill_(1.0)
            scales.amax_history.zero_()

    def step_done(self) -> None:
        """The package updates its scales by itself."""

    def evaluated(self, loss: float) -> dict[str, object]:
        """It does not count what saturates."""
        return {}

    def _scales(self) -> list[Any]:
        return [linear.fp8_meta[key] for linear in self.linears for key in ("scaling_fwd", "scaling_bwd")]


class TEBlock(nn.Module):
    """As `FusedBlock`, under autograd."""

    def __init__(self, shape: ModelShape, kernels: str, engine: TransformerEngine):
        super().__init__()
        self.shape = shape
        self.swiglu = engine.te.ops.SwiGLU()  # gate first, as here
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels)
        self.qkv = engine.linear(shape.hidden_size, shape.qkv_size)
        self.o = engine.linear(shape.attention_size, shape.hidden_size)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels)
        self.gate_up = engine.linear(shape.hidden_size, 2 * shape.ffn_hidden_size)
        self.down = engine.linear(shape.ffn_hidden_size, shape.hidden_size)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.down(self.swiglu(self.gate_up(self.ffn_norm(x_BSD))))

    def attention(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = self.qkv(x_BSD).unflatten(-1, (heads + 2 * kv_heads, head_dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return self.o(causal_attention(rope_reference(q, cos, sin), rope_reference(k, cos, sin), v).flatten(2))
