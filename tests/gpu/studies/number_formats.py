"""Measure how much a number format costs in loss, on a model of the 8B's width.

    PYTHONPATH=.:tests/gpu/studies python tests/gpu/studies/number_formats.py --data-dir DIR
        --out FILE.json [--seeds 1-8] [--steps 500] [--layers 2] [--micro-batches 1]
        [--only "NAME;..."] [--minutes 8.5] [--add EARLIER.json ...] [--plot FILE.png]
        [--text PREFIX]

The text is the docstrings and comments of the standard library, torch and the packages in
TEXT_PACKAGES, with the miniature's vocabulary. No sequence is repeated, so the training loss is a
loss on unseen text and no validation set is needed. The miniature's own 0.87 million tokens would
be repeated 4.7 times in 500 steps, enough for 436 million weights to memorize them.

Block formats are emulated (docs/number_formats.md), so only the losses are meaningful. The times
say nothing about a GPU with hardware support. fast_emulation.py emulates the formats. The study
first prints how many elements it rounds differently from block_formats.py.

All formats of a seed use the same weights, sequences and schedule, so the differences from bf16
are paired by seed. The study finishes a seed before it begins the next, and starts no run that
would not end within `--minutes`. FILE.json holds the finished runs. Pass it to a later call with
`--add` to continue. If no seeds are left, the study only prints the table.

For one long pair, with the text of documentation_text.py:

    --only "bf16;FP8" --layers 4 --steps 3000 --micro-batches 4 --seeds 1
        --text DIR/documentation_text_document

`--small` runs a tiny version on a CPU, with the emulation in plain torch, to check the program.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import convergence
import emulated_layers
import fast_emulation
import torch
from convergence import SHAPE, config_of, text_batches, train_losses

from common.data import corpus
from common.data.gpt_dataset import sequences_in
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.data.preparation import Recipe, build_once
from common.model.shapes import ModelShape
from common.sharding.processes import start_processes
from llama31_8b import prepare
from llama31_8b.rules import MINIATURE

RECIPES: dict[str, dict[str, object]] = {  # keys of the config
    "bf16": {},
    "FP8": {"linear": "fp8"},
    "MXFP8": {"linear": "mxfp8"},
    "MXFP4": {"linear": "mxfp4"},
    "MXFP4, Hadamard": {"linear": "mxfp4+hadamard"},
    "MXFP4, stochastic": {"linear": "mxfp4+stochastic"},
    "MXFP4, stochastic, Hadamard": {"linear": "mxfp4+stochastic+hadamard"},
    "MXFP4, Hadamard, FP8 after 60 %": {"linear": "mxfp4+hadamard"},
    "NVFP4": {"linear": "nvfp4"},
    "NVFP4, stochastic, random Hadamard, squares": {
        "linear": "nvfp4+stochastic+random_hadamard+square_weights"
    },
    "MXFP6 e2m3": {"linear": "mxfp6_e2m3"},
    "MXFP6 e3m2": {"linear": "mxfp6_e3m2"},
}
HEALED = ("MXFP4, Hadamard, FP8 after 60 %", 0.6)
TEXT_PACKAGES = ("torch", "numpy", "sympy", "networkx")
LAST = 50  # steps of a run whose mean loss is its result
SMALL = ModelShape(1, 64, 96, 4, 2, SHAPE.vocab_size, 10000.0)
Curves = dict[str, dict[str, list[float]]]  # recipe -> seed -> loss of each step


def options_of(name: str, steps: int) -> dict[str, object]:
    """Return the keys of a recipe. Its format is then one that a config may name."""
    healed, share = HEALED
    options = RECIPES[name]
    if name == healed:
        options = {"linear": f"{options['linear']} until step {round(share * steps)}, then fp8"}
    if options.get("linear", "fp8") != "fp8":
        emulated_layers.install(str(options["linear"]))
    return options


def prepare_text(data_dir: Path) -> Path:
    """Build token files of the documentation of the standard library and of TEXT_PACKAGES, once.

    Return their prefix.

    Files that another machine built are taken as they are, whatever versions it has.
    """
    name = "packages_text_document"

    def build(folder: Path) -> dict:
        prepare.miniature(folder)
        tokenizer = corpus.load_sentencepiece(folder / prepare.TOKENIZER)
        roots = [Path(importlib.util.find_spec(package).origin).parent for package in TEXT_PACKAGES]
        documents = (document for root in roots for document in corpus.module_documents(root))
        # Each once.
        texts = dict.fromkeys(document.text for document in (*corpus.documents(), *documents))
        writer = IndexedDatasetWriter(folder / name, tokenizer.vocab_size())
        for ids in tokenizer.encode(list(texts)):
            writer.add(ids)
        versions = [f"{package} {importlib.metadata.version(package)}" for package in TEXT_PACKAGES]
        print(
            f"{writer.finish().num_tokens:,} tokens: Python {platform.python_version()}, "
            f"{', '.join(versions)}",
            flush=True,
        )
        return {}

    files = (f"{name}.bin", f"{name}.idx")
    build_once(
        data_dir,
        Recipe("text", f"{name}, recipe 1", MINIATURE.shape.vocab_size, files, f"{name}.json"),
        build,
    )
    return data_dir / name


def seeds_of(text: str) -> list[int]:
    """Return the seeds that `text` lists: "1-3,7" -> 1, 2, 3, 7."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def merged(files: list[Path]) -> Curves:
    """Return the curves of all files. A later file wins where two have the same seed."""
    curves: Curves = {}
    for path in files:
        for name, by_seed in json.loads(path.read_text()).items():
            curves.setdefault(name, {}).update(by_seed)
    return curves


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is NaN with fewer than two values."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, statistics.stdev(values) / math.sqrt(len(values))


