"""The frozen base: operands equal to the bit whatever holds and moves them, slots never overwritten early, loaded alike on any ranks."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from compiling import TARGETS, check_compiles, run_in_interpreter
from lora_ranks import RULES, TABLE
from playing import HURRIES, TwoStreams
from tiny import TINY_PROGRAM, call_on_ranks, free_port, rank_environment

from common.config import from_table
from common.errors import ConfigError, WeightsError
from common.kernels import fp8, transpose
from common.kernels.fp8 import Quantizer, quantize_reference
from common.model import weights
from common.model.llama import Llama, copy_into, init_weights, parameter_seed
from common.model.lora import adapter_parameters, init_adapters
from common.model.shapes import LLAMA2_70B, ModelShape
from common.model.weights import load_base, save_base
from common.sharding import frozen_base as frozen
from common.sharding.activation_offload import HostStack
from common.sharding.frozen_base import BACKWARD, FORWARD, FrozenBase, Key, Ring, places, schedule
from common.sharding.side_stream import InOrder
from common.training.loop import evaluate, pad_for_ranks, train_step
from common.training.session import batching_of
from llama2_70b_lora import train
from llama2_70b_lora.rules import Config
from plan import estimate as plan

SHAPE = ModelShape(5, 32, 48, 4, 2, 61, 10000.0)
ODD = ModelShape(2, 18, 7, 3, 1, 5, 10000.0)  # nothing is a multiple of anything: 30 rows of qkv, 14 of gate and up


def matrix(shape, layer, name):
    """A whole matrix in bf16, the same everywhere; each with an amax of its own."""
    place = places(shape, 1)[0][name]
    generator = torch.Generator().manual_seed(parameter_seed(layer, name))
    return (torch.randn(place.rows, place.columns, generator=generator) * (layer + 1)).bfloat16()


def fill(base, shape):
    for layer in range(shape.num_layers):
        shares = {}
        for name in base.places:
            first, rows, columns = base.share(name)
            mine = matrix(shape, layer, name)[first : first + rows]
            shares[name] = torch.cat((mine, torch.full((rows - len(mine), columns), 1e4, dtype=torch.bfloat16))).to(base.device)
        base.hold(layer, shares)
    base.loaded()
    return base


def expected_operand(shape, layer, name, dtype):
    quantizer = Quantizer(weight=True)
    quantizer.dtype, quantizer.state = dtype, torch.zeros(4)
    return quantize_reference(matrix(shape, layer, name), quantizer)


def wrong(base, shape, key, operands=None):
    """What differs from quantising the whole matrix here and now."""
    if operands is None:
        operands = base.forward_operands(key.layer) if key.layout == FORWARD else base.backward_operands(key.layer)
    differences = []
    for name in ("qkv", "o", "gate_up", "down"):
        expected, got = expected_operand(shape, key.layer, name, base.dtype), operands[name]
        same = got.scale.shape == (1,) and torch.equal(got.scale.cpu(), expected.scale)
        if key.layout == FORWARD:
            same &= got.columnwise is None and got.rowwise.is_contiguous() and got.rowwise.dtype == base.dtype
            same &= torch.equal(got.rowwise.cpu().view(torch.uint8), expected.rowwise.view(torch.uint8))
        else:
            same &= got.rowwise.numel() == 0 and got.columnwise.is_contiguous() and got.columnwise.dtype == base.dtype
            same &= torch.equal(got.columnwise.cpu().view(torch.uint8), expected.columnwise.view(torch.uint8))
        if not same:
            differences.append(f"{key} {name}")
    return differences


def order_of_passes(num_layers):
    """Two micro-batches, two evaluations, a micro-batch; then layers out of turn. A bool: a pass begins, and whether it trains."""
    steps = []
    for training in (True, True, False, False, True):
        steps += [training, *schedule(num_layers, 0, training)]
    layers = random.Random(0).choices(range(num_layers), k=12)
    return [*steps, *(Key(number % 2, layer) for number, layer in enumerate(layers))]


def ask_all(base, shape):
    """Every operand of some passes, compared when it is given and again just before its release."""
    differences = []
    for step in order_of_passes(shape.num_layers):
        if isinstance(step, bool):
            base.begin(step)
            continue
        operands = base.forward_operands(step.layer) if step.layout == FORWARD else base.backward_operands(step.layer)
        differences += wrong(base, shape, step, operands)
        base.release(step.layer)
    return differences


# ---- one rank


@pytest.mark.parametrize("holding", frozen.HOLDINGS)
@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=["even", "odd"])
def test_operands_are_those_of_the_whole_matrices(processes, holding, shape):
    base = fill(FrozenBase(shape, processes, holding=holding), shape)
    assert ask_all(base, shape) == []
    layouts = 2 if holding == "replicated_both" else 1
    assert base.held.nbytes == layouts * shape.num_layers * base.layer_bytes


def test_formats_of_other_gpus(processes):
    with mock.patch.object(fp8, "fp8_dtypes", lambda device: (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)):
        base = fill(FrozenBase(SHAPE, processes), SHAPE)
    assert base.dtype == torch.float8_e4m3fnuz and ask_all(base, SHAPE) == []
    largest = base.forward_operands(1)["down"].rowwise.float().abs().max()
    assert largest == torch.finfo(torch.float8_e4m3fnuz).max, "scaled by the matrix's own amax"


def test_the_bytes_of_the_70b():
    found, size = places(LLAMA2_70B, 8)
    assert [place[1:] for place in found.values()] == [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)]
    assert size == 8192 * (10240 + 8192 + 3 * 28672) == 855_638_016


def test_matrices_do_not_overlap_and_begin_aligned():
    found, size = places(ODD, 3)
    end = 0
    for place in found.values():
        assert place.offset >= end and place.offset % frozen.ALIGNMENT == 0
        end = place.offset + place.rows * place.columns
    assert size >= end and size % (3 * frozen.ALIGNMENT) == 0


def test_the_digest_covers_every_byte_and_scale(processes):
    base = fill(FrozenBase(SHAPE, processes, holding="replicated_both"), SHAPE)
    model = Llama(SHAPE, 16).requires_grad_(False)
    before = train.base_fingerprints(model, base)
    assert sum(t.nbytes for t in base.tensors()) == base.held.nbytes + base.scales.nbytes
    for tensor in (base.held.view(-1)[-1:], base.held.view(-1)[:1], base.scales[-1, -1:].view(torch.uint8).view(-1)[:1]):
        tensor ^= 1
        assert train.base_fingerprints(model, base) != before
        tensor ^= 1
    assert train.base_fingerprints(model, base) == before


# ---- the ring


def code(key):
    return 1 + 2 * key.layer + key.layout


def ring_with(streams, fetched):
    def fetch(key, out):
        fetched.append(key)
        out[: len(out) // 2] = code(key)
        out[len(out) // 2 :] = code(key)

    return Ring([torch.zeros(4, dtype=torch.uint8) for _ in range(frozen.SLOTS)], fetch, streams)


@pytest.mark.parametrize("hurry", HURRIES)
@pytest.mark.parametrize("recompute_layers", [0, 2, 5])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_slot_is_read_before_its_gather_or_overwritten_before_its_release(hurry, recompute_layers, ahead):
    streams, seen = TwoStreams(), []
    ring = ring_with(streams, [])
    order = [*schedule(5, recompute_layers, True) * 2, *schedule(5, 0, False), Key(BACKWARD, 3), Key(FORWARD, 1), Key(BACKWARD, 3)]
    for at, key in enumerate(order):
        memory = ring.take(key, order[at + 1 : at + 1 + ahead])
        for _ in range(3):  # a block is several kernels
            streams.compute(lambda memory=memory, key=key: seen.append((memory == code(key)).all().item()))
        ring.release(key.layer)
    streams.play(HURRIES[hurry])
    assert len(seen) == 3 * len(order) and all(seen)


def test_a_block_that_keeps_its_layer_is_not_robbed():
    ring = ring_with(InOrder(), [])
    kept = [ring.take(Key(FORWARD, layer), [Key(FORWARD, layer + 1)]) for layer in range(frozen.SLOTS)]
    assert [int(memory[0]) for memory in kept] == [code(Key(FORWARD, layer)) for layer in range(frozen.SLOTS)]
    with pytest.raises(RuntimeError, match="none was released"):
        ring.take(Key(FORWARD, 7), [])
    ring.release(1)
    assert ring.take(Key(FORWARD, 7), []) is kept[1], "the released one, and no other"


class Watched:
    """A fetch that notes what it fetched."""

    def __init__(self, base):
        self.inner, self.keys = base.ring.fetch, []
        base.ring.fetch = self

    def __call__(self, key, out):
        self.keys.append(key)
        self.inner(key, out)


def fetches(base, num_layers, recompute_layers):
    """How often a step came before its layer had been sent for, and how many layers were fetched: training twice, evaluation, training."""
    watched, late, count = Watched(base), 0, []
    for training in (True, True, False, True):
        base.begin(training)
        before = len(watched.keys)
        for key in schedule(num_layers, recompute_layers if training else 0, training):
            late += base.ring._find(key) is None and not base._is_here(key)
            (base.forward_operands, base.backward_operands)[key.layout](key.layer)
            base.release(key.layer)
        count.append(len(watched.keys) - before)
    return {"late": late, "count": count}


@pytest.mark.parametrize("recompute_layers", [0, 2, 5])
def test_transposes_are_made_ahead_and_once(processes, recompute_layers):
    base = fill(FrozenBase(SHAPE, processes, recompute_layers=recompute_layers), SHAPE)
    found = fetches(base, 5, recompute_layers)
    assert found["late"] == 0 and found["count"][0] == 5 and found["count"][2] == 0
    assert all(4 <= found["count"][again] <= 5 for again in (1, 3)), "one may still be there from the pass before"


# ---- two ranks


def on_two_ranks(processes, folder):
    found = {}
    for holding in frozen.HOLDINGS:
        base = fill(FrozenBase(SHAPE, processes, holding=holding), SHAPE)
        found[holding] = {"wrong": ask_all(base, SHAPE), "bytes": base.held.nbytes}
    odd = fill(FrozenBase(ODD, processes), ODD)
    found["odd"] = {"wrong": ask_all(odd, ODD), "bytes": odd.held.nbytes}
    found["bf16"] = in_bf16(processes)
    found["fetches"] = {}
    for recompute_layers in (0, 2, 5):
        base = fill(FrozenBase(SHAPE, processes, recompute_layers=recompute_layers), SHAPE)
        found["fetches"][recompute_layers] = fetches(base, 5, recompute_layers)
    found["loaded"] = {layout: load(processes, folder, layout) for layout in ("fused", "ordinary")}
    found["steps"] = {name: few_steps(processes, **changes) for name, changes in RUNS.items()}
    return found


RUNS = {
    "sharded": {},
    "recompute": {"recompute_layers": 1},
    "replicated": {"frozen_base": "replicated"},
    "bf16": {"fp8": ""},
    "bf16, recompute": {"fp8": "", "recompute_layers": 1},
    "bf16, replicated": {"fp8": "", "frozen_base": "replicated"},
    "bf16, SwiGLU's input in 8 bits": {"fp8": "", "fp8_swiglu_input": True},
}
MODEL = RULES.shape


def in_bf16(processes):
    """Operands that are not the matrix itself, of several passes out of a base in bf16; and its bytes."""
    base = fill(FrozenBase(SHAPE, processes, in_fp8=False), SHAPE)
    wrong = []
    for training in (True, False, True):
        base.begin(training)
        for ask in (base.forward_operands, base.backward_operands)[: 1 + training]:
            layers = range(SHAPE.num_layers) if ask == base.forward_operands else reversed(range(SHAPE.num_layers))
            for layer in layers:
                for name, operand in ask(layer).items():
                    whole = operand.scale is None and torch.equal(operand.rowwise, matrix(SHAPE, layer, name))
                    wrong += [] if whole else [f"{layer} {name}"]
                base.release(layer)
    return {"wrong": wrong, "bytes": base.held.nbytes}


def load(processes, folder, layout):
    """The operands of a checkpoint, as bytes, and what this rank read of the blocks' matrices: (file, offset, size)."""
    config = lora_config(processes)
    base = train.frozen_base(config, RULES, processes)
    model = train.build(config, RULES, processes, base)
    ranges, preadv = [], os.preadv

    def counted(file, buffers, offset):
        got = preadv(file, buffers, offset)
        ranges.append((Path(f"/proc/self/fd/{file}").resolve().name, offset, got))
        return got

    with mock.patch.object(weights.os, "preadv", counted):
        report = load_base(model, folder / layout, folder / f"{layout}.json" if (folder / f"{layout}.json").exists() else None, base)
    operands = {}
    for layer in range(MODEL.num_layers):
        for name, operand in base.forward_operands(layer).items():
            operands[f"{layer} {name} rows"] = operand.rowwise.view(torch.uint8).clone()
            operands[f"{layer} {name} scale"] = operand.scale.clone()
        base.release(layer)
        for name, operand in base.backward_operands(layer).items():
            operands[f"{layer} {name} columns"] = operand.columnwise.view(torch.uint8).clone()
        base.release(layer)
    rest = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if ".lora_" not in name}
    return {"operands": operands, "rest": rest, "ranges": ranges, "bytes": report.bytes}


