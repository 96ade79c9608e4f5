"""Attention whose backward repeats the key heads: gradients against fp64, on what a block gives it.

On a CPU by torch's flash kernels there.
"""

import pytest
import torch
from kernel_checks import error
from stand_in_engines import let_run_on_a_cpu
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import engines
from common.errors import ConfigError
from common.kernels import attention, prefix_attention
from common.kernels import repeated_heads_attention as repeated
from common.kernels.attention import attention_backends, causal_attention
from common.self_test.attention import attention_checks
from common.self_test.kernel_cases import Draw, Sizes
from common.self_test.results import SelfTestResult
from llama31_8b.rules import MINIATURE

# batch, sequence, heads, key heads, head dimension.
SHAPES = [
    (2, 33, 4, 2, 16),
    (1, 64, 8, 1, 32),
    (3, 7, 2, 2, 8),
]


def packed_leaves(shape, dtype):
    """q, k and v as views of one projection."""
    batch, sequence, heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    packed = torch.randn(batch, sequence, heads + 2 * kv_heads, head_dim).to(dtype)
    return [part.requires_grad_() for part in packed.split([heads, kv_heads, kv_heads], dim=2)]


def gradients(compute, leaves, d_out):
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def grouped_sdpa(backend):
    def compute(q, k, v):
        with sdpa_kernel(backend):
            parts = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(
                *parts, is_causal=True, enable_gqa=True
            ).transpose(1, 2)

    return compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_as_near_to_fp64_as_sdpas(shape, dtype):
    leaves = packed_leaves(shape, dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    d_out = torch.randn(leaves[0].shape).to(dtype)
    truth = gradients(grouped_sdpa(SDPBackend.MATH), exact, d_out.double())
    plain = gradients(grouped_sdpa(SDPBackend.FLASH_ATTENTION), leaves, d_out)
    found = gradients(repeated.causal_attention, leaves, d_out)
    assert torch.equal(found[0], plain[0]), "the forward is SDPA's"
    for value, same, expected in zip(found, plain, truth, strict=True):
        assert value.shape == expected.shape and value.dtype == dtype
        assert error(value, expected) <= 1.1 * error(same, expected) + 1e-7


def test_the_backward_gets_equal_heads_and_equal_strides(monkeypatch):
    """Both are what AOTriton asks of the tensors for its assembly kernels."""
    seen = []

    class Aten:
        _scaled_dot_product_flash_attention_for_cpu = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        )

        @staticmethod
        def _scaled_dot_product_flash_attention_for_cpu_backward(d_out, q, k, v, *rest):
            seen.extend((x.shape, x.stride()) for x in (d_out, q, k, v))
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out, q, k, v, *rest
            )

    monkeypatch.setattr(prefix_attention, "aten", Aten)
    leaves = packed_leaves(SHAPES[0], torch.float32)
    gradients(repeated.causal_attention, leaves, torch.randn(leaves[0].shape))
    batch, sequence, heads, _, head_dim = SHAPES[0]
    assert len(set(seen)) == 1 and seen[0][0] == (batch, heads, sequence, head_dim)


def test_a_group_is_summed_in_fp32():
    parts = torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16()  # in bf16 each 1 would be lost
    assert repeated.sum_of_groups(parts.view(1, 1, 4, 1), 4).item() == 260.0  # 259 has 9 bits


def test_the_self_test_runs_and_names_repeated_heads(monkeypatch):
    let_run_on_a_cpu(monkeypatch, engines.ATTENTION, "repeated_heads")
    called = []
    right = repeated.causal_attention
    monkeypatch.setattr(
        repeated, "causal_attention", lambda *parts: called.append(1) or right(*parts)
    )
    sizes = Sizes(MINIATURE.shape, 32, 1, False, 0, "reference", torch.bfloat16)
    result = SelfTestResult()
    decibels = [
        measure() for _, _, _, measure in attention_checks(sizes, Draw(torch.device("cpu")), result)
    ]
    assert len(decibels) == 4 and min(decibels) > 45 and called
    assert result.attention.startswith("repeated_heads, flash"), "ROCm's library may follow"


def test_sdpa_can_be_pinned_on_a_cpu(monkeypatch):
    monkeypatch.setenv("ATTENTION_ENGINE", "sdpa")
    leaves = packed_leaves(SHAPES[0], torch.float32)
    with attention_backends("cpu", torch.float32):
        assert torch.equal(
            causal_attention(*leaves), grouped_sdpa(SDPBackend.FLASH_ATTENTION)(*leaves)
        )


@pytest.mark.parametrize(
    ("asked", "library", "refused"),
    [
        ("1", "AOTriton", True),
        ("1", "Ck", False),
        ("0", "AOTriton", False),
        (None, "AOTriton", False),
    ],
)
def test_ck_is_refused_where_this_torch_lacks_it(monkeypatch, asked, library, refused):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(attention, "gpu_architecture", lambda device: "gfx942")
    monkeypatch.setattr(
        torch.backends.cuda,
        "preferred_rocm_fa_library",
        lambda: getattr(torch._C._ROCmFABackend, library),
    )
    if asked is not None:
        monkeypatch.setenv(attention.PREFER_CK, asked)
    if not refused:
        attention_backends("cuda")
        return
    with pytest.raises(ConfigError) as caught:
        attention_backends("cuda")
    assert attention.PREFER_CK in caught.value.what and "AOTriton" in caught.value.why
