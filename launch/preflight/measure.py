"""Measurements of one process on its GPU, for preflight.

torchrun starts `python -m launch.preflight.measure DIR DEVICE SECONDS [BENCHMARK]` on all GPUs at
once. The GPUs then heat up and share power as in a run. Every rank writes DIR/rank_<k>.json:

- its GPU's properties according to torch
- the self-test of BENCHMARK's ops with DIR/config.toml
- the speed of matrix products, copies and collectives

Each speed is the median of as many repetitions as fill SECONDS.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import config as configs
from common.benchmarks import config_class
from common.gpu_kinds import fp8_family
from common.training.metrics import StepClock
from common.training.self_test import Sizes, self_test
from launch.plan.benchmark import workload
from launch.preflight.measured import COLLECTIVES, UNITS, Measured, limit_s

# M = N = K of a GEMM, bytes of a copy, bytes of a collective.
SIZES = {
    "cuda": (8192, 2**31, 2**29),
    "cpu": (128, 2**24, 2**22),
}
# Function, and amount; amount / seconds of one call is in UNITS.
Work = tuple[Callable[[], object], float]


def main(folder: Path, device: str, seconds: float, benchmark: str = "") -> None:
    found = Measured(int(os.environ["RANK"]))
    found.write(folder)
    # Newer torch renames a collective; torch 2.9 has only the old name.
    warnings.filterwarnings("ignore", category=FutureWarning)
    # Also ends this process if a collective or the driver hangs.
    faulthandler.dump_traceback_later(limit_s(seconds), exit=True)
    try:
        measure(found, folder, device, seconds, benchmark)
    except Exception as error:
        found.error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise
    finally:
        found.write(folder)


def measure(found: Measured, folder: Path, device: str, seconds: float, benchmark: str) -> None:
    place = look(found, device)
    if benchmark:
        config = configs.load(folder / "config.toml", config_class(benchmark))
        fixed = workload(benchmark, config)
        sizes = Sizes.of(config, fixed.shape, fixed.sequence_length, fixed.lora_rank)
        result = self_test(sizes, place, lambda op: found.write(folder, op))
        found.attention = result.attention
        found.self_test_s = result.seconds
        found.self_test = [(finding.op, str(finding), finding.good) for finding in result.findings]
    torch.manual_seed(found.rank)
    if int(os.environ["WORLD_SIZE"]) > 1:
        found.write(folder, "start of the process group")
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl", device_id=place if device == "cuda" else None
        )
    try:
        fp8 = {"fnuz": torch.float8_e4m3fnuz, "ocp": torch.float8_e4m3fn}[fp8_family(found.arch)]
        # A CPU may need 12 s for one FP8 product.
        left_out: tuple[str, ...] = ()
        if device == "cpu":
            left_out += ("FP8 GEMM",)
        if not dist.is_initialized():
            left_out += COLLECTIVES
        for name, prepare in works(place, fp8).items():
            if name not in left_out:
                found.write(folder, name)
                work, amount = prepare()
                found.speeds[name] = amount / median_s(work, place, seconds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    found.phase = "done"


def look(found: Measured, device: str) -> torch.device:
    """Record torch's properties of this rank's GPU, before anything is allocated there."""
    if device == "cpu":
        return torch.device("cpu")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    free, total = torch.cuda.mem_get_info(place)
    facts: Any = torch.cuda.get_device_properties(place)  # torch's type stub lacks the PCI address
    found.used_bytes = total - free
    found.name = facts.name
    found.memory_bytes = facts.total_memory
    found.compute_units = facts.multi_processor_count
    found.arch = facts.gcnArchName if torch.version.hip else f"sm_{facts.major}{facts.minor}"
    # torch for ROCm lacked some properties before 2.11. The address is only shown in the table.
    found.uuid = str(getattr(facts, "uuid", ""))
    if all(hasattr(facts, name) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")):
        found.pci = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return place


def works(place: torch.device, fp8: torch.dtype) -> dict[str, Callable[[], Work]]:
    """Return the timed functions by name. Each entry allocates its operands when called.

    Operands are random, since zeros draw less power and run faster. Collectives count bus bandwidth
    as NCCL's own tests define it: the amount that each link carries, whatever the number of ranks.
    """
    n, copy_bytes, collective_bytes = SIZES[place.type]
    one = torch.ones((), device=place)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=place, dtype=torch.bfloat16)

    def bf16_gemm() -> Work:
        x = random(n, n)
        w = random(n, n)
        return lambda: torch.mm(x, w.t()), 2 * n**3 / 1e12

    def fp8_gemm() -> Work:
        x = random(n, n).to(fp8)
        w = random(n, n).to(fp8)
        options: Any = {
            "scale_a": one,
            "scale_b": one,
            "out_dtype": torch.bfloat16,
            "use_fast_accum": True,
        }
        return lambda: torch._scaled_mm(x, w.t(), **options), 2 * n**3 / 1e12

    def copy() -> Work:
        source = torch.randint(256, (copy_bytes,), device=place, dtype=torch.uint8)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), 2 * copy_bytes / 1e12  # read and written

    def all_reduce() -> Work:  # MAX, since repeated sums would overflow after a hundred repetitions
        tensor = random(collective_bytes // 2)
        ranks = dist.get_world_size()
        gigabytes = 2 * (ranks - 1) / ranks * tensor.nbytes / 1e9
        return lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX), gigabytes

    def all_gather() -> Work:
        ranks = dist.get_world_size()
        part = random(collective_bytes // 2 // ranks)
        gathered = part.new_empty(part.numel() * ranks)
        gigabytes = (ranks - 1) * part.nbytes / 1e9
        return lambda: dist.all_gather_into_tensor(gathered, part), gigabytes

    functions = (bf16_gemm, fp8_gemm, copy, all_reduce, all_gather)
    return dict(zip(UNITS, functions, strict=True))


def median_s(work: Callable[[], object], place: torch.device, seconds: float) -> float:
    """Return the median time of one `work` in seconds, repeated for about `seconds`.

    All ranks start together and repeat it equally often.
    """
    times_s(work, 3, place)  # warm-up, in which libraries choose their kernels
    count = torch.tensor(
        max(5, int(seconds / statistics.median(times_s(work, 5, place)))), device=place
    )
    if dist.is_initialized():
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return statistics.median(times_s(work, int(count), place))


def times_s(work: Callable[[], object], count: int, place: torch.device) -> list[float]:
    clock = StepClock(place)
    clock.restart()
    for _ in range(count):
        work()
        clock.mark()
    return [ms / 1e3 for ms in clock.drain_ms()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
    os._exit(0)  # see run_guarded: threads of gloo
