"""Compare the Llama with transformers' Llama, Mistral and Qwen3; test its weights and counts."""

import math
import os

import pytest
import torch
from plain_block import plain_llama
from tiny import TINY, run_config, whole

from common.kernels.cross_entropy import IGNORE_INDEX
from common.kernels.rope import rope_frequencies
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.llama import Llama
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape, RopeScaling
from common.training.pretraining import assemble_random
from llama31_8b.rules import CLOSED, MINIATURE

# Some hundred fp32 roundings of 6e-8 lie between input and gradient, in another order than in
# transformers.
TOLERANCE = 1e-5  # |ours - theirs| <= TOLERANCE * |theirs|, both L2 norms over the whole tensor
# Of 8 frequencies some stay, some are blended, some are stretched.
THREE_BANDS = RopeScaling(original_context=64)
SHAPES = {  # shape, batch, sequence
    "no groups": (ModelShape(2, 32, 48, 4, 4, 61, 10000.0), 2, 17),
    "groups of 3, odd sizes": (ModelShape(2, 30, 35, 3, 1, 53, 10000.0), 3, 13),
    "one kv head of 8": (ModelShape(1, 64, 40, 8, 1, 97, 500000.0), 1, 31),
    "llama 3.1 rope, three bands": (ModelShape(2, 64, 96, 4, 2, 71, 10000.0, THREE_BANDS), 2, 70),
    "llama 3.1 rope, other factors": (
        ModelShape(3, 48, 50, 6, 2, 67, 500000.0, RopeScaling(3.0, 2.0, 5.0, 40)),
        2,
        45,
    ),
    "another epsilon": (ModelShape(1, 24, 20, 2, 2, 41, 10000.0, norm_eps=1e-2), 2, 9),
    "heads wider than the hidden size": (
        ModelShape(2, 40, 48, 4, 2, 61, 10000.0, explicit_head_dim=16),
        2,
        17,
    ),
    "llama 3.2, tied": (
        ModelShape(2, 32, 48, 4, 2, 61, 10000.0, THREE_BANDS, tied_embedding=True),
        2,
        17,
    ),
    "qwen3": (ModelShape(2, 32, 48, 4, 2, 61, 10000.0, norm_eps=1e-3, qk_norm=True), 2, 17),
    "qwen3, narrow heads": (
        ModelShape(2, 48, 56, 6, 3, 53, 10000.0, explicit_head_dim=4, qk_norm=True),
        3,
        13,
    ),
    "qwen3, wide heads, tied": (
        ModelShape(
            3,
            40,
            48,
            4,
            1,
            61,
            10000.0,
            norm_eps=1e-6,
            explicit_head_dim=16,
            qk_norm=True,
            tied_embedding=True,
        ),
        2,
        19,
    ),
}


