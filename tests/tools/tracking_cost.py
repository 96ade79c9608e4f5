"""Compare runs without tracking, and with a tracking server that refuses or hangs.

    PYTHONPATH=. python3 tests/tools/tracking_cost.py [--rounds 5] [--tracker mlflow]

Trains the miniature of llama31_8b on the CPU, in turn without tracking, with a server that refuses
connections and with one that accepts them and never answers. Each round has all three, in
alternating order, so that other work on the machine meets all of them alike. Needs the package of
the tracker.

Prints the median step, the CPU time of the rank's process, and the minutes of the run, and of the
latter two the differences within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.paths import ROOT
from common.records.trackers import TRACKERS

MODES = ("none", "refuses", "hangs")
# Variables that name the server of a tracker.
SERVERS = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_BASE_URL"}
SKIPPED_STEPS = 8  # of the start, in which the machine warms up
POLL_S = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def rank_process(run_dir_of: Path) -> int | None:
    """Return the process that trains below `run_dir_of`, None before it starts."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        # torchrun's command line ends in the rank's.
        module = words[words.index("-m") + 1] if "-m" in words else ""
        if module == "llama31_8b.train" and str(run_dir_of) in " ".join(words):
            return int(folder.name)
    return None


def cpu_seconds(process: int) -> float | None:
    """Return the CPU time of a process in user and kernel mode, None after its end."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def run(mode: str, tracker: str, samples: int, address: str) -> dict[str, float]:
    """Train once. Return the median step in ms, the rank's CPU seconds, and the wall seconds."""
    with tempfile.TemporaryDirectory(prefix="tracking-cost-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "launch", "llama31_8b", "--device", "cpu"]
        command += ["--config", str(ROOT / "configs/llama31_8b/CPU_1x1.toml")]
        command += ["--set", f"max_samples={samples}"]
        environment = os.environ | {"LOGDIR": name, "SEED": "1", "NO_COLOR": "1"}
        if mode != "none":
            command += ["--track", tracker]
            environment[SERVERS[tracker]] = address
        began = time.monotonic()
        with (folder / "output.txt").open("w") as output:
            launcher = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            rank = None
            cpu_s = 0.0
            trained_s = 0.0
            while launcher.poll() is None:
                rank = rank or rank_process(folder)
                seconds = cpu_seconds(rank) if rank else None
                if seconds is not None:
                    cpu_s = max(cpu_s, seconds)
                    trained_s = time.monotonic() - began
                time.sleep(POLL_S)
        wall_s = time.monotonic() - began
        (events,) = folder.glob("llama31_8b/*/events.jsonl")
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        steps = [line["step_time_ms"] for line in lines if line["event"] == "step"][SKIPPED_STEPS:]
        notes = [
            line for line in (folder / "output.txt").read_text().splitlines() if "note" in line
        ]
        print(f"{mode:8} {len(steps)} steps, {'; '.join(notes) or 'no note'}", flush=True)
    return {
        "step_ms": statistics.median(steps),
        "cpu_s": cpu_s,
        "trained_s": trained_s,
        "wall_s": wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tracker", choices=[*SERVERS], default="mlflow")
    parser.add_argument("--samples", type=int, default=1024)
    options = parser.parse_args()
    assert options.tracker in TRACKERS
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)  # connections are accepted by the kernel and never answered
        ports = {"none": 0, "refuses": closed.getsockname()[1], "hangs": silent.getsockname()[1]}
        for number in range(options.rounds):
            order = MODES if number % 2 == 0 else MODES[::-1]
            for mode in order:
                address = f"http://127.0.0.1:{ports[mode]}"
                results[mode].append(run(mode, options.tracker, options.samples, address))
                print(f"round {number + 1}, {mode}: {results[mode][-1]}", flush=True)
    print(f"medians of {options.rounds} rounds; differences to none are medians of the rounds")
    for mode in MODES:
        texts = []
        for name in ("step_ms", "cpu_s", "trained_s", "wall_s"):
            values = [each[name] for each in results[mode]]
            pairs = zip(values, [each[name] for each in results["none"]], strict=True)
            change = statistics.median(value / base - 1 for value, base in pairs)
            texts.append(f"{name} {statistics.median(values):.1f} ({change:+.1%})")
        print(f"{mode:8} {', '.join(texts)}")


if __name__ == "__main__":
    main()
