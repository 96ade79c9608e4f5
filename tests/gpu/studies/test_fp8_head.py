"""Test the study of the head in FP8: its formats, gradients, kernels, table and continuation."""

import json

import convergence
import fp8_head
import head_formats
import pytest
import torch
from block_formats import round_to
from fp8_head import HEADS, SHIPPED, gate, main, table
from head_formats import (
    GRADIENTS,
    NEAREST,
    STOCHASTIC,
    FormatHead,
    HeadFormat,
    Softmax,
    head_format,
    quantize,
    quantize_softmax,
    softmax_amaxes,
    softmax_of,
)
from kernel_checks import DEVICE
from torch.nn import functional as F

from common.model.llama import Head


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    x = torch.randn(80, 48).bfloat16()
    weight = (0.3 * torch.randn(144, 48)).bfloat16()
    return x, weight, torch.randint(144, (80,))


def gradients(x, weight, labels, form):
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    losses = FormatHead.apply(*leaves, labels, form)
    (losses.sum() / len(losses)).backward()
    return losses.detach(), *(leaf.grad.double() for leaf in leaves)


def distance(found, true):
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("name", [name for name in HEADS if name != SHIPPED])
def test_a_head_has_the_gradients_of_the_loss_within_its_rounding(inputs, name):
    x, weight, labels = inputs
    exact = [each.double().requires_grad_() for each in (x, weight)]
    loss = F.cross_entropy(exact[0] @ exact[1].t(), labels)
    loss.backward()
    losses, d_x, d_weight = gradients(x, weight, labels, HEADS[name])
    error = 0.1 if "e5m2" in name else 0.05
    assert abs(losses.mean() - loss) < 0.02
    assert 1e-5 < distance(d_x, exact[0].grad) < error
    assert 1e-5 < distance(d_weight, exact[1].grad) < error


def test_only_the_softmax_without_the_label_is_rounded(inputs):
    x, weight, labels = inputs
    softmax = softmax_of(x @ weight.t(), labels)
    rounded = softmax.quantized(NEAREST, transposed=True)
    assert (rounded.values[labels, torch.arange(80)] == 0).all()
    truth = softmax.matrix().t().double()
    assert distance(rounded.dequantize(), truth) < 0.04
    truth[labels, torch.arange(80)] = softmax.label_part().double()
    expected = (x @ weight.t()).double().softmax(1).t()
    expected[labels, torch.arange(80)] -= 1
    assert distance(truth, expected) < 1e-6


def test_nearest_is_that_of_the_other_emulation_and_stochastic_is_unbiased():
    x = torch.rand(64, 4096).pow(8)
    for name in ("e4m3 row", "e5m2 row", "e4m3 tensor"):
        made = quantize(x, GRADIENTS[name])
        scaled = (x / made.inverse_scale).contiguous()
        assert torch.equal(made.values.float(), round_to(scaled, GRADIENTS[name].element))
    torch.manual_seed(1)
    tiny = torch.full((1, 100_000), 1e-4)
    tiny[0, 0] = 448.0  # scale 1: a step is 2^-9
    values = quantize(tiny, STOCHASTIC).values[0, 1:].double()
    assert set(values.unique().tolist()) == {0.0, 2.0**-9}
    assert abs(values.mean() / 1e-4 - 1) < 0.06  # four standard errors
    assert (quantize(tiny, NEAREST).values[0, 1:] == 0).all()


def test_the_kernel_rounds_as_plain_torch(inputs):
    softmax = Softmax(*(each.to(DEVICE) for each in softmax_of(*logits_of(inputs))))
    matrix = softmax.matrix()
    for transposed, amax in enumerate(softmax_amaxes(softmax)):
        plain = matrix.t().contiguous() if transposed else matrix
        torch.testing.assert_close(amax, plain.amax(1, keepdim=True), rtol=1e-6, atol=0)
        for rounding in (NEAREST, GRADIENTS["e5m2 row"]):
            made = quantize_softmax(softmax, amax, rounding, bool(transposed)).dequantize()
            expected = quantize(plain, rounding).dequantize()
            assert (abs(made - expected) > 1e-5 * expected).double().mean() < 1e-3
        sums = [
            float(quantize_softmax(softmax, amax, STOCHASTIC, bool(transposed)).dequantize().sum())
            for _ in range(2)
        ]
        assert sums[0] != sums[1]
        assert sums == pytest.approx([float(plain.double().sum())] * 2, rel=2e-3)


