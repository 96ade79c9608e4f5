"""Time alternative launch settings of each Triton kernel on this GPU, at a benchmark's shapes.

    ./run_and_time.sh throughput tiles [--benchmark llama2_70b_lora] [--only RoPE]

For authors of common/kernels. The results of the kernels are compared with the reference.

The first lines are for attention: each backend of SDPA, AITER on ROCm, and FlashAttention-4 on
CUDA. A line shows the microseconds of forward and backward together, and the accuracy against the
math backend in dB. A run uses the first engine that works (common/kernels/attention.py).

Each further line is a Tile (common/kernels/architecture.py). The shipped one is marked. A candidate
that does not compile, or whose results differ from the reference, shows the reason instead of a
time. `tune` times whole steps with other engines and variables.

If a candidate is faster on your GPU, change the kernel's `_settings` function accordingly and run
pytest tests/kernels. Then send us the change and the output of both commands.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import benchmarks, known_issues
from common.engines import ATTENTION, REPEATED_HEADS, SDPA, VARIABLES
from common.errors import ConfigError, Interrupted
from common.kernels.architecture import Tile, architecture
from common.kernels.attention import causal_attention
from common.self_test import attention
from common.self_test.kernel_cases import (
    Case,
    Draw,
    Quantizers,
    Sizes,
    kernel_cases,
    random_heads,
)
from common.self_test.kernels import KERNEL_DB, against_reference
from common.self_test.results import SelfTestResult
from launch.preflight.measure import median_s
from throughput.timing import launch_us

ATTENTION_S = 0.02  # time to measure for each way to compute attention
# Op of common/self_test/kernel_cases.py -> the function that returns its launch settings.
SETTINGS = {
    "add + RMS norm": "rms_norm.add_rms_norm_settings",
    "RMS norm backward": "rms_norm.rms_norm_backward_settings",
    "quantize": "quantize.quantize_settings",
    "RoPE": "rope.rope_packed_settings",
    "RoPE backward": "rope.rope_packed_backward_settings",
    "QK norm + RoPE": "qk_norm.qk_norm_rope_settings",
    "QK norm + RoPE backward": "qk_norm.qk_norm_rope_backward_settings",
    "SwiGLU": "swiglu.swiglu_quantized_settings",
    "SwiGLU backward": "swiglu.swiglu_quantized_backward_settings",
    "AdamW": "adamw.adamw_settings",
    "accumulate": "accumulate.accumulate_settings",
    "embedding's gradient": "accumulate.add_rows_settings",
    "adapter down": "lora.down_settings",
    "adapter down backward": "lora.down_backward_settings",
    "adapter up backward": "lora.up_backward_settings",
    "cross entropy": "cross_entropy.cross_entropy_forward_settings",
}
FLASH = SDPBackend.FLASH_ATTENTION
# Ways to compute attention: backend of SDPA, library of the flash backend on ROCm ("": not chosen),
# and engine.
ATTENTION_ON_ROCM = (
    (FLASH, "aotriton", SDPA),
    (FLASH, "aotriton", REPEATED_HEADS),
    (FLASH, "ck", SDPA),
    (SDPBackend.EFFICIENT_ATTENTION, "", SDPA),
    (FLASH, "", "aiter"),
    (FLASH, "", "transformer_engine"),
)
ATTENTION_ON_CUDA = (
    (FLASH, "", SDPA),
    (SDPBackend.EFFICIENT_ATTENTION, "", SDPA),
    (SDPBackend.CUDNN_ATTENTION, "", SDPA),
    (FLASH, "", "flash_attention_4"),
    (FLASH, "", REPEATED_HEADS),
    (FLASH, "", "transformer_engine"),
)
# Ops whose tile has a fixed width: a whole row, or half of a head.
WHOLE_ROWS = ("add + RMS norm", "RMS norm", "RoPE", "QK norm + RoPE")
LOOPS = ("RMS norm backward", "adapter")  # ops whose kernel has a loop, and therefore stages


def main(options: argparse.Namespace) -> int:
    """Print the lines of attention and of each op. Return 0. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "no GPU found",
            "kernels are timed on the GPU",
            "run this on a machine with a GPU",
        )
    device = torch.device("cuda")
    versions = ", ".join(f"{name} {text}" for name, text in known_issues.installed().items())
    print(f"{torch.cuda.get_device_name()}, {architecture(device)}, {versions}", flush=True)
    sizes = sizes_of(options)
    if options.only in "attention":
        for line in attention_lines(sizes, device):
            print(line, flush=True)
    for line in kernel_lines(sizes, device, options.only):
        print(line, flush=True)
    return 0


