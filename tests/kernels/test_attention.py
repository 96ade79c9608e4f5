"""Which of SDPA's backends may run attention where."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from common.kernels import attention
from common.kernels.attention import allowed_backends, attention_backends, causal_attention
from common.training.self_test import backend_in_use


@pytest.mark.parametrize(("vendor", "first"), [("nvidia", SDPBackend.CUDNN_ATTENTION), ("amd", SDPBackend.FLASH_ATTENTION)])
def test_math_is_no_choice_for_bf16_on_a_gpu(vendor, first):
    assert allowed_backends(vendor, torch.bfloat16)[0] == first
    assert SDPBackend.MATH not in allowed_backends(vendor, torch.bfloat16)
    assert SDPBackend.MATH in allowed_backends(vendor, torch.float32)  # the miniature on a GPU
    assert SDPBackend.MATH in allowed_backends("cpu", torch.bfloat16)


def test_what_would_run_is_named_and_none_is_an_error(monkeypatch):
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16)
    with attention_backends("cpu", torch.float32):
        assert backend_in_use(q, k, k) == "flash"
    monkeypatch.setattr(attention, "allowed_backends", lambda vendor, dtype: [SDPBackend.CUDNN_ATTENTION])
    with attention_backends("cpu"), pytest.raises(RuntimeError):
        backend_in_use(q, k, k)
        causal_attention(q, k, k)
