"""Runs of a second: both benchmarks with rules small enough for a test, in one process or on ranks.

`python tests/helpers/tiny.py OPENS ARGUMENTS...` runs the trainer's main and notes in OPENS which
token files were opened, and when.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import fp8_on_cpu  # noqa: F401  (changes torch)
import numpy as np
import torch
from synthetic_run import records

from common import config
from common.data.gpt_dataset import validation_tokens
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import RunError
from common.model.initialization import parameter_seed
from common.model.llama import Llama
from common.model.lora import adapter_parameters
from common.model.shapes import ModelShape
from common.sharding.frozen_base import FrozenBase, layer_layout
from common.sharding.layer_prefetch import ROWWISE, pass_order
from common.sharding.processes import Processes
from common.training.assembly import Batching
from common.training.finetuning import assemble_lora, base_fingerprints
from common.training.loop import evaluate, next_token_pairs, rank_micro_batches, train_step
from common.training.pretraining import assemble_random
from common.training.reports import Reports
from common.training.run import Run
from common.training.timed_run import main
from llama2_70b_lora import rules as lora_rules
from llama31_8b import train as trainer
from llama31_8b.rules import MINIATURE, Config, Rules

TINY_PROGRAM = Path(__file__).resolve()
# The 61 rows of the embedding do not divide by 2 ranks, nor the 10 sequences of an evaluation by
# ranks x micro-batch. No run reaches the target.
TINY = replace(
    MINIATURE,
    shape=ModelShape(2, 32, 48, 4, 2, 61, 10000.0),
    sequence_length=16,
    eval_samples=10,
    eval_interval_samples=32,
    target_loss=0.01,
    max_steps=400,
)
# Sizes that FP8 products take: multiples of 16.
FP8_RULES = replace(TINY, shape=ModelShape(2, 64, 96, 4, 2, 64, 10000.0))
LORA = replace(
    lora_rules.MINIATURE,
    shape=TINY.shape,
    sequence_length=TINY.sequence_length,
    lora_dropout=0.0,
)
# Configs as dicts: the keys that both benchmarks share, then each benchmark's own.
COMMON = {
    "gpu": "CPU",
    "nodes": 1,
    "gpus_per_node": 1,
    "global_batch_size": 8,
    "opt_base_learning_rate": 1e-2,
    "miniature": True,
}
DEFAULTS = {
    **COMMON,
    "opt_learning_rate_warmup_steps": 2,
    "max_samples": 96,
    "micro_batch_size": 4,
    "eval_micro_batch_size": 4,
    "hang_timeout_s": 60.0,
}
LORA_DEFAULTS = {
    **COMMON,
    "opt_learning_rate_training_steps": 100,
    "max_samples": 800,
    "micro_batch_size": 2,
    "eval_micro_batch_size": 2,
}
# name -> changes of DEFAULTS for a run of two ranks
TWO_RANK_RUNS = {
    "plain": {"micro_batch_size": 2},  # 2 ranks x 2 sequences x 2 micro-batches
    "recompute": {"micro_batch_size": 2, "recompute_layers": 1},
    "whole micro-batch": {"micro_batch_size": 4},
}


def run_config(**changes) -> Config:
    return config.from_table({**DEFAULTS, **changes}, Config, "test")


def lora_config(**changes) -> lora_rules.Config:
    return config.from_table({**LORA_DEFAULTS, **changes}, lora_rules.Config, "test")


def drawn(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return normal random numbers that are the same on every rank."""
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    return torch.randn(shape, generator=generator)


