"""Read the master weights of a checkpoint, and write them as weights or adapters."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from common import config as configs
from common.data.preparation import say
from common.errors import ConfigError
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.peft_adapter import save_peft_adapter
from common.model.saved_model import FILE_BYTES
from common.model.shapes import ModelShape
from common.training.build import DTYPES, default_dtype
from common.training.checkpoint import DcpReader
from common.training.continuation import newest
from open_llama.base_config import copy_generation_config, kept_entries
from open_llama.rules import Config, Rules, in_repository, rules_of
from open_llama.tokenizer import copy_tokenizer


def export(options: argparse.Namespace) -> None:
    """Write the newest checkpoint of `options.run`. Raises ConfigError if the output exists."""
    run = options.run
    folder, facts = newest(run)
    config = configs.load(run / "config.toml", Config)
    rules = rules_of(config)
    out = options.out or run / f"exported_step_{facts['step']:08d}"
    if out.exists():
        raise ConfigError(f"{out} exists", "nothing is overwritten", "name another --out")
    if config.lora_rank:
        export_adapter(folder, config, rules, out)
    else:
        data_dir = Path(os.environ["DATADIR"]) if os.environ.get("DATADIR") else None
        export_model(folder, config, rules, out, data_dir)
        if data_dir:
            copy_tokenizer(data_dir, out)
        else:
            say("note: DATADIR is not set, so no tokenizer is copied")
    say(f"{out}: step {facts['step']:,}, {facts['samples']:,} sequences")


def export_model(
    folder: Path, config: Config, rules: Rules, out: Path, data_dir: Path | None
) -> None:
    """Write the weights, rounded to the run's precision. Host memory holds the rounded model.

    `data_dir`: folder of the data, if it is known.
    """
    with default_dtype(DTYPES[config.precision]):
        model = fused_llama(rules.shape, rules.sequence_length)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.copy_(read_master(folder, name, parameter.shape))
    total = sum(parameter.nbytes for parameter in model.parameters())
    files = -(-total // FILE_BYTES)
    entries = kept_entries(config, data_dir)
    write_checkpoint(model, out, files=files, layout=ORDINARY, entries=entries)
    copy_generation_config(config, out)


def export_adapter(folder: Path, config: Config, rules: Rules, out: Path) -> None:
    """Write the adapters in fp32, in peft's format."""
    tensors = {
        name: read_master(folder, name, torch.Size(size))
        for name, size in adapter_sizes(rules.shape, config.lora_rank).items()
    }
    save_peft_adapter(
        out,
        tensors,
        rules.shape,
        config.lora_rank,
        config.lora_alpha,
        config.lora_dropout,
        in_repository(config.weights),
    )


def adapter_sizes(shape: ModelShape, rank: int) -> dict[str, tuple[int, int]]:
    """Return name -> size of each adapter's matrices (common/model/lora.py)."""
    sizes = {}
    for layer in range(shape.num_layers):
        sizes[f"blocks.{layer}.qkv.lora_a"] = (rank, shape.hidden_size)
        sizes[f"blocks.{layer}.qkv.lora_b"] = (shape.qkv_size, rank)
        sizes[f"blocks.{layer}.o.lora_a"] = (rank, shape.attention_size)
        sizes[f"blocks.{layer}.o.lora_b"] = (shape.hidden_size, rank)
    return sizes


def read_master(folder: Path, name: str, size: torch.Size) -> torch.Tensor:
    """Return the whole master weight of parameter `name` in a checkpoint, fp32 on the CPU."""
    master = torch.empty(size, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming a single process", which is right
        dcp.load({f"{name}.master": master}, storage_reader=DcpReader(str(folder)), no_dist=True)
    return master
