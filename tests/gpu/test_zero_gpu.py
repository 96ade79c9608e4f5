"""ZeRO-2 on two GPUs: a race between the streams would not show on a CPU."""

from dataclasses import replace

import pytest
import torch
from ranks import call_on_ranks
from tiny import TINY, run_config

from common.kernels.attention import attention_backends
from common.training.assembly import Batching
from common.training.loop import train_step
from common.training.pretraining import assemble_random
from common.training.warmup import synthetic_batches

RULES = replace(
    TINY,
    shape=replace(TINY.shape, hidden_size=256, ffn_hidden_size=512, vocab_size=509),
    sequence_length=128,
)


def losses(processes, reduce_scatter):
    config = run_config(
        gpu="H200",
        gpus_per_node=processes.world_size,
        micro_batch_size=2,
        reduce_scatter=reduce_scatter,
    )
    with attention_backends("cuda"):
        assembly = assemble_random(config, RULES, processes, seed=1)
        # Every rank gets the batches of both, so their gradients' mean equals one rank's gradient.
        source = synthetic_batches(
            RULES.shape.vocab_size, RULES.sequence_length, replace(processes, rank=0), 2
        )
        steps = [
            train_step(assembly, source, Batching(4 * processes.world_size, 2), 1e-3, processes)
            for _ in range(20)
        ]
    return [processes.sum(loss.clone()).item() for loss, _ in steps]


def train(processes, folder):
    return (
        [losses(processes, "nccl"), losses(processes, "copy_engine")]
        if processes.world_size > 1
        else [losses(processes, "nccl")]
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_train_as_one_does(tmp_path):
    """bf16 rounds by 2^-9; twenty steps of learning four batches amplify that."""
    (tmp_path / "one").mkdir()
    (alone,) = call_on_ranks(
        1, "test_zero_gpu:train", tmp_path / "one", timeout_s=300, device="cuda"
    )[0]
    by_nccl, by_copies = call_on_ranks(
        2, "test_zero_gpu:train", tmp_path, timeout_s=300, device="cuda"
    )[0]
    assert by_nccl == pytest.approx(alone, rel=2e-3) and alone[-1] < 0.95 * alone[0]
    assert by_copies == pytest.approx(by_nccl, rel=2e-3)
