"""Test LoRA on the frozen base: equal on one and two ranks, and bit for bit for every storage."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import call_on_ranks
from tiny import LORA, lora_config, lora_steps

from common.errors import ConfigError, WeightsError
from common.kernels.fp8 import Quantizer
from common.kernels.quantize import quantize_reference
from common.model import checkpoint_loader, checkpoint_names
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.sharding.activation_offload import ActivationOffloader
from common.sharding.frozen_base import FrozenBase
from common.training.finetuning import assemble_lora, load_random

MODEL = LORA.shape
FP8 = {"linear": "fp8"}
RUNS = {
    "sharded": FP8,
    "replicated": FP8 | {"frozen_base": "replicated"},
    "replicated_both": FP8 | {"frozen_base": "replicated_both"},
    "replicated, one transpose": FP8 | {"frozen_base": "replicated", "transposed_layers": 1},
    "bf16": {"precision": "bf16"},
    "bf16, replicated": {"precision": "bf16", "frozen_base": "replicated"},
    "fp32": {},
}


def on_two_ranks(processes, folder):
    loaded = {layout: load(processes, folder, layout) for layout in ("fused", "ordinary")}
    return {
        "loaded": loaded,
        "steps": {
            name: lora_steps(processes, one_batch=True, **changes) for name, changes in RUNS.items()
        },
    }


def load(processes, folder, layout):
    """Return a checkpoint's operands as bytes, and (file, offset, size) of this rank's reads."""
    ranges, reports, preadv = [], [], os.preadv

    def counted(file, buffers, offset):
        got = preadv(file, buffers, offset)
        ranges.append((Path(f"/proc/self/fd/{file}").resolve().name, offset, got))
        return got

    with mock.patch.object(checkpoint_loader.os, "preadv", counted):
        assembly, base = assemble_lora(
            lora_config(gpus_per_node=processes.world_size, **FP8),
            LORA,
            processes,
            1,
            lambda *into: reports.append(load_base(into[0], folder / layout, None, into[1])),
        )
    operands = {}
    for layer in range(MODEL.num_layers):
        for name, operand in base.forward_weights(layer).items():
            operands[f"{layer} {name} rows"] = operand.rowwise.view(torch.uint8).clone()
            operands[f"{layer} {name} scale"] = operand.inverse_scale.clone()
        base.release(layer)
        for name, operand in base.backward_weights(layer).items():
            operands[f"{layer} {name} columns"] = operand.columnwise.view(torch.uint8).clone()
        base.release(layer)
    rest = {
        name: parameter.detach().clone()
        for name, parameter in assembly.model.named_parameters()
        if ".lora_" not in name
    }
    return {"operands": operands, "rest": rest, "ranges": ranges, "bytes": reports[0].bytes}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("frozen"), fused_llama(MODEL, 16)
    init_weights(model, MODEL.num_layers, 5, 0.5, copy_weight)
    for layout in ("fused", "ordinary"):
        write_checkpoint(model, folder / layout, files=3, layout=layout)
    return folder


@pytest.fixture(scope="module")
def pair(checkpoints):
    return call_on_ranks(2, "test_lora_training:on_two_ranks", checkpoints)


# ---- loading


def whole_expected(folder, layout):
    model = fused_llama(MODEL, 16).bfloat16()
    load_base(model, folder / layout)
    expected = {}
    for layer, block in enumerate(model.blocks):
        for name in ("qkv", "o", "gate_up", "down"):
            quantizer = Quantizer(weight=True)
            quantizer.dtype, quantizer.state = torch.float8_e4m3fn, torch.zeros(4)
            operand = quantize_reference(getattr(block, name).weight.detach(), quantizer)
            expected[f"{layer} {name} rows"] = operand.rowwise.view(torch.uint8)
            expected[f"{layer} {name} columns"] = operand.columnwise.view(torch.uint8)
            expected[f"{layer} {name} scale"] = operand.inverse_scale
    matrices = [f".{name}.weight" for name in ("qkv", "o", "gate_up", "down")]
    rest = {
        n: p.detach()
        for n, p in model.named_parameters()
        if not (n.startswith("blocks") and n.endswith(tuple(matrices)))
    }
    return expected, rest


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", ["fused", "ordinary"])
def test_loading_gives_the_same_operands_on_one_and_two_ranks(processes, checkpoints, pair, layout):
    expected, rest = whole_expected(checkpoints, layout)
    for found in (load(processes, checkpoints, layout), *(rank["loaded"][layout] for rank in pair)):
        assert_same(found["operands"], expected)
        assert_same(found["rest"], rest)
        assert found["bytes"] == sum(size for _, _, size in found["ranges"])


def test_two_ranks_read_each_matrix_once(processes, checkpoints, pair):
    rest = sum(t.numel() for t in whole_expected(checkpoints, "fused")[1].values())
    both = [rank["loaded"]["fused"] for rank in pair]
    assert sum(found["bytes"] for found in both) == 4 * (MODEL.num_parameters + rest), (
        "fp32; the small rest is read by both"
    )
    once, twice = ({tuple(r) for r in found["ranges"]} for found in both)
    assert sum(size for _, _, size in once & twice) == 4 * rest


@pytest.mark.parametrize("name", RUNS)
def test_training_on_two_ranks_follows_one(processes, pair, name):
    alone = lora_steps(processes, one_batch=True, **RUNS[name])
    first, second = (rank["steps"][name] for rank in pair)
    for found in (alone, first, second):
        assert (
            found["base unchanged"]
            and found["evaluates forward only"]
            and found["losses"][-1] < found["losses"][0]
        )
        assert not any(
            ".weight" in name and "blocks" in name and "norm" not in name
            for name in found["parameters"]
        )
        # The micro-batches are the same, so are their scales: what differs is the order of the sums
        # of the gradients.
        assert found["losses"] == pytest.approx(alone["losses"], rel=2e-3) and found[
            "norms"
        ] == pytest.approx(alone["norms"], rel=2e-2)
        assert found["evaluation"] == pytest.approx(alone["evaluation"], rel=2e-3)
    assert_same(first["adapters"], second["adapters"])


def test_storage_changes_no_bit(pair):
    runs = pair[0]["steps"]
    for name, same in (
        ("replicated", "sharded"),
        ("replicated_both", "sharded"),
        ("replicated, one transpose", "sharded"),
        ("bf16, replicated", "bf16"),
    ):
        assert (
            runs[name]["losses"] == runs[same]["losses"]
            and runs[name]["evaluation"] == runs[same]["evaluation"]
        )


def test_offloading_changes_no_bit(processes):
    five = replace(LORA, shape=replace(LORA.shape, num_layers=5), lora_dropout=0.1)
    here = lora_steps(processes, rules=five, **FP8)
    with mock.patch.object(
        ActivationOffloader, "offload", autospec=True, side_effect=ActivationOffloader.offload
    ) as offload:
        there = lora_steps(processes, rules=five, **FP8, offload_layers=3)
    assert offload.call_count == 6 * 4 * 3, "6 steps of 4 micro-batches, 3 layers each"
    assert there["losses"] == here["losses"] and there["evaluation"] == here["evaluation"]
    assert_same(there["adapters"], here["adapters"])


def test_fp8_follows_bf16(pair):
    runs = pair[0]["steps"]
    assert runs["sharded"]["losses"] != runs["bf16"]["losses"] != runs["fp32"]["losses"]
    assert runs["sharded"]["losses"] == pytest.approx(runs["bf16"]["losses"], rel=0.02)
    assert runs["bf16"]["losses"] == pytest.approx(runs["fp32"]["losses"], rel=0.02)


# ---- refused


def test_a_bad_checkpoint_is_refused_before_a_layer_is_added(processes, checkpoints, tmp_path):
    base, model = FrozenBase(MODEL, processes), fused_llama(MODEL, 16)
    index = json.loads((checkpoints / "fused" / checkpoint_names.INDEX).read_text())
    (tmp_path / checkpoint_names.INDEX).write_text(json.dumps(index))
    with (
        mock.patch.object(base, "add_layer", side_effect=AssertionError),
        pytest.raises(WeightsError, match="safetensors"),
    ):
        load_base(model, tmp_path, None, base)
    source = fused_llama(MODEL, 16)
    init_weights(source, MODEL.num_layers, 5, 0.5, copy_weight)
    write_checkpoint(source, tmp_path / "double", dtype=torch.float64)
    with (
        mock.patch.object(base, "add_layer", side_effect=AssertionError),
        pytest.raises(WeightsError, match="BF16"),
    ):
        load_base(model, tmp_path / "double", None, base)


REFUSED = [
    {"frozen_base": "none"},
    {"frozen_base": "replicated_both"},
    {"offload_layers": 1},
]


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_impossible_configs_are_refused(processes, changes):
    key = next(iter(changes))
    with pytest.raises(ConfigError, match=f"{key} = .* cannot be used"):
        lora_config(gpus_per_node=processes.world_size, **changes)


def test_random_weights_have_a_standard_deviation_of_0_02(processes):
    base = FrozenBase(MODEL, processes)
    load_random(fused_llama(MODEL, 16), base)
    operand = base.forward_weights(1)["gate_up"]
    assert float((operand.rowwise.float() * operand.inverse_scale).std()) == pytest.approx(
        0.02, rel=0.1
    )
