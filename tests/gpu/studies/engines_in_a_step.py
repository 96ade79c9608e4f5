"""Time a training step with each engine of attention and of products, alone and together.

    PYTHONPATH=. python3 tests/gpu/studies/engines_in_a_step.py llama31_8b
        [--layers 16] [--rounds 3] [--steps 4] [--set KEY=VALUE]

One GPU, one process, synthetic tokens, no recomputation. Rounds take the engines in turn, so that a
drift of the clock meets all of them alike. An engine that cannot be used here has its reason in the
table. The last row pins nothing: what a user gets.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from common import config as configs
from common import engines
from common.benchmarks import config_class, rules_of, trainer_of
from common.engines import ATTENTION, PRODUCTS, VARIABLES
from common.errors import ConfigError
from common.kernels.attention import attention_backends, attention_engine
from common.kernels.fp8 import product_engine
from common.paths import ROOT
from common.sharding.processes import start_processes
from common.training.assembly import Batching
from common.training.loop import train_step
from common.training.warmup import synthetic_batches

LAYERS = {"llama31_8b": 16, "llama2_70b_lora": 10}
CHANGES = {
    "llama31_8b": {"recompute_layers": "0", "moment_precision": "fp32", "global_batch_size": "4"},
    "llama2_70b_lora": {"offload_layers": "5", "global_batch_size": "4"},
}
# Engines of attention and of products; "" leaves the choice to the program.
PAIRS = [
    ("sdpa", "torch"),
    ("sdpa", "cublaslt"),
    ("sdpa", "transformer_engine"),
    ("flash_attention_4", "torch"),
    ("transformer_engine", "torch"),
    ("transformer_engine", "transformer_engine"),
    ("flash_attention_4", "cublaslt"),
    ("", ""),
]


def pin(attention: str, products: str) -> None:
    """Pin both engines for this process and forget the choices made so far."""
    engines.forget()
    for operation, name in ((ATTENTION, attention), (PRODUCTS, products)):
        os.environ.pop(VARIABLES[operation], None)
        if name:
            os.environ[VARIABLES[operation]] = name


def step_times(step: Callable[[], object], count: int) -> list[float]:
    """Return milliseconds of `count` steps, each ended by a synchronization."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=LAYERS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    path = ROOT / "configs" / args.benchmark / "H200_1x1.toml"
    changes = CHANGES[args.benchmark] | dict(item.split("=", 1) for item in args.set)
    config = configs.load(path, config_class(args.benchmark), changes)
    rules = rules_of(args.benchmark, config)
    layers = args.layers or LAYERS[args.benchmark]
    rules = replace(rules, shape=replace(rules.shape, num_layers=layers))
    trainer = trainer_of(args.benchmark)
    processes = start_processes("cuda", 600.0, trainer.high_priority_compute(config))
    pin("sdpa", "torch")
    with attention_backends("cuda"):
        assembly = trainer.assemble_random(config, rules, processes, 1)
        model = assembly.model
        batches = synthetic_batches(
            model.shape.vocab_size, model.max_sequence_length, processes, config.micro_batch_size
        )
        batching = Batching(config.global_batch_size, config.gradient_accumulation_steps)
        step = partial(train_step, assembly, batches, batching, 1e-6, processes)
        print(f"{torch.cuda.get_device_name()}, {args.benchmark}, {layers} layers", flush=True)
        print_table(step, processes.device, args.rounds, args.steps)
    torch.distributed.destroy_process_group()


def print_table(step: Callable[[], object], device: torch.device, rounds: int, count: int) -> None:
    """Time all pairs in turn and print one row for each."""
    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
    unusable: dict[tuple[str, str], str] = {}
    used: dict[tuple[str, str], str] = {}
    for number in range(rounds):
        for pair in PAIRS:
            if pair in unusable:
                continue
            pin(*pair)
            try:
                choices = [
                    find(device, torch.bfloat16) for find in (attention_engine, product_engine)
                ]
                used[pair] = ", ".join(str(choice.engine) for choice in choices)
                # The first steps of a pair compile kernels and choose algorithms.
                step_times(step, 1 if number else 2)
                found = step_times(step, count)
            except (ConfigError, RuntimeError) as error:
                unusable[pair] = " ".join(f"{type(error).__name__}: {error}".split())[:150]
                if isinstance(error, ConfigError):
                    unusable[pair] = error.why[:150]
                torch.cuda.empty_cache()
                continue
            times[pair].append(statistics.median(found))
            print(f"round {number + 1}  {used[pair]}: {times[pair][-1]:.1f} ms", flush=True)
    first = statistics.median(times[PAIRS[0]])
    print(f"\n{'attention':<20}{'products':<20}{'ms':>9}{'change':>9}  rounds")
    for pair in PAIRS:
        names = f"{pair[0] or '(not pinned)':<20}{pair[1] or '(not pinned)':<20}"
        if pair in unusable:
            print(f"{names}  not usable: {unusable[pair]}")
            continue
        median = statistics.median(times[pair])
        each = " ".join(f"{value:.1f}" for value in times[pair])
        print(f"{names}{median:>9.1f}{median / first - 1:>+9.2%}  {each}  [{used[pair]}]")


if __name__ == "__main__":
    main()
