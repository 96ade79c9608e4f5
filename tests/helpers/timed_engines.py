"""A node of gfx942 on a CPU, whose engines compute like SDPA and take given times."""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from common import engines
from common.kernels import attention, fp8, swiglu
from common.machine.hardware import Probe
from common.self_test import engine_times
from common.self_test.kernel_cases import Sizes
from common.self_test.run import check_engines
from llama31_8b.rules import MINIATURE

CPU = torch.device("cpu")
SIZES = Sizes(MINIATURE.shape, 32, 1, False, 0, "reference", torch.bfloat16)
AITER = {"amd-aiter": "0.1.14.post1"}
DRIVER = "6.16.13"


def causal_attention(q, k, v):
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)


class Gfx942:
    """The stand-in node. `timed` lists the operations that were timed, in their order."""

    def __init__(self, monkeypatch, cache, packages=(), driver=DRIVER, **ms):
        """`cache`: folder of kept times. `ms`: engine of attention -> its time, or one a start."""
        self.ms = ms
        self.timed = []
        self.tested = []  # engines of attention
        for module in (attention, fp8, swiglu):
            monkeypatch.setattr(module, "gpu_architecture", lambda device: "gfx942")
        monkeypatch.setattr(engines, "version_of", dict(packages).get)
        monkeypatch.setattr(engines, "version_of", lambda name: dict(packages).get(name, ""))
        monkeypatch.setattr(engines, "module_of", self.module_of)
        monkeypatch.setattr(engine_times, "probe", lambda: Probe("amd", (), driver))
        monkeypatch.setattr(engine_times, "times_in_turns", self.times_in_turns)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def module_of(self, engine):
        def attend(q, k, v):
            self.tested.append(engine.name)
            return causal_attention(q, k, v)

        return SimpleNamespace(require=lambda: None, causal_attention=attend)

    def times_in_turns(self, operation, names, work, device):
        self.timed.append(operation.name)
        work()  # one layer, with the engine in use
        return {name: [*self.ms[name]] for name in names}

    def start(self):
        """Choose as a new process would, and return the result."""
        engines.forget()
        self.timed.clear()
        self.tested.clear()
        return check_engines(SIZES, CPU)


def choose_on_a_rank(processes, folder):
    """Choose on one of two ranks with times of its own. Return what it chose, and why."""
    import pytest

    ms = ({"aiter": (9, 9), "repeated_heads": (5, 5), "sdpa": (8, 8)},)
    ms += ({"aiter": (9, 9), "repeated_heads": (12, 12), "sdpa": (8, 8)},)
    with pytest.MonkeyPatch.context() as monkeypatch:
        node = Gfx942(monkeypatch, folder / f"cache_{processes.rank}", AITER, **ms[processes.rank])
        first = node.start().engines["attention"]
        timed = list(node.timed)
        second = node.start().engines["attention"]
        kept = [path.name for path in (folder / f"cache_{processes.rank}").rglob("*.json")]
    return {
        "engines": [first.engine, second.engine],
        "ms": first.ms,
        "timed": [timed, node.timed],
        "files": len(kept),
    }
