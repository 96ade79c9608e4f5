"""Engines of attention against fp32 and against SDPA, on what a block gives them: FlashAttention-4, and repeated heads. One GPU."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.kernels.attention import attention_backends
from common.kernels.engines import ATTENTION_ENGINE, REPEATED_HEADS, SDPA
from common.kernels.flash_attention_4 import PACKAGE
from common.model.fused_block import attend
from common.packages import version_of
from common.training.kernel_cases import Draw
from common.training.self_test import _attention_truth, backend_in_use, decibels
from llama2_70b_lora import rules as lora_rules
from llama31_8b import rules as pretraining_rules

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
both_shapes = pytest.mark.parametrize(
    "rules", [pretraining_rules.CLOSED, lora_rules.CLOSED], ids=["8b", "70b"]
)


@both_shapes
def test_repeated_heads_are_as_exact_as_sdpas_grouped_ones(rules, monkeypatch):
    """By the same kernels, torch's flash ones: no result may be 1 dB further from fp32."""
    found = {}
    for name in (SDPA, REPEATED_HEADS):
        monkeypatch.setenv(ATTENTION_ENGINE, name)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found[name] = decibels_of(
                "", rules.shape, rules.sequence_length, Draw(torch.device("cuda")), nullcontext()
            )
    print(found)
    assert all(
        ours > grouped - 1 for ours, grouped in zip(found[REPEATED_HEADS], found[SDPA], strict=True)
    ), found


@pytest.mark.skipif(
    not (ON_HOPPER and version_of(PACKAGE)), reason="needs a Hopper GPU and flash-attn-4"
)
@both_shapes
def test_flash_attention_4_is_as_exact_as_cudnn(rules, monkeypatch):
    """out, dQ, dK and dV of the last key head with its query heads may not be 1 dB further from fp32 than cuDNN's. An evaluation's forward, another
    kernel since it keeps no log-sum-exp, gives the same output.
    """
    found = {}
    for name in ("cudnn", "flash_attention_4"):
        if name != "cudnn":
            monkeypatch.setenv(ATTENTION_ENGINE, name)
        draw = Draw(torch.device("cuda"))
        found[name] = decibels_of(
            name, rules.shape, rules.sequence_length, draw, attention_backends("cuda")
        )
    print(found)
    assert all(
        ours > cudnn - 1
        for ours, cudnn in zip(found["flash_attention_4"], found["cudnn"], strict=True)
    ), found


def decibels_of(name, shape, length, draw, backends):
    """Return dB of out, dQ, dK, dV; the backend that runs must begin with `name`.

    With two sequences, of which the last is compared: also the stride between them must be right."""
    projection, d_out = (
        draw(2, length, shape.qkv_size),
        draw(2, length, shape.num_heads, shape.head_dim),
    )
    with backends:
        out, (q, k, v) = attend(shape, projection, keep=True)
        evaluated, _ = attend(shape, projection, keep=False)
        assert backend_in_use(q, k, v).startswith(name)
        gradients = torch.autograd.grad(out, (q, k, v), d_out)
    assert decibels(out, evaluated) > 60
    group = shape.num_heads // shape.num_kv_heads
    truth = _attention_truth(q[-1, :, -group:], k[-1, :, -1], v[-1, :, -1], d_out[-1, :, -group:])
    results = [
        x[-1, :, -heads:] for x, heads in zip((out, *gradients), (group, group, 1, 1), strict=True)
    ]
    return [decibels(exact, value) for exact, value in zip(truth, results, strict=True)]
