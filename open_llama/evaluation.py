"""Load a model and its adapters, and measure the loss."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from pathlib import Path
from typing import Any

import torch

from common import config as configs
from common.data.indexed_dataset_header import (
    index_path,
    mask_path,
    require_validation,
    stored_documents,
    stored_sequences,
    tokens_path,
)
from common.data.preparation import require_as_recorded, say
from common.errors import ConfigError, NonFinite, PreflightError
from common.kernels.attention import attention_backends
from common.model.checkpoint_files import read_json
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_names import CONFIG
from common.model.families import CONTEXT, family_of, require_within_window
from common.model.fused_block import fused_llama
from common.model.llama import Llama
from common.model.merged_adapter import read_adapter, require_modules
from common.model.peft_adapter import OUTPUT, SPLIT, require_adapter
from common.model.precision import DTYPES, default_dtype
from common.sharding.processes import start_processes
from common.training.arguments import NAME_WEIGHTS, WEIGHTS, weights_of
from common.training.loop import evaluate, next_token_pairs, rank_micro_batches
from open_llama.data import Documents, spread_windows
from open_llama.rules import BENCHMARK
from open_llama.tokenizer import RECORD, are_masked

MICRO_BATCH_TOKENS = 8192
DEFAULT_LENGTH = 1024  # tokens per sequence


def require_model(folder: Path) -> None:
    """Raise ConfigError unless `folder` holds a model."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder", WEIGHTS, NAME_WEIGHTS)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: no {CONFIG}", WEIGHTS, NAME_WEIGHTS)


def trained_length(model: Path, adapter: Path | None = None) -> tuple[int, Path]:
    """Return the tokens per sequence that a model was trained with, and the file that names them.

    An adapter, or else a model, in the directory of a run has the sequence length of that run
    (config.toml). Others have the context in config.json, or 0 if it names none. Raises ConfigError
    or StorageError if config.toml cannot be read, and WeightsError if config.json cannot be read.
    """
    path = (adapter or model).absolute().parent / "config.toml"
    run: dict = {}
    with contextlib.suppress(FileNotFoundError):
        run = configs.read_table(path)
    if "sequence_length" in run:  # a run of open_llama
        length = run["sequence_length"]
        if type(length) is not int or length < 1:
            do = "correct it, or set --sequence-length"
            raise ConfigError(f"{path}: sequence_length is {length!r}", "it counts tokens", do)
        return length, path
    path = model / CONFIG
    context = read_json(path).get(CONTEXT)
    return context if type(context) is int and context > 0 else 0, path


def default_length(model: Path, adapter: Path | None = None) -> int:
    """Return the tokens per sequence to evaluate with, and print where the number comes from.

    Models outside the directory of a run have DEFAULT_LENGTH, or their context if that is smaller.
    Raises an error if the file that names the number cannot be read.
    """
    length, path = trained_length(model, adapter)
    origin = f"the length used by the run ({path})"
    if path.name == CONFIG:
        origin = f"the model's context ({CONTEXT} in {path})"
        if not 0 < length < DEFAULT_LENGTH:
            length = DEFAULT_LENGTH
            where = f"in the directory of a run of {BENCHMARK}"
            origin = f"the default, since {adapter or model} is not {where}"
    say(f"sequence length {length}: {origin}")
    return length


def load_model(folder: Path, sequence_length: int, device: torch.device) -> Llama:
    """Return the model in the safetensors checkpoint `folder`, without gradients.

    Raises ConfigError if there is no such folder, or if sequences are longer than the model's
    sliding window, and WeightsError if the checkpoint is damaged.
    """
    require_model(folder)
    family = family_of(str(folder))
    require_within_window(family, sequence_length)
    on_gpu = device.type == "cuda"
    dtype = DTYPES["bf16" if on_gpu else "fp32"]
    with device, default_dtype(dtype):
        model = fused_llama(family.shape, sequence_length, "triton" if on_gpu else "reference")
        model.make_rope_tables(device)
    model.requires_grad_(False)
    load_base(model, folder)
    return model


