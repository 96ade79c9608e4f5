"""A run of a second: the real trainer of llama31_8b with rules small enough for a test, in this process or in ranks of its own.

python tests/helpers/tiny.py OPENS ARGUMENTS...     the trainer's main; notes in OPENS when token files were opened
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing.forkserver
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

import fp8_on_cpu  # noqa: F401  (changes torch)
import numpy as np
import torch
from synthetic_run import records

from common import config
from common.data.indexed_dataset_writer import Writer
from common.errors import RunError
from common.model.shapes import ModelShape
from common.paths import ROOT
from common.sharding.processes import start_processes
from common.training.reports import Reports
from common.training.run import Run
from common.training.timed_run import main
from llama31_8b import train as trainer
from llama31_8b.rules import MINIATURE, Config, Rules

TINY_PROGRAM = Path(__file__).resolve()
PYTHONPATH = os.pathsep.join(
    map(str, [ROOT, *sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir())])
)
# 61 rows of embedding do not divide by 2 ranks, 10 evaluation sequences not by ranks x micro-batch. The target is out of reach.
TINY = replace(
    MINIATURE,
    shape=ModelShape(2, 32, 48, 4, 2, 61, 10000.0),
    sequence_length=16,
    eval_samples=10,
    eval_interval_samples=32,
    target_loss=0.01,
    max_steps=400,
)
DEFAULTS = {
    "gpu": "CPU",
    "nodes": 1,
    "gpus_per_node": 1,
    "global_batch_size": 8,
    "opt_base_learning_rate": 1e-2,
    "opt_learning_rate_warmup_steps": 2,
    "max_samples": 96,
    "micro_batch_size": 4,
    "eval_micro_batch_size": 4,
    "hang_timeout_s": 60.0,
    "miniature": True,
}


def run_config(**changes) -> Config:
    return config.from_table({**DEFAULTS, **changes}, Config, "test")


def write_data(
    folder: Path, rules: Rules = TINY, train_documents: int = 80, validation_tokens: int = 200
) -> Path:
    """Both pairs. A token decides its successor but for some noise, so that there is something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    vocab = rules.shape.vocab_size
    lengths = {
        rules.train_prefix: random.integers(5, 60, train_documents),
        rules.validation_prefix: [validation_tokens],
    }
    for prefix, documents in lengths.items():
        writer = Writer(folder / prefix, vocab)
        for length in documents:
            tokens = np.cumsum(1 + (random.random(length) < 0.2), dtype=np.int64) + random.integers(
                vocab
            )
            writer.add(tokens % vocab)
        writer.finish()
    return folder


@dataclass
class Facts:
    """What a run left behind. `error` is the kind of RunError that ended it, "" after success."""

    losses: list[float]
    norms: list[float]
    rates: list[float]  # learning rates
    evaluations: list[tuple[int, float]]
    status: str
    error: str
    message: str


def run(
    run_dir: Path,
    data_dir: Path,
    rules: Rules = TINY,
    seed: int = 1,
    config_name: str = "CPU_1x1.toml",
    save: bool = False,
    checkpoint: str = "",
    continues: Path | None = None,
    **changes,
) -> Facts:
    """The trainer's `run` in this process, and `abort` where it fails, as run_guarded would call it."""
    rank = int(os.environ.get("RANK", "0"))
    run_dir.mkdir(
        parents=True, exist_ok=True
    )  # another rank may have made it; what is in it is never overwritten
    configured = run_config(**changes)
    asked = Run(
        benchmark="llama31_8b",
        config=configured,
        config_name=config_name,
        seed=seed,
        rank=rank,
        device="cpu",
        run_dir=run_dir,
        data_dir=data_dir,
        checkpoint=checkpoint,
        continues=continues,
        save=save,
    )
    error = None
    with mock.patch.object(trainer, "rules_of", lambda config: rules):
        reports = Reports.to(run_dir, rank)
        try:
            trainer.run(asked, reports)
        except RunError as failure:
            error = failure
            reports.abort()
        finally:
            gc.unfreeze()  # the loop froze and stopped the collector, for a process that ends with it
            gc.enable()
    return facts(run_dir, error)