def lora_config(processes, **changes):
    fp8_keys = {"precision": "bf16", "fp8": "torch", "fused_blocks": True, "fp8_recipe": "current", "reshard_after_forward": False}
    return from_table(
        {**TABLE, **fp8_keys, "gpus_per_node": processes.world_size, "micro_batch_size": 2, "eval_micro_batch_size": 2, **changes},
        Config,
        "test",
    )


def few_steps(processes, rules=RULES, **changes):
    """Losses and gradient norms of some steps, an evaluation with padding, and whether the base is what it was."""
    torch.manual_seed(0)
    config = lora_config(processes, **changes)
    base = train.frozen_base(config, rules, processes)
    model = train.build(config, rules, processes, base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter_seed(5, name)))
            copy_into(parameter, 0.1 * full if parameter.ndim == 2 else torch.ones(parameter.shape))
    with mock.patch(f"{__name__}.matrix", lambda *which, matrix=matrix: 0.1 * matrix(*which)):
        fill(base, rules.shape)
    init_adapters(model, seed=3)
    optimizer = train.adapter_optimizer(model, config, rules, processes)
    before = train.base_fingerprints(model, base)
    sequences = torch.randint(61, (8, 2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32).repeat(3, 1, 1)
    sequences[:, 1, 11:] = -100
    share = 8 // processes.world_size
    mine = [part for batch in sequences.split(8) for part in batch.split(share)[processes.rank].split(2)]
    batches, losses, norms = iter(mine), [], []
    for _ in range(3):
        loss, norm = train_step(model, optimizer, batches, batching_of(config), 1e-2, processes.world_size, lambda phase: None)
        losses.append(float(processes.sum(loss)))
        norms.append(float(norm))
    evaluation = evaluate(model, pad_for_ranks(sequences[:5].numpy(), processes, 2), processes, lambda phase: None)
    foresees = base.expected == schedule(rules.shape.num_layers, 0, False)  # so the model has told it that nothing trains
    unchanged = train.base_fingerprints(model, base) == before
    adapters = {name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()}
    names = [name for name, _ in model.named_parameters()]
    found = {"losses": losses, "norms": norms, "evaluation": evaluation, "foresees": foresees, "unchanged": unchanged}
    return found | {"adapters": adapters, "names": names}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("frozen"), Llama(MODEL, 16)
    init_weights(model, 5, 0.5)
    for layout in ("fused", "ordinary"):
        save_base(model, folder / layout, shards=3, layout=layout)
    return folder


@pytest.fixture(scope="module")
def pair(checkpoints):
    return call_on_ranks(2, "test_frozen:on_two_ranks", checkpoints)


@pytest.mark.parametrize("case", [*frozen.HOLDINGS, "odd"])
def test_two_ranks_get_the_same_operands_and_keep_their_half(pair, case):
    shape = ODD if case == "odd" else SHAPE
    copies = {"replicated": 1, "replicated_both": 2}.get(case, 1)  # two layouts of one half each
    for rank in pair:
        assert rank[case]["wrong"] == []
        assert rank[case]["bytes"] == copies * shape.num_layers * places(shape, 2 if copies == 1 and case != "replicated" else 1)[1]


def on_four_ranks(processes, folder):
    base = fill(FrozenBase(SHAPE, processes), SHAPE)
    return {"wrong": ask_all(base, SHAPE), "bytes": base.held.nbytes, "shards": base.shards, "share": base.share("qkv")}


def test_two_nodes_share_within_a_node(tmp_path):
    command, port = (
        [sys.executable, str(TINY_PROGRAM), "call", "test_frozen:on_four_ranks", str(tmp_path), "cpu"],
        free_port(),
    )
    environments = [rank_environment(rank, 4, port) | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)} for rank in range(4)]
    started = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for environment in environments]
    for process in started:
        assert process.wait(120) == 0, process.stderr.read()[-3000:]
    found = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(4)]
    size = SHAPE.num_layers * places(SHAPE, 2)[1]
    assert found == [{"wrong": [], "bytes": size, "shards": 2, "share": (32 * (rank % 2), 32, 32)} for rank in range(4)]


