"""Compare blocks in an emulated block format with plain blocks that quantize, and test healing."""

from dataclasses import replace

import pytest
import torch
from block_formats import BLOCK_FORMATS, hadamard, quantize
from emulated_layers import install
from fused_lora import RANK, SMALL, MemoryBase, data, plain_block, results
from plain_block import Block
from signal_to_noise import sqnr_db

from common import config as configs
from common.linear_formats import FORMATS
from common.model.fused_block import FusedBlock
from common.model.fused_lora_block import FusedLoraBlock
from common.model.linear_layers import DelayedScaling, LinearLayers, linear_layers
from common.model.lora import AdapterSettings
from common.paths import ROOT
from llama31_8b.rules import Config
from tests.model.test_fused_block import QK_NORM, SHAPE, run

RECIPES = [
    "mxfp8",
    "mxfp8_hybrid",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4",
    "nvfp4",
    "mxfp4+square_weights",
    "nvfp4+square_weights",
]
WGRAD = {"mxfp4+hadamard": False, "nvfp4+random_hadamard": True}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize(
    ("until", "then"), [("", ""), ("step 340", "fp8"), ("loss 3.6", "bf16"), ("loss 4", "fp8")]
)
def test_every_emulated_format_can_be_installed_and_healed(name, until, then):
    end = f" until {until}, then {then}" if until else ""
    for options in ((), ("stochastic",), ("stochastic", "random_hadamard", "square_weights")):
        text = "+".join((name, *options)) + end
        install(text)
        path = ROOT / "configs/llama31_8b/H200_1x8.toml"
        number_format = replace(configs.load(path, Config), linear=text).linear_format
        assert (number_format.name, number_format.options) == (name, options)
        assert (number_format.until, number_format.then) == (until, then)
        assert number_format.emulated and number_format.in_fp8 == (then == "fp8")


@pytest.mark.parametrize(
    "text",
    [
        "mxfp5",
        "mxfp4+",
        "+hadamard",
        "mxfp4+hadamard+hadamard",
        "mxfp4+hadamard+random_hadamard",
        "fp8+stochastic",
        "fp8 until step 340, then bf16",
        "mxfp4 until step 340",
        "mxfp4 until 340, then fp8",
        "mxfp4 until step 0, then fp8",
        "mxfp4 until loss -1, then fp8",
        "mxfp4 until loss 3.6, then fp8\n",
        "mxfp4 until loss 3.6, then mxfp8",
    ],
)
def test_another_format_cannot_be_installed(text):
    with pytest.raises(ValueError, match="not an emulated format"):
        install(text)


class ThreeProducts(torch.autograd.Function):
    """x W^T whose products quantize each factor along the dimension of the sum."""

    @staticmethod
    def forward(ctx, x, weight, recipe):
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return along_rows(x, recipe) @ along_rows(weight, recipe, weight=True).t()

    @staticmethod
    def backward(ctx, g):
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        d_x = along_rows(g, recipe, gradient=True) @ along_rows(weight.t(), recipe, weight=True).t()
        g_t, x_t = g.t(), x.t()
        if recipe in WGRAD:
            g_t, x_t = (hadamard(tensor, WGRAD[recipe]) for tensor in (g_t, x_t))
        return d_x, along_rows(g_t, recipe, gradient=True) @ along_rows(x_t, recipe).t(), None


def along_rows(x, recipe, gradient=False, weight=False):
    block_format = BLOCK_FORMATS[recipe.split("+")[0]]
    square = weight and "square_weights" in recipe
    return quantize(
        x,
        block_format,
        block_format.gradient_element if gradient else block_format.element,
        square=square,
    ).dequantize(x.dtype)


def quantizing(linear, recipe):
    """A linear layer of a plain block, from now on in `recipe`."""

    def forward(x):
        return ThreeProducts.apply(x.flatten(0, -2), linear.weight, recipe).unflatten(
            0, x.shape[:-1]
        )

    linear.forward = forward


def layers_of(recipe, until="", then="fp8"):
    return linear_layers(install(recipe + (f" until {until}, then {then}" if until else "")))