@torch.no_grad()
def add_adapter(model: Llama, folder: Path) -> None:
    """Add alpha / rank x B A of the adapter in `folder`, in peft's format, to the weights.

    Raises WeightsError if the adapter cannot be read or has other modules, ConfigError if their
    sizes do not fit the model.
    """
    adapter = read_adapter(folder)
    layers = [f"model.layers.{layer}.self_attn" for layer in range(model.shape.num_layers)]
    require_modules(adapter, (f"{layer}.{name}" for layer in layers for name in (*SPLIT, OUTPUT)))
    try:
        for layer, attention in enumerate(layers):
            block: Any = model.blocks[layer]
            qkv = torch.cat([adapter.product(f"{attention}.{name}") for name in SPLIT])
            output = adapter.product(f"{attention}.{OUTPUT}")
            for weight, product in ((block.qkv.weight, qkv), (block.o.weight, output)):
                weight += (adapter.scale * product).to(weight.device, weight.dtype)
    except RuntimeError as error:
        what = f"{folder} does not fit the model: {error}"
        do = "name the base that it was trained on"
        raise ConfigError(what, "the adapter was trained on another model", do) from error


def measure(options: argparse.Namespace) -> None:
    """Print the loss of the model that the options of `eval` name."""
    device_name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_name == "cuda" and not torch.cuda.is_available():
        why = "no driver answers, *_VISIBLE_DEVICES hides all GPUs, or torch is built for the CPU"
        raise PreflightError("--device cuda, but torch sees no GPU", why, "leave out --device")
    weights = weights_of(options.model, options.adapter)
    require_model(weights.model)
    if weights.adapter:
        require_adapter(weights.adapter)
    length = options.sequence_length or default_length(weights.model, weights.adapter)
    masked = are_masked([options.data])  # conversations, of which the loss counts the answers
    available = stored_sequences(options.data, length)
    if masked:
        available = stored_documents(options.data, length, sys.maxsize)
    sequences = options.sequences or available
    unit = f"sequences of {length} tokens"
    do = "set smaller --sequences or a smaller --sequence-length, or name a longer file"
    require_validation(options.data, available, max(1, sequences), unit, do)
    vocab_size = family_of(str(weights.model)).shape.vocab_size
    files = [index_path(options.data), tokens_path(options.data), mask_path(options.data)]
    prepare = f"./run_and_time.sh {BENCHMARK} prepare"
    require_as_recorded(options.data.parent / RECORD, files, vocab_size, prepare)
    processes = start_processes(device_name, 600.0)
    with attention_backends(device_name, DTYPES["bf16" if device_name == "cuda" else "fp32"]):
        model = load_model(weights.model, length, processes.device)
        if weights.adapter:
            add_adapter(model, weights.adapter)
        if masked:
            pairs = Documents(options.data, length, vocab_size).spread(sequences)
        else:
            pairs = next_token_pairs(spread_windows(options.data, length, sequences, vocab_size))
        size = max(1, min(sequences, MICRO_BATCH_TOKENS // length))
        batches = rank_micro_batches(pairs, processes, size)
        loss = evaluate(model, batches, processes, per_token=masked)
    torch.distributed.destroy_process_group()
    if not math.isfinite(loss):
        what = f"{weights.model}: the loss is {loss}"
        why = "a weight or an activation of the model is not finite"
        raise NonFinite(what, why, "check the run or the file that the weights come from")
    print(
        f"loss {loss:.4f}, perplexity {perplexity(loss)}:"
        f" {sequences:,} sequences of {length} tokens"
    )


def perplexity(loss: float) -> str:
    """Return e^loss as text, which is "inf" beyond the largest float."""
    return f"{torch.tensor(loss, dtype=torch.float64).exp().item():.2f}"
