"""Test adapters: only they train, on any ranks and micro-batches, with dropout in training only."""

from dataclasses import replace

import pytest
import torch
from fused_lora import lora_llama
from ranks import call_on_ranks
from tiny import LORA, lora_steps

from common.model.fused_block import fused_llama
from common.model.lora import init_adapters
from common.model.shapes import LLAMA2_70B


@pytest.fixture(scope="module")
def one_rank(processes):
    return lora_steps(processes)


def test_only_the_adapters_train_and_have_optimizer_state(one_rank):
    expected = LORA.shape.lora_parameters(LORA.lora_rank)
    assert (
        one_rank["trained"] == expected and 2 * expected < one_rank["states"] < 2 * expected + 20
    ), "two moments, and step counts"
    assert one_rank["base unchanged"]
    assert one_rank["losses"][-1] < one_rank["losses"][0], "they do learn"


def test_two_ranks_follow_the_curve_of_one(one_rank, tmp_path):
    first, second = call_on_ranks(2, "tiny:lora_steps", tmp_path)
    # 1e-6 relative: the same sums in another order, fp32.
    assert first["losses"] == pytest.approx(one_rank["losses"], rel=1e-5)
    assert first["norms"] == pytest.approx(one_rank["norms"], rel=1e-4)
    assert first["base unchanged"] and second["base unchanged"]
    for name, adapter in first["adapters"].items():
        assert torch.equal(adapter, second["adapters"][name]), "replicas stay equal to the bit"


def test_micro_batches_change_nothing(one_rank, processes):
    whole = lora_steps(processes, micro_batch_size=8)
    assert whole["losses"] == pytest.approx(one_rank["losses"], rel=1e-5)


def test_dropout_is_on_in_training(processes):
    torch.manual_seed(0)
    with_dropout = lora_steps(processes, rules=replace(LORA, lora_dropout=0.1))
    without = lora_steps(processes)
    assert with_dropout["losses"][0] == pytest.approx(without["losses"][0], rel=1e-6), (
        "B is zero at first: the adapter adds nothing"
    )
    assert with_dropout["losses"][2:] != without["losses"][2:]


def test_lora_a_starts_as_kaiming_uniform_and_lora_b_as_zero():
    model = lora_llama(
        fused_llama(replace(LORA.shape, hidden_size=256, num_heads=4), 16), 16, 32, 0.1
    )
    init_adapters(model, 1)
    assert len([parameter for parameter in model.parameters() if parameter.requires_grad]) == 8
    for block in model.blocks:
        assert block.scale == 2.0
        for adapter in (block.qkv, block.o):
            bound = adapter.lora_a.shape[1] ** -0.5
            assert adapter.lora_a.abs().max() <= bound and float(
                adapter.lora_a.detach().std()
            ) == pytest.approx(bound / 3**0.5, rel=0.05)
            assert not adapter.lora_b.any()


def test_adapter_parameters_and_flops_of_the_70b():
    assert LLAMA2_70B.lora_parameters(16) == 44_564_480
    flops = LLAMA2_70B.training_flops(8192, 16)
    assert flops.total == pytest.approx(307.33e9, rel=1e-5)
    # Head, adapters, attention.
    assert flops.others == 4 * 32_000 * 8192 + 6 * 44_564_480 + 6 * 80 * 8192 * 8192
