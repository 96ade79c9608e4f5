"""Build fused LoRA blocks, and a Llama of them, with frozen weights in memory."""

import torch
from plain_block import Block, LoRALinear
from torch import nn

from common.kernels.fp8 import QuantizedTensor
from common.kernels.quantize import quantize_reference
from common.kernels.rope import rope_tables
from common.model.fused_lora_block import FusedLoraBlock
from common.model.linear_layers import DelayedScaling, LinearLayers
from common.model.llama import Head, Llama
from common.model.lora import AdapterSettings, adapter_parameters
from common.model.shapes import ModelShape

SMALL = ModelShape(1, 48, 80, 4, 2, 64, 10000.0)  # dimensions that no tile divides
# With initial weights, the branches' outputs exceed the rounding of the residual stream.
WIDE = ModelShape(2, 1024, 2048, 8, 2, 64, 10000.0)
NAMES = ("qkv", "o", "gate_up", "down")
RANK, ALPHA, P = 4, 8.0, 0.25
BATCH, SEQUENCE = 2, 19


def saved_bytes_per_token(shape: ModelShape, rank: int, fp8: bool) -> int:
    """Return the bytes per token that `SavedByLoraBlock` has, with activations in bf16.

    `fp8`: gate_up is kept in 8 bits.
    """
    elements = 2 * shape.hidden_size + shape.attention_size + shape.qkv_size + 2 * rank
    if shape.qk_norm:
        elements += (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    gate_up = 2 * shape.ffn_hidden_size * (1 if fp8 else 2)
    log_sum_exp = 4 * shape.num_heads
    rstd = 2 * 4
    return 2 * elements + gate_up + log_sum_exp + rstd


class MemoryBase:
    """Stand-in for FrozenBase: the weights of one block, in both layouts.

    `matrices`: name of a linear layer -> weight [out, in]. `calls` records the requests.
    """

    def __init__(self, matrices: dict[str, torch.Tensor], scaling: LinearLayers):
        self.calls = []
        quantizers = {name: scaling.quantizer(weight=True) for name in matrices}
        scaling.allocate(next(iter(matrices.values())).device)
        self.operands = {
            name: quantize_reference(matrix, quantizers[name]) for name, matrix in matrices.items()
        }

    def forward_weights(self, layer):
        self.calls.append(f"forward {layer}")
        return {name: operand._replace(columnwise=None) for name, operand in self.operands.items()}

    def backward_weights(self, layer):
        self.calls.append(f"backward {layer}")
        weights = {}
        for name, operand in self.operands.items():
            if operand.inverse_scale is None:  # not quantized: products read the one layout
                weights[name] = operand
                continue
            columnwise = operand.rowwise.t().contiguous()
            weights[name] = QuantizedTensor(torch.empty(0, 0), columnwise, operand.inverse_scale)
        return weights

    def release(self, layer):
        self.calls.append(f"release {layer}")


def plain_block(shape=SMALL, dtype=torch.float32, dropout=0.0):
    """Return a block with initial weights, and adapters whose B is slightly off zero."""
    torch.manual_seed(1)
    block = Block(shape)
    # 0.02 as in init_weights at the width of WIDE; larger for narrower shapes, so that sums are as
    # large.
    std = 0.02 * (WIDE.hidden_size / shape.hidden_size) ** 0.5
    for name, parameter in block.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.1)
        elif name in ("o.weight", "down.weight"):
            nn.init.normal_(parameter, 0.0, std / 2)
        else:
            nn.init.normal_(parameter, 0.0, std)
    block.to(dtype).requires_grad_(False)
    for name in ("qkv", "o"):
        layer = LoRALinear(getattr(block, name), RANK, ALPHA, dropout)
        nn.init.kaiming_uniform_(layer.lora_a, a=5**0.5)
        nn.init.normal_(layer.lora_b, 0.0, 0.01)
        setattr(block, name, layer)
    return block


def fused_block(plain, dropout=0.0, fp8=False, layer=0, kernels="reference"):
    """Return a FusedLoraBlock with the weights and adapters of `plain`, a `plain_block`.

    The adapters are in fp32, norms in the dtype of `plain`. The base is a MemoryBase.
    """
    scaling = DelayedScaling() if fp8 else LinearLayers()
    matrices = {}
    for name in NAMES:
        linear = getattr(plain, name)
        if isinstance(linear, LoRALinear):
            linear = linear.base
        matrices[name] = linear.weight
    settings = AdapterSettings(RANK, ALPHA, dropout)
    block = FusedLoraBlock(plain.shape, layer, None, kernels, settings, scaling)
    block.base = MemoryBase(matrices, scaling)
    block.base.scaling = scaling
    block.to(plain.attention_norm.weight.dtype)
    for name in ("qkv", "o"):
        setattr(block, name, getattr(block, name).float())
    block.load_state_dict(
        {name: t for name, t in plain.state_dict().items() if name in block.state_dict()}
    )
    return block


def lora_llama(source, rank, alpha, dropout=0.0):
    """Return a Llama with the frozen weights of `source` and uninitialized trainable adapters."""
    shape, settings = source.shape, AdapterSettings(rank, alpha, dropout)
    linear = LinearLayers()
    blocks = []
    for layer, block in enumerate(source.blocks):
        base = MemoryBase({name: getattr(block, name).weight.detach() for name in NAMES}, linear)
        blocks.append(FusedLoraBlock(shape, layer, base, "reference", settings, linear))
    model = Llama(shape, source.max_sequence_length, blocks, Head(shape, "reference"))
    kept = {
        name: tensor for name, tensor in source.state_dict().items() if name in model.state_dict()
    }
    model.load_state_dict(kept, strict=False)
    trained = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


def data(shape=SMALL, dtype=torch.float32, batch=BATCH, sequence=SEQUENCE):
    """Return x and d_out, both random [batch, sequence, hidden], and the rope tables."""
    generator = torch.Generator().manual_seed(5)
    x, d_out = (
        torch.randn(batch, sequence, shape.hidden_size, generator=generator).to(dtype)
        for _ in range(2)
    )
    return x, d_out, rope_tables(shape, sequence, "cpu")


def results(block, x, d_out, tables):
    """Return the output, and the gradients of the input (`d_x`) and of every adapter, by name."""
    leaf = x.clone().requires_grad_()
    trained = {name: p for name, p in block.named_parameters() if p.requires_grad}
    out = block(leaf, *tables)
    gradients = torch.autograd.grad(out, [leaf, *trained.values()], d_out)
    return {"output": out.detach(), "d_x": gradients[0]} | dict(
        zip(trained, gradients[1:], strict=True)
    )
