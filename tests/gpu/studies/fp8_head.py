"""Measure what FP8 in the output head does to gradients and to the loss.

    PYTHONPATH=.:tests/gpu/studies python tests/gpu/studies/fp8_head.py text --data-dir DIR
    ... fp8_head.py gradients --data-dir DIR --out FILE.json [--steps 20,400]
    ... fp8_head.py times
    ... fp8_head.py seeds --data-dir DIR --out FILE.json [--seeds 1-8] [--only "NAME;..."]
        [--minutes 8] [--add EARLIER.json ...]

`text` prepares the token files, without a GPU. `--vocabulary` (default: the 8B's 128,256) applies
to `text`, `gradients` and `seeds`. With 2,048, the text is that of number_formats.py.

`gradients` trains the shipped model to each of `--steps` and compares the head's gradients there
with fp64 products of exact probabilities. Rows of d_W without a label in the batch are the sums of
tiny positive probabilities. The printed verdict follows GROWTH_LIMIT and STANDARD_ERRORS, which
were fixed before the first run. `times` times products and casts at the 8B's shape. `seeds` trains
pairs as number_formats.py does. For two GPUs, start two processes with CUDA_VISIBLE_DEVICES=0 and
1, other seeds and other files, and print the table of both with `--add` and no seeds left to do.

head_formats.py has the formats, head_gradients.py the measures. `--small` runs a tiny model on a
CPU, with FP8 products emulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import convergence
import number_formats
import torch
from block_formats import E5M2
from convergence import config_of, text_batches, train_losses, train_steps
from head_formats import (
    GRADIENTS,
    NEAREST,
    STOCHASTIC,
    TENSOR,
    TENSOR_STOCHASTIC,
    HeadFormat,
    Quantized,
    Rounding,
    Softmax,
    bf16_gradient,
    head_format,
    install_kernel,
    quantize,
    quantize_softmax,
    random_softmax,
    softmax_amaxes,
    unscaled_product,
)
from head_gradients import (
    head_samples,
    measure_input,
    measure_weight,
    measure_whole,
    print_gradients,
    verdict,
)
from number_formats import LAST, mean_and_error, merged, seeds_of
from torch import Tensor

from common.data.gpt_dataset import sequences_in
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.data.preparation import Recipe, build_once
from common.kernels.cross_entropy import cross_entropy_backward, cross_entropy_forward
from common.model.shapes import LLAMA31_8B, ModelShape
from common.sharding.processes import Processes, start_processes
from launch.preflight.measure import median_s

SHAPE = replace(LLAMA31_8B, num_layers=2)
SMALL = ModelShape(1, 256, 512, 4, 2, SHAPE.vocab_size, 10000.0)

GATE = 0.3  # % of samples
# Loss of the 8B per sequence near its target, and sequences to the target (docs/number_formats.md).
SLOPE = 0.0275 / 12288
SEQUENCES = 161109
SECONDS = 0.5  # for which each kernel is timed

# Text


def prepare_text(data_dir: Path, vocabulary: int) -> Path:
    """Build token files with a vocabulary of `vocabulary` tokens, once. Return their prefix."""
    if vocabulary == convergence.SHAPE.vocab_size:
        return number_formats.prepare_text(data_dir)
    name = f"packages_text_{vocabulary}_document"

    def build(folder: Path) -> dict:
        from tokenizers import ByteLevelBPETokenizer

        texts = number_formats.texts()
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(texts, vocabulary, min_frequency=2, show_progress=False)
        writer = IndexedDatasetWriter(folder / name, vocabulary)
        for encoding in tokenizer.encode_batch(texts):
            if encoding.ids:
                writer.add(encoding.ids)
        tokens = writer.finish().num_tokens
        print(f"{tokens:,} tokens, {tokenizer.get_vocab_size():,} in the vocabulary", flush=True)
        return {}

    recipe = Recipe(
        "text", f"{name}, 1", vocabulary, (f"{name}.bin", f"{name}.idx"), f"{name}.json"
    )
    build_once(data_dir, recipe, build)
    return data_dir / name


def batches_of(args: argparse.Namespace, shape: ModelShape, steps: int, seed: int) -> Iterator[Any]:
    prefix = prepare_text(args.data_dir, shape.vocab_size)
    there = sequences_in(prefix, convergence.SEQUENCE)
    if there < steps * convergence.BATCH:
        raise SystemExit(f"{prefix} has {there:,} sequences, too few for {steps} steps")
    return text_batches(prefix, steps, shape.vocab_size, seed)


# Part A: the gradients of a step


def training_config(args: argparse.Namespace) -> Any:
    if args.small:
        return replace(config_of({}), gpu="CPU")
    return config_of({"linear": "fp8"})


def guarded(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return the part's result, or None after its traceback."""
    try:
        return part(*arguments)
    except Exception:
        traceback.print_exc()
        return None


