"""Transformer Engine's layers in our block: on a CPU with a stand-in for the package; tests/gpu has the package itself."""

import sys
import types
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from plain_block import Block
from tiny import TINY, run, run_config
from torch import nn
from torch.nn import functional as F

from common.errors import ConfigError, PreflightError
from common.kernels.swiglu import swiglu_reference
from common.model.fused_block import fused_llama
from common.model.te_block import VERSION, TEBlock, TransformerEngine
from common.training.loop import Batching, evaluate, train_step
from common.training.warmup import synthetic_batches, warm_up
from llama31_8b import train as trainer
from llama31_8b.rules import Config
from llama31_8b.train import assemble

BATCHING = Batching(8, 2)


def config(**changes) -> Config:
    return run_config(**{"gpu": "H200", "fp8": "te"} | changes)


@pytest.fixture(autouse=True)
def reference_kernels():
    """The config names a GPU, whose engine is Triton; these tests run on a CPU."""
    with mock.patch.object(Config, "kernels", "reference"):
        yield


# What the real package does with scales, in a few lines of our own, and the products in the dtype given.


@dataclass(repr=False, kw_only=True)
class Recipe:
    name: str
    options: dict

    def delayed(self) -> bool:
        return self.name == "DelayedScaling"


class Scales:
    def __init__(self, length: int, tensors: int):
        self.scale, self.amax_history = torch.ones(tensors), torch.zeros(length, tensors)

    def see(self, place: int, tensor: torch.Tensor) -> None:
        self.amax_history[0, place] = torch.maximum(self.amax_history[0, place], tensor.detach().abs().max().float())

    def move_on(self, largest: float) -> None:
        amax = self.amax_history.amax(0)
        self.scale.copy_(torch.where(amax > 0, largest / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = 0.0


class Package:
    """State of the stand-in: what is registered, which region is open, what was called how."""

    def __init__(self):
        self.open, self.regions, self.layers, self.calls = [], [], [], []
        self.first = False  # the next layer called is the first of its region: its backward is the last one

    def move_on(self, key: str, largest: float) -> None:
        for layer in self.layers:
            layer.fp8_meta[key].move_on(largest)

    def autocast(self, **options):
        package = self

        class Region:
            def __enter__(self):
                package.open.append(options)
                package.regions.append(options)
                package.first = True

            def __exit__(self, *error):
                package.open.pop()
                if options["recipe"].delayed() and torch.is_grad_enabled():
                    package.move_on("scaling_fwd", 448.0)

        return Region()

    def modules(self) -> dict[str, types.ModuleType]:
        names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common", "transformer_engine.common.recipe")
        made = {name: types.ModuleType(name) for name in names}
        package, pytorch, common, recipe = made.values()
        package.pytorch, package.common, common.recipe = pytorch, common, recipe
        pytorch.autocast, pytorch.Linear = self.autocast, type("Linear", (Linear,), {"package": self})
        pytorch.ops = types.SimpleNamespace(SwiGLU=lambda: swiglu_reference)
        recipe.Format = types.SimpleNamespace(HYBRID="e4m3, gradients e5m2")
        recipe.DelayedScaling = lambda **options: Recipe(name="DelayedScaling", options=options)
        return made


class Linear(nn.Module):
    package: Package

    def __init__(self, in_features, out_features, *, bias, params_dtype, device):
        super().__init__()
        assert type(device) is str and bias is False  # the real one compares the device with "meta"
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.fp8_meta: dict[str, Scales] = {}

    def init_fp8_metadata(self):
        if not self.package.open or self.fp8_meta:
            return
        recipe = self.package.open[-1]["recipe"]
        length = recipe.options.get("amax_history_len", 0)
        # Of current scaling there is an object as well, and nothing in it.
        self.fp8_meta = {key: Scales(length, n) if recipe.delayed() else object() for key, n in (("scaling_fwd", 3), ("scaling_bwd", 2))}
        self.package.layers.append(self)

    def forward(self, x, is_first_microbatch=None):
        assert len(self.package.open) == 1, "not inside one region"
        self.init_fp8_metadata()
        self.package.calls.append((self, is_first_microbatch))
        assert x.dtype == self.weight.dtype, "the real one refuses this"
        weight = self.weight
        out = F.linear(x, weight)
        forward, backward = self.fp8_meta.values()
        if isinstance(forward, Scales):
            forward.see(0, x)
            forward.see(1, weight)
            if out.requires_grad:
                out.register_hook(lambda gradient: backward.see(0, gradient))
                if self.package.first:
                    out.register_hook(lambda gradient: self.package.move_on("scaling_bwd", 57344.0))
        self.package.first = False
        return out


@pytest.fixture
def package(monkeypatch):
    package = Package()
    for name, module in package.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return package


def test_it_has_the_parameters_of_the_fused_block(package):
    with torch.device("meta"):
        fused, ours = fused_llama(TINY.shape, 16).blocks[0], TransformerEngine().block(TINY.shape, "reference")
    described = [[(name, p.shape, p.dtype, p.device) for name, p in block.named_parameters()] for block in (fused, ours)]
    assert described[0] == described[1] and isinstance(ours, TEBlock)
    assert [name for name, part in ours.named_children() if isinstance(part, Linear)] == ["qkv", "o", "gate_up", "down"]


def test_it_trains_as_the_plain_block_does_where_products_are_the_same(package, processes, monkeypatch):
    """Two micro-batches per step; every layer called once per forward, in one region with the recipe."""
    monkeypatch.setattr(trainer, "FusedBlock", lambda shape, kernels, scaling, recompute: Block(shape))
    losses = {}
    for fp8 in ("", "te"):
        assembly = assemble(config(fp8=fp8), TINY, processes, seed=1)
        assert all(type(block) is (TEBlock if fp8 else Block) for block in assembly.model.blocks)
        package.regions.clear()
        source = synthetic_batches(TINY.shape.vocab_size, TINY.sequence_length, processes, 4)
        steps = [train_step(assembly, source, BATCHING, 1e-2, processes) for _ in range(3)]
        losses[fp8] = [(float(loss), float(norm)) for loss, norm in steps]
    assert losses[""] == losses["te"]
    recipe = assembly.fp8.recipe
    options = {"margin": 0, "fp8_format": "e4m3, gradients e5m2", "amax_history_len": 4, "amax_compute_algo": "max"}
    assert (recipe.name, recipe.options) == ("DelayedScaling", options)
    assert package.regions == [{"enabled": True, "recipe": recipe}] * 6
    layers = [part for block in assembly.model.blocks for part in block.children() if isinstance(part, Linear)]
    assert [layer for layer, _ in package.calls] == 6 * layers


def test_the_history_moves_once_per_forward_and_evaluation_leaves_no_trace(package, processes):
    assembly = assemble(config(), TINY, processes, seed=1)
    model = assembly.model
    source = synthetic_batches(TINY.shape.vocab_size, TINY.sequence_length, processes, 4)
    tensors = assembly.fp8.tensors()
    assert len(tensors) == TINY.shape.num_layers * 4 * 2 * 2
    for forwards in (2, 4):
        train_step(assembly, source, BATCHING, 1e-2, processes)
        history = model.blocks[0].qkv.fp8_meta["scaling_fwd"].amax_history
        assert int((history[:, 0] > 0).sum()) == min(forwards, 3), "row 0 waits for the next forward"
    before = [tensor.clone() for tensor in tensors]
    assert all(tensor.any() for tensor in before if tensor.ndim == 2), "there is something to be kept"
    evaluate(model, [4 * next(source)[:, :, :8] % TINY.shape.vocab_size], processes)
    assert model.training
    assert all(torch.equal(old, new) for old, new in zip(before, assembly.fp8.tensors(), strict=True))
    assert all(old is new for old, new in zip(tensors, assembly.fp8.tensors(), strict=True)), "the warm-up's digest holds these"


def test_a_forward_that_fails_leaves_the_region(package, processes):
    assembly = assemble(config(), TINY, processes, seed=1)
    with pytest.raises(IndexError):
        assembly.model(torch.full((1, 4), 10**6))
    assert not package.open


def test_the_warm_up_leaves_the_scales_as_new(package, processes, monkeypatch):
    assembly = assemble(config(), TINY, processes, seed=1)
    engine = assembly.fp8
    fresh, seen = [tensor.clone() for tensor in engine.tensors()], []
    reset = engine.reset
    monkeypatch.setattr(engine, "reset", lambda: (seen.extend(t.clone() for t in engine.tensors()), reset()))
    warm_up(assembly, BATCHING, (4, 4), processes, lambda phase: None)
    assert all(torch.equal(old, new) for old, new in zip(fresh, engine.tensors(), strict=True))
    assert sum(not torch.equal(old, new) for old, new in zip(fresh, seen, strict=True)) > len(fresh) / 2, "the warm-up changes them"


def test_scales_that_stay_after_the_warm_up_are_refused(package, processes, monkeypatch):
    assembly = assemble(config(), TINY, processes, seed=1)
    monkeypatch.setattr(assembly.fp8, "reset", lambda: None)
    with pytest.raises(PreflightError, match="changed the training state"):
        warm_up(assembly, BATCHING, (4, 4), processes, lambda phase: None)


def test_a_whole_run_with_it(package, processes, tmp_path, tiny_data, monkeypatch):
    with_te = run(tmp_path / "te", tiny_data, gpu="H200", fp8="te", max_samples=32)
    assert with_te.error == "target_missed" and len(package.layers) == 8 and len(with_te.evaluations) == 1
    events = (tmp_path / "te" / "events.jsonl").read_text()
    assert '"event": "fp8"' not in events, "it counts nothing that saturates"


@pytest.mark.parametrize("breakage", [ImportError("libcudnn.so.9: not found"), OSError("bad ELF"), AssertionError("version mismatch")])
def test_a_package_that_does_not_load_is_named_with_its_remedy(monkeypatch, breakage):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "transformer_engine":
                raise breakage

    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ConfigError) as raised:
        TransformerEngine()
    assert "Transformer Engine" in raised.value.what and str(breakage) in raised.value.why
    assert f'pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]=={VERSION}"' in raised.value.do


def test_nothing_else_imports_the_package(monkeypatch, processes):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assemble(config(fp8="torch"), TINY, processes, seed=1)
    with pytest.raises(ConfigError):
        assemble(config(), TINY, processes, seed=1)


@pytest.mark.parametrize("changes", [{"recompute_layers": 1}, {"gpu": "CPU"}], ids=str)
def test_what_the_engine_cannot_do_is_refused_by_the_config(changes):
    key = "fp8" if "gpu" in changes else next(iter(changes))
    with pytest.raises(ConfigError, match=f"{key} = .* cannot be used"):
        config(**changes)
