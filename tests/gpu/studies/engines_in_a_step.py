"""Time a training step with each engine of attention, products and SwiGLU.

    PYTHONPATH=. python3 tests/gpu/studies/engines_in_a_step.py llama31_8b
        [--layers 16] [--rounds 3] [--steps 4] [--set KEY=VALUE]
        [--only ATTENTION,PRODUCTS,SWIGLU ...]

Uses one GPU, one process and synthetic tokens, without recomputation. Each round measures every
engine once, so that a drift of the clock affects all of them alike. The table gives the reason if
an engine cannot be used on this machine. The last row selects no engine: it is the default.
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
from common.benchmarks import config_class, rules_of
from common.engines import ATTENTION, PRODUCTS, SWIGLU, VARIABLES
from common.errors import ConfigError
from common.kernels.attention import attention_backends, attention_engine
from common.kernels.fp8 import product_engine
from common.kernels.swiglu import swiglu_engine
from common.paths import ROOT
from common.sharding.processes import high_priority_compute, start_processes
from common.training import finetuning, pretraining
from common.training.assembly import Batching
from common.training.loop import train_step
from common.training.warmup import synthetic_batches

LAYERS = {"llama31_8b": 16, "llama2_70b_lora": 10}
CHANGES = {
    "llama31_8b": {"recompute_layers": "0", "moment_precision": "fp32", "global_batch_size": "4"},
    "llama2_70b_lora": {"offload_layers": "5", "global_batch_size": "4"},
}
OPERATIONS = (ATTENTION, PRODUCTS, SWIGLU)
Names = tuple[str, ...]  # an engine of each; "" leaves the choice to the program
ROWS: list[Names] = [
    ("sdpa", "torch", "kernel"),
    ("sdpa", "cublaslt", "kernel"),
    ("sdpa", "transformer_engine", "kernel"),
    ("flash_attention_4", "torch", "kernel"),
    ("transformer_engine", "torch", "kernel"),
    ("transformer_engine", "transformer_engine", "kernel"),
    ("flash_attention_4", "cublaslt", "kernel"),
    ("flash_attention_4", "cublaslt", "quack"),
    ("", "", ""),
]


def pin(names: Names) -> None:
    """Pin the engines for this process and forget the choices made so far."""
    engines.forget()
    for operation, name in zip(OPERATIONS, names, strict=True):
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
    parser.add_argument("--only", action="append", metavar="ATTENTION,PRODUCTS,SWIGLU")
    args = parser.parse_args()
    rows = [tuple(row.split(",")) for row in args.only or []] or ROWS
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
    training = finetuning if rules.lora_rank else pretraining
    processes = start_processes("cuda", 600.0, high_priority_compute(config, rules))
    pin(ROWS[0])
    with attention_backends("cuda"):
        assembly = training.assemble_random(config, rules, processes, 1)
        model = assembly.model
        batches = synthetic_batches(
            model.shape.vocab_size, model.max_sequence_length, processes, config.micro_batch_size
        )
        batching = Batching(config.global_batch_size, config.gradient_accumulation_steps)
        step = partial(train_step, assembly, batches, batching, 1e-6, processes)
        print(f"{torch.cuda.get_device_name()}, {args.benchmark}, {layers} layers", flush=True)
        print_table(rows, step, processes.device, args.rounds, args.steps)
    torch.distributed.destroy_process_group()


def print_table(
    rows: list[Names], step: Callable[[], object], device: torch.device, rounds: int, count: int
) -> None:
    """Time all rows in turn and print one line for each."""
    times: dict[Names, list[float]] = {row: [] for row in rows}
    unusable: dict[Names, str] = {}
    used: dict[Names, str] = {}
    for number in range(rounds):
        for row in rows:
            if row in unusable:
                continue
            pin(row)
            try:
                choices = [
                    attention_engine(device, torch.bfloat16),
                    product_engine(device, torch.bfloat16),
                    swiglu_engine(device),
                ]
                used[row] = ", ".join(str(choice.engine) for choice in choices)
                # The first steps of a row compile kernels and choose algorithms.
                step_times(step, 1 if number else 2)
                found = step_times(step, count)
            except (ConfigError, RuntimeError) as error:
                unusable[row] = " ".join(f"{type(error).__name__}: {error}".split())[:150]
                if isinstance(error, ConfigError):
                    unusable[row] = error.why[:150]
                torch.cuda.empty_cache()
                continue
            times[row].append(statistics.median(found))
            print(f"round {number + 1}  {used[row]}: {times[row][-1]:.1f} ms", flush=True)
    first = statistics.median(times[rows[0]])
    print(f"\n{'attention':<20}{'products':<20}{'swiglu':<20}{'ms':>9}{'change':>9}  rounds")
    for row in rows:
        names = "".join(f"{name or '(not pinned)':<20}" for name in row)
        if row in unusable:
            print(f"{names}  not usable: {unusable[row]}")
            continue
        median = statistics.median(times[row])
        each = " ".join(f"{value:.1f}" for value in times[row])
        print(f"{names}{median:>9.1f}{median / first - 1:>+9.2%}  {each}  [{used[row]}]")


if __name__ == "__main__":
    main()
