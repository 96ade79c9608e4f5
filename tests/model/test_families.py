"""Compare shapes of public models with published totals and with configs of transformers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from common.errors import ConfigError
from common.model.families import FAMILIES, family_of, shape_of
from common.model.shapes import LLAMA31_8B, ModelShape, RopeScaling

pytestmark = pytest.mark.quick

# Total parameters: `num_parameters` of each model's page at huggingface.co, which counts its
# safetensors.
PUBLISHED = {
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama2-70b": 68_976_648_192,
    "llama2-13b": 13_015_864_320,
    "llama2-7b": 6_738_415_616,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-4b": 4_022_468_096,
}
LLAMA = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=61,
)
MISTRAL = LLAMA | dict(model_type="mistral", num_key_value_heads=2)
QWEN3 = MISTRAL | dict(model_type="qwen3", head_dim=32)
# As Llama 3.2 has it.
LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def test_every_family_has_its_published_number_of_parameters():
    assert {name: family.shape.num_parameters for name, family in FAMILIES.items()} == PUBLISHED
    assert shape_of("Llama3.1-8B") is LLAMA31_8B


def test_a_head_dim_of_its_own_changes_projections_and_attention_and_not_the_rest():
    plain = ModelShape(2, 64, 96, 4, 2, 61, 10000.0)
    wide = replace(plain, explicit_head_dim=32)
    assert (wide.head_dim, wide.attention_size, wide.qkv_size) == (
        32,
        128,
        256,
    ) and plain.attention_size == 64
    assert wide.num_parameters - plain.num_parameters == 2 * 64 * (256 - 128 + 128 - 64)
    assert wide.attention_flops_per_token(10) == 2 * plain.attention_flops_per_token(10)
    assert wide.lora_parameters(3) == 2 * 3 * (64 + 256 + 128 + 64)
    assert replace(plain, hidden_size=128).head_dim == 32, "derived again"
    tied, normed = replace(plain, tied_embedding=True), replace(plain, qk_norm=True)
    assert (
        plain.num_parameters - tied.num_parameters == 61 * 64
        and tied.matmul_parameters == plain.matmul_parameters
    )
    assert (
        normed.num_parameters - plain.num_parameters == 2 * 2 * 16
        and normed.matmul_parameters == plain.matmul_parameters
    )


def written(folder, config: dict) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    {
        "old llama: as many kv heads": (
            LLAMA,
            ModelShape(2, 64, 96, 4, 4, 61, 10000.0, norm_eps=1e-6),
        ),
        "llama 3.2": (
            LLAMA
            | dict(
                num_key_value_heads=2,
                rope_theta=5e5,
                rms_norm_eps=float(np.float32(1e-5)),
                rope_scaling=LLAMA3_ROPE,
                tie_word_embeddings=True,
            ),
            ModelShape(2, 64, 96, 4, 2, 61, 5e5, RopeScaling(factor=32.0), tied_embedding=True),
        ),
        "mistral": (
            MISTRAL | dict(head_dim=16),
            ModelShape(2, 64, 96, 4, 2, 61, 10000.0, norm_eps=1e-6),
        ),
        "qwen3": (
            QWEN3 | dict(rope_theta=1e6),
            ModelShape(2, 64, 96, 4, 2, 61, 1e6, norm_eps=1e-6, explicit_head_dim=32, qk_norm=True),
        ),
    }.values(),
)
def test_a_config_json_is_read(tmp_path, config, expected):
    folder = written(tmp_path, config)
    assert shape_of(folder) == shape_of(folder + "/config.json") == expected


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen3"])
def test_a_config_json_that_transformers_writes_is_read(tmp_path, kind):
    import transformers

    sizes = dict(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    rope = dict(rope_theta=5e5) | (LLAMA3_ROPE if kind == "Llama" else dict(rope_type="default"))
    made = getattr(transformers, f"{kind}Config")(
        **sizes, head_dim=32, rope_parameters=rope, tie_word_embeddings=kind == "Qwen3"
    )
    made.save_pretrained(tmp_path)
    expected = ModelShape(2, 64, 96, 4, 2, 61, 5e5, norm_eps=1e-6, explicit_head_dim=32)
    expected = replace(expected, rope_scaling=RopeScaling(factor=32.0) if kind == "Llama" else None)
    assert shape_of(str(tmp_path)) == replace(
        expected, qk_norm=kind == "Qwen3", tied_embedding=kind == "Qwen3"
    )
    assert family_of(str(tmp_path)).sliding_window == (4096 if kind == "Mistral" else None)


def test_only_mistral_v01_has_a_window(tmp_path):
    assert {
        name: family.sliding_window for name, family in FAMILIES.items() if family.sliding_window
    } == {"mistral-7b-v0.1": 4096}
    # As in transformers, without the key there is one. v0.3 has null.
    assert family_of(written(tmp_path, MISTRAL)).sliding_window == 4096
    assert family_of(written(tmp_path, MISTRAL | dict(sliding_window=None))).sliding_window is None
    assert (
        family_of(
            written(tmp_path, QWEN3 | dict(sliding_window=4096, use_sliding_window=False))
        ).sliding_window
        is None
    )


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (LLAMA | dict(attention_bias=True), "attention_bias"),
        (LLAMA | dict(mlp_bias=True), "mlp_bias"),
        (LLAMA | dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (LLAMA | dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_scaling 'linear'"),
        (LLAMA | dict(quantization_config=dict(bits=4)), "quantization_config"),
        (QWEN3 | dict(use_sliding_window=True, sliding_window=4096), "use_sliding_window"),
        (LLAMA | dict(model_type="mixtral"), "model_type 'mixtral'"),
        ([1], "model_type None"),
        (LLAMA | dict(vocab_size="61"), "vocab_size"),
        (LLAMA | dict(head_dim=-16), "head_dim is -16"),
        (MISTRAL | dict(sliding_window="4k"), "sliding_window is '4k'"),
        (LLAMA | dict(rope_scaling="llama3"), "rope_scaling is 'llama3'"),
        (LLAMA | dict(rope_parameters=[1]), "rope_parameters is [1]"),
        (LLAMA | dict(rope_theta=10**400), "rope_theta"),
        (MISTRAL | dict(num_key_value_heads=None), "num_key_value_heads"),
        (LLAMA | dict(num_attention_heads=5), "shape"),
        (LLAMA | dict(rope_scaling=dict(rope_type="llama3")), "factor is None"),
        (LLAMA | dict(rope_scaling=LLAMA3_ROPE | dict(low_freq_factor=4.0)), "low_freq_factor"),
        (LLAMA | dict(tie_word_embeddings="false"), "tie_word_embeddings is 'false'"),
        (LLAMA | dict(head_dim=0), "head_dim is 0"),
        (LLAMA | dict(per_layer_config={"0": {}}), "per_layer_config"),
    ],
)
def test_what_the_blocks_do_not_compute_is_refused_by_name(tmp_path, config, what):
    with pytest.raises(ConfigError) as raised:
        shape_of(written(tmp_path, config))
    assert what in raised.value.what


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_attention_heads=5), ("hidden_size 64", "num_heads 5")),
        (dict(num_key_value_heads=3), ("num_heads 4", "num_kv_heads 3")),
        (dict(head_dim=15), ("head dimension 15",)),
    ],
)
def test_a_shape_that_is_refused_says_which_size_does_not_fit(tmp_path, changes, words):
    with pytest.raises(ConfigError) as raised:
        shape_of(written(tmp_path, LLAMA | changes))
    assert all(word in raised.value.why for word in words)


def test_an_unknown_name_suggests_near_ones_and_a_wrong_path_says_so(tmp_path):
    with pytest.raises(ConfigError) as raised:
        shape_of("qwen3-7b")
    assert "qwen3-8b" in raised.value.why
    with pytest.raises(ConfigError) as raised:
        shape_of("zzz")
    assert all(name in raised.value.why for name in FAMILIES)
    with pytest.raises(ConfigError, match="no such file"):
        shape_of(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        shape_of(str(tmp_path))
