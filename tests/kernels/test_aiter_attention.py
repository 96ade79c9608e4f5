"""AITER's attention through a stand-in for the package, which computes by SDPA: AITER itself was never run by us."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import ConfigError
from common.kernels import aiter_attention
from common.kernels.attention import attention_backends, causal_attention
from common.training import self_test
from common.training.kernel_cases import Draw, Sizes
from llama31_8b.rules import MINIATURE

CPU = torch.device("cpu")


def sdpa(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)


class StandIn:
    """The signatures of ROCm/aiter v0.1.9.post1 and what they compute; `calls` has what decides their kernels."""

    def __init__(self):
        self.calls = []

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_lse=False, how_v3_bf16_cvt=1):
        assert causal and return_lse and not dropout_p and softmax_scale is None
        self.calls.append(("forward", how_v3_bf16_cvt))
        return sdpa(q, k, v), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def fmha_v3_bwd(
        self,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dropout_p,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        deterministic,
        is_v3_atomic_fp32,
        how_v3_bf16_cvt,
        dq=None,
        dk=None,
        dv=None,
        alibi_slopes=None,
        rng_state=None,
        gen=None,
    ):
        assert is_causal and (window_size_left, window_size_right, dropout_p) == (-1, -1, 0.0) and softmax_scale == q.shape[-1] ** -0.5
        assert rng_state.shape == (2,) and rng_state.dtype == torch.int64 and dout.is_contiguous() and not dq.any()
        assert torch.equal(out, sdpa(q, k, v)) and softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        self.calls.append(("backward", is_v3_atomic_fp32, deterministic, how_v3_bf16_cvt))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            found = torch.autograd.grad(sdpa(*leaves), leaves, dout)
        for place, gradient in zip((dq, dk, dv), found, strict=True):
            place.copy_(gradient)
        return dq, dk, dv, softmax_lse


@pytest.fixture(params=["gfx942", "gfx950"])
def aiter(request, monkeypatch):
    package = StandIn()
    monkeypatch.setitem(sys.modules, "aiter", package)
    monkeypatch.setenv("ATTENTION_ENGINE", "aiter")
    monkeypatch.setattr(aiter_attention, "gpu", lambda device: request.param)
    return package


def test_output_and_gradients_of_grouped_heads_with_32_bit_atomics(aiter):
    torch.manual_seed(0)
    packed = torch.randn(2, 32, 8, 16)  # heads are views of one projection, as in a block
    leaves = [x.requires_grad_() for x in packed.split([4, 2, 2], 2)]
    truth = sdpa(*leaves)
    d_out = torch.randn(2, 4, 32, 16).transpose(1, 2)
    with attention_backends("cpu"):
        out = causal_attention(*leaves)
    assert torch.equal(out, truth)
    found, expected = (torch.autograd.grad(x, leaves, d_out) for x in (out, truth))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert aiter.calls == [("forward", 0), ("backward", True, False, 0)]


def test_the_self_test_runs_it_and_names_it(aiter):
    sizes = Sizes(MINIATURE.shape, 32, 1, False, 0, "reference", torch.float32)
    result = self_test.Result()
    decibels = [measure() for _, _, _, measure in self_test.attention_checks(sizes, Draw(CPU), result)]
    assert result.attention == "aiter, 32-bit atomics" and len(decibels) == 4 and min(decibels) > 60
    assert len(aiter.calls) == 2


def test_a_fault_of_its_backward_is_found(aiter, monkeypatch):
    right = aiter.fmha_v3_bwd

    def overflows(*tensors, **options):
        right(*tensors, **options)
        options["dq"][-1, -1, -1, -1] = torch.inf

    monkeypatch.setattr(aiter, "fmha_v3_bwd", overflows)
    sizes = Sizes(MINIATURE.shape, 32, 1, False, 0, "reference", torch.float32)
    checks = self_test.attention_checks(sizes, Draw(CPU), self_test.Result())
    bad = [op for op, _, least, measure in checks if not measure() >= least]
    assert bad == ["attention backward dQ"]


def test_without_the_variable_it_is_not_asked(aiter, monkeypatch):
    monkeypatch.delenv("ATTENTION_ENGINE")
    with attention_backends("cpu"):
        causal_attention(*(torch.randn(1, 8, 2, 16) for _ in range(3)))
    assert not aiter.calls


@pytest.mark.parametrize("arch", ["no GPU", "sm_90"])
def test_refused_elsewhere(aiter, monkeypatch, arch):
    monkeypatch.setattr(aiter_attention, "gpu", lambda device: arch)
    with pytest.raises(ConfigError) as caught:
        attention_backends("cpu")
    assert arch in caught.value.why and "ATTENTION_ENGINE" in caught.value.do


def test_a_cpu_is_no_gpu():
    assert aiter_attention.gpu(CPU) == "no GPU"


@pytest.mark.parametrize(("package", "why"), [(None, "ModuleNotFoundError"), (SimpleNamespace(flash_attn_func=print), "fmha_v3_bwd")])
def test_refused_without_the_package_or_its_functions(aiter, monkeypatch, package, why):
    monkeypatch.setitem(sys.modules, "aiter", package)
    with pytest.raises(ConfigError) as caught:
        attention_backends("cpu")
    assert why in caught.value.why and "amd-aiter" in caught.value.do


@pytest.mark.parametrize("name", ["", "ck"])
def test_another_name_is_refused(aiter, monkeypatch, name):
    monkeypatch.setenv("ATTENTION_ENGINE", name)
    with pytest.raises(ConfigError, match="no engine"):
        attention_backends("cpu")