def smoothed(by_seed: dict[str, list[float]]) -> list[float]:
    """Return, for each step, the mean over the seeds and over the LAST steps up to it."""
    steps = [statistics.mean(losses) for losses in zip(*by_seed.values(), strict=True)]
    return [statistics.mean(steps[max(0, end - LAST) : end]) for end in range(1, len(steps) + 1)]


def table(curves: Curves) -> str:
    """Return a Markdown table with a row for each format.

    It shows the loss of the last steps, its difference from bf16 over the seeds that both have, and
    the step at which bf16 had that loss.
    """
    last = {
        name: {seed: statistics.mean(losses[-LAST:]) for seed, losses in by_seed.items()}
        for name, by_seed in curves.items()
    }
    lines = [
        "| format | seeds | loss | ± | minus bf16 | ± | in % | bf16 had this loss at step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, by_seed in last.items():
        mean, error = mean_and_error(list(by_seed.values()))
        cells = [name, str(len(by_seed)), f"{mean:.4f}", f"{error:.4f}"]
        shared = [seed for seed in by_seed if seed in last.get("bf16", {})]
        if shared and name != "bf16":
            difference, error = mean_and_error(
                [by_seed[seed] - last["bf16"][seed] for seed in shared]
            )
            bf16 = smoothed({seed: curves["bf16"][seed] for seed in shared})
            there = bf16[-1] + difference
            reached = next(
                step for step, loss in enumerate(bf16, 1) if loss <= there or step == len(bf16)
            )
            cells += [
                f"{difference:+.4f}",
                f"{error:.4f}",
                f"{difference / bf16[-1]:+.2%}",
                f"{reached} of {len(bf16)}",
            ]
        lines.append(f"| {' | '.join(cells + [''] * (8 - len(cells)))} |")
    return "\n".join(lines)


def plot(curves: Curves, path: Path) -> None:
    """Draw each format's loss minus bf16's over the steps.

    Each curve is the mean over the seeds, with a band of one standard error.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, by_seed in curves.items():
        shared = [seed for seed in by_seed if seed in curves["bf16"]]
        if name == "bf16" or not shared:
            continue
        above = []  # for each seed, the loss minus bf16's at each step
        for seed in shared:
            own = smoothed({seed: by_seed[seed]})
            bf16 = smoothed({seed: curves["bf16"][seed]})
            above.append([a - b for a, b in zip(own, bf16, strict=True)])
        means = []
        errors = []
        for values in zip(*above, strict=True):
            mean, error = mean_and_error(list(values))
            means.append(mean)
            errors.append(error)
        steps = range(1, len(means) + 1)
        axes.plot(steps, means, label=name)
        if len(shared) > 1:
            low = [mean - error for mean, error in zip(means, errors, strict=True)]
            high = [mean + error for mean, error in zip(means, errors, strict=True)]
            axes.fill_between(steps, low, high, alpha=0.15)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel="step", ylabel=f"loss minus bf16's, mean of the last {LAST} steps")
    axes.legend(fontsize="small")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data/miniature"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--add", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", default="1-8")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--only", default=";".join(list(RECIPES)[:-2]))
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="of 8,192 tokens, in each step"
    )
    parser.add_argument(
        "--text", type=Path, help="prefix of other token files in the miniature's tokens"
    )
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    curves = merged(args.add)
    todo = [
        (seed, name)
        for seed in seeds_of(args.seeds)
        for name in args.only.split(";")
        if str(seed) not in curves.get(name, {})
    ]
    shape = SMALL if args.small else replace(SHAPE, num_layers=args.layers)
    if args.small:
        convergence.SEQUENCE, convergence.BATCH = 64, 2
    if todo:
        prefix = args.text or prepare_text(args.data_dir)
        num_micro_batches = args.steps * args.micro_batches
        if sequences_in(prefix, convergence.SEQUENCE) < num_micro_batches * convergence.BATCH:
            parser.error(
                f"{prefix} has too few tokens for {args.steps} steps: it would be read twice"
            )
        processes = start_processes("cpu" if args.small else "cuda", 600.0)
        if not args.small:
            print(fast_emulation.install(processes.device), flush=True)
    took: dict[str, float] = {}  # the latest run of each recipe; its first one compiles
    for seed, name in todo:
        started = time.monotonic()
        expected_s = 1.2 * took.get(name, max(took.values(), default=0.0))
        if started - began + expected_s > 60 * args.minutes:
            print(f"{args.minutes} minutes are over; go on with --add {args.out}", flush=True)
            break
        config = config_of(options_of(name, args.steps))
        config = replace(config, gpu="CPU") if args.small else config
        batches = text_batches(prefix, num_micro_batches, shape.vocab_size, seed)
        torch.manual_seed(seed)  # of stochastic rounding
        losses = train_losses(
            config, batches, args.steps, processes, seed, shape, args.micro_batches
        )
        curves.setdefault(name, {})[str(seed)] = [round(loss, 4) for loss in losses]
        took[name] = time.monotonic() - started
        print(
            f"seed {seed}, {name}: {curves[name][str(seed)][-1]:.4f} after {took[name]:.0f} s",
            flush=True,
        )
        args.out.write_text(json.dumps(curves))
        if not args.small:
            torch.cuda.empty_cache()
    args.out.write_text(json.dumps(curves))
    print(table(curves))
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