def snapshots(args: argparse.Namespace, shape: ModelShape, processes: Processes) -> Iterator[Any]:
    """Train as shipped. Yield (step, loss, samples of the head) at each of args.steps."""
    wanted = [int(step) for step in args.steps.split(",")]
    steps = max(wanted)
    batches = batches_of(args, shape, steps + args.batches, 1)
    # These batches train nothing.
    held_out = [torch.from_numpy(next(batches)).to(processes.device) for _ in range(args.batches)]
    trained = train_steps(training_config(args), batches, steps, processes, 1, shape)
    for step, (assembly, loss) in enumerate(trained, 1):
        if step in wanted:
            yield step, float(loss), list(head_samples(assembly.model, held_out))


def gradients(args: argparse.Namespace, shape: ModelShape, processes: Processes) -> None:
    results: dict[str, Any] = {}
    began = time.monotonic()
    for step, loss, samples in snapshots(args, shape, processes):
        trained = time.monotonic()
        last = samples[-1]
        amax = float(last.softmax.matrix().max())
        measured: dict[str, Any] = {
            "loss": loss,
            "d_W": guarded(measure_weight, samples, args.rows, amax),
            "d_x": guarded(measure_input, last, args.tokens, amax),
            "whole": guarded(measure_whole, last, args.rows, amax),
        }
        results[str(step)] = measured
        args.out.write_text(json.dumps(results))
        labels = last.softmax.labels.unique().numel()
        print(
            f"\n## step {step}, loss {loss:.3f}, {labels:,} of {len(last.weight):,} rows have a "
            f"label in {len(last.x):,} tokens; trained {trained - began:.0f} s, measured "
            f"{time.monotonic() - trained:.0f} s"
        )
        guarded(print_gradients, measured)
        began = time.monotonic()
    print(guarded(verdict, results))


# Times


def times() -> None:
    """Print milliseconds at the 8B's shape, of random logits."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    softmax = random_softmax(device, 8192, LLAMA31_8B.vocab_size)
    guarded(install_kernel, softmax)
    width = LLAMA31_8B.hidden_size
    x = torch.randn(8192, width, device=device).bfloat16()
    weight = (torch.randn(LLAMA31_8B.vocab_size, width, device=device) * 0.02).bfloat16()
    launches = {**casts(softmax, x, weight), **products(softmax, x, weight)}
    print("| 8,192 x 4,096 x 128,256 | ms |\n|---|---|")
    for name, launch in launches.items():
        took_s = guarded(median_s, launch, device, SECONDS)
        print(f"| {name} | {'failed' if took_s is None else f'{1e3 * took_s:.3f}'} |", flush=True)


Launches = dict[str, Callable[[], object]]


def products(softmax: Softmax, x: Tensor, weight: Tensor) -> Launches:
    """Return the three products in bf16 and in FP8."""
    d_logits = bf16_gradient(softmax)
    by_token, by_column = softmax_amaxes(softmax)
    factors = {
        "forward": (quantize(x, TENSOR), quantize(weight, TENSOR)),
        "dgrad": (
            quantize_softmax(softmax, by_token, NEAREST, False),
            quantize(weight.t(), TENSOR),
        ),
        "wgrad": (quantize_softmax(softmax, by_column, NEAREST, True), quantize(x.t(), TENSOR)),
    }
    launches: Launches = {
        "forward bf16": lambda: x @ weight.t(),
        "dgrad bf16": lambda: d_logits @ weight,
        "wgrad bf16": lambda: d_logits.t() @ x,
    }
    for name, pair in factors.items():
        for fast in (True, False):
            sums = "fast" if fast else "fp32"
            launches[f"{name} FP8, {sums} sums"] = partial(unscaled_product, *pair, fast)
    return launches


def casts(softmax: Softmax, x: Tensor, weight: Tensor) -> Launches:
    """Return the kernels between the logits and the products."""
    logits, labels = softmax.logits[None], softmax.labels[None]
    _, largest, total = cross_entropy_forward(logits, labels)
    scratch = logits.clone()
    upstream = torch.ones(1, device=x.device)
    by_token, by_column = softmax_amaxes(softmax)

    def cast(amax: Tensor, rounding: Rounding, transposed: bool) -> Callable[[], Quantized]:
        return lambda: quantize_softmax(softmax, amax, rounding, transposed)

    launches: Launches = {
        "d_logits bf16": lambda: cross_entropy_backward(scratch, labels, largest, total, upstream),
        "largest of rows and columns": lambda: softmax_amaxes(softmax),
        "label's part of d_x and d_W in fp32": lambda: label_parts(softmax, x, weight),
    }
    for name in ("e4m3 row", "e4m3 row stochastic", "e5m2 row"):
        launches[f"cast for dgrad, {name}"] = cast(by_token, GRADIENTS[name], False)
        launches[f"cast for wgrad, {name}"] = cast(by_column, GRADIENTS[name], True)
    return launches


def label_parts(softmax: Softmax, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the label's part of d_x and the rows that are added to d_W."""
    part = softmax.label_part()[:, None]
    return part * weight[softmax.labels].float(), part * x.float()


