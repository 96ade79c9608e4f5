"""Attention implementations that replace SDPA where a config's [env] sets ATTENTION_ENGINE."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch

from common.errors import ConfigError
from common.kernels import aiter_attention, flash_attention_4, repeated_heads_attention
from common.kernels.architecture import architecture
from common.kernels.engines import ATTENTION_ENGINE, REPEATED_HEADS, SDPA

KNOWN = {
    "aiter": aiter_attention,
    "flash_attention_4": flash_attention_4,
    REPEATED_HEADS: repeated_heads_attention,
}
OTHERWISE = f"set {ATTENTION_ENGINE}={SDPA} in [env]: torch's SDPA then computes attention"


def engine_module(name: str) -> ModuleType:
    """Return the module of this engine. Raises ConfigError for an unknown name."""
    if name not in KNOWN:
        raise ConfigError(
            f"{ATTENTION_ENGINE} = {name!r} is no engine",
            f"known are {', '.join((SDPA, *KNOWN))}",
            f"write one of them, or {OTHERWISE}",
        )
    return KNOWN[name]


def require_engine(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the chosen engine does not support this GPU or dtype.

    Also raised if the engine's package is missing or lacks a function that is called.
    """
    if os.environ[ATTENTION_ENGINE] == SDPA:
        return
    engine = engine_module(os.environ[ATTENTION_ENGINE])
    what = f"{ATTENTION_ENGINE} = {os.environ[ATTENTION_ENGINE]!r} cannot be used here"
    gpu = architecture(device) if device.type == "cuda" else "no GPU"
    if gpu not in engine.GPUS or dtype != torch.bfloat16:
        raise ConfigError(
            what,
            f"it is for bf16 on {' and '.join(engine.GPUS)}, this is {str(dtype)[6:]} on {gpu}",
            OTHERWISE,
        )
    try:
        for function in engine.FUNCTIONS:
            getattr(import_module(engine.MODULE), function)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            what, f"{type(error).__name__}: {error}", f"{engine.INSTALL}, or {OTHERWISE}"
        ) from error