def test_a_head_by_the_kernel_has_the_gradients_of_plain_torch(inputs, monkeypatch, capsys):
    inputs = [each.to(DEVICE) for each in inputs]
    monkeypatch.setattr(head_formats, "BY_KERNEL", [False])
    form = HeadFormat(dgrad=NEAREST, wgrad=NEAREST)
    plain = gradients(*inputs, form)
    head_formats.install_kernel(softmax_of(*logits_of(inputs)))
    assert head_formats.BY_KERNEL == [True] and "by the kernel" in capsys.readouterr().out
    for found, expected in zip(gradients(*inputs, form), plain, strict=True):
        assert distance(found, expected) < 2e-3


def logits_of(inputs):
    x, weight, labels = inputs
    return x @ weight.t(), labels, torch.full((80,), 1 / 80, device=x.device)


def test_the_table_converts_loss_to_samples_as_the_log_did():
    shipped = {str(seed): [3.0] * 500 for seed in range(8)}
    worse = {seed: [3.0178] * 500 for seed in shipped}
    line = table({SHIPPED: shipped, "backward": worse}).splitlines()[-1]
    # docs/log.md, 2026-11-23: +0.0178 of loss are +4.9 % of samples.
    assert line.split(" | ")[:6] == ["| backward", "8", "3.0178", "+0.0178", "0.0000", "8"]
    assert "| +4.94 |" in line and line.endswith("refused |")
    assert [gate(0.0, 0.1), gate(0.2, 1.0), gate(0.5, 1.0)] == [
        "passed",
        "mean passes, noise does not",
        "mean fails, within noise",
    ]


@pytest.fixture
def small(monkeypatch, tmp_path, miniature_data, processes):
    """The arguments that all calls have, with the miniature's text."""
    monkeypatch.setattr(fp8_head, "prepare_text", lambda *arguments: text_of(miniature_data))
    monkeypatch.setattr(fp8_head, "start_processes", lambda *arguments: processes)
    shape = fp8_head.ModelShape(1, 64, 96, 4, 2, 2048, 10000.0)
    monkeypatch.setattr(fp8_head, "SMALL", shape)
    for name in ("SEQUENCE", "BATCH"):  # which --small changes
        monkeypatch.setattr(convergence, name, getattr(convergence, name))
    return ["--small", "--vocabulary", "2048"]


def text_of(folder):
    return folder / fp8_head.number_formats.MINIATURE.train_prefix


def test_gradients_are_measured_at_each_step(small, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--steps", "1,2", "--rows", "64", "--tokens", "16", "--batches", "1"]
    main(["gradients", *small, *options, "--out", str(out)])
    measured = json.loads(out.read_text())
    assert list(measured) == ["1", "2"]
    for step in measured.values():
        rows = step["d_W"]["variants"]
        assert abs(rows["bf16, x bf16"]["growth"][0]) < 1e-3
        assert rows["e4m3 row, x bf16"]["error"] > 3 * rows["bf16, x bf16"]["error"]
        assert len(rows["e4m3 row, x e4m3"]["deciles"]) == 10
        assert step["whole"].keys() == rows.keys()
    printed = capsys.readouterr().out
    assert "d_W at steps 1, 2: bf16, x bf16" in printed and "d_x at steps 1, 2" in printed


def test_a_later_call_goes_on_with_the_same_losses(small, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    common = ["seeds", *small, "--steps", "3", "--only", "bf16 by this study;wgrad, stochastic"]
    main([*common, "--seeds", "1", "--out", str(first)])
    main([*common, "--seeds", "1-2", "--out", str(second), "--add", str(first)])
    curves = json.loads(second.read_text())
    assert [list(by_seed) for by_seed in curves.values()] == [["1", "2"]] * 3
    assert curves[SHIPPED]["1"] == json.loads(first.read_text())[SHIPPED]["1"]
    # The control computes what the shipped head does, up to the order of sums.
    assert curves["bf16 by this study"]["1"] == pytest.approx(curves[SHIPPED]["1"], abs=2e-3)
    assert "| wgrad, stochastic | 2 |" in capsys.readouterr().out
    main([*common, "--seeds", "3", "--out", str(second), "--minutes", "0"])
    assert "0.0 minutes are over" in capsys.readouterr().out


def test_shipped_is_the_head_of_the_package():
    with head_format(HEADS[SHIPPED]):
        assert Head.forward.__module__ == "common.model.llama"
    with head_format(HeadFormat()):
        assert Head.forward.__module__ == "head_formats"
    assert Head.forward.__module__ == "common.model.llama"