def hugging_face(shape: ModelShape, sequence_length: int, kind: str = "", **options):
    """`kind`: Llama, Mistral or Qwen3, by default by the shape; `options` of its config."""
    import transformers

    kind = kind or ("Qwen3" if shape.qk_norm else "Llama")
    rope = {"rope_type": "default", "rope_theta": shape.rope_base}
    if scaling := shape.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context,
        }
        rope |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=sequence_length,
        rms_norm_eps=shape.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=shape.tied_embedding,
        attn_implementation="eager",
        **options,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def their_names(name: str) -> list[str]:
    """The parameters of transformers that ours is made of, in the order of its rows."""
    fixed = {
        "embedding.weight": "model.embed_tokens",
        "head.norm.weight": "model.norm",
        "head.output.weight": "lm_head",
    }
    if name in fixed:
        return [fixed[name] + ".weight"]
    number, part = name.removeprefix("blocks.").removesuffix(".weight").split(".", 1)
    parts = {
        "attention_norm": ["input_layernorm"],
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "o": ["self_attn.o_proj"],
        "ffn_norm": ["post_attention_layernorm"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
        "rotation.q_norm": ["self_attn.q_norm"],
        "rotation.k_norm": ["self_attn.k_norm"],
    }
    return [f"model.layers.{number}.{theirs}.weight" for theirs in parts[part]]


def pair(shape: ModelShape, sequence_length: int, make=fused_llama, **theirs):
    """Return our model and theirs with equal weights.

    The weights are so large that attention is not uniform and norms differ from 1.
    """
    torch.manual_seed(0)
    ours, theirs = make(shape, sequence_length), hugging_face(shape, sequence_length, **theirs)
    their_parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(
                1 + 0.3 * torch.randn_like(parameter)
                if parameter.ndim == 1
                else 0.2 * torch.randn_like(parameter)
            )
            rows = [their_parameters.pop(their_name) for their_name in their_names(name)]
            for mine, its in zip(parameter.split([len(part) for part in rows]), rows, strict=True):
                its.copy_(mine)
    assert not their_parameters, "transformers has weights that we do not"
    return ours, theirs


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert ours.shape == theirs.shape, what
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert error <= TOLERANCE, f"{what}: relative error {error:.1e}"


@pytest.mark.parametrize(
    "make", [fused_llama, plain_llama], ids=["fused blocks", "the tests' plain blocks"]
)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_loss_and_every_gradient_agree_with_transformers(name, make):
    shape, batch, sequence = SHAPES[name]
    assert_parity(shape, batch, *pair(shape, sequence, make))


def test_creating_a_model_draws_no_normal_values(monkeypatch):
    """On the meta device torch would import torch._dynamo for them, in every rank."""

    def fail(*args, **named):
        raise AssertionError("normal values were drawn")

    monkeypatch.setattr(torch.nn.init, "normal_", fail)
    with torch.device("meta"):
        model = fused_llama(LLAMA31_8B, 8)
    assert model.embedding.weight.requires_grad


def test_mistral_is_a_llama_within_its_window_and_not_beyond():
    shape, batch, sequence = SHAPES["groups of 3, odd sizes"]
    assert_parity(shape, batch, *pair(shape, sequence, kind="Mistral", sliding_window=sequence))
    with pytest.raises(AssertionError, match="logits"):
        assert_parity(
            shape, batch, *pair(shape, sequence, kind="Mistral", sliding_window=sequence - 1)
        )


def assert_parity(shape: ModelShape, batch: int, ours: Llama, theirs) -> None:
    sequence = ours.max_sequence_length
    tokens = torch.randint(shape.vocab_size, (batch, sequence))
    labels = torch.cat((tokens[:, 1:], torch.full((batch, 1), IGNORE_INDEX)), dim=1)
    labels[0, 2:7] = IGNORE_INDEX
    # Transformers shifts them itself.
    their_labels = torch.cat((tokens[:, :1], labels[:, :-1]), dim=1)

    their_result = theirs(tokens, labels=their_labels)
    their_result.loss.backward()
    loss_sum, count = ours(tokens, labels)
    loss = loss_sum.sum() / count.sum()
    loss.backward()

    assert count.tolist() == (labels != IGNORE_INDEX).sum(-1).tolist()
    assert_near(ours(tokens), their_result.logits, "logits")
    assert_near(loss, their_result.loss, "loss")
    their_parameters = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        rows = [their_parameters[their_name].grad for their_name in their_names(parameter_name)]
        for mine, its, their_name in zip(
            parameter.grad.split([len(part) for part in rows]),
            rows,
            their_names(parameter_name),
            strict=True,
        ):
            assert_near(mine, its, f"gradient of {their_name}")


def test_the_rope_of_the_parity_test_has_all_three_bands():
    shape = SHAPES["llama 3.1 rope, three bands"][0]
    plain = rope_frequencies(ModelShape(2, 64, 96, 4, 2, 71, 10000.0))
    kept = rope_frequencies(shape) / plain
    factor = THREE_BANDS.factor
    bands = [
        (kept == 1).sum(),
        ((kept < 0.999) & (kept > 1.001 / factor)).sum(),
        torch.isclose(kept, torch.tensor(1 / factor)).sum(),
    ]
    assert all(count > 0 for count in bands) and sum(bands) == len(plain), bands


def test_an_ignored_label_has_no_loss_no_count_and_no_gradient():
    shape, batch, sequence = SHAPES["no groups"]
    model, _ = pair(shape, sequence)
    tokens = torch.randint(shape.vocab_size, (batch, sequence))
    labels = torch.randint(shape.vocab_size, (batch, sequence))
    whole_sum, _ = model(tokens, labels)
    first, second = labels.clone(), labels.clone()
    first[:, ::2], second[:, 1::2] = IGNORE_INDEX, IGNORE_INDEX
    parts = [model(tokens, half) for half in (first, second)]
    # Two fp32 sums instead of one.
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole_sum, rtol=1e-6, atol=0)
    assert (parts[0][1] + parts[1][1]).tolist() == [sequence] * batch
    loss_sum, count = model(tokens, torch.full_like(labels, IGNORE_INDEX))
    loss_sum.sum().backward()
    assert loss_sum.tolist() == [0.0] * batch == count.tolist()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_a_token_does_not_see_what_follows_it():
    shape, _, sequence = SHAPES["llama 3.1 rope, three bands"]
    model, _ = pair(shape, sequence)
    tokens = torch.randint(shape.vocab_size, (1, sequence))
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % shape.vocab_size
    before, after = model(tokens), model(changed)
    # Logits are near 1; the kernels may block otherwise.
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-5)
    assert (before[:, 40:] - after[:, 40:]).abs().max() > 0.1


