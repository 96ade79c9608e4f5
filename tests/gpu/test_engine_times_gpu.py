"""The choice of engines by time on a GPU, at the sizes of the 8B. One GPU."""

import pytest
import torch

from common import config as configs
from common import engines
from common.benchmarks import config_class, rules_of
from common.kernels.architecture import gpu_architecture
from common.kernels.attention import attention_backends
from common.paths import ROOT
from common.self_test import engine_times
from common.self_test.kernel_cases import Sizes
from common.self_test.run import check_engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Return a function that chooses as a new process would, with kept times in `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in engines.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    path = ROOT / "configs/llama31_8b/H200_1x1.toml"
    config = configs.load(path, config_class("llama31_8b"))
    rules = rules_of("llama31_8b", config)
    sizes = Sizes.of(config, rules.shape, rules.sequence_length, rules.lora_rank)

    def check():
        engines.forget()
        with attention_backends("cuda"):
            return check_engines(sizes, CUDA)

    return check


def test_every_operation_takes_its_fastest_engine_and_the_next_start_keeps_it(start, monkeypatch):
    cold = start()
    print(*cold.engine_lines(), sep="\n")
    assert not cold.bad and not cold.notes
    usable = {}
    for name, choice in cold.engines.items():
        usable[name] = len(engines.choose(name, gpu_architecture(CUDA), {}, "bf16").usable)
        assert len(choice.ms) == (usable[name] if usable[name] > 1 else 0)
        if choice.ms:
            assert choice.engine == engine_times.fastest(choice.ms)
            assert {len(times) for times in choice.ms.values()} == {engine_times.MEASUREMENTS}
    assert usable[engines.ATTENTION] > 1 and usable[engines.PRODUCTS] > 1
    assert torch.cuda.memory_allocated() < 2**28
    monkeypatch.setattr(engine_times, "times_in_turns", lambda *_: pytest.fail("timed again"))
    kept = start()
    assert {name: (choice.engine, choice.ms) for name, choice in kept.engines.items()} == {
        name: (choice.engine, choice.ms) for name, choice in cold.engines.items()
    }


def test_an_engine_that_is_slow_here_is_not_used(start, monkeypatch):
    """The first of the list runs its product twice as often as the others."""
    first = engines.choose(engines.PRODUCTS, gpu_architecture(CUDA), {}).engine
    module = engines.module_of(first)
    product = module.product

    def slow(*arguments):
        product(*arguments)
        return product(*arguments)

    monkeypatch.setattr(module, "product", slow)
    choice = start().engines[engines.PRODUCTS]
    print(choice)
    assert choice.engine != first.name and "faster than" in choice.why
