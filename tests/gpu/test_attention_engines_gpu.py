"""Engines of attention against fp32 and against SDPA, on what a block gives them. One GPU."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import engines
from common.engines import REPEATED_HEADS, SDPA
from common.errors import ConfigError
from common.kernels.attention import attention_backends
from common.model.fused_block import attend
from common.self_test.attention import _attention_truth, backend_in_use
from common.self_test.kernel_cases import Draw
from common.self_test.results import decibels
from llama2_70b_lora import rules as lora_rules
from llama31_8b import rules as pretraining_rules

VARIABLE = engines.VARIABLES[engines.ATTENTION]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
both_shapes = pytest.mark.parametrize(
    "rules", [pretraining_rules.CLOSED, lora_rules.CLOSED], ids=["8b", "70b"]
)


@both_shapes
def test_repeated_heads_are_as_exact_as_sdpas_grouped_ones(rules, monkeypatch):
    """Both use torch's flash kernels. No result may be 1 dB further from fp32."""
    found = {}
    for name in (SDPA, REPEATED_HEADS):
        monkeypatch.setenv(VARIABLE, name)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found[name] = decibels_of(
                "", rules.shape, rules.sequence_length, Draw(torch.device("cuda")), nullcontext()
            )
    print(found)
    assert all(
        ours > grouped - 1 for ours, grouped in zip(found[REPEATED_HEADS], found[SDPA], strict=True)
    ), found


@pytest.mark.parametrize("name", ["flash_attention_4", "transformer_engine", "aiter"])
@both_shapes
def test_a_package_is_as_exact_as_sdpa(name, rules, monkeypatch):
    """out, dQ, dK and dV of the last key head may not be 1 dB further from fp32 than SDPA's.

    An evaluation's forward, which may be another kernel, gives the same output.
    """
    found = {}
    for engine in (SDPA, name):
        monkeypatch.setenv(VARIABLE, engine)
        try:
            backends = attention_backends("cuda")
        except ConfigError as error:
            pytest.skip(f"{error.what}: {error.why}")
        draw = Draw(torch.device("cuda"))
        first = "" if engine == SDPA else engine
        found[engine] = decibels_of(first, rules.shape, rules.sequence_length, draw, backends)
    print(found)
    assert all(ours > sdpa - 1 for ours, sdpa in zip(found[name], found[SDPA], strict=True)), found


def decibels_of(name, shape, length, draw, backends):
    """Return the SQNR in dB of out, dQ, dK and dV. The backend that runs must begin with `name`.

    The batch has two sequences, and the last is compared. So the stride between them matters too.
    """
    projection = draw(2, length, shape.qkv_size)
    d_out = draw(2, length, shape.num_heads, shape.head_dim)
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