@pytest.mark.parametrize("recompute_layers", [0, 2, 5])
def test_gathers_are_ahead_and_none_is_made_twice(pair, recompute_layers):
    """Of the first pass the first layer alone is late; each pass has sent for two layers of the next one."""
    again = max(0, recompute_layers - 1)  # a recomputed layer is gathered forward once more, but for those that are still there
    for rank in pair:
        found = rank["fetches"][recompute_layers]
        assert found["late"] == 1
        training = [found["count"][pass_] for pass_ in (1, 3)]
        assert found["count"][2] == 5, "an evaluation gathers each layer once"
        assert all(10 <= count <= 10 + again + 1 for count in training)
        if not recompute_layers:
            assert found["count"] == [12, 10, 5, 10]


def whole_expected(folder, layout):
    model = Llama(MODEL, 16).bfloat16()
    load_base(model, folder / layout)
    expected = {}
    for layer, block in enumerate(model.blocks):
        for name in ("qkv", "o", "gate_up", "down"):
            quantizer = Quantizer(weight=True)
            quantizer.dtype, quantizer.state = torch.float8_e4m3fn, torch.zeros(4)
            operand = quantize_reference(getattr(block, name).weight.detach(), quantizer)
            expected[f"{layer} {name} rows"] = operand.rowwise.view(torch.uint8)
            expected[f"{layer} {name} columns"] = operand.columnwise.view(torch.uint8)
            expected[f"{layer} {name} scale"] = operand.scale
    matrices = [f".{name}.weight" for name in ("qkv", "o", "gate_up", "down")]
    rest = {n: p.detach() for n, p in model.named_parameters() if not (n.startswith("blocks") and n.endswith(tuple(matrices)))}
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
    assert sum(found["bytes"] for found in both) == 4 * (MODEL.num_parameters + rest), "fp32; the small rest is read by both"
    once, twice = ({tuple(r) for r in found["ranges"]} for found in both)
    assert sum(size for _, _, size in once & twice) == 4 * rest


