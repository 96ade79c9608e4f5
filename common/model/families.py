"""Shapes of public Llama-like models, by name or from a Hugging Face config.json.

The numbers are from the config.json that each publisher ships with the weights.
tests/model/test_families.py compares the resulting numbers of parameters with published ones.
Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from common.errors import ConfigError, failure_of
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape, RopeScaling
from common.records.json_lines import is_number
from common.suggestions import unknown
from common.text_tables import number
from common.values import path as path_of
from common.values import spelled_as


@dataclass(frozen=True)
class Family:
    """A published model."""

    name: str
    shape: ModelShape
    # Number of tokens that the published model's attention sees. Our attention sees all tokens,
    # which is the same in sequences of at most this length.
    sliding_window: int | None = None
    model_type: str = "llama"  # one of MODEL_TYPES
    # Only from a config.json, and only if it has them:
    context: int | None = None  # tokens
    token_ids: Mapping[str, object] = field(default_factory=dict, hash=False)  # of TOKENS


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
            model_type="mistral",
        ),
        Family(
            "qwen3-8b",
            ModelShape(36, 4096, 12288, 32, 8, 151936, 1000000.0, norm_eps=1e-6, qk_norm=True),
            model_type="qwen3",
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
            model_type="qwen3",
        ),
    )
}

PUBLISHERS = ("meta-llama", "qwen", "mistralai")  # of FAMILIES, on the Hugging Face hub
MODEL_TYPES = ("llama", "mistral", "qwen3")
CONTEXT = "max_position_embeddings"  # keys of config.json
TOKENS = ("bos_token_id", "eos_token_id")
# The only supported values of these keys. They are also the defaults of keys that are missing or
# null in config.json.
SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "per_layer_config": None,
    "quantization_config": None,
}
# Numbers that transformers takes if config.json lacks the key.
ROPE_THETA = 10000.0
NORM_EPS = 1e-6
QWEN3_HEAD_DIM = 128
MISTRAL_WINDOW = 4096
CHECK_FILE = "check the file"
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SCALING = ("factor", "low_freq_factor", "high_freq_factor")  # as in RopeScaling
ORIGINAL_CONTEXT = "original_max_position_embeddings"


def shape_of(name_or_path: str) -> ModelShape:
    """Return the shape of a model. Argument and errors: see `family_of`."""
    return family_of(name_or_path).shape


def known_name(text: str) -> str:
    """Return the name in FAMILIES that `text` means, "" if it means none.

    `text` is that name in any case, or the ID of a model on the Hugging Face hub, such as
    Qwen/Qwen3-8B or meta-llama/Llama-3.1-8B-Instruct.
    """
    publisher, _, name = text.rpartition("/")
    if publisher.lower() in PUBLISHERS:
        name = re.sub(r"^Meta-|(-Instruct|-Base|-chat)?(-hf)?$", "", name, flags=re.IGNORECASE)
    elif publisher:
        return ""
    name = spelled_as(name, FAMILIES)
    return name if name in FAMILIES else ""


def family_of(name_or_path: str) -> Family:
    """Return a model of FAMILIES, or one that a Hugging Face config.json describes.

    `name_or_path`: a name or ID (`known_name`), or the path of a config.json or of its folder.

    Raises ConfigError if the name is unknown, the file cannot be read, or our blocks do not support
    the model.
    """
    if name := known_name(name_or_path):
        return FAMILIES[name]
    path = path_of(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config(path)
    if path.suffix == ".json" or "/" in name_or_path:
        do = "check the path, or download its config.json first"
        raise unknown(f"{path}: no such file", path.name, FAMILIES, do)
    do = "use one of them, or a Hugging Face model's config.json"
    raise unknown(f"unknown model {name_or_path!r}", name_or_path, FAMILIES, do)


def require_within_window(family: Family, sequence_length: int) -> None:
    """Raise ConfigError if a sequence is longer than the model's sliding window."""
    window = family.sliding_window
    if window is not None and sequence_length > window:
        raise ConfigError(
            f"sequence_length {sequence_length} is beyond the sliding window of {family.name}",
            f"a token of this model sees {window} tokens, but attention here sees all",
            f"set at most {window}",
        )


def _from_config(path: Path) -> Family:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        known = failure_of(error)
        raise known or ConfigError(f"{path}: cannot be read as JSON", why, CHECK_FILE) from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{path}: unsupported model_type {kind!r}",
            f"supported types are {', '.join(MODEL_TYPES)}: models with RMSNorm, rotary embedding, "
            "grouped-query attention and SwiGLU",
            "choose a model of one of these types",
        )
    for key, value in SUPPORTED_VALUES.items():
        if config.get(key) not in (None, value):
            _refuse(path, key, config[key])
    context = config.get(CONTEXT)
    if context is not None:
        context = _size(path, CONTEXT, context)
    ids = {key: config[key] for key in TOKENS if config.get(key) is not None}
    window = _sliding_window(path, config)
    return Family(str(path), _shape(path, config), window, kind, context, ids)


