"""Measurements of one process on its GPU, for preflight.

torchrun starts `python -m launch.preflight.measure DIR DEVICE SECONDS [BENCHMARK]` on all GPUs at
once, so that they heat up and share power as in a run. Every rank writes DIR/rank_<k>.json:

- its GPU's properties according to torch
- the self-test of BENCHMARK's ops with DIR/config.toml
- the speed of matrix products, copies and collectives

Each speed is the median over repetitions that take SECONDS in total.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import config as configs
from common.benchmarks import config_class
from common.estimate.workload import benchmark_workload
from common.gpu_kinds import fp8_family
from common.kernels.step_clock import StepClock
from common.self_test.kernel_cases import Sizes
from common.self_test.run import self_test
from launch.preflight.rank_report import COLLECTIVES, UNITS, RankReport, limit_s

# M = N = K of a GEMM, bytes of a copy, bytes of a collective.
SIZES = {
    "cuda": (8192, 2**31, 2**29),
    "cpu": (128, 2**24, 2**22),
}
# A function, and the amount of work of one call: amount / seconds is a speed in UNITS.
Work = tuple[Callable[[], object], float]


def main(folder: Path, device: str, seconds: float, benchmark: str = "") -> None:
    """Measure, and write the results to `folder`, also if an error ends the measurement."""
    report = RankReport(int(os.environ["RANK"]))
    report.write(folder)
    # Newer torch renames a collective; torch 2.9 has only the old name.
    warnings.filterwarnings("ignore", category=FutureWarning)
    # Also ends this process if a collective or the driver hangs.
    faulthandler.dump_traceback_later(limit_s(seconds), exit=True)
    try:
        measure(report, folder, device, seconds, benchmark)
    except Exception as error:
        report.error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise
    finally:
        report.write(folder)


def measure(report: RankReport, folder: Path, device: str, seconds: float, benchmark: str) -> None:
    """Fill `report` with the properties of the GPU, the self-test and the speeds.

    `benchmark`: "" for no self-test. The file in `folder` names the phase at any time.
    """
    place = record_properties(report, device)
    if int(os.environ["WORLD_SIZE"]) > 1:  # before the self-test, in which ranks compare engines
        report.write(folder, "start of the process group")
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl", device_id=place if device == "cuda" else None
        )
    try:
        if benchmark:
            run_self_test(report, folder, place, benchmark)
        torch.manual_seed(report.rank)
        fp8 = {"fnuz": torch.float8_e4m3fnuz, "ocp": torch.float8_e4m3fn}[fp8_family(report.arch)]
        skipped: tuple[str, ...] = ()
        if device == "cpu":
            skipped += ("FP8 GEMM",)  # one product may take 12 s
        if not dist.is_initialized():
            skipped += COLLECTIVES
        for name, prepare in workloads(place, fp8).items():
            if name not in skipped:
                report.write(folder, name)
                work, amount = prepare()
                report.speeds[name] = amount / median_s(work, place, seconds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    report.phase = "done"


def run_self_test(report: RankReport, folder: Path, place: torch.device, benchmark: str) -> None:
    """Run the self-test of the config in `folder`, and record its results."""
    config = configs.load(folder / "config.toml", config_class(benchmark))
    fixed = benchmark_workload(benchmark, config)
    sizes = Sizes.of(config, fixed.shape, fixed.sequence_length, fixed.lora_rank)
    result = self_test(sizes, place, lambda op: report.write(folder, op))
    report.attention = result.attention
    report.engines = {name: str(choice) for name, choice in result.engines.items()}
    report.engine_notes = result.notes
    report.self_test_s = result.seconds
    report.self_test = [(each.op, str(each), each.good) for each in result.results]


def record_properties(report: RankReport, device: str) -> torch.device:
    """Record what torch reports about this rank's GPU, and return the device.

    Call it before anything is allocated on the GPU.
    """
    if device == "cpu":
        return torch.device("cpu")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    free, total = torch.cuda.mem_get_info(place)
    gpu: Any = torch.cuda.get_device_properties(place)  # torch's type stub lacks the PCI address
    report.used_bytes = total - free
    report.name = gpu.name
    report.memory_bytes = gpu.total_memory
    report.compute_units = gpu.multi_processor_count
    report.arch = gpu.gcnArchName if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
    # torch for ROCm lacks some properties before 2.11. The address is only displayed.
    report.uuid = str(getattr(gpu, "uuid", ""))
    if all(hasattr(gpu, name) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")):
        report.pci = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    return place


def workloads(place: torch.device, fp8: torch.dtype) -> dict[str, Callable[[], Work]]:
    """Return name -> function that allocates operands and returns the work to time.

    Operands are random, since zeros draw less power and run faster.
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

    collectives = (partial(collective, name, collective_bytes, place) for name in COLLECTIVES)
    return dict(zip(UNITS, (bf16_gemm, fp8_gemm, copy, *collectives), strict=True))


def collective(name: str, size: int, place: torch.device) -> Work:
    """Return a call of a collective on random bf16 values, and its GB as NCCL's tests count them.

    `name`: "all-reduce" or "all-gather". `size`: bytes of the tensor that is reduced, or of the
    result that is gathered. The GB are those that each link carries, for any number of ranks: they
    give the bus bandwidth.
    """
    ranks = dist.get_world_size()
    whole = torch.randn(size // 2 // ranks * ranks, device=place, dtype=torch.bfloat16)
    gigabytes = (ranks - 1) / ranks * whole.nbytes / 1e9
    if name == "all-reduce":
        # MAX, since sums would overflow after a hundred repetitions.
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX), 2 * gigabytes
    part = whole[: len(whole) // ranks].clone()
    return lambda: dist.all_gather_into_tensor(whole, part), gigabytes


def median_s(
    work: Callable[[], object],
    place: torch.device,
    seconds: float,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the median time of one call of `work` in seconds, over about `seconds`.

    All ranks of `group` make the same number of calls: the largest that any rank would choose.
    """
    times_s(work, 3, place)  # warm-up, in which libraries choose their kernels
    estimate_s = statistics.median(times_s(work, 5, place))
    count = torch.tensor(max(5, int(seconds / estimate_s)), device=place)
    if dist.is_initialized():
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    return statistics.median(times_s(work, int(count), place))


def times_s(work: Callable[[], object], count: int, place: torch.device) -> list[float]:
    """Return the time of each of `count` calls of `work`, in seconds."""
    clock = StepClock(place)
    clock.restart()
    for _ in range(count):
        work()
        clock.mark()
    return [ms / 1e3 for ms in clock.drain_ms()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
    os._exit(0)  # see run_guarded: threads of gloo
