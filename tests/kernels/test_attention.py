"""Which of SDPA's backends may run attention where."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.kernels import attention
from common.kernels.attention import attention_backends, causal_attention
from common.self_test.attention import backend_in_use

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("hip", "first"), [(None, SDPBackend.CUDNN_ATTENTION), ("7.2", SDPBackend.FLASH_ATTENTION)]
)
def test_bf16_on_a_gpu_never_uses_the_math_backend(monkeypatch, hip, first):
    seen = []
    monkeypatch.setattr(attention, "sdpa_kernel", lambda order, set_priority: seen.append(order))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(attention, "gpu_architecture", lambda device: "gfx942" if hip else "sm_100")
    for device, dtype in (
        ("cuda", torch.bfloat16),
        ("cuda", torch.float32),
        ("cpu", torch.bfloat16),
    ):
        attention_backends(device, dtype)
    gpu, miniature_on_gpu, cpu = seen
    assert gpu[0] == miniature_on_gpu[0] == first and SDPBackend.MATH not in gpu
    assert SDPBackend.MATH in miniature_on_gpu and cpu == [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.MATH,
    ]


def test_backend_in_use_returns_its_name_and_raises_if_none_fits():
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16)
    with attention_backends("cpu", torch.float32):
        assert backend_in_use(q, k, k).partition(",")[0] == "flash", "ROCm's library may follow"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError):
        backend_in_use(q, k, k)
        causal_attention(q, k, k)