def facts(run_dir: Path, error: RunError | None = None) -> Facts:
    if not (run_dir / "result.txt").exists():  # another rank writes it
        return Facts([], [], [], [], "", error.kind if error else "", str(error or ""))
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    log = records(run_dir / "result.txt")
    evaluations = [
        (record["metadata"]["samples_count"], record["value"])
        for record in log
        if record["key"] == "eval_accuracy"
    ]
    status = next(
        (record["metadata"]["status"] for record in log if record["key"] == "run_stop"), ""
    )
    losses, norms, rates = (
        [step[key] for step in steps] for key in ("loss", "grad_norm", "learning_rate")
    )
    return Facts(
        losses, norms, rates, evaluations, status, error.kind if error else "", str(error or "")
    )


# Processes of their own.


def rank_environment(rank: int, world_size: int, port: int, per_node: int = 0) -> dict[str, str]:
    per_node = per_node or world_size
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world_size,
    }
    names = {**where, "LOCAL_WORLD_SIZE": per_node, "OMP_NUM_THREADS": 1, "PYTHONPATH": PYTHONPATH}
    return os.environ | {name: str(value) for name, value in names.items()}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(world_size: int, command: list[str]) -> list[subprocess.Popen]:
    """`command` once per rank, with what torchrun would put into the environment."""
    port = free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            [sys.executable, *command], env=rank_environment(rank, world_size, port), **pipes
        )
        for rank in range(world_size)
    ]


def call_on_ranks(
    world_size: int,
    function: str,
    folder: Path,
    timeout_s: float = 120.0,
    device: str = "cpu",
    ranks_per_node: int = 0,
) -> list:
    """What FUNCTION(processes, folder) returned on every rank; by default they are of one node."""
    # Importing torch's compiler asks for GPUs; what is forked after that cannot use one.
    port, context = (
        free_port(),
        rank_server() if device == "cpu" else multiprocessing.get_context("spawn"),
    )
    environments = [
        rank_environment(rank, world_size, port, ranks_per_node) for rank in range(world_size)
    ]
    processes = [
        context.Process(target=call, args=(function, folder, device, environment))
        for environment in environments
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        process.join()
        assert process.exitcode == 0, (folder / f"rank_{rank}.err").read_text()[-4000:]
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(world_size)]


@cache
def rank_server() -> multiprocessing.context.BaseContext:
    """Ranks are forked from a process that has imported torch and does nothing else: that saves each of them four seconds of a core."""
    context = multiprocessing.get_context("forkserver")
    # torch imports dynamo for the first optimizer.
    context.set_forkserver_preload(["tiny", "torch._dynamo", "common.training.checkpoint"])
    with mock.patch.dict(os.environ, rank_environment(0, 1, 0)):
        multiprocessing.forkserver.ensure_running()
    return context


def call(function: str, folder: Path, device: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with (folder / f"rank_{environment['RANK']}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.path += PYTHONPATH.split(
        os.pathsep
    )  # the server hands on that of pytest, which lacks the folders that were not collected
    module, _, name = function.partition(":")
    processes = start_processes(device, 60.0)
    result = getattr(importlib.import_module(module), name)(processes, folder)
    torch.save(result, folder / f"rank_{processes.rank}.pt")
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # gloo's threads now and then end an interpreter that is shutting down with std::terminate


def train_watched(opens: Path, arguments: list[str]) -> None:
    """The trainer's main with TINY rules; `opens` gets a line per token file opened: its path, and whether run_start was logged."""
    result = Path(arguments[arguments.index("--run-dir") + 1]) / "result.txt"

    def hook(event: str, details: tuple) -> None:
        if event == "open" and str(details[0]).endswith((".bin", ".idx")):
            started = result.exists() and '"run_start"' in result.read_text()
            with opens.open("a") as file:
                file.write(json.dumps([str(details[0]), started]) + "\n")

    sys.addaudithook(hook)
    trainer.rules_of = lambda config: TINY
    main(arguments, "llama31_8b", Config, trainer.run, saves=True)


if __name__ == "__main__":
    train_watched(Path(sys.argv[1]), sys.argv[2:])
