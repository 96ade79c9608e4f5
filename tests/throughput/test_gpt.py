"""Compare the GPT with Hugging Face's, and test its sizes and the search for the largest batch."""

import argparse

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.errors import ConfigError, OutOfMemory
from common.measure import published
from throughput import gpt
from throughput.gpt_model import Gpt, build_gpt, train_step
from throughput.gpt_sizes import SIZES, STAND_INS, GptShape, Size
from throughput.result import Result

pytestmark = pytest.mark.quick

SHAPE = GptShape(2, 3, 24, 40, 61)
PUBLISHED = {row["model"]: row for row in published.tables()["gpt"].rows}


def test_it_computes_what_hugging_faces_gpt_2_computes():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = Gpt(SHAPE, 16)
    config = GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_inner=40,
        activation_function="gelu",
        resid_pdrop=0,
        embd_pdrop=0,
    )
    theirs = GPT2LMHeadModel(config).eval()
    names = {
        "norm_1": "ln_1",
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "norm_2": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    pairs = {
        "embedding.weight": "wte.weight",
        "positions.weight": "wpe.weight",
        "norm.weight": "ln_f.weight",
        "norm.bias": "ln_f.bias",
    }
    for layer in range(2):
        pairs |= {
            f"blocks.{layer}.{a}.{kind}": f"h.{layer}.{b}.{kind}"
            for a, b in names.items()
            for kind in ("weight", "bias")
        }
    mine, other = dict(ours.named_parameters()), dict(theirs.transformer.named_parameters())
    assert pairs.keys() == mine.keys() and set(pairs.values()) == other.keys()

    def like(tensor: torch.Tensor, name: str) -> torch.Tensor:
        # Its linear layers are [in, out].
        return tensor.t() if tensor.ndim == 2 and name.startswith("h.") else tensor

    with torch.no_grad():
        for a, b in pairs.items():
            torch.nn.init.normal_(mine[a], std=0.3)
            other[b].copy_(like(mine[a], b))
    tokens = torch.randint(61, (3, 17))
    loss = ours(tokens)
    logits = theirs(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for a, b in pairs.items():
        torch.testing.assert_close(mine[a].grad, like(other[b].grad, b), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_the_published_one(name):
    size, row = SIZES[name], PUBLISHED[name]
    with torch.device("meta"):
        counted = sum(
            parameter.numel() for parameter in Gpt(size.shape, size.sequence_length).parameters()
        )
    assert counted == size.shape.num_parameters(size.sequence_length)
    assert counted == pytest.approx(row["parameters_counted"], rel=0.01)
    said, unit = row["parameters"].split()
    assert counted == pytest.approx(float(said) * {"M": 1e6, "B": 1e9}[unit], rel=0.01)
    assert (size.batch, size.sequence_length) == (row["batch"], row["seq"])
    assert 6 * counted * row["tokens_per_s"] / 1e12 == pytest.approx(row["tflops"], rel=0.01)


def test_a_token_costs_six_flops_a_weight_and_attention():
    hidden, ffn, length = SHAPE.hidden_size, SHAPE.ffn_hidden_size, 16
    model = Gpt(SHAPE, length)
    weights = (
        sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
        + model.embedding.weight.numel()
    )
    assert weights == 2 * hidden * (4 * hidden + 2 * ffn) + 61 * hidden
    assert SHAPE.training_flops_per_token(length) == 6 * weights + 2 * (12 * length * hidden) // 2


def test_a_step_trains_in_bf16_throughout():
    state = {}
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: state.update(optimizer.state))
    model = build_gpt(SHAPE, 16, torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train_step(model, Size(SHAPE, 2, 16))()
    hook.remove()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    kept = [
        *model.parameters(),
        *(tensor for moments in state.values() for key, tensor in moments.items() if key != "step"),
    ]
    assert len(kept) == 3 * len(before) and {tensor.dtype for tensor in kept} == {torch.bfloat16}


# --- rows -----------------------------------------------------------------------------------------


def options(**changes) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "device": "cpu",
            "model": None,
            "sweep": False,
            "batch": None,
            "seq": None,
            "warmup": 1,
            "steps": 2,
        }
        | changes
    )


@pytest.fixture
def result(tmp_path):
    return Result("gpt", gpt.TABLES, tmp_path / "out", "cpu", {"peak_tflops_16_bits": 0.5}, {})


@pytest.fixture
def full_above_11(monkeypatch):
    """A GPU on which 11 sequences of any model fit; throughput is best at 8."""

    def timed_steps(size, device, warmup, steps):
        if size.batch > 11:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return [{8: 8.0}.get(size.batch, 3.0 + size.batch)] * steps, 10**9 * size.batch

    monkeypatch.setattr(gpt, "timed_steps", timed_steps)


def test_on_a_cpu_stand_ins_are_measured(result):
    gpt.measure(options(seq=8), result)
    assert [(row["model"], row["seq"], row["samples"]) for row in result.rows] == [
        (name, 8, 2) for name in STAND_INS
    ]
    row = result.rows[0]
    size = STAND_INS["tiny"]
    rate = 1e3 * size.batch * 8 / row["ms"]
    assert row["tokens_per_s"] == pytest.approx(rate)
    assert row["tflops"] == pytest.approx(6 * row["parameters"] * rate / 1e12)
    assert row["tflops_attention"] == pytest.approx(
        size.shape.training_flops_per_token(8) * rate / 1e12
    )
    assert row["percent"] == pytest.approx(100 * row["tflops_attention"] / 0.5)


def test_what_does_not_fit_is_a_row_and_the_rest_goes_on(result, full_above_11):
    gpt.measure(options(device="cuda", warmup=3, steps=10), result)
    assert {row["model"]: row.get("error", row.get("memory_gb")) for row in result.rows} == {
        **{
            "small": "out of memory",
            "medium": "out of memory",
            "large": 8.0,
            "xl": 4.0,
            "1.5b": 4.0,
            "3b": 2.0,
            "7b": 8.0,
            "13b": 4.0,
        }
    }


def test_a_sweep_doubles_until_the_memory_is_full_and_finds_the_largest(result, full_above_11):
    gpt.measure(options(device="cuda", model="7b", sweep=True), result)
    assert {row["table"] for row in result.rows} == {"sweep"}
    assert [(row["batch"], row.get("error", row.get("mark"))) for row in result.rows] == [
        *(
            (1, ""),
            (2, ""),
            (4, ""),
            (8, "most tokens/s"),
            (16, "out of memory"),
            (11, "largest that fits"),
        )
    ]


def test_batch_max_is_the_largest_that_fits(result, full_above_11):
    gpt.measure(options(device="cuda", model="small", batch="max"), result)
    (row,) = result.rows
    assert row["batch"] == 11 and "error" not in row


def test_a_sweep_on_a_cpu_ends_before_the_memory_does(result, monkeypatch):
    monkeypatch.setattr(gpt, "timed_steps", lambda size, *_: ([1.0], 0))
    gpt.measure(options(model="tiny", sweep=True), result)
    assert [row["batch"] for row in result.rows] == [1, 2, 4, 8, 16]


def test_a_doubled_batch_may_be_the_largest_and_is_measured_once(result, monkeypatch):
    def timed_steps(size, *_, **__):
        if size.batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return [1.0], 0

    monkeypatch.setattr(gpt, "timed_steps", timed_steps)
    gpt.measure(options(device="cuda", model="tiny", sweep=True), result)
    assert [row["batch"] for row in result.rows] == [1, 2, 4, 8]
    assert [row.get("mark") for row in result.rows[:2]] == ["", ""]
    assert "largest" in result.rows[2]["mark"] and "most tokens/s" in result.rows[2]["mark"]
    assert result.rows[3]["error"] == "out of memory"


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shape"), False),
    ],
)
def test_only_a_lack_of_memory_means_that_a_batch_does_not_fit(monkeypatch, error, memory):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(gpt, "timed_steps", fail)
    if memory:
        assert not gpt.fits(STAND_INS["tiny"], "cpu", 1)
    else:
        with pytest.raises(RuntimeError, match="shape"):
            gpt.fits(STAND_INS["tiny"], "cpu", 1)


def test_what_cannot_be_measured_is_refused(result):
    with pytest.raises(ConfigError):
        gpt.measure(options(batch=2, sweep=True), result)
    assert result.rows == []


def test_a_size_that_the_host_cannot_hold_is_refused(result, monkeypatch):
    monkeypatch.setattr("throughput.memory.available_memory", lambda root: 2**30)
    with pytest.raises(OutOfMemory, match="13b"):
        gpt.measure(options(model="13b"), result)
    assert not result.rows
