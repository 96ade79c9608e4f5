"""Test the frozen base: equal bits from every storage, and no buffer overwritten while in use."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from ranks import call_on_ranks
from simulated_streams import ORDERS, SimulatedStreams
from tiny import fill, lora_config, matrix

from common.config import FROZEN_BASE_STORAGE
from common.estimate.memory import memory_peak, state_bytes
from common.estimate.workload import Workload
from common.kernels import fp8
from common.kernels.fp8 import Quantizer
from common.kernels.quantize import quantize_reference
from common.model.fused_block import fused_llama
from common.model.shapes import LLAMA2_70B, ModelShape
from common.sharding import frozen_base as frozen
from common.sharding.frozen_base import FrozenBase, layer_layout
from common.sharding.layer_prefetch import (
    COLUMNWISE,
    ROWWISE,
    LayerKey,
    PrefetchBuffers,
    pass_order,
)
from common.sharding.side_stream import SideStream
from common.training.finetuning import base_fingerprints

SHAPE = ModelShape(5, 32, 48, 4, 2, 61, 10000.0)
# Nothing is a multiple of anything: 30 rows of qkv, 14 of gate and up.
ODD = ModelShape(2, 18, 7, 3, 1, 5, 10000.0)


def expected_operand(shape, layer, name, dtype):
    quantizer = Quantizer(weight=True)
    quantizer.dtype, quantizer.state = dtype, torch.zeros(4)
    return quantize_reference(matrix(shape, layer, name), quantizer)


def wrong(base, shape, key, operands=None):
    """The weights that differ from quantizing the whole matrix here."""
    if operands is None:
        operands = (
            base.forward_weights(key.layer)
            if key.orientation == ROWWISE
            else base.backward_weights(key.layer)
        )
    differences = []
    for name in ("qkv", "o", "gate_up", "down"):
        expected, got = expected_operand(shape, key.layer, name, base.dtype), operands[name]
        same = got.inverse_scale.shape == (1,) and torch.equal(
            got.inverse_scale.cpu(), expected.inverse_scale
        )
        if key.orientation == ROWWISE:
            same &= (
                got.columnwise is None
                and got.rowwise.is_contiguous()
                and got.rowwise.dtype == base.dtype
            )
            same &= torch.equal(
                got.rowwise.cpu().view(torch.uint8), expected.rowwise.view(torch.uint8)
            )
        else:
            same &= (
                got.rowwise.numel() == 0
                and got.columnwise.is_contiguous()
                and got.columnwise.dtype == base.dtype
            )
            same &= torch.equal(
                got.columnwise.cpu().view(torch.uint8), expected.columnwise.view(torch.uint8)
            )
        if not same:
            differences.append(f"{key} {name}")
    return differences


def order_of_passes(num_layers):
    """Two micro-batches, two evaluations, a micro-batch; then layers in random order.

    A bool starts a pass, of training or not.
    """
    steps = []
    for training in (True, True, False, False, True):
        steps += [training, *pass_order(num_layers, training, COLUMNWISE)]
    layers = random.Random(0).choices(range(num_layers), k=12)
    return [*steps, *(LayerKey(number % 2, layer) for number, layer in enumerate(layers))]


def ask_all(base, shape):
    """All weights of some passes, compared when they are requested. Returns those that differ."""
    differences = []
    for step in order_of_passes(shape.num_layers):
        if isinstance(step, bool):
            base.start_pass(step)
            continue
        operands = (
            base.forward_weights(step.layer)
            if step.orientation == ROWWISE
            else base.backward_weights(step.layer)
        )
        differences += wrong(base, shape, step, operands)
        base.release(step.layer)
    return differences


# ---- one rank


@pytest.mark.parametrize("storage", FROZEN_BASE_STORAGE)
@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=["even", "odd"])
def test_operands_equal_the_whole_matrices_quantized(processes, storage, shape):
    base = fill(FrozenBase(shape, processes, storage=storage), shape)
    assert ask_all(base, shape) == []
    orientations = 2 if storage == "replicated_both" else 1
    assert base.stored.nbytes == orientations * shape.num_layers * base.layer_bytes


@pytest.mark.parametrize("kept", [1, 4, 99])
def test_the_transposes_of_some_layers_are_stored_and_the_others_made(processes, kept):
    storage = "replicated"
    base = fill(FrozenBase(SHAPE, processes, storage=storage, transposed_layers=kept), SHAPE)
    assert ask_all(base, SHAPE) == []
    stored = min(kept, SHAPE.num_layers)
    assert base.stored.nbytes == (SHAPE.num_layers + stored) * base.layer_bytes
    assert (base.buffers is None) == (stored == SHAPE.num_layers)
    if base.buffers is not None:
        made = count_fetches(base, SHAPE.num_layers)["count"]
        assert all(made[step] <= SHAPE.num_layers - stored for step in (0, 1, 3)), made


def test_a_base_in_fnuz_fp8_is_scaled_to_the_largest_fnuz_number(processes):
    with mock.patch.object(
        fp8, "fp8_dtypes", lambda device: (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    ):
        base = fill(FrozenBase(SHAPE, processes), SHAPE)
    assert base.dtype == torch.float8_e4m3fnuz and ask_all(base, SHAPE) == []
    largest = base.forward_weights(1)["down"].rowwise.float().abs().max()
    assert largest == torch.finfo(torch.float8_e4m3fnuz).max, "scaled by the matrix's own amax"


def test_layer_layout_of_the_70b():
    found, size = layer_layout(LLAMA2_70B, 8, 1)
    assert [matrix[1:] for matrix in found.values()] == [
        (10240, 8192),
        (8192, 8192),
        (57344, 8192),
        (8192, 28672),
    ]
    assert size == 8192 * (10240 + 8192 + 3 * 28672) == 855_638_016


def test_matrices_do_not_overlap_and_begin_aligned():
    found, size = layer_layout(ODD, 3, 1)
    end = 0
    for place in found.values():
        assert place.offset >= end and place.offset % frozen.ALIGNMENT == 0
        end = place.offset + place.rows * place.columns
    assert size >= end and size % (3 * frozen.ALIGNMENT) == 0


def test_the_digest_covers_every_byte_and_scale(processes):
    base = fill(FrozenBase(SHAPE, processes, storage="replicated_both"), SHAPE)
    model = fused_llama(SHAPE, 16).requires_grad_(False)
    before = base_fingerprints(model, base)
    assert sum(t.nbytes for t in base.tensors()) == base.stored.nbytes + base.inverse_scales.nbytes
    for tensor in (
        base.stored.view(-1)[-1:],
        base.stored.view(-1)[:1],
        base.inverse_scales[-1, -1:].view(torch.uint8).view(-1)[:1],
    ):
        tensor ^= 1
        assert base_fingerprints(model, base) != before
        tensor ^= 1
    assert base_fingerprints(model, base) == before


# ---- prefetching


def code(key):
    return 1 + 2 * key.layer + key.orientation


def buffers_with(streams):
    def fetch(key, out):
        out[: len(out) // 2] = code(key)
        out[len(out) // 2 :] = code(key)

    return PrefetchBuffers(
        [torch.zeros(4, dtype=torch.uint8) for _ in range(frozen.NUM_BUFFERS)], fetch, streams
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_buffer_is_read_before_its_fetch_or_overwritten_before_its_release(order, ahead):
    streams, seen = SimulatedStreams(), []
    buffers = buffers_with(streams)
    keys = [*pass_order(5, True, COLUMNWISE) * 2, *pass_order(5, False, COLUMNWISE)]
    keys += [LayerKey(COLUMNWISE, 3), LayerKey(ROWWISE, 1), LayerKey(COLUMNWISE, 3)]
    for at, key in enumerate(keys):
        memory = buffers.acquire(key, keys[at + 1 : at + 1 + ahead])
        for _ in range(3):  # a block is several kernels
            streams.compute(
                lambda memory=memory, key=key: seen.append((memory == code(key)).all().item())
            )
        buffers.release(key.layer)
    streams.execute(ORDERS[order])
    assert len(seen) == 3 * len(keys) and all(seen)


def test_a_buffer_in_use_is_not_overwritten():
    buffers = buffers_with(SideStream())
    keys = [LayerKey(ROWWISE, layer) for layer in range(frozen.NUM_BUFFERS)]
    kept = [buffers.acquire(key, [LayerKey(ROWWISE, key.layer + 1)]) for key in keys]
    assert [int(memory[0]) for memory in kept] == [code(key) for key in keys]
    with pytest.raises(RuntimeError, match="none was released"):
        buffers.acquire(LayerKey(ROWWISE, 7), [])
    buffers.release(1)
    assert buffers.acquire(LayerKey(ROWWISE, 7), []) is kept[1], "the released one, and no other"


def count_fetches(base, num_layers):
    """Count requests before their layer was fetched, and the fetches of each pass.

    The passes are training twice, evaluation, training.
    """
    fetched, fetch, late, count = [], base.buffers.fetch, 0, []

    def counted(key, out):
        fetched.append(key)
        fetch(key, out)

    base.buffers.fetch = counted
    for training in (True, True, False, True):
        base.start_pass(training)
        before = len(fetched)
        for key in pass_order(num_layers, training, COLUMNWISE):
            late += base.buffers.find(key) is None and not base.is_stored(key)
            (base.forward_weights, base.backward_weights)[key.orientation](key.layer)
            base.release(key.layer)
        count.append(len(fetched) - before)
    return {"late": late, "count": count}


def test_transposes_are_made_ahead_and_once(processes):
    found = count_fetches(fill(FrozenBase(SHAPE, processes), SHAPE), 5)
    assert found["late"] == 0 and found["count"][0] == 5 and found["count"][2] == 0
    assert all(4 <= found["count"][again] <= 5 for again in (1, 3)), (
        "one may still be there from the pass before"
    )


# ---- two ranks


def on_two_ranks(processes, folder):
    found = {}
    for storage in FROZEN_BASE_STORAGE:
        base = fill(FrozenBase(SHAPE, processes, storage=storage), SHAPE)
        found[storage] = {"wrong": ask_all(base, SHAPE), "bytes": base.stored.nbytes}
    odd = fill(FrozenBase(ODD, processes), ODD)
    found["odd"] = {"wrong": ask_all(odd, ODD), "bytes": odd.stored.nbytes}
    found["unquantized"] = {dtype: unquantized(processes, dtype) for dtype in DTYPES}
    found["fetches"] = count_fetches(fill(FrozenBase(SHAPE, processes), SHAPE), 5)
    return found


DTYPES = (torch.bfloat16, torch.float32)


def unquantized(processes, dtype):
    """Return the weights of several passes that differ from the matrix, and the base's bytes."""
    base = fill(FrozenBase(SHAPE, processes, dtype=dtype), SHAPE)
    wrong = []
    for training in (True, False, True):
        base.start_pass(training)
        for request in (base.forward_weights, base.backward_weights)[: 1 + training]:
            layers = (
                range(SHAPE.num_layers)
                if request == base.forward_weights
                else reversed(range(SHAPE.num_layers))
            )
            for layer in layers:
                for name, weight in request(layer).items():
                    same = weight.inverse_scale is None and weight.rowwise.dtype == dtype
                    same = same and torch.equal(
                        weight.rowwise, matrix(SHAPE, layer, name).to(dtype)
                    )
                    wrong += [] if same else [f"{layer} {name}"]
                base.release(layer)
    return {"wrong": wrong, "bytes": base.stored.nbytes}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return call_on_ranks(2, "test_frozen:on_two_ranks", tmp_path_factory.mktemp("frozen"))


