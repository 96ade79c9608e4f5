"""Test attention by optional packages, with stand-ins for them that compute with SDPA.

tests/gpu runs FlashAttention-4. AITER has not been run.
"""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from stand_in_engines import let_run_on_a_cpu
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import engines
from common.errors import ConfigError
from common.kernels import aiter_attention, transformer_engine
from common.kernels.attention import attention_backends, causal_attention
from common.model.fused_block import attend
from common.self_test.attention import attention_checks
from common.self_test.kernel_cases import Draw, Sizes
from common.self_test.results import SelfTestResult
from llama31_8b.rules import MINIATURE

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def sdpa(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(1, 2)


class Aiter:
    """Functions with the signatures of ROCm/aiter v0.1.9.post1.

    `calls` records the arguments that select a kernel.
    """

    def __init__(self):
        self.calls = []

    def flash_attn_func(
        self,
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        return_lse=False,
        how_v3_bf16_cvt=1,
    ):
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
        assert (
            is_causal
            and (window_size_left, window_size_right, dropout_p) == (-1, -1, 0.0)
            and softmax_scale == q.shape[-1] ** -0.5
        )
        assert (
            rng_state.shape == (2,)
            and rng_state.dtype == torch.int64
            and dout.is_contiguous()
            and not dq.any()
        )
        assert torch.equal(out, sdpa(q, k, v)) and softmax_lse.shape == (
            q.shape[0],
            q.shape[2],
            q.shape[1],
        )
        self.calls.append(("backward", is_v3_atomic_fp32, deterministic, how_v3_bf16_cvt))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            found = torch.autograd.grad(sdpa(*leaves), leaves, dout)
        for place, gradient in zip((dq, dk, dv), found, strict=True):
            place.copy_(gradient)
        return dq, dk, dv, softmax_lse


class FlashAttention4:
    """Function with the signature and the errors of flash-attn-4 4.0.0b36, as far as used.

    `calls` records whether a backward pass follows.
    """

    def __init__(self):
        self.calls = []

    def flash_attn_func(
        self,
        q,
        k,
        v,
        qv=None,
        gather_kv_indices=None,
        softmax_scale=None,
        causal=False,
        return_lse=False,
    ):
        assert causal and softmax_scale is None and all(x.stride(-1) == 1 for x in (q, k, v))
        self.calls.append(q.requires_grad)
        out = sdpa(q, k, v)
        if not (q.requires_grad or return_lse):
            return out, None
        return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1])


class TransformerEngine:
    """DotProductAttention as 2.20.2 and ROCm's fork have it, as far as it is used."""

    def __init__(self):
        self.calls = []

    def DotProductAttention(self, heads, head_dim, **options):
        assert options == {
            "num_gqa_groups": options["num_gqa_groups"],
            "attention_dropout": 0.0,
            "qkv_format": "bshd",
            "attn_mask_type": "causal",
        }

        def compute(q, k, v):
            assert q.shape[2:] == (heads, head_dim) and k.shape[2] == options["num_gqa_groups"]
            self.calls.append("forward")
            return sdpa(q, *taken_for_packed(k, v)).flatten(2)

        return compute


def taken_for_packed(k, v):
    """Return keys and values as 2.20.2's `get_qkv_layout` leads to: by offsets, not by strides."""
    one_storage = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if not one_storage or (k.storage_offset(), v.storage_offset()) != (0, k[0, 0].numel()):
        return k, v
    batch, keys, heads, head_dim = k.shape
    strides = torch.empty(batch, keys, 2, heads, head_dim).stride()
    return k.as_strided((batch, keys, 2, heads, head_dim), strides).unbind(2)


STAND_INS = {
    "aiter": ("aiter", Aiter, "0.1.14.post1"),
    "flash_attention_4": ("flash_attn.cute", FlashAttention4, "4.0.0b36"),
    "transformer_engine": ("transformer_engine.pytorch", TransformerEngine, "2.20.2"),
}
PRODUCTS = {
    "transformer_engine.pytorch.cpp_extensions.gemm": SimpleNamespace(general_gemm=None),
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage": SimpleNamespace(
        Float8TensorStorage=None
    ),
}


