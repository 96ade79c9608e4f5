"""The hash of a tensor's bits."""

import pytest
import torch

from common.training.digest import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_fingerprint_sees_two_swapped_values_near_and_far_apart(dtype):
    values = torch.arange(1, 1002).to(dtype)  # an odd length: bf16 and bytes need padding
    for first, second in ((10, 11), (0, 100)):
        swapped = values.clone()
        swapped[first], swapped[second] = values[second], values[first]
        assert not torch.equal(values, swapped) and fingerprint(values) != fingerprint(swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_sees_the_sign_of_zero(dtype):
    values = torch.zeros(7, dtype=dtype)
    negative = values.clone()
    negative[6] = -0.0
    assert torch.equal(values, negative) and fingerprint(values) != fingerprint(negative)


def test_a_fingerprint_sees_every_single_bit():
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    bits = values.view(torch.int32)
    seen = {fingerprint(values)}
    for place in range(values.numel()):
        for bit in range(32):
            flipped = bits.clone()
            flipped.view(-1)[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(fingerprint(flipped.view(torch.float32)))
    # All different: a hash of 64 bits has no business with collisions here.
    assert len(seen) == 1 + 32 * values.numel()


def test_changes_of_two_weights_do_not_cancel():
    values = torch.arange(100, dtype=torch.int32)
    seen = {fingerprint(values)}
    for up in range(1, 12):
        for down in range(1, 12):
            changed = values.clone()
            changed[0] += up
            changed[1] -= down
            seen.add(fingerprint(changed))
    assert len(seen) == 1 + 11 * 11


def test_a_fingerprint_depends_on_values_alone(monkeypatch):
    values = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(values)
    assert whole == fingerprint(values.t().contiguous().t()) == fingerprint(values.clone())
    monkeypatch.setattr("common.training.digest._CHUNK", 7)
    assert fingerprint(values) == whole  # the same in pieces
    assert fingerprint(torch.empty(0)) == 0 and fingerprint(torch.tensor(3.0)) != fingerprint(
        torch.tensor(0.0)
    )
