"""Compare block formats with torchao bit for bit where the rules agree, and test where they differ.

They differ for infinities and for blocks of numbers close to the smallest of fp32.
"""

import math

import pytest
import torch
from block_formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    HADAMARD_SIZE,
    Element,
    hadamard,
    quantize,
    round_to,
)
from emulated_layers import PRECISIONS

TORCHAO_ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_hybrid": torch.float8_e5m2,  # of gradients
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4": torch.float4_e2m1fn_x2,
}


def element_of(name):
    return BLOCK_FORMATS[name].gradient_element  # `element` differs only in mxfp8_hybrid


def ours(x, name, **options):
    return quantize(x, BLOCK_FORMATS[name], element_of(name), **options)


def by_torchao(x, name, block_size=None):
    """Convert x: [rows, columns] with torchao and return it in fp32.

    Pads with zeros, because torchao takes only whole blocks.
    """
    from torchao.prototype.mx_formats.mx_tensor import (
        to_dtype,
        to_mx,
    )  # here: not every worker of pytest needs it
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    size = block_size or BLOCK_FORMATS[name].block_size
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    if name == "nvfp4":
        scale = per_tensor_amax_to_scale(padded.abs().max())
        made = NVFP4Tensor.to_nvfp4(padded, per_tensor_scale=scale).dequantize(torch.float32)
    else:
        element = TORCHAO_ELEMENTS[name]
        scale, data = to_mx(padded, element, size)
        made = to_dtype(data, scale, element, size, torch.float32)
    return made[:, : x.shape[1]]


def same_bits(a, b):
    """NaN may have any bits, zero keeps its sign."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def random(rows, columns, spread, seed=0):
    """Normal numbers times e^(spread * normal), so that blocks hold large and small ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp(
        spread * torch.randn(rows, columns, generator=generator)
    )


def numbers(element: Element):
    """All numbers of a format that are not negative, in order."""
    steps = torch.arange(2 << element.mantissa_bits).float()
    exponents = range(element.min_exponent, element.max_exponent + 1)
    found = torch.cat(
        [steps * 2.0 ** (exponent - element.mantissa_bits) for exponent in exponents]
    ).unique()
    return found[found <= element.largest]


def ties_and_neighbors(name):
    """Return every number of a format, every tie, and the fp32 numbers next to both.

    Both signs occur, and the scale of each block is 2^0. One number of the size of the format's
    largest power of two fixes it. Larger numbers of its binade saturate.
    """
    element, size = element_of(name), BLOCK_FORMATS[name].block_size
    exact = numbers(element)
    top = 2.0 ** (element.max_exponent + 1)
    points = torch.cat(
        (exact, (exact[1:] + exact[:-1]) / 2, torch.linspace(element.largest, top, 9)[:-1])
    )
    points = torch.cat(
        (points, points.nextafter(torch.tensor(0.0)), points.nextafter(torch.tensor(math.inf)))
    )
    points = points[points < top]
    points = torch.cat((points, -points))
    points = torch.nn.functional.pad(points, (0, -len(points) % (size - 1))).view(-1, size - 1)
    return torch.cat((torch.full((len(points), 1), 2.0**element.max_exponent), points), 1)


def test_a_config_knows_the_same_formats():
    assert set(BLOCK_FORMATS) == set(PRECISIONS) == set(TORCHAO_ELEMENTS) | {"nvfp4"}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (3, 100), (5, 7), (1, 33)], ids=str)
def test_random_matrices_with_ragged_ends_are_cast_as_by_torchao(name, dtype, shape):
    for spread in (0.0, 1.0, 6.0):
        x = random(*shape, spread).to(dtype)
        assert same_bits(ours(x, name).dequantize(torch.float32), by_torchao(x.float(), name))


@pytest.mark.parametrize("name", TORCHAO_ELEMENTS)
def test_ties_go_to_even_and_large_numbers_saturate(name):
    x = ties_and_neighbors(name)
    made = ours(x, name)
    assert (made.scales == 1).all() and same_bits(
        made.dequantize(torch.float32), by_torchao(x, name)
    )
    assert made.elements.max() == element_of(name).largest and x.max() > element_of(name).largest
    assert set(made.elements.abs().flatten().tolist()) == set(numbers(element_of(name)).tolist()), (
        "every number of the format, and no other"
    )