def install_stand_in(name, monkeypatch):
    """Put a stand-in in the place of a package, and pin it as the engine of a CPU. Return it."""
    module, make, version = STAND_INS[name]
    package = make()
    for imported, content in {module: package, **PRODUCTS}.items():
        monkeypatch.setitem(sys.modules, imported, content)
    for variable in ("NVTE_FLASH_ATTN", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(variable, "0")
    let_run_on_a_cpu(monkeypatch, engines.ATTENTION, name, version)
    transformer_engine.attention_module.cache_clear()
    return package


@pytest.fixture
def aiter(monkeypatch):
    return install_stand_in("aiter", monkeypatch)


@pytest.fixture
def flash_attention(monkeypatch):
    return install_stand_in("flash_attention_4", monkeypatch)


@pytest.fixture(params=STAND_INS)
def stand_in(request, monkeypatch):
    """The stand-in of each package in turn, pinned."""
    return install_stand_in(request.param, monkeypatch)


def test_aiter_gives_sdpas_output_and_gradients_with_32_bit_atomics(aiter):
    torch.manual_seed(0)
    packed = torch.randn(2, 32, 8, 16)  # heads are views of one projection, as in a block
    leaves = [x.requires_grad_() for x in packed.split([4, 2, 2], 2)]
    check(leaves, causal_attention)
    assert aiter.calls == [("forward", 0), ("backward", True, False, 0)]


def test_an_empty_directory_of_compiled_modules_is_as_if_unset(aiter, monkeypatch):
    """The variable of an image that was built without AITER, on a base that brings it."""
    for given in ("", "/opt/aiter"):
        monkeypatch.setenv("AITER_JIT_DIR", given)
        aiter_attention.require()
        assert os.environ.get("AITER_JIT_DIR") == (given or None)


def test_flash_attention_4_gets_the_views_of_a_block_without_a_copy(flash_attention, monkeypatch):
    torch.manual_seed(0)
    shape = MINIATURE.shape
    projection = torch.randn(2, 32, shape.qkv_size)
    called = flash_attention.flash_attn_func
    places = []

    def watched(*parts, **rest):
        places.append([x.data_ptr() for x in parts])
        return called(*parts, **rest)

    monkeypatch.setattr(
        flash_attention,
        "flash_attn_func",
        watched,
    )
    with attention_backends("cpu"):
        out, leaves = attend(shape, projection, keep=True)
        evaluated, _ = attend(shape, projection, keep=False)
    check(leaves, lambda *_: out)
    assert (
        torch.equal(evaluated, out)
        and not evaluated.requires_grad
        and flash_attention.calls == [True, False]
    )
    heads = (0, shape.num_heads, shape.num_heads + shape.num_kv_heads)
    assert places == 2 * [[projection[..., head * shape.head_dim :].data_ptr() for head in heads]]


def test_keys_with_tokens_outermost_are_those_of_their_sequence(stand_in):
    """As ranks that share sequences have them. Transformer Engine mixed them up on an H200."""
    torch.manual_seed(0)
    kv = torch.randn(32, 2, 4, 16).transpose(0, 1)
    leaves = [x.requires_grad_() for x in (torch.randn(2, 32, 4, 16), *kv.chunk(2, 2))]
    check(leaves, causal_attention)


def check(leaves, compute):
    """Check that the output of `compute` and all gradients are SDPA's, bit for bit."""
    truth = sdpa(*leaves)
    d_out = torch.randn_like(truth.transpose(1, 2)).transpose(1, 2)
    with attention_backends("cpu"):
        out = compute(*leaves)
    assert torch.equal(out, truth)
    found, expected = (torch.autograd.grad(x, leaves, d_out) for x in (out, truth))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


SIZES = Sizes(MINIATURE.shape, 32, 1, False, 0, "reference", torch.bfloat16)


def test_the_self_test_runs_and_names_the_pinned_engine(stand_in):
    result = SelfTestResult()
    decibels = [measure() for _, _, _, measure in attention_checks(SIZES, Draw(CPU), result)]
    names = {f"{name} {version}" for name, (_, _, version) in STAND_INS.items()}
    assert result.attention in names
    assert len(decibels) == 4 and min(decibels) > 45
    assert stand_in.calls


def test_the_self_test_finds_an_infinite_gradient_of_aiter(aiter, monkeypatch):
    right = aiter.fmha_v3_bwd

    def overflows(*tensors, **options):
        right(*tensors, **options)
        options["dq"][-1, -1, -1, -1] = torch.inf

    monkeypatch.setattr(aiter, "fmha_v3_bwd", overflows)
    checks = attention_checks(SIZES, Draw(CPU), SelfTestResult())
    bad = [op for op, _, least, measure in checks if not measure() >= least]
    assert bad == ["attention backward dQ"]


def test_an_engine_that_is_not_pinned_is_not_called(stand_in, monkeypatch):
    monkeypatch.delenv("ATTENTION_ENGINE")
    with attention_backends("cpu"):
        causal_attention(*(torch.randn(1, 8, 2, 16) for _ in range(3)))
    assert not stand_in.calls


@pytest.mark.parametrize(
    ("name", "package", "why"),
    [
        ("aiter", None, "ModuleNotFoundError"),
        ("aiter", SimpleNamespace(flash_attn_func=print), "fmha_v3_bwd"),
        ("flash_attention_4", None, "ModuleNotFoundError"),
        ("flash_attention_4", SimpleNamespace(), "flash_attn_func"),
        ("transformer_engine", SimpleNamespace(), "DotProductAttention"),
    ],
)
def test_an_engine_without_its_package_or_its_functions_is_refused(monkeypatch, name, package, why):
    install_stand_in(name, monkeypatch)
    module, _, _ = STAND_INS[name]
    monkeypatch.setitem(sys.modules, module, package)
    with pytest.raises(ConfigError) as caught:
        attention_backends("cpu")
    assert why in caught.value.why and "ATTENTION_ENGINE" in caught.value.do
