"""The optional packages that compute attention in SDPA's place where a config's [env] names one in ATTENTION_ENGINE."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch

from common.errors import ConfigError
from common.kernels import aiter_attention, flash_attention_4
from common.kernels.architecture import architecture
from common.kernels.engines import ATTENTION_ENGINE

KNOWN = {"aiter": aiter_attention, "flash_attention_4": flash_attention_4}
OTHERWISE = f"remove {ATTENTION_ENGINE} from [env]: torch's SDPA then computes attention"


def chosen_engine() -> ModuleType:
    """The file that calls the package which ATTENTION_ENGINE names. Raises ConfigError for another name."""
    name = os.environ[ATTENTION_ENGINE]
    if name not in KNOWN:
        raise ConfigError(
            f"{ATTENTION_ENGINE} = {name!r} is no engine", f"known are {', '.join(KNOWN)}", f"write one of them, or {OTHERWISE}"
        )
    return KNOWN[name]


def require_engine(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError on a GPU or in a dtype that the chosen engine is not for, and where its package lacks what is called."""
    engine = chosen_engine()
    what = f"{ATTENTION_ENGINE} = {os.environ[ATTENTION_ENGINE]!r} cannot be used here"
    gpu = architecture(device) if device.type == "cuda" else "no GPU"
    if gpu not in engine.GPUS or dtype != torch.bfloat16:
        raise ConfigError(what, f"it is for bf16 on {' and '.join(engine.GPUS)}, this is {str(dtype)[6:]} on {gpu}", OTHERWISE)
    try:
        for function in engine.FUNCTIONS:
            getattr(import_module(engine.MODULE), function)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(what, f"{type(error).__name__}: {error}", f"{engine.INSTALL}, or {OTHERWISE}") from error
