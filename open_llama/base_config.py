"""Copy entries of config.json, and generation_config.json, from the base to a saved model.

A saved model's own config.json describes its shape. Other programs also need the context, the ids
of special tokens, and generation_config.json. A model that was trained from random weights gets the
ids of the tokenizer of its data. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

from common.atomic_write import copy_whole
from common.model.families import CONTEXT
from open_llama.rules import Config, base_family, in_repository
from open_llama.tokenizer import recorded_token_ids

GENERATION = "generation_config.json"


def kept_entries(config: Config, data_dir: Path | None) -> dict[str, object]:
    """Return entries for config.json of the saved model, {} if there are none.

    Context and ids come from the weights that the run starts from. A run from random weights has
    the context of its model, and the ids that `prepare text` recorded in `data_dir` (None: the
    folder is unknown). The context is at least the sequence length of the run. A Mistral stays one,
    with its sliding window.

    Raises ConfigError, if config.json has changed since `rules_of` read it.
    """
    entries: dict[str, object] = {}
    if data_dir:
        entries |= recorded_token_ids(data_dir)
    family = base_family(config)
    if config.weights:
        entries |= family.token_ids
    if family.context:
        entries[CONTEXT] = max(family.context, config.sequence_length)
    if family.model_type == "mistral":  # its tensors have the names of Llama's
        entries |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": family.sliding_window,
        }
    return entries


def copy_generation_config(config: Config, folder: Path) -> None:
    """Copy generation_config.json, if the base has one, to the saved model in `folder`."""
    source = in_repository(config.weights) / GENERATION
    if config.weights and source.is_file():
        copy_whole(source, folder / GENERATION)
