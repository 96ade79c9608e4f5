"""A Llama of the fused LoRA blocks whose frozen weights are those of another model, kept in memory."""

from __future__ import annotations

from common.kernels.fp8 import QuantizedTensor
from common.model.fused_lora_block import FusedLoraBlock
from common.model.linear_layers import LinearLayers
from common.model.llama import Head, Llama
from common.model.lora import AdapterSettings, adapter_parameters

MATRICES = ("qkv", "o", "gate_up", "down")


class MemoryBase:
    """FrozenWeights without FP8."""

    def __init__(self, source: Llama):
        self.layers = [{name: QuantizedTensor(getattr(block, name).weight.detach()) for name in MATRICES} for block in source.blocks]

    def forward_weights(self, layer):
        return self.layers[layer]

    backward_weights = forward_weights

    def release(self, layer):
        pass


def lora_llama(source: Llama, rank: int, alpha: float, dropout: float = 0.0) -> Llama:
    """Adapters undefined; they alone train."""
    shape, base = source.shape, MemoryBase(source)
    settings, linear = AdapterSettings(rank, alpha, dropout), LinearLayers()
    blocks = [FusedLoraBlock(shape, layer, base, "reference", settings, linear) for layer in range(shape.num_layers)]
    model = Llama(shape, source.max_sequence_length, blocks, Head(shape, "reference"))
    kept = {name: tensor for name, tensor in source.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(kept, strict=False)
    trained = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model