@pytest.mark.parametrize("case", [*FROZEN_BASE_STORAGE, "odd"])
def test_two_ranks_get_the_same_operands_and_keep_their_half(pair, case):
    shape = ODD if case == "odd" else SHAPE
    copies = {"replicated": 1, "replicated_both": 2}.get(case, 1)  # two layouts of one half each
    for rank in pair:
        assert rank[case]["wrong"] == []
        assert (
            rank[case]["bytes"]
            == copies
            * shape.num_layers
            * layer_layout(shape, 2 if copies == 1 and case != "replicated" else 1, 1)[1]
        )


def on_four_ranks(processes, folder):
    base = fill(FrozenBase(SHAPE, processes), SHAPE)
    return {
        "wrong": ask_all(base, SHAPE),
        "bytes": base.stored.nbytes,
        "shards": base.num_shards,
        "share": base.shard_rows("qkv"),
    }


def test_two_nodes_share_within_a_node(tmp_path):
    found = call_on_ranks(4, "test_frozen:on_four_ranks", tmp_path, ranks_per_node=2)
    size = SHAPE.num_layers * layer_layout(SHAPE, 2, 1)[1]
    assert found == [
        {"wrong": [], "bytes": size, "shards": 2, "share": (32 * (rank % 2), 32, 32)}
        for rank in range(4)
    ]