# --- initial weights ------------------------------------------------------------------------------


def initialized(
    shape: ModelShape = MINIATURE.shape, seed: int = 1, sequence_length: int = 128
) -> Llama:
    model = fused_llama(shape, sequence_length)
    init_weights(model, shape.num_layers, seed, CLOSED.init_std, copy_weight)
    return model


def test_every_weight_has_the_standard_deviation_of_its_kind():
    model = initialized()
    scaled_std = 0.02 / math.sqrt(2 * MINIATURE.shape.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
            continue
        std = scaled_std if name.endswith(("o.weight", "down.weight")) else 0.02
        count = parameter.numel()
        # 5 sigma of the estimate.
        assert abs(float(parameter.detach().std()) / std - 1) < 5 / math.sqrt(2 * count), name
        assert abs(float(parameter.detach().mean())) < 5 * std / math.sqrt(count), name


def test_no_two_weights_are_drawn_alike_and_seeds_differ():
    first, second = whole(initialized(seed=1)), whole(initialized(seed=2))
    matrices = [
        tensor.flatten()[:64]
        for weights in (first, second)
        for tensor in weights.values()
        if tensor.ndim == 2
    ]
    drawn = {tuple((tensor / tensor.norm()).tolist()) for tensor in matrices}
    assert len(drawn) == len(matrices) == 2 * (4 * MINIATURE.shape.num_layers + 2)


def test_no_weight_is_minus_zero_even_where_the_generator_draws_it(monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda tensor, *args, **options: tensor.fill_(-0.0)
    )
    for name, parameter in initialized(TINY.shape).named_parameters():
        assert not torch.signbit(parameter).any(), name


def test_weights_do_not_depend_on_the_number_of_threads(monkeypatch):
    threads, weights = torch.get_num_threads(), []
    for cpus in (1, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: range(cpus))
        torch.set_num_threads(min(cpus, 2))
        weights.append(whole(initialized()))
    torch.set_num_threads(threads)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_weights_do_not_depend_on_the_number_of_ranks(two_ranks, processes):
    expected = whole(assemble_random(run_config(), TINY, processes, seed=7).model)
    plain = whole(initialized(TINY.shape, seed=7, sequence_length=TINY.sequence_length))
    for rank in two_ranks:
        assert rank["initial"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(rank["initial"][name], tensor) and torch.equal(
                plain[name], tensor
            ), name


def test_the_first_loss_is_that_of_a_guess():
    """Logits are near N(0, D*std^2), which adds half their variance to the mean logsumexp."""
    shape = MINIATURE.shape
    torch.manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (4, 2, 128))
    with torch.no_grad():
        loss_sum, count = initialized()(*tokens.unbind(1))
    expected = math.log(shape.vocab_size) + shape.hidden_size * 0.02**2 / 2
    # 512 tokens with logits of deviation 0.23: 5 sigma.
    assert abs(float(loss_sum.sum() / count.sum()) - expected) < 0.05


# --- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"), [(LLAMA31_8B, 8_030_261_248), (LLAMA2_70B, 68_976_648_192)]
)
def test_the_number_of_parameters_is_the_published_one_and_the_models(shape, expected):
    with torch.device("meta"):
        model = fused_llama(shape, 8192)
    assert (
        shape.num_parameters
        == expected
        == sum(parameter.numel() for parameter in model.parameters())
    )


def test_the_arithmetic_of_the_8b_model_is_51_47_gflop_per_token():
    assert (
        LLAMA31_8B.matmul_parameters == 8_030_261_248 - 128_256 * 4096 - 65 * 4096 == 7_504_658_432
    )
    flops = LLAMA31_8B.training_flops(8192)
    assert flops.total == 6 * 7_504_658_432 + 6 * 32 * 8192 * 4096
    assert flops.others == 6 * 128_256 * 4096 + 6 * 32 * 8192 * 4096, "head and attention"
    assert round(flops.total / 1e9, 2) == 51.47


def test_heads_that_do_not_divide_are_refused():
    for heads, kv_heads in ((5, 5), (4, 3)):
        with pytest.raises(ValueError, match="heads"):
            ModelShape(1, 64, 64, heads, kv_heads, 10, 10000.0)
