"""Runs of open_llama on a GPU: text and weights to start from, and a summary of runs.

    python3 -m tests.gpu.studies.train_open_llama text --packages torch sympy --out FILE.jsonl
    python3 -m tests.gpu.studies.train_open_llama weights --model llama3.1-8b --out DIR
    python3 -m tests.gpu.studies.train_open_llama summary RUN...
    python3 -m tests.gpu.studies.train_open_llama plot LABEL=RUN LABEL=RUN... --out FILE.png

`text` writes the docstrings and comments of the standard library and of installed packages, each
text once, for `prepare text`. `weights` writes a Hugging Face checkpoint with random weights of the
model's shape. `summary` prints for each run its settings, tokens/s of the median logged step, peak
memory and losses. `plot` draws the training losses of runs on the same batches, means over 20
steps, and the difference of each from the first run. It prints the differences by stretches.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sysconfig
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common.data import corpus
from common.model.families import shape_of

MEAN_OF = 20  # steps
STRETCHES = 10  # parts of a run whose mean difference `plot` prints
SETTINGS = ("linear", "micro_batch_size", "recompute_layers", "moment_precision", "lora_rank")


def write_text(packages: list[str], out: Path) -> None:
    """Write one JSON line per text. Packages that are not installed are named and left out."""
    began = time.monotonic()
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            print(f"{package}: not installed")
        else:
            roots.append(Path(spec.origin).parent)
    with ProcessPoolExecutor() as pool:
        texts = dict.fromkeys(text for found in pool.map(texts_of, roots) for text in found)
    with out.open("w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    characters = sum(map(len, texts))
    seconds = time.monotonic() - began
    print(f"{out}: {len(texts):,} texts, {characters:,} characters, {seconds:.0f} s")


def texts_of(root: Path) -> list[str]:
    return [document.text for document in corpus.module_documents(root)]


def write_weights(name: str, out: Path) -> None:
    # needs torch, whose import takes seconds that `summary` between runs need not take
    import torch

    from common.model.checkpoint_names import ORDINARY
    from common.model.checkpoint_writer import write_checkpoint
    from common.model.fused_block import fused_llama
    from common.model.initialization import copy_weight, init_weights
    from common.training.build import default_dtype

    began = time.monotonic()
    shape = shape_of(name)
    with default_dtype(torch.bfloat16):
        model = fused_llama(shape, max_sequence_length=8192)
    init_weights(model, shape.num_layers, seed=1, std=0.02, set_weight=copy_weight)
    write_checkpoint(model, out, files=4, layout=ORDINARY)
    print(f"{out}: {shape.num_parameters / 1e9:.2f}e9 weights, {time.monotonic() - began:.0f} s")


def events_of(run: Path) -> list[dict]:
    """Return the events of a run, the oldest first."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def summary(run: Path) -> dict:
    config = tomllib.loads((run / "config.toml").read_text())
    events = events_of(run)
    steps = [event for event in events if event["event"] == "step"]
    timed = [event for event in steps if "tokens_per_s_per_gpu" in event]
    rates = [event["tokens_per_s_per_gpu"] for event in timed]
    evaluations = [event["loss"] for event in events if event["event"] == "eval"]
    return {
        "run": run.name,
        **{key: config.get(key) for key in SETTINGS},
        "steps": len(steps),
        "tokens_per_s_per_gpu": round(statistics.median(rates)) if rates else None,
        "mfu": timed[-1]["mfu"] if timed else None,
        "memory_gib": max((event["memory_gib"] or 0 for event in timed), default=None),
        "losses": [round(step["loss"], 4) for step in steps[:: max(1, len(steps) // 20)]],
        "evaluations": evaluations,
    }


def training_losses(run: Path) -> list[float]:
    """Return the training loss of each optimizer step, the first step first."""
    return [event["loss"] for event in events_of(run) if event["event"] == "step"]


def plot(runs: dict[str, Path], out: Path) -> None:
    """Draw the losses of `runs`, label -> run directory, and their differences from the first."""
    # only this command needs matplotlib
    from matplotlib.figure import Figure

    losses = {label: training_losses(run) for label, run in runs.items()}
    steps = min(map(len, losses.values()))
    if steps < MEAN_OF:
        raise SystemExit(f"error: a run has {steps} steps, fewer than the {MEAN_OF} of a mean")
    ends = range(MEAN_OF, steps + 1, MEAN_OF)
    means = {
        label: [statistics.fmean(curve[end - MEAN_OF : end]) for end in ends]
        for label, curve in losses.items()
    }
    first = next(iter(means))
    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for label, curve in means.items():
        gaps = [a - b for a, b in zip(curve, means[first], strict=True)]
        upper.plot(ends, curve, label=label, linewidth=1)
        lower.plot(ends, gaps, linewidth=1)
        if label == first:
            continue
        length = max(1, len(gaps) // STRETCHES)
        for stretch in range(0, len(gaps), length):
            part = gaps[stretch : stretch + length]
            last = ends[stretch] - MEAN_OF + len(part) * MEAN_OF
            print(f"to step {last}: {label} minus {first} {statistics.fmean(part):+.4f}")
    upper.set(ylabel=f"training loss, means over {MEAN_OF} steps")
    upper.legend()
    lower.set(xlabel="optimizer step", ylabel=f"difference from\n{first}")
    figure.savefig(out)


def labelled_run(text: str) -> tuple[str, Path]:
    """Return the label and the directory in LABEL=RUN."""
    label, equals, run = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected LABEL=RUN")
    return label, Path(run)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("text")
    texts.add_argument("--packages", nargs="*", default=[])
    texts.add_argument("--out", type=Path, required=True)
    weights = commands.add_parser("weights")
    weights.add_argument("--model", required=True)
    weights.add_argument("--out", type=Path, required=True)
    runs = commands.add_parser("summary")
    runs.add_argument("runs", type=Path, nargs="+")
    plots = commands.add_parser("plot")
    plots.add_argument("runs", type=labelled_run, nargs="+", metavar="LABEL=RUN")
    plots.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "text":
        write_text(options.packages, options.out)
    elif options.command == "weights":
        write_weights(options.model, options.out)
    elif options.command == "plot":
        plot(dict(options.runs), options.out)
    else:
        for run in options.runs:
            print(json.dumps(summary(run)), flush=True)


if __name__ == "__main__":
    main()
