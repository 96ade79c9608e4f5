"""The block with Transformer Engine's linear layers in FP8, under its own recipes: the second engine, to hold the first (fused_block.py) against.

Parameters are named and shaped as in `Block`; norm, RoPE, attention and SwiGLU are the plain block's. The package is optional and NVIDIA's
(docs.nvidia.com/deeplearning/transformer-engine); what is said of it here was read in the sources of VERSION. Where it differs from the
other engine: delayed scales follow the last HISTORY micro-batches instead of optimizer steps, and the largest values of all ranks; they
begin at 1, so that gradients below e5m2's range are lost in the first two backward passes of a run (the second finds the scales of what the
first has lost still at 1); under FSDP2 weights are cast in every forward and again in every backward: it then ignores
`is_first_microbatch`, which is therefore left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from common.kernels.fp8 import HISTORY
from common.model.block import Block, RMSNorm
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
    """The package, the recipe, and the layers of a model made with both, which hold the scales."""

    def __init__(self, recipe: str):
        """`recipe`: "delayed" or "current"; e4m3 forward, e5m2 gradients."""
        self.te, recipes = load()
        hybrid = recipes.Format.HYBRID
        if recipe == "delayed":
            self.recipe = recipes.DelayedScaling(margin=0, fp8_format=hybrid, amax_history_len=HISTORY, amax_compute_algo="max")
        else:
            self.recipe = recipes.Float8CurrentScaling(fp8_format=hybrid)
        self.linears: list[Any] = []

    def linear(self, like: nn.Linear) -> nn.Module:
        """A layer of the size, dtype and device of `like`; values undefined."""
        weight = like.weight
        made = self.te.Linear(
            like.in_features, like.out_features, bias=False, params_dtype=weight.dtype, device=weight.device.type
        )  # the device as text: only "meta" itself defers its initialization
        self.linears.append(made)
        return made

    @torch.no_grad()
    def allocate(self) -> None:
        """Make the scales, on the current GPU. The layers would do so at their first forward; a warm-up has to know them before."""
        with self.te.autocast(enabled=True, recipe=self.recipe):
            for linear in self.linears:
                linear.init_fp8_metadata()

    @contextmanager
    def region(self, training: bool) -> Iterator[None]:
        """Around a model's forward, once: at its end the history of every layer moves on. What evaluation records is taken back."""
        before = [] if training else [tensor.clone() for tensor in self.state()]
        with self.te.autocast(enabled=True, recipe=self.recipe):
            yield
        if before:
            torch._foreach_copy_(self.state(), before)

    def state(self) -> list[Tensor]:
        """Scales [n] and histories [HISTORY, n], fp32, changed in place. Current scaling has none."""
        return [tensor for scales in self._scales() for tensor in (scales.scale, scales.amax_history)]

    def reset(self) -> None:
        """As `allocate` left them."""
        for scales in self._scales():
            scales.scale.fill_(1.0)
            scales.amax_history.zero_()

    def _scales(self) -> list[Any]:
        if not self.recipe.delayed():
            return []
        return [linear.fp8_meta[key] for linear in self.linears for key in ("scaling_fwd", "scaling_bwd")]


class TEBlock(Block):
    """To be called inside `engine.region`."""

    def __init__(self, shape: ModelShape, kernels: str, fp8_swiglu_input: bool, engine: TransformerEngine):
        super().__init__(shape, kernels, fp8_swiglu_input)
        for name, layer in list(self.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(self, name, engine.linear(layer))
        # Nothing compiles this block, so that the norms are fused here where there are kernels for it.
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels)
