"""Copy entries of config.json, and generation_config.json, from the base to a saved model.

A saved model's own config.json describes its shape. Other programs also need the context, the ids
of special tokens, and generation_config.json. A model that was trained from random weights gets the
ids of the tokenizer of its data. Standard library only.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from common.model.checkpoint_names import CONFIG
from common.model.families import FAMILIES
from open_llama.rules import Config, in_repository
from open_llama.tokenizer import TOKENS, recorded_token_ids

GENERATION = "generation_config.json"
CONTEXT = "max_position_embeddings"


def kept_entries(config: Config, data_dir: Path | None) -> dict[str, object]:
    """Return entries for config.json of the saved model, {} if there are none.

    Context and ids are those of the weights that the run starts from. A run from random weights has
    the context of its model, and the ids that `prepare text` recorded in `data_dir` (None: the
    folder is unknown). The context is at least the sequence length of the run.
    """
    ids = recorded_token_ids(data_dir) if data_dir else {}
    path = in_repository(config.weights or config.model)
    if not config.weights and config.model.lower() in FAMILIES:
        return dict(ids)
    try:
        published = json.loads((path / CONFIG if path.is_dir() else path).read_text())
    except (OSError, ValueError):  # a base may have weights only
        return dict(ids)
    keys = (CONTEXT, *TOKENS) if config.weights else (CONTEXT,)
    entries = {key: published[key] for key in keys if published.get(key) is not None}
    if CONTEXT in entries:
        entries[CONTEXT] = max(entries[CONTEXT], config.sequence_length)
    return ids | entries


def copy_generation_config(config: Config, folder: Path) -> None:
    """Copy generation_config.json, if the base has one, to the saved model in `folder`."""
    source = in_repository(config.weights) / GENERATION
    if config.weights and source.is_file():
        shutil.copyfile(source, folder / GENERATION)
