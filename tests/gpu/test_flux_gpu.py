"""Test FLUX's transformer on GPUs: its attention backend and the search for the largest batch."""

import pytest
import torch
from ranks import call_on_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.kernels.attention import attention_backends
from throughput.flux_model import Flux, FluxShape, image_positions, rope_table
from throughput.flux_rank import FluxRequest, measure_batches, try_batch
from throughput.memory import free_memory

SMALL = FluxShape(1, 2, 256, 2, 64, 128, 64)
FITS, TOO_MUCH = 4, 8  # batches: the last rank is left the memory midway between their peaks


def outputs_and_gradients(model: Flux, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the output and the gradients of all parameters in one fp32 vector on the CPU.

    Each tensor is scaled to length 1, so that none outweighs the others.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.randn(2, *size, generator=generator).to(device, dtype)
        for size in ((48, 64), (37, 128), (64,))
    ]
    time = torch.rand(2, generator=generator).to(device)
    out = model(
        *drawn,
        time,
        torch.ones_like(time),
        rope_table(image_positions(6, 8, 37), SMALL, torch.device(device)),
    )
    out.float().square().sum().backward()
    found = [out.detach(), *(parameter.grad for parameter in model.parameters())]
    return torch.cat([(tensor.float() / tensor.float().norm()).flatten().cpu() for tensor in found])


def copy_of(weights: dict[str, torch.Tensor], device: str, dtype: torch.dtype) -> Flux:
    model = Flux(SMALL).to(device, dtype)
    model.load_state_dict(weights)
    return model


def compare_backends(device: str) -> tuple[float, float]:
    """Return the relative errors of bf16 against fp32 on a CPU.

    The first is with the attention backend that a run takes, the second with plain products.
    """
    torch.manual_seed(2)
    weights = {name: value.bfloat16() for name, value in Flux(SMALL).state_dict().items()}
    truth = outputs_and_gradients(copy_of(weights, "cpu", torch.float32), "cpu", torch.float32)
    errors = []
    for backend in (attention_backends(device), sdpa_kernel(SDPBackend.MATH)):
        with backend:
            found = outputs_and_gradients(
                copy_of(weights, device, torch.bfloat16), device, torch.bfloat16
            )
        errors.append(float((found - truth).norm() / truth.norm()))
    return errors[0], errors[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_is_as_exact_as_plain_products():
    fused, plain = compare_backends("cuda")
    assert fused <= 2 * plain < 0.1


def search(processes, folder):
    """Search the largest batch on every rank. The last rank has too little memory for TOO_MUCH.

    From 4 images on, the peak grows by about 1 GiB an image. Counted on fake tensors, one rank
    needs 11.9 GiB for 4 and 15.7 GiB for 8. So FITS has 2 GiB to spare, for what torch's cache
    cannot use, and TOO_MUCH lacks 2 GiB. For fewer images, the optimizer's gradients set the peak:
    10.0 GiB for 1 and 10.1 GiB for 2.
    """
    request = FluxRequest(
        "cuda", FluxShape(1, 2), 64, 64, 512, batch=0, recompute_blocks=3, warmup=1, steps=2
    )
    with attention_backends("cuda"):
        roomy = [try_batch(request, processes, size) for size in (FITS, TOO_MUCH)]
        free_memory(processes.device)
        _, total = torch.cuda.mem_get_info(processes.device)
        if processes.rank == processes.world_size - 1:
            torch.cuda.set_per_process_memory_fraction(sum(roomy) / 2 / total, processes.device)
        return measure_batches(request, processes, folder) | {"roomy": roomy}


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_search_ends_where_a_gpu_runs_out_of_memory(tmp_path, ranks):
    """No rank hangs, and a failed try leaves its memory to the next one.

    With two ranks, the second runs out of memory while the first has enough.
    """
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    found = call_on_ranks(ranks, "test_flux_gpu:search", tmp_path, timeout_s=300, device="cuda")
    batch, tried = found[0]["batch"], dict(found[0]["tried"])
    fits, too_much = found[0]["roomy"]
    assert fits < too_much and FITS <= batch < TOO_MUCH
    for size, peak in tried.items():
        ran_out = peak is None
        assert ran_out == (size > batch)
    assert 0 < found[0]["memory_bytes"] < too_much
    assert len(found[0]["times_ms"]) == 2 and all(
        of_rank["times_ms"] == found[0]["times_ms"] for of_rank in found
    )
