"""Measure the time that a run of `llama2_70b_lora` needs before its clock starts, with random weights of the real shapes on disk.

    torchrun --nproc_per_node N -m throughput.load_time --config configs/llama2_70b_lora/H200_1x4.toml --folder DIR [--layers 80] [--keep]

Writes random weights in bf16 as safetensors shards in MLCommons' layout, one per layer (1.71 GB each at 70B) and one for the rest, and drops
them from the page cache. Then does what `llama2_70b_lora.train` does before `run_start`: imports, the base, adapters, hashes of the frozen
tensors, the synthetic warm-up. Prints rank 0's times, and extrapolates them from `--layers` to all. `--keep` leaves the shards in the folder,
and a folder that has shards is used as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.config import load
from common.kernels.attention import attention_backends
from common.model.checkpoint_loader import LoadReport, load_base
from common.model.checkpoint_names import FUSED, INDEX, tensor_shapes
from common.model.llama import Llama
from common.model.shapes import ModelShape
from common.sharding.frozen_base import FrozenBase
from common.sharding.processes import Processes, start_processes
from common.training.loop import Batching
from common.training.warmup import warm_up
from launch import page_cache
from llama2_70b_lora.rules import CLOSED, MINIATURE, Config, Rules
from llama2_70b_lora.train import assemble, base_fingerprints

LIMIT_S = 30 * 60  # of the closed division for init_start to init_stop (mlcommons/training_policies, training_rules.adoc)


def write_shards(folder: Path, shape: ModelShape, processes: Processes) -> None:
    """Rank r writes shards r, r + ranks and so on. All layers get the same values, because drawing them takes longer than writing them."""
    shapes, shards = tensor_shapes(shape, FUSED), shape.num_layers + 1
    numbers = {name: int(name.split(".")[2]) if name.startswith("model.layers.") else shape.num_layers for name in shapes}
    weight_map = {name: f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for name, number in numbers.items()}
    folder.mkdir(parents=True, exist_ok=True)

    @cache
    def drawn(size: tuple[int, ...]) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=processes.device).normal_(0.0, 0.02).cpu()

    for file in sorted(set(weight_map.values()))[processes.rank :: processes.world_size]:
        names = [name for name in shapes if weight_map[name] == file]
        tensors = {name: drawn(shapes[name]).clone() for name in names}  # the format refuses two tensors that share memory
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if processes.rank == 0:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    processes.barrier()


def start_run(config: Config, rules: Rules, folder: Path, processes: Processes) -> tuple[LoadReport, list[float]]:
    """What a run does between init_start and run_start. Seconds before the load, of the load, and after it."""
    marks, reports = [time.monotonic()], []
    torch.manual_seed(1 + processes.rank)

    def load(model: Llama, base: FrozenBase) -> None:
        marks.append(time.monotonic())
        reports.append(load_base(model, folder, None, base))
        marks.append(time.monotonic())

    assembly, base = assemble(config, rules, processes, 1, load)
    base_fingerprints(assembly.model, base)
    batching = Batching(config.global_batch_size, config.gradient_accumulation_steps)
    warm_up(assembly, batching, (config.micro_batch_size, config.eval_micro_batch_size), processes, lambda phase: None)
    processes.barrier()
    marks.append(time.monotonic())
    return reports[0], [after - before for before, after in pairwise(marks)]


def process_age_s() -> float:
    """Seconds since this process was started."""
    started_ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    imports_s = process_age_s()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=0, help="default: all")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    config = load(args.config, Config)
    rules = MINIATURE if config.miniature else CLOSED
    layers = args.layers or rules.shape.num_layers
    cut = replace(rules, shape=replace(rules.shape, num_layers=layers))
    processes = start_processes(args.device, config.hang_timeout_s)
    if not (args.folder / INDEX).exists():
        write_shards(args.folder, cut.shape, processes)
    page_cache.clear(sorted(args.folder.glob("*.safetensors"))[processes.rank :: processes.world_size])
    processes.barrier()
    with attention_backends(processes.device.type):
        report, (build_s, *rest) = start_run(config, cut, args.folder, processes)
    if processes.rank == 0:
        print_report(report, [imports_s + build_s, *rest], layers, rules.shape.num_layers, args.folder)
    processes.barrier()
    if processes.rank == 0 and not args.keep:
        shutil.rmtree(args.folder)
    torch.distributed.destroy_process_group()


def print_report(report: LoadReport, seconds: list[float], layers: int, all_layers: int, folder: Path) -> None:
    """`seconds`: before the load, imports included; of the load; of adapters, hashes and warm-up. The last two grow with the layers."""
    before, load, after = seconds
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
    print(
        f"LOAD {layers} layers, {stored:.1f} GB on disk: {sum(seconds):.1f} s to run_start = imports and build {before:.1f}, load {load:.1f}, "
        f"adapters, hashes and warm-up {after:.1f}; {stored / load:.2f} GB/s, {report.bytes / 1e9:.1f} GB read by rank 0, "
        f"at most {report.peak_host_bytes / 2**30:.1f} GiB of host memory; extrapolated to {all_layers} layers: "
        f"{before + all_layers / layers * (load + after):.0f} s of the {LIMIT_S} s that the rules allow",
        flush=True,
    )


if __name__ == "__main__":
    main()