def start(layers, block):
    """Return a block assembled as `build` does."""
    layers.allocate(torch.device("cpu"))
    block.register_forward_pre_hook(lambda block, _: layers.start_pass(block.training))


def fused(layers, dtype=torch.float32, recompute=False, shape=SHAPE):
    torch.manual_seed(0)
    block = FusedBlock(shape, "reference", layers, recompute)
    start(layers, block)
    for name, parameter in block.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.05)
    return block.to(dtype)


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def near(found, expected):
    """fp32 sums in another order, which may round an element the other way."""
    assert found.keys() == expected.keys()
    return all(
        (found[name] - value).norm() < 1e-3 * value.norm() for name, value in expected.items()
    )


@pytest.mark.parametrize(
    ("recipe", "shape"), [*((recipe, SHAPE) for recipe in (*RECIPES, *WGRAD)), ("mxfp4", QK_NORM)]
)
def test_a_block_quantizes_the_factors_of_all_its_products(recipe, shape):
    block, plain = fused(layers_of(recipe), shape=shape), Block(shape)
    plain.load_state_dict(block.state_dict())
    exact = run(plain)
    for name in ("qkv", "o", "gate_up", "down"):
        quantizing(getattr(plain, name), recipe)
    found, expected = run(block), run(plain)
    assert near(found, expected)
    noise = {name: sqnr_db(found[name], exact[name]) for name in ("down.weight", "qkv.weight")}
    assert all(value < 40 for value in noise.values()), f"not quantized: {noise}"
    assert recipe != "mxfp4" or all(value < 20 for value in noise.values()), (
        f"too near for 4 bits: {noise}"
    )


@pytest.mark.parametrize("recipe", [*RECIPES[:5], "mxfp4+square_weights"])
def test_a_lora_block_reads_its_frozen_weights_in_the_format(recipe):
    plain = plain_block()
    layers = layers_of(recipe)
    linears = {name: getattr(plain, name) for name in ("qkv", "o", "gate_up", "down")}
    linears = {name: getattr(linear, "base", linear) for name, linear in linears.items()}
    base = layers.frozen_base(
        MemoryBase({name: linear.weight for name, linear in linears.items()}, LinearLayers())
    )
    block = FusedLoraBlock(SMALL, 0, base, "reference", AdapterSettings(RANK, 8.0, 0.0), layers)
    block.load_state_dict(
        {name: t for name, t in plain.state_dict().items() if name in block.state_dict()}
    )
    start(layers, block)
    for linear in linears.values():
        quantizing(linear, recipe)
    x, d_out, tables = data()
    assert near(results(block, x, d_out, tables), results(plain, x, d_out, tables))


def test_a_base_in_fp8_is_read_in_the_format_until_healing_and_then_as_stored():
    layers, of_base = layers_of("mxfp4", "step 1"), DelayedScaling()
    stored = MemoryBase(
        {"o": torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()}, of_base
    )
    base = layers.frozen_base(stored)
    layers.allocate(torch.device("cpu"))
    whole = stored.operands["o"].rowwise.float() * stored.operands["o"].inverse_scale
    forward, backward = base.forward_weights(0)["o"], base.backward_weights(0)["o"]
    assert forward.inverse_scale is None and torch.equal(
        forward.rowwise, along_rows(whole, "mxfp4").bfloat16()
    )
    assert backward.inverse_scale is None and torch.equal(
        backward.columnwise, along_rows(whole.t(), "mxfp4").bfloat16()
    )
    base.release(0)
    assert stored.calls == ["forward 0", "backward 0", "release 0"]
    layers.step_done()
    assert torch.equal(
        base.forward_weights(0)["o"].rowwise.view(torch.uint8),
        stored.operands["o"].rowwise.view(torch.uint8),
    )
    assert base.backward_weights(0)["o"].inverse_scale is stored.operands["o"].inverse_scale