def write_data(
    folder: Path, rules: Rules = TINY, train_documents: int = 80, validation_tokens: int = 200
) -> Path:
    """Write the token files of both splits, and return `folder`.

    Except for some noise, a token determines the next one, so that there is something to learn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    vocab = rules.shape.vocab_size
    lengths = {
        rules.train_prefix: random.integers(5, 60, train_documents),
        rules.validation_prefix: [validation_tokens],
    }
    for prefix, documents in lengths.items():
        writer = IndexedDatasetWriter(folder / prefix, vocab)
        for length in documents:
            tokens = np.cumsum(1 + (random.random(length) < 0.2), dtype=np.int64) + random.integers(
                vocab
            )
            writer.add(tokens % vocab)
        writer.finish()
    return folder


@dataclass
class Facts:
    """Result of a run. `error` is the kind of the RunError that ended it, or ""."""

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
    """Call the trainer's `run_rank` in this process, and `abort` after a failure."""
    rank = int(os.environ.get("RANK", "0"))
    # Another rank may have created it. Its files are never overwritten.
    run_dir.mkdir(parents=True, exist_ok=True)
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
    return facts(run_dir, run_here(trainer, rules, asked))


def run_here(trainer: ModuleType, rules: Rules | lora_rules.Rules, asked: Run) -> RunError | None:
    """Call `run_rank` of a benchmark's trainer with `rules`, and return the error that ended it."""
    error = None
    with mock.patch.object(trainer, "rules_of", lambda config: rules):
        reports = Reports.open(asked.run_dir, asked.rank)
        try:
            trainer.run_rank(asked, reports)
        except RunError as failure:
            error = failure
            reports.abort()
        finally:
            # The training loop disables the garbage collector for the rest of its process.
            gc.unfreeze()
            gc.enable()
    return error


def facts(run_dir: Path, error: RunError | None = None) -> Facts:
    """Read the result of a run from its log and events. `error` is the one that ended it."""
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


# The pre-training model on two ranks.


def everything(processes: Processes, folder: Path) -> dict:
    """Return all that the tests ask of two ranks. Starting a pair costs more than this work."""
    runs = {}
    for name, changes in TWO_RANK_RUNS.items():
        one = folder / f"{name}_{processes.rank}"
        runs[name] = asdict(run(one, folder / "data", gpus_per_node=2, **changes))
    return {
        "runs": runs,
        **optimizer_step(processes),
        "evaluation": evaluation(processes, folder / "data"),
    }


def optimizer_step(processes: Processes) -> dict:
    """Return the initial weights, the norm of known gradients, and the weights after their step."""
    assembly = assemble_random(
        run_config(gpus_per_node=processes.world_size), TINY, processes, seed=7
    )
    model = assembly.model
    initial = whole(model)
    sum(
        (parameter * known_gradient(name, parameter.shape)).sum()
        for name, parameter in model.named_parameters()
    ).backward()
    norm = float(assembly.step(1e-2))
    return {"initial": initial, "norm": norm, "stepped": whole(model)}


