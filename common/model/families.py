"""Shapes of public Llama-like models, by name or from a Hugging Face config.json.

The numbers are from the config.json that each publisher ships with the weights.
tests/model/test_families.py compares the resulting numbers of parameters with published ones.
Standard library only.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common.errors import ConfigError
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape, RopeScaling


@dataclass(frozen=True)
class Family:
    """A published model."""

    name: str
    shape: ModelShape
    # Number of tokens that the published model's attention sees. Our attention sees all tokens,
    # which is the same in sequences of at most this length.
    sliding_window: int | None = None


LLAMA32_SCALING = RopeScaling(factor=32.0)

# The positional arguments of ModelShape: layers, hidden size, ffn size, query heads, key heads,
# vocabulary, base of the rotation.
FAMILIES = {
    family.name: family
    for family in (
        Family("llama3.1-8b", LLAMA31_8B),
        Family("llama3.1-70b", ModelShape(80, 8192, 28672, 64, 8, 128256, 500000.0, RopeScaling())),
        Family(
            "llama3.1-405b", ModelShape(126, 16384, 53248, 128, 8, 128256, 500000.0, RopeScaling())
        ),
        Family(
            "llama3.2-1b",
            ModelShape(
                16, 2048, 8192, 32, 8, 128256, 500000.0, LLAMA32_SCALING, tied_embedding=True
            ),
        ),
        Family("llama2-70b", LLAMA2_70B),
        Family("llama2-13b", ModelShape(40, 5120, 13824, 40, 40, 32000, 10000.0)),
        Family("llama2-7b", ModelShape(32, 4096, 11008, 32, 32, 32000, 10000.0)),
        Family(
            "mistral-7b-v0.1",
            ModelShape(32, 4096, 14336, 32, 8, 32000, 10000.0),
            sliding_window=4096,
        ),
        Family(
            "qwen3-8b",
            ModelShape(36, 4096, 12288, 32, 8, 151936, 1000000.0, norm_eps=1e-6, qk_norm=True),
        ),
        Family(
            "qwen3-4b",
            ModelShape(
                36,
                2560,
                9728,
                32,
                8,
                151936,
                1000000.0,
                norm_eps=1e-6,
                explicit_head_dim=128,
                qk_norm=True,
                tied_embedding=True,
            ),
        ),
    )
}

MODEL_TYPES = ("llama", "mistral", "qwen3")
# The only supported values of these keys. They are also the defaults of keys that are missing or
# null in config.json.
SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
CHECK_FILE = "check the file"
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def shape_of(name_or_path: str) -> ModelShape:
    """Return the shape of a model. Argument and errors: see `family_of`."""
    return family_of(name_or_path).shape


def family_of(name_or_path: str) -> Family:
    """Return a model of FAMILIES, or one that a Hugging Face config.json describes.

    `name_or_path`: a name, or the path of a config.json or of its folder.

    Raises ConfigError if the name is unknown, the file cannot be read, or our blocks do not support
    the model.
    """
    family = FAMILIES.get(name_or_path.lower())
    if family is not None:
        return family
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config(path)
    if path.suffix == ".json" or "/" in name_or_path:
        raise ConfigError(
            f"{path}: no such file",
            "a model is a known name or the path of a config.json",
            "check the path",
        )
    near = difflib.get_close_matches(name_or_path.lower(), FAMILIES, n=3, cutoff=0.5)
    why = f"known models are {', '.join(FAMILIES)}"
    if near:
        why = f"similar names are {', '.join(near)}"
    raise ConfigError(
        f"unknown model {name_or_path}",
        why,
        "use one of these, or the path of a Hugging Face model's config.json",
    )


def _from_config(path: Path) -> Family:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read as JSON", f"{type(error).__name__}: {error}", CHECK_FILE
        ) from None
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES:
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise ConfigError(
            f"{path}: unsupported model_type {kind!r}",
            f"supported types are {', '.join(MODEL_TYPES)}: models with RMSNorm, rotary embedding, "
            "grouped-query attention and SwiGLU",
            "choose a model of one of these types",
        )
    for key, value in SUPPORTED_VALUES.items():
        if config.get(key) not in (None, value):
            _refuse(path, key, config[key])
    return Family(str(path), _shape(path, config), _sliding_window(path, config))


def _shape(path: Path, config: dict[str, Any]) -> ModelShape:
    qwen3 = config["model_type"] == "qwen3"
    # As in transformers, whose config class has this default only for llama.
    if config["model_type"] == "llama" and config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config.get("num_attention_heads")
    missing = [key for key in SIZES if type(config.get(key)) is not int or config[key] < 1]
    if missing:
        raise _not_positive(path, missing[0], config.get(missing[0]))
    layers, hidden, ffn, heads, kv_heads, vocab = (config[key] for key in SIZES)
    head_dim = config.get("head_dim") or None
    if head_dim is None and qwen3:
        head_dim = 128  # the default of transformers
    if head_dim is not None and (type(head_dim) is not int or head_dim < 1):
        raise _not_positive(path, "head_dim", head_dim)
    # transformers 5 has rope_theta and the scaling in rope_parameters.
    rope = _table(path, config, "rope_parameters")
    scaling = rope if rope.get("rope_type") else _table(path, config, "rope_scaling")
    try:
        return ModelShape(
            layers,
            hidden,
            ffn,
            heads,
            kv_heads,
            vocab,
            rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(path, scaling),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            explicit_head_dim=head_dim if head_dim and head_dim * heads != hidden else None,
            qk_norm=qwen3,
            tied_embedding=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path}: not a valid model shape",
            f"{type(error).__name__}: {error}",
            CHECK_FILE,
        ) from None


def _not_positive(path: Path, key: str, value: object) -> ConfigError:
    return ConfigError(f"{path}: {key} is {value!r}", "it must be a positive integer", CHECK_FILE)


def _table(path: Path, config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under `key`, or {} if it is missing or null."""
    table = config.get(key) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {key} is {table!r}", "it must be a JSON object", CHECK_FILE)
    return table


def _rope_scaling(path: Path, scaling: dict[str, Any]) -> RopeScaling | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        _refuse(path, "rope_scaling", kind)
    return RopeScaling(
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )


def _sliding_window(path: Path, config: dict[str, Any]) -> int | None:
    """Return the sliding window of all layers in tokens, or None if the model has none.

    Configs of Qwen3 have a window that `use_sliding_window` turns off.
    """
    on = config.get("use_sliding_window", config["model_type"] == "mistral")
    if on and config["model_type"] == "qwen3":
        _refuse(path, "use_sliding_window", True)
    window = config.get("sliding_window") if on else None
    if window is not None and (type(window) is not int or window < 1):
        raise _not_positive(path, "sliding_window", window)
    return window


def _refuse(path: Path, key: str, value: object) -> NoReturn:
    raise ConfigError(
        f"{path}: unsupported {key} {value!r}",
        "the blocks of this package do not compute it",
        "choose a model without it",
    )