def test_ties_of_nvfp4_go_to_even():
    """The tensor's scale is 1 and the blocks' scales are e4m3 numbers, so ties are exact."""
    points = torch.tensor(
        [0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, 0.0, -0.0, 4.0]
    )
    scales = numbers(E4M3)[numbers(E4M3) >= 2.0**-6]
    x = (
        torch.cat((torch.full((len(scales), 1), 6.0), points.expand(len(scales), -1)), 1)
        * scales[:, None]
    )
    made = ours(x, "nvfp4")
    assert made.tensor_scale == 1 and torch.equal(made.scales.flatten(), scales)
    assert same_bits(made.dequantize(torch.float32), by_torchao(x, "nvfp4"))
    expected = torch.tensor(
        [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -2.0, -4.0, 0.0, 0.0, 4.0]
    )
    # 1 / the others is rounded, and 2.5 times them times that no tie any more.
    powers_of_two = scales.log2().frac() == 0
    assert (
        powers_of_two.sum() == 15
        and (made.elements.flatten(1)[powers_of_two, 1:] == expected).all()
    )


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_zeros_keep_their_sign(name):
    x = torch.tensor([[0.0, -0.0] * 40])
    made = ours(x, name).dequantize(torch.float32)
    assert same_bits(made, x)
    x[0, 40] = 3.0
    assert same_bits(ours(x, name).dequantize(torch.float32), by_torchao(x, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_nan_makes_all_numbers_that_share_its_scale_nan(name):
    x = random(4, 128, 1.0)
    x[1, 40] = math.nan
    made = ours(x, name).dequantize(torch.float32)
    assert same_bits(made, by_torchao(x, name))
    assert made[1, 32:64].isnan().all()
    # NVFP4 also has one scale for the whole tensor.
    sharing = x.numel() if name == "nvfp4" else 32
    assert int(made.isnan().sum()) == sharing


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_infinity_becomes_nan_as_everywhere_in_this_package(name, bad):
    """torchao stores the largest number instead, and a run that computes nonsense would go on."""
    x = random(4, 128, 1.0)
    x[1, 40] = bad
    made = ours(x, name).dequantize(torch.float32)
    assert made[1, 32:64].isnan().all() and int(made.isnan().sum()) == (
        32 if name != "nvfp4" else x.numel()
    )
    assert name == "nvfp4" or same_bits(made[2:], by_torchao(x, name)[2:])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("power", [127, 100, -60, -90])
def test_numbers_near_the_ends_of_fp32_are_cast_as_by_torchao(name, power):
    x = (random(8, 64, 0.0).clamp(-1.99, 1.99)) * 2.0**power
    assert same_bits(ours(x, name).dequantize(torch.float32), by_torchao(x, name))


@pytest.mark.parametrize("name", TORCHAO_ELEMENTS)
def test_the_smallest_scale_is_2_to_the_minus_127(name):
    """torchao divides by 2^-126 there and multiplies by 2^-127, which halves the numbers."""
    element = element_of(name)
    x = torch.full((1, 32), 2.0**-127) * numbers(element).flip(0)[:32].repeat(8)[:32]
    made = ours(x, name)
    assert (made.scales == 2.0**-127).all() and torch.equal(made.dequantize(torch.float32), x)
    tiny = ours(x * 2.0**-20, name).dequantize(torch.float32)
    assert tiny.isfinite().all() and (tiny <= x).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_square_shares_its_scale(name):
    size = BLOCK_FORMATS[name].block_size
    x = random(2 * size, 3 * size, 2.0)
    tiles = x.view(2, size, 3, size).transpose(1, 2)
    made = ours(x, name, square=True)
    whole = made.dequantize(torch.float32)
    assert made.scales.shape == (2, 1, 3, 1)
    assert torch.equal(ours(x.t(), name, square=True).dequantize(torch.float32), whole.t()), (
        "the same numbers in both layouts"
    )
    if name != "nvfp4":  # torchao's blocks of NVFP4 have 16 elements
        expected = by_torchao(tiles.flatten(0, 1).flatten(1).contiguous(), name, size * size)
        assert same_bits(
            whole.view(2, size, 3, size).transpose(1, 2).flatten(0, 1).flatten(1), expected
        )
    else:
        amax = tiles.abs().amax((2, 3)) / 6 / made.tensor_scale
        assert torch.equal(
            made.scales.flatten(),
            amax.clamp(2.0**-6, 448).to(torch.float8_e4m3fn).float().flatten(),
        )
    assert ours(x[:-3, :-5], name, square=True).dequantize(torch.float32).shape == (
        2 * size - 3,
        3 * size - 5,
    )


@pytest.mark.parametrize("element", [E4M3, E2M1], ids=["e4m3", "e2m1"])
def test_stochastic_rounding_is_right_in_the_mean_and_leaves_numbers_of_the_format(element):
    torch.manual_seed(0)
    exact = numbers(element)
    assert torch.equal(
        round_to(torch.cat((exact, -exact)), element, stochastic=True), torch.cat((exact, -exact))
    )
    lower, upper = exact[:-1], exact[1:]
    for share in (0.25, 0.5, 0.9):
        x = (lower + share * (upper - lower)).repeat(2) * torch.tensor(
            [1.0, -1.0]
        ).repeat_interleave(len(lower))
        draws = round_to(x.expand(4000, -1).contiguous(), element, stochastic=True)
        up = (draws.abs() == upper.repeat(2)).float()
        assert ((draws.abs() == lower.repeat(2)) | (up == 1)).all()
        assert (up.mean(0) - share).abs().max() < 0.05, "six standard errors"
    assert round_to(torch.tensor([1e9, -1e9]), element, stochastic=True).tolist() == [
        element.largest,
        -element.largest,
    ]
    assert round_to(torch.tensor([math.nan]), element, stochastic=True).isnan().all()


@pytest.mark.parametrize("random_signs", [False, True])
@pytest.mark.parametrize("columns", [64, 50])
def test_the_hadamard_transform_of_both_factors_leaves_their_product_unchanged(
    random_signs, columns
):
    a, b = random(8, columns, 1.0, seed=1), random(6, columns, 1.0, seed=2)
    transformed = [hadamard(x, random_signs) for x in (a, b)]
    assert transformed[0].shape == (8, -(-columns // HADAMARD_SIZE) * HADAMARD_SIZE)
    assert torch.allclose(transformed[0] @ transformed[1].t(), a @ b.t(), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(transformed[0][:, :columns], a)


def test_the_hadamard_transform_spreads_an_outlier_and_with_random_signs_also_a_mean():
    x = torch.zeros(1, 16)
    x[0, 5] = 4.0
    plain, signed = hadamard(x, False), hadamard(x, True)
    assert torch.equal(plain.abs(), torch.ones(1, 16)) and torch.equal(
        signed.abs(), torch.ones(1, 16)
    )
    ones = torch.ones(1, 16)
    assert torch.equal(hadamard(ones, False), torch.tensor([[4.0] + [0.0] * 15])), (
        "a plain transform gathers a mean in one element"
    )
    assert hadamard(ones, True).abs().max() < 4