def known_gradient(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the gradient that `optimizer_step` gives the parameter `name`."""
    return drawn(3, name, shape)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def evaluation(processes: Processes, data_dir: Path) -> float:
    """Return the loss of the initial weights on `evaluation_sequences`."""
    model = assemble_random(
        run_config(gpus_per_node=processes.world_size), TINY, processes, seed=7
    ).model
    return evaluate(
        model,
        rank_micro_batches(evaluation_sequences(data_dir), processes, micro_batch_size=4),
        processes,
    )


def evaluation_sequences(data_dir: Path):
    """Return int [eval_samples, 2, sequence]: tokens and labels. Label -100 is ignored."""
    windows = validation_tokens(
        data_dir / TINY.validation_prefix,
        TINY.sequence_length,
        TINY.eval_samples,
        TINY.shape.vocab_size,
    )
    sequences = next_token_pairs(windows)
    sequences[3, 1, 5:] = -100  # a short one: it weighs as much as the others
    sequences[6, 1] = -100  # and one without any label: it has no weight
    return sequences


# The LoRA model.


def matrix(shape: ModelShape, layer: int, name: str) -> torch.Tensor:
    """Return a whole matrix of the base in bf16, equal on all ranks. Largest values differ."""
    size = layer_layout(shape, 1, 1)[0][name]
    return (drawn(layer, name, (size.rows, size.columns)) * (layer + 1)).bfloat16()


def fill(base: FrozenBase, shape: ModelShape, scale: float = 1.0) -> FrozenBase:
    """Add scale x `matrix` of every layer. Rows beyond a matrix are large, and must not matter."""
    for layer in range(shape.num_layers):
        shards = {}
        for name in base.matrices:
            first, rows, columns = base.shard_rows(name)
            own = scale * matrix(shape, layer, name)[first : first + rows]
            shards[name] = torch.cat(
                (own, torch.full((rows - len(own), columns), 1e4, dtype=torch.bfloat16))
            ).to(base.device)
        base.add_layer(layer, shards)
    base.finalize()
    return base


def with_precision(config: lora_rules.Config, precision: str) -> lora_rules.Config:
    """Return `config` with the precision of a GPU. On a CPU a config without FP8 is in fp32."""
    config_class = type("Config", (lora_rules.Config,), {"precision": precision})
    return config_class(**vars(config))


def lora_steps(
    processes: Processes,
    folder: Path | None = None,
    rules=LORA,
    one_batch: bool = False,
    precision: str = "",
    **changes,
) -> dict:
    """Train LoRA adapters for six steps, equally on any number of ranks.

    With `one_batch`, three steps on the same batch, which is learned faster. The scales of FP8 then
    start anew in each step, so that they do not depend on how the ranks share the batch.
    Return losses and gradient norms, an evaluation whose last batch is padded, and facts about
    model and base.
    """
    torch.manual_seed(0)
    configured = lora_config(**{"gpus_per_node": processes.world_size, **changes})
    if precision:
        configured = with_precision(configured, precision)

    def load(model: Llama, base: FrozenBase) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(0.1 * drawn(5, name, parameter.shape))
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
        fill(base, rules.shape, 0.1)

    assembly, base = assemble_lora(configured, rules, processes, 3, load)
    model = assembly.model
    optimizer = assembly.optimizer
    batching = Batching(configured.global_batch_size, configured.gradient_accumulation_steps)
    before = base_fingerprints(model, base)
    sequences = torch.randint(
        61, (48, 2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    sequences[:, 1, 11:] = -100
    steps = [sequences[:8]] * 3 if one_batch else list(sequences.split(8))
    own = [batch.chunk(processes.world_size)[processes.rank] for batch in steps]
    batches = iter([part for batch in own for part in batch.split(configured.micro_batch_size)])
    losses = []
    norms = []
    for _ in own:
        if one_batch:
            assembly.linear.reset()
        loss, norm = train_step(assembly, batches, batching, 1e-2, processes)
        losses.append(float(processes.sum(loss)))
        norms.append(float(norm))
    evaluation = evaluate(model, rank_micro_batches(sequences[:5].numpy(), processes, 2), processes)
    return {
        "losses": losses,
        "norms": norms,
        "evaluation": evaluation,
        "evaluates forward only": base.order == pass_order(rules.shape.num_layers, False, ROWWISE),
        "base unchanged": base_fingerprints(model, base) == before,
        "adapters": {
            name: parameter.detach().clone()
            for name, parameter in adapter_parameters(model).items()
        },
        "parameters": [name for name, _ in model.named_parameters()],
        "trained": sum(p.numel() for p in optimizer.weights),
        "states": sum(t.numel() for t in optimizer.state_tensors()),
    }


# The trainer in a process of its own.


def train_watched(opens: Path, arguments: list[str]) -> None:
    """Run the trainer's main with TINY rules.

    `opens` gets a line per opened token file: its path, and whether run_start was logged.
    """
    result = Path(arguments[arguments.index("--run-dir") + 1]) / "result.txt"

    def hook(event: str, details: tuple) -> None:
        if event == "open" and str(details[0]).endswith((".bin", ".idx")):
            started = result.exists() and '"run_start"' in result.read_text()
            with opens.open("a") as file:
                file.write(json.dumps([str(details[0]), started]) + "\n")

    sys.addaudithook(hook)
    trainer.rules_of = lambda config: TINY
    main(arguments, "llama31_8b", trainer.run_rank)


if __name__ == "__main__":
    train_watched(Path(sys.argv[1]), sys.argv[2:])
