"""FP8 and random numbers where the number of ranks matters."""

from types import SimpleNamespace

import pytest
import torch

from common.kernels.fp8 import INVERSE, SATURATED, SCALE
from common.kernels.quantize import quantize_reference
from common.model.linear_layers import DelayedScaling
from common.sharding.context_parallel import ContextGroup
from common.sharding.processes import Processes
from common.training import pretraining, timed_run
from llama31_8b import train


def begun(steps: int = 4):
    """Scales of an activation and of a gradient, after some steps of normal numbers."""
    linear = DelayedScaling()
    activation, gradient = linear.quantizer(), linear.quantizer(gradient=True)
    linear.allocate(torch.device("cpu"))
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        linear.start_pass(training=True)
        for quantizer in (activation, gradient):
            quantize_reference(torch.randn(256, 64, generator=chance), quantizer)
        linear.step_done()
    return linear


@pytest.mark.parametrize("ranks", [6, 8])
def test_gradients_of_more_ranks_do_not_saturate_in_the_first_step(ranks):
    """The loss is multiplied by the number of ranks, so gradients are larger by it."""
    before = begun()
    linear = begun(steps=0)
    state = {name: tensor.clone() for name, tensor in before.state().items()}
    linear.resume([state], 4, gradient_ratio=ranks)
    activation, gradient = linear.quantizers
    assert torch.equal(activation.state[SCALE], before.quantizers[0].state[SCALE])
    linear.start_pass(training=True)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(2)) * ranks
    stored = quantize_reference(x, gradient)
    assert gradient.state[SATURATED] == 0
    back = stored.rowwise.float() * gradient.state[INVERSE]
    assert float(back.norm()) == pytest.approx(float(x.norm()), rel=5e-3)
    linear.step_done()
    assert gradient.state[SCALE] < before.quantizers[1].state[SCALE] / (ranks / 2)


@pytest.mark.parametrize("sharing", [1, 2])
def test_ranks_draw_other_numbers_unless_they_share_sequences(monkeypatch, tmp_path, sharing):
    class Stopped(Exception):
        pass

    def stop(*arguments):
        raise Stopped

    seeds = []
    for rank in range(8):
        context = ContextGroup(sharing, rank % sharing)
        processes = Processes(rank, 8, torch.device("cpu"), None, context)
        monkeypatch.setattr(timed_run, "start", lambda *arguments, found=processes: found)
        monkeypatch.setattr(timed_run, "log_submission", lambda *arguments: None)
        monkeypatch.setattr(pretraining, "sequences_in", lambda *arguments: 1)
        # The self-test draws numbers of its own.
        monkeypatch.setattr(timed_run, "run_self_test", lambda *arguments: torch.manual_seed(1))
        monkeypatch.setattr(pretraining, "assemble_full", stop)
        from synthetic_run import PRETRAINING

        run = SimpleNamespace(
            config=PRETRAINING.run_config(), data_dir=tmp_path, seed=5, save=False, run_dir=tmp_path
        )
        with pytest.raises(Stopped):
            train.run_rank(run, SimpleNamespace(log=None))
        seeds.append(torch.initial_seed())
    assert seeds == [5 + rank // sharing for rank in range(8)]
