"""Test FP8 products without transposes, as on compute capability 10.x, on a CPU.

A CPU's products support every layout, too.
"""

import pytest
import torch
from kernel_checks import NO_AMD, normal, sqnr_db

from common.kernels import fp8
from common.kernels.fp8 import dgrad, takes_every_layout, wgrad
from common.kernels.quantize import quantize_reference
from common.model.linear_layers import DelayedScaling
from common.self_test import products
from common.self_test.kernel_cases import Draw, Sizes
from common.sharding.frozen_base import FrozenBase
from llama31_8b.rules import MINIATURE

pytestmark = NO_AMD

CPU = torch.device("cpu")


@pytest.fixture
def pretend(monkeypatch):
    """A function that lets this CPU pass for a GPU of the architecture `arch`."""

    def set_architecture(arch):
        monkeypatch.setattr(fp8, "architecture", lambda device: arch)
        takes_every_layout.cache_clear()

    yield set_architecture
    takes_every_layout.cache_clear()


def operands():
    """The two factors of dgrad and of wgrad."""
    scaling = DelayedScaling()
    made = (scaling.quantizer(), scaling.quantizer(weight=True), scaling.quantizer(gradient=True))
    scaling.allocate(CPU)
    x, weight, g = (
        normal(*size, seed=seed).cpu() for seed, size in enumerate(((48, 64), (32, 64), (48, 32)))
    )
    return [
        quantize_reference(value, quantizer)
        for value, quantizer in zip((x, weight, g), made, strict=True)
    ]


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
def test_nothing_is_transposed_and_the_products_are_the_same(pretend, arch):
    x, weight, g = operands()
    assert all(each.columnwise is not None for each in (x, weight, g))
    expected = dgrad(g, weight), wgrad(g, x)
    pretend(arch)
    x, weight, g = operands()
    assert all(each.columnwise is None for each in (x, weight, g))
    assert x.for_wgrad() is x, "its rowwise layout is what wgrad reads"
    for found, product in zip((dgrad(g, weight), wgrad(g, x)), expected, strict=True):
        assert found.shape == product.shape and sqnr_db(found.float(), product.float()) > 50


@pytest.mark.parametrize("arch", ["sm_90", "sm_89", "sm_120", "gfx942", "gfx950"])
def test_other_gpus_keep_both_layouts_without_a_trial_product(pretend, arch, monkeypatch):
    pretend(arch)
    monkeypatch.setattr(fp8, "product", pytest.fail)
    assert not takes_every_layout(CPU)


def refuses(*_, **__):
    raise RuntimeError(
        "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"
    )


@pytest.mark.parametrize(
    "multiply", [refuses, lambda a, b, **_: torch.zeros(32, 32)], ids=["refused", "wrong"]
)
def test_a_refused_or_wrong_trial_product_keeps_both_layouts(pretend, multiply, monkeypatch):
    pretend("sm_100")
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    assert not takes_every_layout(CPU)
    assert all(each.columnwise is not None for each in operands())


def test_the_self_test_multiplies_in_the_layouts_of_the_step(pretend, monkeypatch):
    sizes = Sizes(MINIATURE.shape, 32, 1, True, 0, "reference", torch.bfloat16)
    pretend("sm_100")
    called = []
    for name, right in (("dgrad", dgrad), ("wgrad", wgrad)):
        monkeypatch.setattr(
            products,
            name,
            lambda *factors, name=name, right=right: called.append(name) or right(*factors),
        )
    for product in ("fprop", "dgrad", "wgrad"):
        assert (
            products._product(product, (64, 32, 48), True, sizes, Draw(CPU))
            > products.FP8_PRODUCT_DB
        )
    assert called == ["dgrad", "wgrad"]


@pytest.mark.parametrize("storage", ["sharded", "replicated", "replicated_both"])
def test_a_frozen_base_stores_and_hands_out_its_weights_alone(pretend, processes, storage):
    pretend("sm_100")
    shape = MINIATURE.shape
    base = FrozenBase(shape, processes, storage=storage)
    matrices = {
        name: normal(each.rows, each.columns, seed=each.rows).cpu()
        for name, each in base.matrices.items()
    }
    for layer in range(shape.num_layers):
        base.add_layer(layer, matrices)
    assert base.transposed_layers == 0 and base.buffers is None
    base.start_pass(training=True)
    for name, weight in base.backward_weights(1).items():
        forward = base.forward_weights(1)[name]
        assert weight.columnwise is None and weight.inverse_scale == forward.inverse_scale
        assert torch.equal(weight.rowwise.view(torch.uint8), forward.rowwise.view(torch.uint8))
        g = quantize_reference(normal(16, weight.rowwise.shape[0]).cpu(), gradient_quantizer())
        found = dgrad(g, weight)
        assert (
            sqnr_db(
                found.float(),
                (g.rowwise.float() * g.inverse_scale)
                @ (weight.rowwise.float() * weight.inverse_scale),
            )
            > 50
        )


def gradient_quantizer():
    scaling = DelayedScaling()
    made = scaling.quantizer(gradient=True)
    scaling.allocate(CPU)
    return made
