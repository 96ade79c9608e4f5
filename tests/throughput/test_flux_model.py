"""Compare FLUX's transformer with diffusers: outputs, gradients, parameter counts and FLOPs."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from throughput.flux_model import Flux, FluxShape, image_positions, rope_table

# Some hundred fp32 roundings of 6e-8 lie between input and gradient, in another order than in
# diffusers.
TOLERANCE = 1e-5  # |ours - theirs| <= TOLERANCE * |theirs|, both L2 norms over the whole tensor
TINY = FluxShape(1, 2, 64, 2, 12, 40, 24, (8, 12, 12))
SIZES = {
    "square, text shorter than the image": (2, 4, 4, 7),
    "ragged, text longer than the image": (2, 3, 5, 29),
    "one image": (1, 1, 3, 1),
}


def diffusers_model(shape: FluxShape):
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=shape.in_channels,
        num_layers=shape.double_blocks,
        num_single_layers=shape.single_blocks,
        attention_head_dim=shape.head_dim,
        num_attention_heads=shape.num_heads,
        joint_attention_dim=shape.context_size,
        pooled_projection_dim=shape.pooled_size,
        guidance_embeds=True,
        axes_dims_rope=shape.rope_axes,
    )


ENDS = {
    **{
        "inputs.image": ["x_embedder"],
        "inputs.text": ["context_embedder"],
        "outputs.linear": ["proj_out"],
    },
    **{
        "inputs.time.into": ["time_text_embed.timestep_embedder.linear_1"],
        "inputs.time.out": ["time_text_embed.timestep_embedder.linear_2"],
    },
    "inputs.guidance.into": ["time_text_embed.guidance_embedder.linear_1"],
    "inputs.guidance.out": ["time_text_embed.guidance_embedder.linear_2"],
    **{
        "inputs.pooled.into": ["time_text_embed.text_embedder.linear_1"],
        "inputs.pooled.out": ["time_text_embed.text_embedder.linear_2"],
    },
    "outputs.modulation.linear": ["norm_out.linear"],  # diffusers keeps the scale before the shift
}
DOUBLE = {
    "image.modulation.linear": ["norm1.linear"],
    "image.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    **{
        "image.norm.q": ["attn.norm_q"],
        "image.norm.k": ["attn.norm_k"],
        "image.out": ["attn.to_out.0"],
    },
    **{"image.up": ["ff.net.0.proj"], "image.down": ["ff.net.2"]},
    "text.modulation.linear": ["norm1_context.linear"],
    "text.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    **{
        "text.norm.q": ["attn.norm_added_q"],
        "text.norm.k": ["attn.norm_added_k"],
        "text.out": ["attn.to_add_out"],
    },
    **{"text.up": ["ff_context.net.0.proj"], "text.down": ["ff_context.net.2"]},
}
SINGLE = {
    **{
        "modulation.linear": ["norm.linear"],
        "into": ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"],
    },
    **{"norm.q": ["attn.norm_q"], "norm.k": ["attn.norm_k"], "out": ["proj_out"]},
}


def their_names(name: str) -> list[str]:
    """The parameters of diffusers that ours is made of, in the order of its rows."""
    module, kind = name.rsplit(".", 1)
    for ours, theirs, names in (
        ("double_blocks.", "transformer_blocks.", DOUBLE),
        ("single_blocks.", "single_transformer_blocks.", SINGLE),
    ):
        if module.startswith(ours):
            number, rest = module.removeprefix(ours).split(".", 1)
            return [f"{theirs}{number}.{their}.{kind}" for their in names[rest]]
    return [f"{their}.{kind}" for their in ENDS[module]]


def ours_from(theirs: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    whole = torch.cat([theirs[their] for their in their_names(name)])
    return torch.cat(whole.chunk(2)[::-1]) if name.startswith("outputs.modulation") else whole


def inputs(
    shape: FluxShape, batch: int, rows: int, columns: int, text_tokens: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    return {
        "latents": draw(batch, rows * columns, shape.in_channels),
        "text": draw(batch, text_tokens, shape.context_size),
        "pooled": draw(batch, shape.pooled_size),
        "time": torch.rand(batch, generator=generator),
        "guidance": 1 + 3 * torch.rand(batch, generator=generator),
    }


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).detach().norm()) <= TOLERANCE * float(theirs.detach().norm())


@pytest.mark.parametrize("recompute_blocks", [0, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients_are_those_of_diffusers(size, recompute_blocks):
    batch, rows, columns, text_tokens = SIZES[size]
    torch.manual_seed(3)
    theirs = diffusers_model(TINY)
    for parameter in theirs.parameters():  # also biases and norms, which start at 0 and 1
        torch.nn.init.normal_(parameter, 1.0 if parameter.shape == (TINY.head_dim,) else 0.0, 0.2)
    ours = Flux(TINY, recompute_blocks)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(ours_from(weights, name))
    drawn, positions = (
        inputs(TINY, batch, rows, columns, text_tokens),
        image_positions(rows, columns, text_tokens),
    )
    out = ours(**drawn, rope=rope_table(positions, TINY, torch.device("cpu")))
    expected = theirs(
        hidden_states=drawn["latents"],
        encoder_hidden_states=drawn["text"],
        pooled_projections=drawn["pooled"],
        timestep=drawn["time"],
        guidance=drawn["guidance"],
        txt_ids=positions[:text_tokens].float(),
        img_ids=positions[text_tokens:].float(),
    ).sample
    assert close(out, expected)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert [
        name
        for name, parameter in ours.named_parameters()
        if not close(parameter.grad, ours_from(gradients, name))
    ] == []
    used = [their for name, _ in ours.named_parameters() for their in their_names(name)]
    assert sorted(used) == sorted(weights)


def test_every_input_and_the_rope_count():
    """A change of any of them changes the output: none is lost on the way."""
    model, drawn = Flux(TINY), inputs(TINY, 2, 3, 4, 5)
    rope = rope_table(image_positions(3, 4, 5), TINY, torch.device("cpu"))
    before = model(**drawn, rope=rope)
    for name in drawn:
        assert not torch.allclose(
            model(**drawn | {name: drawn[name] * 0.5}, rope=rope), before, atol=1e-6
        ), name
    turned = rope_table(image_positions(4, 3, 5), TINY, torch.device("cpu"))
    assert not torch.allclose(model(**drawn, rope=turned), before, atol=1e-6)


def test_flux_1_dev_has_as_many_parameters_as_that_of_diffusers():
    with torch.device("meta"):
        ours, theirs = Flux(FluxShape()), diffusers_model(FluxShape())
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    assert round(count / 1e9, 2) == 11.90


def test_the_parts_have_every_parameter_once():
    model = Flux(TINY)
    found = [parameter for part in model.parts for parameter in part.parameters()]
    assert len(found) == len(set(found)) and set(found) == set(model.parameters())


@pytest.mark.parametrize("shape", [TINY, replace(TINY, double_blocks=3, single_blocks=1)])
def test_flops_are_those_that_torch_counts(shape):
    """torch counts every matrix product of the forward pass, two of them for attention."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        rope = rope_table(image_positions(4, 6, 7), shape, torch.device("cpu"))
        Flux(shape)(**inputs(shape, 2, 4, 6, 7), rope=rope)
    assert 3 * counter.get_total_flops() == 2 * shape.flops_per_image(24, 7)