def test_gradients_are_rounded_stochastically_and_nothing_else_is():
    block = fused(layers_of("mxfp4+stochastic"))
    nearest = run(fused(layers_of("mxfp4")))
    torch.manual_seed(1)
    first, second = run(block), run(block)
    torch.manual_seed(1)
    again = run(block)
    assert torch.equal(first["output"], nearest["output"]) and equal(again, first)
    assert not any(torch.equal(first[name], second[name]) for name in first if name != "output")
    draws = [run(block)["down.weight"] for _ in range(16)]
    exact = run(fused(LinearLayers()))["down.weight"]
    assert sqnr_db(torch.stack(draws).mean(0), exact) > sqnr_db(nearest["down.weight"], exact), (
        "the mean is nearer than the nearest"
    )


@pytest.mark.parametrize("recipe", ["mxfp4+hadamard", "nvfp4"])
def test_recompute_changes_no_bit(recipe):
    assert equal(run(fused(layers_of(recipe), recompute=True)), run(fused(layers_of(recipe))))


@pytest.mark.parametrize("then", ["fp8", "bf16"])
def test_after_healing_a_block_computes_as_one_that_never_used_the_first_format(then):
    """The reference uses FP8 from its first step, without a history."""
    layers = layers_of("mxfp4", "step 2", then)
    block = fused(layers, torch.bfloat16)
    reference = linear_layers(FORMATS[then])
    plain = fused(reference, torch.bfloat16)
    for step in range(2):
        assert not layers.healed
        in_format = run(block, torch.bfloat16, seed=step)
        layers.step_done()
    assert layers.healed
    for step in range(3):
        found = run(block, torch.bfloat16, seed=step)
        expected = run(plain, torch.bfloat16, seed=step)
        assert equal(found, expected)
        layers.step_done()
        reference.step_done()
    assert not equal(in_format, found)
    layers.reset()
    assert not layers.healed and equal(run(block, torch.bfloat16, seed=1), in_format), (
        "as before the first step: the warm-up's end"
    )


def test_healing_at_a_loss_waits_for_an_evaluation_that_reaches_it():
    layers = layers_of("mxfp4+hadamard", "loss 3.6")
    fused(layers)
    assert (
        layers.evaluated(3.7) == {"linear_format": "mxfp4, emulated", "clipped_elements": 0}
        and not layers.healed
    )
    layers.step_done()
    assert layers.evaluated(3.6)["linear_format"] == "mxfp4, emulated" and layers.healed, (
        "this evaluation was still in the format"
    )
    layers.step_done()
    assert layers.evaluated(9.9)["linear_format"] == "fp8" and layers.steps == 1, (
        "it stays healed, and its FP8 history goes on"
    )


@pytest.mark.parametrize("until", ["step 2", "loss 3.6", ""])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_checkpoint_knows_whether_it_has_healed(until, steps):
    """After `steps` of four steps, with an evaluation after the second."""
    layers = layers_of("mxfp4+hadamard", until)
    block, found = fused(layers, torch.bfloat16), []
    for step in range(4):
        if step == steps:
            saved = {name: tensor.clone() for name, tensor in layers.state().items()}
        found.append(run(block, torch.bfloat16, seed=step))
        layers.step_done()
        if step == 1:
            layers.evaluated(3.0)
    continued = layers_of("mxfp4+hadamard", until)
    block = fused(continued, torch.bfloat16)
    continued.resume([saved], steps)
    assert continued.healed == (until != "" and steps >= 2)
    for step in range(steps, 4):
        assert equal(run(block, torch.bfloat16, seed=step), found[step])
        continued.step_done()
        if step == 1:
            continued.evaluated(3.0)


def test_weights_are_cast_once_per_step():
    layers = layers_of("mxfp4")
    block = fused(layers)
    first = run(block)["output"]
    with torch.no_grad():
        block.down.weight.mul_(3)
    assert torch.equal(run(block)["output"], first)
    layers.step_done()
    assert not torch.equal(run(block)["output"], first)


def test_both_kernel_engines_give_the_same_results_in_mxfp8():
    """In Triton's interpreter the block's kernels write the compute dtype, with the same cast."""
    shape = replace(SHAPE, ffn_hidden_size=64)
    found = []
    for kernels in ("reference", "triton"):
        torch.manual_seed(0)
        layers = layers_of("mxfp8")
        block = FusedBlock(shape, kernels, layers)
        start(layers, block)
        for name, parameter in block.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.05)
        found.append(run(block))
    assert near(*found)
