"""Compare the training loss of FP8 and bf16 on a model of the 8B's width with two layers.

    PYTHONPATH=. python tests/gpu/studies/convergence.py --data-dir DIR --out losses.json
        [--steps 400] [--seeds 1,2,3] [--only "NAME;..."]
    PYTHONPATH=. python tests/gpu/studies/convergence.py --golden
        --out tests/gpu/studies/golden_H200.json

All runs of a seed use the same sequences of the miniature's text and the same schedule. Only the
precision of the blocks differs. Prints the mean training loss of the last 50 steps and its ratio
to bf16 with the same seed.

Compare the mean over several seeds. Two bf16 runs of one seed differ by some tenths of a percent,
because the backward pass of attention adds in a different order each time.

`--golden` writes the losses that test_golden.py compares later runs with: 100 steps of GOLDEN on
synthetic text, which depends neither on a file nor on the Python version.

Needs a GPU. A run takes about 15 s on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.data.gpt_dataset import TrainData, train_batches
from common.kernels.attention import attention_backends
from common.model.shapes import LLAMA31_8B, ModelShape
from common.sharding.processes import Processes, start_processes
from common.training.assembly import Batching
from common.training.loop import next_token_pairs, train_step
from common.training.pretraining import assemble_random
from common.training.schedules import warmup_cosine
from llama31_8b import prepare
from llama31_8b.rules import CLOSED, MINIATURE, Config

SHAPE = replace(LLAMA31_8B, num_layers=2, vocab_size=MINIATURE.shape.vocab_size)
SEQUENCE, BATCH = 1024, 8  # 8,192 tokens per step
SEED, LEARNING_RATE, WARMUP_STEPS = 1, 4e-4, 20

VARIANTS: dict[str, dict[str, object]] = {
    "bf16": {},
    "fp8": {"linear": "fp8"},
    "fp8, moments in bf16": {"linear": "fp8", "moment_precision": "bf16"},
}


# name in the recorded file -> variant
GOLDEN = {"bf16 fused": "bf16", "fp8 torch delayed": "fp8"}
GOLDEN_STEPS = 100


def config_of(options: dict[str, object]) -> Config:
    return Config(
        gpu="H200",
        nodes=1,
        gpus_per_node=1,
        global_batch_size=BATCH,
        opt_base_learning_rate=LEARNING_RATE,
        opt_learning_rate_warmup_steps=WARMUP_STEPS,
        max_samples=BATCH,
        micro_batch_size=BATCH,
        eval_micro_batch_size=BATCH,
        **options,  # type: ignore[arg-type]
    )


def text_batches(prefix: Path, steps: int, vocab_size: int, seed: int) -> Iterator[np.ndarray]:
    """Yield int [BATCH, 2, SEQUENCE] from token files, in longer sequences than the miniature's."""
    data = TrainData(prefix, SEQUENCE, steps * BATCH, seed, vocab_size)
    yield from map(next_token_pairs, train_batches(data, BATCH, BATCH, 0, 1))


def synthetic_batches(steps: int, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield int32 [BATCH, 2, SEQUENCE] of a chain in which each token has eight likely followers.

    So there is something to learn, and it is the same on every machine.
    """
    generator = np.random.Generator(np.random.Philox(SEED))
    followers = generator.integers(0, vocab_size, (vocab_size, 8), np.int64)
    for _ in range(steps):
        choice = generator.integers(0, 8, (SEQUENCE + 1, BATCH))
        noise = generator.integers(0, vocab_size, (SEQUENCE + 1, BATCH))
        is_noise = generator.random((SEQUENCE + 1, BATCH)) < 0.1
        tokens = np.empty((SEQUENCE + 1, BATCH), np.int64)
        tokens[0] = noise[0]
        for place in range(1, SEQUENCE + 1):
            tokens[place] = np.where(
                is_noise[place], noise[place], followers[tokens[place - 1], choice[place]]
            )
        yield next_token_pairs(tokens.T.astype(np.int32))


def train_losses(
    config: Config,
    batches: Iterator[np.ndarray],
    steps: int,
    processes: Processes,
    seed: int = SEED,
    shape: ModelShape = SHAPE,
    micro_batches: int = 1,
) -> list[float]:
    """Return the training loss of each step, which has `micro_batches` of BATCH sequences."""
    rules = replace(CLOSED, shape=shape, sequence_length=SEQUENCE)
    lr_at = warmup_cosine(LEARNING_RATE, LEARNING_RATE / 10, WARMUP_STEPS, steps)
    losses: list[Tensor] = []
    with attention_backends(processes.device.type):
        assembly = assemble_random(config, rules, processes, seed)
        on_device = (torch.from_numpy(batch).to(processes.device) for batch in batches)
        for step in range(steps):
            loss, _ = train_step(
                assembly,
                on_device,
                Batching(BATCH * micro_batches, micro_batches),
                lr_at(step),
                processes,
            )
            losses.append(loss)
    return torch.stack(losses).tolist()


def golden_losses(processes: Processes) -> dict[str, list[float]]:
    return {
        name: train_losses(
            config_of(VARIANTS[variant]),
            synthetic_batches(GOLDEN_STEPS, SHAPE.vocab_size),
            GOLDEN_STEPS,
            processes,
        )
        for name, variant in GOLDEN.items()
    }


def summary(name: str, curves: dict[int, list[float]], bf16: dict[int, list[float]] | None) -> str:
    """Return a line with the mean loss at the end, and its ratio to bf16: mean and by seed."""
    finals = {seed: statistics.mean(losses[-50:]) for seed, losses in curves.items()}
    line = f"{name:45} last 50: {statistics.mean(finals.values()):.4f}"
    if bf16 is None:
        return line
    ratios = [final / statistics.mean(bf16[seed][-50:]) - 1 for seed, final in finals.items()]
    return (
        f"{line} ({statistics.mean(ratios):+.2%} of bf16; by seed "
        f"{', '.join(f'{ratio:+.2%}' for ratio in ratios)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data/miniature"))
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default=str(SEED))
    parser.add_argument("--only", default=";".join(VARIANTS))
    args = parser.parse_args()
    processes = start_processes("cuda", 600.0)
    if args.golden:
        facts = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "losses": golden_losses(processes),
        }
        args.out.write_text(json.dumps(facts, indent=1) + "\n")
        return
    prepare.miniature(args.data_dir)
    curves: dict[str, dict[int, list[float]]] = {}
    for name in args.only.split(";"):
        curves[name] = {}
        for seed in map(int, args.seeds.split(",")):
            batches = text_batches(
                args.data_dir / MINIATURE.train_prefix, args.steps, SHAPE.vocab_size, seed
            )
            curves[name][seed] = train_losses(
                config_of(VARIANTS[name]), batches, args.steps, processes, seed
            )
            torch.cuda.empty_cache()
        print(summary(name, curves[name], curves.get("bf16")), flush=True)
        args.out.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