# Part B: paired seeds

SHIPPED = "shipped"
HEADS: dict[str, HeadFormat | None] = {
    SHIPPED: None,
    "bf16 by this study": HeadFormat(),  # shows the noise of a pair
    "backward": HeadFormat(dgrad=NEAREST, wgrad=NEAREST),
    "backward, fp32 sums": HeadFormat(dgrad=NEAREST, wgrad=NEAREST, fast_sums=False),
    "backward, stochastic": HeadFormat(dgrad=STOCHASTIC, wgrad=STOCHASTIC),
    "backward, stochastic, fp32 sums": HeadFormat(
        dgrad=STOCHASTIC, wgrad=STOCHASTIC, fast_sums=False
    ),
    "backward, stochastic, x and W too": HeadFormat(
        dgrad=STOCHASTIC, wgrad=STOCHASTIC, other=TENSOR_STOCHASTIC
    ),
    "backward, stochastic, x and W too, fp32 sums": HeadFormat(
        dgrad=STOCHASTIC, wgrad=STOCHASTIC, other=TENSOR_STOCHASTIC, fast_sums=False
    ),
    "backward, e5m2": HeadFormat(dgrad=Rounding(E5M2), wgrad=Rounding(E5M2)),
    "dgrad": HeadFormat(dgrad=NEAREST),
    "wgrad": HeadFormat(wgrad=NEAREST),
    "wgrad, stochastic": HeadFormat(wgrad=STOCHASTIC),
    "forward": HeadFormat(forward=True),
    "forward, fp32 sums": HeadFormat(forward=True, fast_sums=False),
    "dgrad, fp32 sums": HeadFormat(dgrad=NEAREST, fast_sums=False),
    "wgrad, fp32 sums": HeadFormat(wgrad=NEAREST, fast_sums=False),
}


def seeds(args: argparse.Namespace, shape: ModelShape, processes: Processes) -> None:
    """Train the runs that are missing, a seed at a time, and print the table."""
    began = time.monotonic()
    curves = merged(args.add)
    names = list(dict.fromkeys([SHIPPED, *args.only.split(";")]))
    took: dict[str, float] = {}
    for seed in seeds_of(args.seeds) if args.seeds else []:
        missing = [name for name in names if str(seed) not in curves.get(name, {})]
        slowest = max(took.values(), default=0.0)
        expected_s = 1.1 * sum(took.get(name, slowest) for name in missing)
        if missing and time.monotonic() - began + expected_s > 60 * args.minutes:
            print(f"{args.minutes} minutes are over; go on with --add {args.out}", flush=True)
            break
        for name in missing:
            started = time.monotonic()
            losses = guarded(train_one, args, shape, processes, seed, HEADS[name])
            if losses is None:
                continue
            curves.setdefault(name, {})[str(seed)] = [round(loss, 4) for loss in losses]
            took[name] = time.monotonic() - started
            last = statistics.mean(losses[-LAST:])
            print(f"seed {seed}, {name}: {last:.4f} after {took[name]:.0f} s", flush=True)
            args.out.write_text(json.dumps(curves))
    args.out.write_text(json.dumps(curves))
    print(table(curves))