@pytest.mark.parametrize("name", RUNS)
def test_training_on_two_ranks_follows_one(processes, pair, name):
    alone = few_steps(processes, **RUNS[name])
    first, second = (rank["steps"][name] for rank in pair)
    for found in (alone, first, second):
        assert found["unchanged"] and found["foresees"] and found["losses"][-1] < found["losses"][0]
        assert not any(".weight" in name and "blocks" in name and "norm" not in name for name in found["names"])
        # The micro-batches are the same, so are their scales: what differs is the order of the sums of the gradients.
        assert found["losses"] == pytest.approx(alone["losses"], rel=2e-3) and found["norms"] == pytest.approx(alone["norms"], rel=2e-2)
        assert found["evaluation"] == pytest.approx(alone["evaluation"], rel=2e-3)
    assert_same(first["adapters"], second["adapters"])


def test_holding_and_recompute_change_no_bit(pair):
    runs = pair[0]["steps"]
    for name, same in (("recompute", "sharded"), ("replicated", "sharded"), ("bf16, recompute", "bf16"), ("bf16, replicated", "bf16")):
        assert runs[name]["losses"] == runs[same]["losses"] and runs[name]["evaluation"] == runs[same]["evaluation"]


@pytest.mark.parametrize("changes", [{"fp8_recipe": "delayed"}, {"fp8": ""}], ids=str)
@pytest.mark.parametrize("recompute_layers", [0, 2])
def test_what_waits_in_the_host_changes_no_bit(processes, changes, recompute_layers):
    five = replace(RULES, shape=replace(RULES.shape, num_layers=5), lora_dropout=0.1)
    changes = changes | {"recompute_layers": recompute_layers, "fp8_swiglu_input": True}
    here = few_steps(processes, five, **changes)
    with mock.patch.object(HostStack, "push", autospec=True, side_effect=HostStack.push) as push:
        there = few_steps(processes, five, **changes, offload_layers=3)
    # 3 steps of 4 micro-batches; of five layers neither those that are recomputed nor the last one.
    assert push.call_count == 12 * min(3, 4 - recompute_layers)
    assert there["losses"] == here["losses"] and there["evaluation"] == here["evaluation"]
    assert_same(there["adapters"], here["adapters"])