def attention_lines(sizes: Sizes, device: torch.device) -> Iterator[str]:
    """Yield one line for each backend of SDPA and for each optional package.

    On ROCm the flash backend has one line for each library.
    """
    heads = f"{sizes.shape.num_heads}/{sizes.shape.num_kv_heads}"
    yield f"attention [{sizes.micro_batch_size}, {sizes.sequence_length}, {heads}]"
    variants = ATTENTION_ON_ROCM if torch.version.hip else ATTENTION_ON_CUDA
    for backend, library, engine in variants:
        try:
            if library:
                torch.backends.cuda.preferred_rocm_fa_library(library)
            with (
                mock.patch.object(
                    attention,
                    "attention_backends",
                    lambda *_, backend=backend: sdpa_kernel(backend),
                ),
                mock.patch.dict(os.environ, {VARIABLES[ATTENTION]: engine}),
            ):
                checks = attention.attention_checks(sizes, Draw(device), SelfTestResult())
                errors = " / ".join(f"{measure():.1f}" for _, _, _, measure in checks)
                microseconds = attention_us(sizes, device, backend)
                outcome = f"{microseconds:8.1f} µs  {errors} dB (out, dQ, dK, dV)"
        except Interrupted:
            raise
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            outcome = f"fails: {type(error).__name__}: {first_line[:80]}"
        name = backend.name.lower() if engine == SDPA else engine
        yield f"  {outcome}  {name} {library}".rstrip()


def attention_us(sizes: Sizes, device: torch.device, backend: SDPBackend) -> float:
    """Return the microseconds of a forward and a backward of attention."""
    draw = Draw(device)
    leaves = [
        tensor.requires_grad_()
        for tensor in random_heads(sizes, draw, sizes.sequence_length, sizes.sequence_length)
    ]
    d_out = draw(*leaves[0].shape, dtype=sizes.dtype)
    with sdpa_kernel(backend):
        return 1e6 * median_s(
            lambda: torch.autograd.grad(causal_attention(*leaves), leaves, d_out),
            device,
            ATTENTION_S,
        )


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes of the benchmark in FP8, at the micro-batch of the options."""
    rules = benchmarks.divisions(options.benchmark)["closed"]
    default_micro_batch = 1 if rules.lora_rank else 2
    return Sizes(
        shape=rules.shape,
        sequence_length=rules.sequence_length,
        micro_batch_size=options.micro_batch or default_micro_batch,
        fp8=True,
        lora_rank=rules.lora_rank,
        kernels="triton",
        dtype=torch.bfloat16,
    )


def kernel_lines(sizes: Sizes, device: torch.device, only: str) -> Iterator[str]:
    """Yield one line for each op, followed by a line for each candidate."""
    arch = architecture(device)
    for op, shape, case in kernel_cases(sizes, Draw(device)):
        if only not in op:
            continue
        yield f"{op} {shape}"
        module, name = SETTINGS[op].split(".")
        kernels = importlib.import_module(f"common.kernels.{module}")
        settings = getattr(kernels, name)
        for change in changes(arch, op):
            tiles: list[Tile] = []  # those that the kernel was launched with

            # Defaults bind the variables of the loops at their present values.
            def changed(*given: object, settings=settings, change=change, tiles=tiles) -> Tile:
                tiles.append(changed_tile(settings(*given), change))
                return tiles[-1]

            with mock.patch.object(kernels, name, changed):
                outcome = timed(case, sizes, device)
            tile = str(change)
            if tiles:
                tile = ", ".join(f"{key} {value}" for key, value in tiles[-1]._asdict().items())
            shipped = "" if change else "  shipped"
            yield f"  {outcome}  {tile}{shipped}"


def changes(arch: str, op: str) -> Iterator[Mapping[str, float]]:
    """Yield the changes to try, beginning with no change. Each change concerns one key of the Tile.

    The changes are factors for warps and tile sizes, numbers of stages for kernels with loops, and
    numbers of waves per SIMD on AMD.
    """
    yield {}
    tile = [] if op.startswith(WHOLE_ROWS) else ["columns"]
    for key in ("warps", "rows", *tile):
        yield from ({key: factor} for factor in (0.5, 2.0))
    if op.startswith(LOOPS):
        yield from ({"stages": stages} for stages in (1, 2, 3))
    if arch.startswith("gfx"):
        yield from ({"waves_per_eu": waves} for waves in (1, 2, 4))


def changed_tile(tile: Tile, change: Mapping[str, float]) -> Tile:
    """Return `tile` with a change that `changes` yields."""
    values = {}
    for key, value in change.items():
        if key in ("stages", "waves_per_eu"):
            values[key] = int(value)
        else:
            values[key] = int(max(1, value * getattr(tile, key)))  # a factor
    return tile._replace(**values)


def timed(case: Case, sizes: Sizes, device: torch.device) -> str:
    """Return the microseconds of the op with Triton kernels, or why it failed.

    The time includes everything that the op launches, such as a transpose, or a clone of tensors
    that it changes.
    """
    try:
        db = against_reference(case, sizes, device)
        if not db >= KERNEL_DB:
            return f"WRONG: {db:.1f} dB"
        quantizers = Quantizers(sizes, device)
        case("triton", quantizers)
        if sizes.fp8:
            quantizers.scaling.step_done()
        return f"{launch_us(lambda: case('triton', quantizers)):8.1f} µs"
    except Interrupted:
        raise
    except Exception as error:  # compiler errors have no common class
        return f"fails: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:80]}"
