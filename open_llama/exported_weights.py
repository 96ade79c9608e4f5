"""Read the master weights of a checkpoint, and write them as weights or adapters."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from common import config as configs
from common.atomic_write import new_folder
from common.data.preparation import say
from common.errors import ConfigError, RunError, WeightsError, first_line
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import require_new, write_checkpoint
from common.model.fused_block import fused_llama
from common.model.peft_adapter import save_peft_adapter
from common.model.precision import DTYPES, default_dtype
from common.model.saved_model import FILE_BYTES
from common.model.shapes import ModelShape
from common.paths import data_folder
from common.training.arguments import data_of_run, run_to_continue
from common.training.checkpoint import DcpReader
from common.training.continuation import DATA_FILES, damaged, data_record, newest
from open_llama.base_config import copy_generation_config, kept_entries
from open_llama.rules import BENCHMARK, Config, Rules, in_repository, rules_of
from open_llama.tokenizer import copy_tokenizer


def export(options: argparse.Namespace) -> None:
    """Write the newest checkpoint of `options.run`. Its folder gets its name when it is complete.

    Raises ConfigError if the run is of another benchmark, or if the output exists.
    """
    run = run_to_continue(options.run)
    folder, facts = newest(run)
    if facts["benchmark"] != BENCHMARK:
        what = f"{run} is a run of {facts['benchmark']}"
        why = f"export reads the checkpoints of {BENCHMARK}"
        raise ConfigError(what, why, f"name a run of {BENCHMARK}")
    config = configs.load(run / "config.toml", Config)
    rules = rules_of(config)
    out = options.out or run / f"exported_step_{facts['step']:08d}"
    require_new(out)
    data_dir = tokenizer_folder(run, facts, rules)

    def add_tokenizer(new: Path) -> None:
        if data_dir and not copy_tokenizer(data_dir, new):
            say(f"note: {data_dir} has no tokenizer to copy; DATADIR names the folder of the data")

    if config.lora_rank:
        export_adapter(folder, config, rules, out, add_tokenizer)
    else:
        with new_folder(out) as new:
            export_model(folder, config, rules, new, data_dir)
            add_tokenizer(new)
    say(f"{out}: step {facts['step']:,}, {facts['samples']:,} sequences")


def tokenizer_folder(run: Path, facts: dict, rules: Rules) -> Path | None:
    """Return the folder of the data, or None, with a note, if it holds the data of another run.

    `facts`: the checkpoint's.
    """
    data_dir = data_folder(BENCHMARK, os.environ)
    if not os.environ.get("DATADIR"):
        data_dir = data_of_run(run) or data_dir
    stored = data_record(data_dir, rules.recorded_files(data_dir))
    recorded = facts[DATA_FILES]
    if all(recorded.get(name) == identity for name, identity in stored.items()):
        return data_dir
    say(
        f"note: {data_dir} holds other data or another tokenizer than the run used: "
        "set DATADIR to copy the tokenizer"
    )
    return None


def export_model(
    folder: Path, config: Config, rules: Rules, out: Path, data_dir: Path | None
) -> None:
    """Write the weights, rounded to the run's precision.

    Host memory holds the rounded model. `data_dir`: folder of the run's data, if it is known.
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


def export_adapter(
    folder: Path, config: Config, rules: Rules, out: Path, add: Callable[[Path], object]
) -> None:
    """Write the adapters in fp32, in peft's format. `add`: adds files to the new folder."""
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
        add,
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
    """Return the whole master weight of parameter `name` in a checkpoint, fp32 on the CPU.

    Raises WeightsError if the checkpoint is damaged, or is removed because the run saved a new one.
    """
    master = torch.empty(size, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming a single process", which is right
        try:
            reader = DcpReader(str(folder))
            dcp.load({f"{name}.master": master}, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise _cause(folder, error) from None
    return master


def _cause(folder: Path, error: CheckpointException) -> BaseException:
    """Return the error for a checkpoint `folder` that could not be read."""
    (cause, _), *_ = error.failures.values()
    if isinstance(cause, KeyboardInterrupt | RunError):
        return cause
    if not folder.is_dir():
        why = "a run removes its checkpoint when a newer one is complete"
        return WeightsError(f"{folder} was removed while it was read", why, "export again")
    return damaged(folder, first_line(cause))