def test_a_base_in_bf16_has_one_layout_and_the_matrices_themselves(processes, pair):
    alone = in_bf16(processes)
    assert alone["wrong"] == pair[0]["bf16"]["wrong"] == []
    assert alone["bytes"] == SHAPE.num_layers * places(SHAPE, 1, 2)[1]
    assert pair[0]["bf16"]["bytes"] == SHAPE.num_layers * places(SHAPE, 2, 2)[1] // 2


def test_fp8_follows_bf16(pair):
    runs = pair[0]["steps"]
    assert runs["sharded"]["losses"] != runs["bf16"]["losses"]
    assert runs["sharded"]["losses"] == pytest.approx(runs["bf16"]["losses"], rel=0.02)
    assert runs["bf16, SwiGLU's input in 8 bits"]["losses"] == pytest.approx(runs["bf16"]["losses"], rel=0.01)


# ---- refused


def test_what_is_wrong_with_a_checkpoint_is_said_before_a_layer_is_held(processes, checkpoints, tmp_path):
    config = lora_config(processes)
    base = train.frozen_base(config, RULES, processes)
    model = train.build(config, RULES, processes, base)
    index = json.loads((checkpoints / "fused" / weights.INDEX).read_text())
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    with mock.patch.object(base, "hold", side_effect=AssertionError), pytest.raises(WeightsError, match="3 of 3 shards are missing"):
        load_base(model, tmp_path, None, base)
    half = torch.float64
    source = Llama(MODEL, 16)
    init_weights(source, 5, 0.5)
    save_base(source, tmp_path / "double", dtype=half)
    with mock.patch.object(base, "hold", side_effect=AssertionError), pytest.raises(WeightsError, match="expected a dtype of BF16"):
        load_base(model, tmp_path / "double", None, base)


