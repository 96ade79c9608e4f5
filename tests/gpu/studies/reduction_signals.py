"""Time a step of the 8B on several GPUs with a barrier between the copy engines, and with signals.

PYTHONPATH=. torchrun --nproc-per-node 2 tests/gpu/studies/reduction_signals.py
    [--layers 16] [--rounds 4] [--steps 5] [--traces DIR]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common import config as configs
from common.benchmarks import config_class, rules_of
from common.kernels.attention import attention_backends
from common.paths import ROOT
from common.self_test.kernel_cases import Sizes
from common.self_test.run import check_engines
from common.sharding.copy_engine import CopyEngineReduceScatter, _rows_of
from common.sharding.processes import high_priority_compute, start_processes
from common.sharding.reduce_scatter import Shard, pad_rows
from common.sharding.symmetric_memory import ring_order
from common.training import pretraining
from common.training.assembly import Batching
from common.training.loop import train_step
from common.training.warmup import synthetic_batches

SENT = 64
ADDED = 128


class Signals(CopyEngineReduceScatter):
    """A rank waits for the copies into its buffers, and for the sums of those that it overwrites.

    The n-th copy of a rank is to be added as the n-th. Counters are in the signal pads.
    """

    def __init__(self, other: CopyEngineReduceScatter):
        vars(self).update(vars(other))
        self.started = 0
        self.handle = self.received.handle
        self.peers = ring_order(self.rank, self.ranks)

    def start(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        finished = self.finish()
        padded = []
        for shard, gradient in zip(shards, gradients, strict=True):
            padded.append(pad_rows(gradient, len(shard.master) * self.ranks).to(self.dtype))
        for peer in self.peers:
            if self.started >= 2:
                self.wait(ADDED, peer, self.started - 1)
            slot = self.rank - 1 if self.rank > peer else self.rank
            for shard, gradient in zip(shards, padded, strict=True):
                rows = _rows_of(peer, shard, gradient)
                self.slots[shard.parameter][self.receiving][peer][slot].copy_(rows)
            self.signal(SENT, peer, self.started + 1)
        self.started += 1
        self.sent = shards, padded, gradients
        return finished

    def finish(self) -> list[Tensor]:
        if self.sent is None:
            return []
        shards, padded, gradients = self.sent
        self.sent = None
        for peer in self.peers:
            self.wait(SENT, peer, self.started)
        for shard, gradient in zip(shards, padded, strict=True):
            own = _rows_of(self.rank, shard, gradient)
            received = self.slots[shard.parameter][self.receiving][self.rank]
            shard.gradient = self.accumulate(shard.gradient, own, received)
        for peer in self.peers:
            self.signal(ADDED, peer, self.started)
        self.receiving = 1 - self.receiving
        return gradients


class KernelSignals(Signals):
    """Signals by torch's kernels. A flag is 0 or 1, so each counter has two, used in turn."""

    def signal(self, what: int, peer: int, number: int) -> None:
        self.handle.put_signal(peer, self.channel(what, number))

    def wait(self, what: int, peer: int, number: int) -> None:
        self.handle.wait_signal(peer, self.channel(what, number))

    def channel(self, what: int, number: int) -> int:
        return 1 + number % 2 + (2 if what == ADDED else 0)


class StreamSignals(Signals):
    """Signals by operations of streams, which need no multiprocessor."""

    driver = ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None

    def signal(self, what: int, peer: int, number: int) -> None:
        status = self.driver.cuStreamWriteValue32_v2(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.c_uint64(self.handle.signal_pad_ptrs[peer] + 4 * (what + self.rank)),
            ctypes.c_uint32(number),
            ctypes.c_uint(0),  # after all writes so far
        )
        assert status == 0, status

    def wait(self, what: int, peer: int, number: int) -> None:
        status = self.driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.c_uint64(self.handle.signal_pad_ptrs[self.rank] + 4 * (what + peer)),
            ctypes.c_uint32(number),
            ctypes.c_uint(0),  # until the value is at least `number`
        )
        assert status == 0, status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--traces", type=Path)
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    changes = {"recompute_layers": "0", "global_batch_size": str(4 * ranks)}
    path = ROOT / f"configs/llama31_8b/H200_1x{ranks}.toml"
    config = configs.load(path, config_class("llama31_8b"), changes)
    rules = rules_of("llama31_8b", config)
    rules = replace(rules, shape=replace(rules.shape, num_layers=args.layers))
    processes = start_processes("cuda", 600.0, high_priority_compute(config, rules))
    with attention_backends("cuda", torch.bfloat16):
        sizes = Sizes.of(config, rules.shape, rules.sequence_length, rules.lora_rank)
        check_engines(sizes, processes.device)
        assembly = pretraining.assemble_random(config, rules, processes, 1)
        model = assembly.model
        batches = synthetic_batches(
            model.shape.vocab_size, model.max_sequence_length, processes, config.micro_batch_size
        )
        batching = Batching(config.global_batch_size, config.gradient_accumulation_steps)
        step = partial(train_step, assembly, batches, batching, 1e-6, processes)
        measure(assembly, step, args)
    dist.destroy_process_group()


def measure(assembly, step, args) -> None:
    optimizer = assembly.optimizer
    barrier = optimizer.reduce_scatter
    variants = {
        "barrier": barrier,
        "signals by kernels": KernelSignals(barrier),
        "signals by streams": StreamSignals(barrier),
    }
    times = {name: [] for name in variants}
    losses = {name: [] for name in variants}
    for number in range(args.rounds):
        for name, variant in variants.items():
            optimizer.reduce_scatter = variant
            for _ in range(4 if number == 0 and variant is barrier else 1):
                loss, norm = step()
            torch.cuda.synchronize()
            dist.barrier()
            for _ in range(args.steps):
                began = time.perf_counter()
                loss, norm = step()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - began))
            losses[name].append((float(loss), float(norm)))
            if dist.get_rank() == 0:
                block = times[name][-args.steps :]
                print(
                    f"round {number + 1} {name:20} {statistics.median(block):8.2f} ms "
                    f"({min(block):.1f} to {max(block):.1f}) {losses[name][-1]}",
                    flush=True,
                )
    if dist.get_rank() == 0:
        for name, values in times.items():
            print(f"{name:20} {statistics.median(values):8.2f} ms", flush=True)
    if args.traces:
        for number, (name, variant) in enumerate(variants.items()):
            optimizer.reduce_scatter = variant
            step()
            torch.cuda.synchronize()
            dist.barrier()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                step()
                torch.cuda.synchronize()
            profile.export_chrome_trace(
                str(args.traces / f"trace_{number}_{dist.get_rank()}.json.gz")
            )


if __name__ == "__main__":
    main()
