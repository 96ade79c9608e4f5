"""A small Llama of fused blocks in FP8."""

import torch

from common.model.fused_block import FusedBlock
from common.model.linear_layers import DelayedScaling
from common.model.llama import Head, Llama
from common.model.shapes import ModelShape


def fp8_llama(
    shape: ModelShape, sequence_length: int, kernels: str = "reference", device: str = "cpu"
) -> tuple[Llama, DelayedScaling]:
    """Return a model with random bf16 weights and its scales, attached as `build` does."""
    torch.manual_seed(0)
    scaling = DelayedScaling()
    blocks = [FusedBlock(shape, kernels, scaling) for _ in range(shape.num_layers)]
    model = Llama(shape, sequence_length, blocks, Head(shape, kernels))
    model = model.to(device, torch.bfloat16)
    model.make_rope_tables(device)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.05)
    scaling.allocate(torch.device(device))
    model.register_forward_pre_hook(lambda model, _: scaling.start_pass(model.training))
    return model, scaling