def train_one(
    args: argparse.Namespace,
    shape: ModelShape,
    processes: Processes,
    seed: int,
    form: HeadFormat | None,
) -> list[float]:
    steps = int(args.steps.split(",")[-1])
    batches = batches_of(args, shape, steps, seed)
    torch.manual_seed(seed)  # of stochastic rounding
    with head_format(form):
        losses = train_losses(training_config(args), batches, steps, processes, seed, shape)
    if processes.device.type == "cuda":
        torch.cuda.empty_cache()
    return losses


def table(curves: dict[str, dict[str, list[float]]]) -> str:
    """Return the differences from the shipped head, paired by seed, and what they cost."""
    lines = [
        "| head | seeds | loss | minus shipped | ± | positive | all steps | ± | samples % | ± "
        f"| gate {GATE} % |",
        "|" + "---|" * 11,
    ]
    shipped = curves.get(SHIPPED, {})
    for name, by_seed in curves.items():
        shared = [seed for seed in by_seed if seed in shipped]
        loss = statistics.mean(statistics.mean(by_seed[seed][-LAST:]) for seed in by_seed)
        cells = [name, str(len(by_seed)), f"{loss:.4f}"]
        if name != SHIPPED and shared:
            last, whole = ([paired(by_seed[s], shipped[s], n) for s in shared] for n in (LAST, 0))
            mean, error = mean_and_error(last)
            cells += [f"{mean:+.4f}", f"{error:.4f}", f"{sum(each > 0 for each in last)}"]
            cells += [f"{number:.4f}" for number in mean_and_error(whole)]
            samples, noise = (100 * number / SLOPE / SEQUENCES for number in (mean, error))
            cells += [f"{samples:+.2f}", f"{noise:.2f}", gate(samples, noise)]
        lines.append(f"| {' | '.join(cells + [''] * (11 - len(cells)))} |")
    return "\n".join(lines)


def paired(found: list[float], shipped: list[float], last: int) -> float:
    """Return the mean difference of the last steps. 0: of all."""
    return statistics.mean(a - b for a, b in zip(found[-last:], shipped[-last:], strict=True))


def gate(samples: float, noise: float) -> str:
    """Return the verdict of a cost in % of samples with its standard error."""
    if samples - 2 * noise > GATE:
        return "refused"
    if samples + 2 * noise <= GATE:
        return "passed"
    return "mean passes, noise does not" if samples <= GATE else "mean fails, within noise"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("text", "gradients", "times", "seeds"))
    parser.add_argument("--data-dir", type=Path, default=Path("data/miniature"))
    parser.add_argument("--out", type=Path, default=Path("fp8_head.json"))
    parser.add_argument("--vocabulary", type=int, default=SHAPE.vocab_size)
    parser.add_argument("--steps", help="(default: gradients 20,400, seeds 500)")
    parser.add_argument("--rows", type=int, default=8192, help="vocabulary rows measured")
    parser.add_argument("--tokens", type=int, default=512, help="tokens whose d_x is measured")
    parser.add_argument("--batches", type=int, default=8, help="of AdamW's division")
    parser.add_argument("--seeds", default="1-8")
    parser.add_argument("--only", default="backward;backward, stochastic;forward")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--add", type=Path, nargs="*", default=[])
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    if args.part == "text":
        print(prepare_text(args.data_dir, args.vocabulary))
        return
    if args.part == "times":
        times()
        return
    args.steps = args.steps or ("20,400" if args.part == "gradients" else "500")
    if args.small:
        convergence.SEQUENCE, convergence.BATCH = 128, 4
    shape = replace(SMALL if args.small else SHAPE, vocab_size=args.vocabulary)
    processes = start_processes("cpu" if args.small else "cuda", 600.0)
    if args.part == "seeds" and not args.small:
        guarded(install_kernel, random_softmax(processes.device, 512, 32768))
    {"gradients": gradients, "seeds": seeds}[args.part](args, shape, processes)


if __name__ == "__main__":
    main()
