"""Slow a GPU for real: compute matrix products in a second process for a share of the time.

    python3 -m tests.gpu.slow_gpu SHARE [--gpu 0]

Start it in the background, run `throughput suite --quick --against FILE`, and end it by its process
ID. SHARE is the time of the products alone, as a fraction of each period. Two processes take turns
on a GPU, so steps beside it take about 1 / (1 - SHARE) times as long. A median of short calls
hardly changes, because the GPU changes hands only every few milliseconds.

Prints a line when it begins, with the number of products in each period, and one every 30 s with
the share of the periods that it kept.
"""

from __future__ import annotations

import argparse
import time

import torch

PERIOD_S = 0.02  # shorter than every step that the suite measures, but for the MLP's
SIZE = 4096  # of the products: some 0.2 ms each on an H200
TIMED = 200  # products from which the time of one is known
REPORT_S = 30.0


def share(text: str) -> float:
    """Parse SHARE, a fraction above 0 and at most 0.5: two processes share what there is."""
    value = float(text)
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 0.5")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("share", type=share, metavar="SHARE")
    parser.add_argument("--gpu", type=int, default=0)
    options = parser.parse_args()
    torch.cuda.set_device(options.gpu)
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def products(count: int) -> float:
        """Compute `count` products and return the seconds until they are done."""
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(a, a, out=out)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    products(TIMED)
    one = products(TIMED) / TIMED
    count = max(1, round(options.share * PERIOD_S / one))
    print(
        f"{count} products of {1e3 * one:.3f} ms in each {1e3 * PERIOD_S:.0f} ms: "
        f"{count * one / PERIOD_S:.1%} of the time",
        flush=True,
    )
    began = time.perf_counter()
    periods = 0
    while True:
        left = PERIOD_S - products(count)
        periods += 1
        if left > 0:
            time.sleep(left)
        elapsed = time.perf_counter() - began
        if elapsed >= REPORT_S:
            kept = periods * count * one / elapsed
            print(f"products took {kept:.1%} of the last {elapsed:.0f} s", flush=True)
            began = time.perf_counter()
            periods = 0


if __name__ == "__main__":
    main()