REFUSED = [
    {"transport": "multicast"},
    {"frozen_base": "none"},
    {"transport": "copy_engine", "gpus_per_node": 1},
    {"transport": "copy_engine", "frozen_base": "replicated"},
    {"offload_layers": 1},
    {"offload_layers": 1, "fp8_swiglu_input": True, "fp8": "", "fused_blocks": False},
    {"transport": "copy_engine", "fp8": "", "fused_blocks": False},
    {"frozen_base": "replicated", "fp8": "", "fused_blocks": False},
]


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_ways_that_are_none_are_refused(processes, changes):
    assert lora_config(processes, gpus_per_node=2, transport="copy_engine").transport == "copy_engine"
    key = next(iter(changes))
    with pytest.raises(ConfigError, match=f"{key} = .* cannot be used"):
        lora_config(processes, **{"gpus_per_node": 2, **changes})


def test_copy_engines_that_cannot_reach_the_peers_are_refused_with_a_way_out(processes):
    import torch.distributed._symmetric_memory as symmetric

    group = frozen.node_group(processes, 60.0)
    with (
        mock.patch.object(symmetric, "rendezvous", side_effect=RuntimeError("no peer access\nmore")),
        pytest.raises(ConfigError) as refused,
    ):
        frozen.CopyEngineFetch(torch.empty(1, 1, 1, dtype=torch.uint8), group)
    assert "no peer access" in refused.value.why and "more" not in refused.value.why and "nccl" in refused.value.do