def _shape(path: Path, config: dict[str, Any]) -> ModelShape:
    qwen3 = config["model_type"] == "qwen3"
    # As in transformers, whose config class has this default only for llama.
    if config["model_type"] == "llama" and config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config.get("num_attention_heads")
    layers, hidden, ffn, heads, kv_heads, vocab = (
        _size(path, key, config.get(key)) for key in SIZES
    )
    head_dim = config.get("head_dim")
    if head_dim is None and qwen3:
        head_dim = QWEN3_HEAD_DIM
    if head_dim is not None:
        head_dim = _size(path, "head_dim", head_dim)
    tied = config.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise ConfigError(
            f"{path}: tie_word_embeddings is {tied!r}", "it must be true or false", CHECK_FILE
        )
    base, scaling = _rotation(path, config)
    epsilon = _number(path, "rms_norm_eps", config.get("rms_norm_eps", NORM_EPS))
    try:
        return ModelShape(
            layers,
            hidden,
            ffn,
            heads,
            kv_heads,
            vocab,
            rope_base=float(base),
            rope_scaling=scaling,
            # Conversions from GGUF write 1e-5 as its fp32 value, 9.999999747378752e-06.
            norm_eps=float(f"{epsilon:.6g}"),
            explicit_head_dim=head_dim if head_dim and head_dim * heads != hidden else None,
            qk_norm=qwen3,
            tied_embedding=tied,
        )
    except ValueError as error:
        raise ConfigError(f"{path}: not a valid model shape", str(error), CHECK_FILE) from None


def _rotation(path: Path, config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling of the rotation, as transformers 5 reads them.

    Old files have `rope_theta` and `rope_scaling`, new ones both in `rope_parameters`. In
    transformers, `rope_scaling` replaces all of `rope_parameters`. A base that would be lost in
    this way is refused.
    """
    parameters = _table(path, config, "rope_parameters")
    rope = _table(path, config, "rope_scaling") or parameters
    stored = (rope.get("rope_theta"), config.get("rope_theta"), ROPE_THETA)
    base = _number(path, "rope_theta", next(value for value in stored if value is not None))
    lost = parameters.get("rope_theta")
    if rope.get("rope_theta") is None and lost not in (None, base):
        raise ConfigError(
            f"{path}: rope_scaling has no rope_theta, but rope_parameters has {lost!r}",
            "rope_scaling replaces all of rope_parameters, so rope_theta would be "
            f"{number(base, 'g')}",
            "move all entries to rope_parameters, and remove rope_scaling",
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        _refuse(path, "partial_rotary_factor", rope["partial_rotary_factor"])
    if any(isinstance(value, dict) for value in rope.values()):
        _refuse(path, "rope_parameters", "of each kind of layer")
    if kind == "default":
        return base, None
    if kind != "llama3":
        _refuse(path, "rope_scaling", kind)
    factor, low, high = (_number(path, key, rope.get(key)) for key in SCALING)
    context = config.get(ORIGINAL_CONTEXT)  # wins over the scaling's
    if context is None:
        context = rope.get(ORIGINAL_CONTEXT)
    if low >= high:
        raise ConfigError(
            f"{path}: low_freq_factor {low:g} is not below high_freq_factor {high:g}",
            "frequencies between the two are blended",
            CHECK_FILE,
        )
    return base, RopeScaling(factor, low, high, _size(path, ORIGINAL_CONTEXT, context))


def _size(path: Path, key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{path}: {key} is {value!r}", "it must be a positive integer", CHECK_FILE
        )
    return value


def _number(path: Path, key: str, value: object) -> float:
    if is_number(value) and value > 0:
        return value
    raise ConfigError(
        f"{path}: {key} is {value!r}", "it must be a finite positive number", CHECK_FILE
    )


def _table(path: Path, config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under `key`, or {} if it is missing or null."""
    table = config.get(key)
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{path}: {key} is {table!r}", "it must be a JSON object", CHECK_FILE)
    return table or {}


def _sliding_window(path: Path, config: dict[str, Any]) -> int | None:
    """Return the sliding window of all layers in tokens, or None if the model has none.

    In transformers, only `sliding_window: null` turns off Mistral's. Qwen3 has none unless
    `use_sliding_window` is set, and Llama has none.
    """
    kind = config["model_type"]
    layers = config.get("layer_types") or ["full_attention"]
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        _refuse(path, "layer_types", layers)
    if kind == "qwen3" and config.get("use_sliding_window"):
        _refuse(path, "use_sliding_window", config["use_sliding_window"])
    window = config.get("sliding_window", MISTRAL_WINDOW)
    if kind != "mistral" or window is None:
        return None
    return _size(path, "sliding_window", window)


def _refuse(path: Path, key: str, value: object) -> NoReturn:
    raise ConfigError(
        f"{path}: unsupported {key} {value!r}",
        "the blocks of this package do not compute it",
        "choose a model without it",
    )