def test_gathers_are_ahead_and_none_is_made_twice(pair):
    """Only the first layer of the first pass is late.

    Each pass fetches two layers of the next one.
    """
    for rank in pair:
        assert rank["fetches"] == {"late": 1, "count": [12, 10, 5, 10]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_unquantized_base_stores_the_matrices_themselves_once(processes, pair, dtype):
    alone, size = unquantized(processes, dtype), dtype.itemsize
    assert alone["wrong"] == pair[0]["unquantized"][dtype]["wrong"] == []
    assert alone["bytes"] == SHAPE.num_layers * layer_layout(SHAPE, 1, size)[1]
    assert (
        pair[0]["unquantized"][dtype]["bytes"]
        == SHAPE.num_layers * layer_layout(SHAPE, 2, size)[1] // 2
    )


@pytest.mark.parametrize("storage", FROZEN_BASE_STORAGE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_what_the_plan_counts(processes, pair, storage, ranks):
    work = Workload(SHAPE, 16, 4, 8, 8, lora_rank=4)
    config = lora_config(linear="fp8", gpus_per_node=ranks, frozen_base=storage)
    held = (
        pair[0][storage]["bytes"]
        if ranks == 2
        else FrozenBase(SHAPE, processes, storage=storage).stored.nbytes
    )
    rest = 2 * ((2 * SHAPE.num_layers + 1) * 32 + 2 * 61 * 32)
    assert state_bytes(config, work)["weights"] == held + rest + 4 * SHAPE.lora_parameters(4)
    prefetch = FrozenBase(SHAPE, processes, storage=storage).buffers
    size = sum(buffer.memory.nbytes for buffer in prefetch.buffers) if prefetch else 0
    assert memory_peak(config, work).parts.get("gathered weights", 0) == size


def test_planned_memory_of_the_70b_on_4_gpus():
    """Each of 4 GPUs holds 2 x 68.45 / 4 GB in FP8, 1.05 in bf16, and 0.18 of adapters.

    The prefetch buffers take 2.57 GB.
    """
    config = lora_config(linear="fp8", micro_batch_size=1, gpus_per_node=4)
    work = Workload(LLAMA2_70B, 8192, 173, 384, 384, lora_rank=16)
    assert state_bytes(config, work)["weights"] / 1e9 == pytest.approx(
        34.23 + 1.05 + 0.18, abs=0.01
    )
    assert memory_peak(config, work).parts["gathered weights"] / 1e9 == pytest.approx(
        2.57, abs=0.01
    )


# ---- GPUs


def on_two_gpus(processes, folder):
    """Return what differs from the whole matrices in all passes of `ask_all`.

    Products are also enqueued without waiting, as a block does.
    """
    shape = replace(SHAPE, hidden_size=1024, ffn_hidden_size=2816, num_heads=8)
    differences = []
    for storage in ("sharded", "replicated"):
        base = fill(FrozenBase(shape, processes, kernels="triton", storage=storage), shape)
        differences += ask_all(base, shape) + under_load(base, shape)
    return differences


def under_load(base, shape):
    """Copy the operands on the compute stream behind slow work, in three passes without a wait."""
    busy, copies = torch.randn(4096, 4096, device=base.device), []
    for training in (True, False, True):
        base.start_pass(training)
        for key in pass_order(shape.num_layers, training, COLUMNWISE):
            operands = (base.forward_weights, base.backward_weights)[key.orientation](key.layer)
            for _ in range(5):
                busy = torch.tanh(busy @ busy)
            copies.append(
                (
                    key,
                    {
                        name: fp8.QuantizedTensor(
                            o.rowwise.clone(),
                            None if o.columnwise is None else o.columnwise.clone(),
                            o.inverse_scale,
                        )
                        for name, o in operands.items()
                    },
                )
            )
            base.release(key.layer)
    return [
        difference for key, operands in copies for difference in wrong(base, shape, key, operands)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_two_gpus_the_weights_are_those_of_the_whole_matrices(tmp_path):
    assert call_on_ranks(2, "test_frozen:on_two_gpus", tmp_path, timeout_s=300, device="cuda") == [
        [],
        [],
    ]