def test_copy_engines_begin_with_the_neighbour_and_bring_every_share():
    import torch.distributed._symmetric_memory as symmetric

    held = torch.randint(256, (3, 2, 4, 8), dtype=torch.uint8)  # [rank, layout, layer, bytes]
    asked = []

    def get_buffer(peer, shape, dtype):
        assert tuple(shape) == (2, 4, 8) and dtype == torch.uint8
        asked.append(peer)
        return held[peer]

    group = mock.Mock(size=lambda: 3, rank=lambda: 1)
    with mock.patch.object(symmetric, "rendezvous", lambda tensor, group: mock.Mock(get_buffer=get_buffer)):
        fetch = frozen.CopyEngineFetch(held[1], group)
    out = torch.zeros(24, dtype=torch.uint8)
    fetch(Key(BACKWARD, 3), out)
    assert asked == [2, 0, 1] == list(fetch.peers) and torch.equal(out, held[:, BACKWARD, 3].flatten())


def test_a_cpu_has_no_copy_engines():
    with pytest.raises(ConfigError, match="copy_engine"):
        frozen.symmetric_empty((1,), torch.device("cpu"))


def test_symmetric_memory_never_asks_for_multicast(monkeypatch):
    import torch.distributed._symmetric_memory as symmetric

    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    with mock.patch.object(symmetric, "empty", lambda *shape, **_: os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]):
        assert frozen.symmetric_empty((1,), torch.device("cpu")) == "1"


# ---- bench, plan


@pytest.mark.parametrize("holding", frozen.HOLDINGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_are_as_planned(processes, pair, holding, ranks):
    work = plan.Workload(SHAPE, 16, 4, 8, 8, lora_rank=4)
    table = {**TABLE, "precision": "bf16", "fp8": "torch", "fused_blocks": True, "micro_batch_size": 2}
    config = from_table(table | {"gpus_per_node": ranks, "frozen_base": holding}, Config, "test")
    held = pair[0][holding]["bytes"] if ranks == 2 else FrozenBase(SHAPE, processes, holding=holding).held.nbytes
    rest = 2 * ((2 * SHAPE.num_layers + 1) * 32 + 2 * 61 * 32)
    assert plan.state_bytes(config, work)["weights"] == held + rest + 4 * SHAPE.lora_parameters(4)
    ring = FrozenBase(SHAPE, processes, holding=holding).ring
    slots = sum(slot.memory.nbytes for slot in ring.slots) if ring else 0
    assert plan.memory_peak(config, work).parts.get("gathered weights", 0) == slots


def test_the_plan_of_the_70b():
    """Gigabytes on each of 4 GPUs: 2 x 68.45 / 4 in FP8, 1.05 in bf16, 0.18 of adapters; and 2.57 of the ring."""
    table = {**TABLE, "precision": "bf16", "fp8": "torch", "fused_blocks": True, "micro_batch_size": 1, "gpus_per_node": 4}
    config, work = from_table(table, Config, "test"), plan.Workload(LLAMA2_70B, 8192, 173, 384, 384, lora_rank=16)
    assert plan.state_bytes(config, work)["weights"] / 1e9 == pytest.approx(34.23 + 1.05 + 0.18, abs=0.01)
    assert plan.memory_peak(config, work).parts["gathered weights"] / 1e9 == pytest.approx(2.57, abs=0.01)


def test_random_weights_are_as_wide_as_asked(processes):
    base = FrozenBase(SHAPE, processes)
    train.hold_random_weights(base)
    operand = base.forward_operands(2)["gate_up"]
    assert float((operand.rowwise.float() * operand.scale).std()) == pytest.approx(0.02, rel=0.1)


# ---- the transpose

INTERPRETED = """
import torch
from common.kernels.transpose import transpose_triton
for shape in ((128, 256), (5, 300), (257, 1), (200, 129), (132, 4), (300, 208)):
    x = torch.randint(256, shape, dtype=torch.uint8)
    out = torch.zeros(shape[::-1], dtype=torch.uint8)
    transpose_triton(x, out)
    assert torch.equal(out, x.t()), shape
print("agreed")
"""


def test_the_transpose_kernel_in_the_interpreter():
    run_in_interpreter(INTERPRETED)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
def test_the_transpose_kernel_compiles_for(target):
    signature = {"x_ptr": "*i32", "out_ptr": "*i32", "row_words": "i32", "column_words": "i32"}
    check_compiles(target, transpose._transpose_kernel, signature, {"BLOCK": transpose.BLOCK}, transpose.NUM_WARPS)


# ---- GPUs


def on_two_gpus(processes, folder):
    """Both gathers, every byte of every layer in both layouts, and all passes of `ask_all`: what differed."""
    shape = replace(SHAPE, hidden_size=1024, ffn_hidden_size=2816, num_heads=8)
    bases = [fill(FrozenBase(shape, processes, kernels="triton", transport=transport), shape) for transport in frozen.TRANSPORTS]
    differences = [difference for base in bases for difference in ask_all(base, shape)]
    torch.cuda.synchronize()  # what was fetched ahead is there
    out = [torch.zeros(bases[0].layer_bytes, dtype=torch.uint8, device=processes.device) for _ in bases]
    for key in schedule(shape.num_layers, 0, True):
        for base, memory in zip(bases, out, strict=True):
            base.ring.fetch(key, memory.zero_())
        if not torch.equal(*out):
            differences.append(f"{key}: the gathers differ")
    # Slots under load: products of what was given are enqueued without waiting, as a block does, and compared at the end.
    for base in bases:
        differences += under_load(base, shape)
    processes.barrier()  # a rank that left would take its memory along
    return differences


def under_load(base, shape):
    """Copies of the operands taken on the compute stream behind slow work, for three passes without the host ever waiting."""
    busy, copies = torch.randn(4096, 4096, device=base.device), []
    for training in (True, False, True):
        base.begin(training)
        for key in schedule(shape.num_layers, 0, training):
            operands = (base.forward_operands, base.backward_operands)[key.layout](key.layer)
            for _ in range(5):
                busy = torch.tanh(busy @ busy)
            copies.append(
                (
                    key,
                    {
                        name: fp8.QuantizedTensor(o.rowwise.clone(), None if o.columnwise is None else o.columnwise.clone(), o.scale)
                        for name, o in operands.items()
                    },
                )
            )
            base.release(key.layer)
    return [difference for key, operands in copies for difference in wrong(base, shape, key, operands)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_two_gpus_copy_engines_bring_what_nccl_brings(tmp_path):
    assert call_on_ranks(2, "test_frozen:on_two_gpus", tmp_path, timeout_s=300, device="cuda") == [[], []]
