"""Run a benchmark as a submitter would and observe it from outside.

    python3 -m tests.gpu.whole_run llama31_8b --data-dir D --log-dir L
        [--stop-after S | --kill-rank R --after S] [-- --checkpoint 60s]

--stop-after S sends SIGTERM to ./run_and_time.sh S seconds after `run_start`. --kill-rank R
--after S sends SIGKILL to rank R instead. Without either, the run continues to its end. Arguments
after `--` are passed to ./run_and_time.sh. Base weights are read from $MODEL.

Prints the time of each phase in seconds since the command, step times (with those during a
checkpoint apart), peak memory, the exit code, processes left running, and the verdict of `check`.

tests/gpu/full_size_files.py writes files of the real shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from common.machine.host import available_memory
from common.paths import ROOT
from launch.processes.supervise import processes_of
from submission.run import Run

HOST = Path("/")
POLL_S = 0.2


def time_of(run: Path, key: str) -> float | None:
    """Return the Unix time of the first record with `key` in the log, None without one."""
    first = Run.read(run / "result.txt").log.first(key)
    return first and first.time_ms / 1e3


class Watch(threading.Thread):
    """Thread that watches the host's free memory and the saves of a run.

    `least`: the least free memory in bytes. `writing`, `whole`: name of a save -> the Unix time at
    which its folder was first seen unfinished, and finished.
    """

    def __init__(self, log_dir: Path):
        super().__init__(daemon=True)
        self.log_dir, self.before, self.ended = log_dir, available_memory(HOST), threading.Event()
        self.least, self.writing, self.whole = self.before, {}, {}

    def run(self) -> None:
        while not self.ended.wait(POLL_S):
            self.least = min(self.least, available_memory(HOST))
            for folder in self.log_dir.glob("*/*/checkpoints/step_*"):
                if not folder.suffix:
                    self.whole.setdefault(folder.stem, time.time())
                elif folder.stem not in self.whole:  # else it is being removed
                    self.writing.setdefault(folder.stem, time.time())


def wait_for(run_of, key: str, child: subprocess.Popen, seconds: float) -> None:
    """Wait until `seconds` after `key` came into the log, or until the run ends."""
    while child.poll() is None:
        run = run_of()
        if run and (at := time_of(run, key)) and time.time() >= at + seconds:
            return
        time.sleep(POLL_S)


def steps_line(run: Path, watch: Watch) -> list[str]:
    """Return lines about the step times, with the steps during a save apart.

    The first three steps are left out.
    """
    records, begin = Run.read(run / "result.txt").records, time_of(run, "block_start")
    steps = [
        (begin + event["time_s"], event["step_time_ms"])
        for event in records
        if event["event"] == "step"
    ][3:]
    spans = [(first, watch.whole.get(name, float("inf"))) for name, first in watch.writing.items()]
    alone: list[float] = []
    beside: list[float] = []
    for at, ms in steps:
        overlaps = any(at > first and at - ms / 1e3 < last for first, last in spans)
        steps_of_kind = beside if overlaps else alone
        steps_of_kind.append(ms)
    lines = []
    for name, ms in (("without a save", alone), ("beside a save", beside)):
        if ms:
            lines.append(
                f"{len(ms):5} steps {name}: median {statistics.median(ms):.1f} ms, "
                f"mean {statistics.mean(ms):.1f}, {min(ms):.1f} to {max(ms):.1f}"
            )
    lines += [
        f"      save of step {event['step']}: training stood still for {event['seconds']:.2f} s"
        for event in records
        if event["event"] == "checkpoint"
    ]
    lines += [
        f"      {name}: whole {watch.whole[name] - begin:.1f} s after its first file"
        for name, begin in watch.writing.items()
        if name in watch.whole
    ]
    return lines


def send_signal(args: argparse.Namespace, run_of, child: subprocess.Popen) -> float | None:
    """Send the signal that `args` ask for. Return its Unix time, or None if none was sent."""
    if args.stop_after is None and args.kill_rank is None:
        return None
    wait_for(run_of, "run_start", child, args.after if args.stop_after is None else args.stop_after)
    if child.poll() is not None:
        return None
    target = child.pid
    number = signal.SIGTERM
    if args.kill_rank is not None:
        heartbeat = run_of() / f"ranks/rank_{args.kill_rank}.heartbeat"
        target = json.loads(heartbeat.read_text())["pid"]
        number = signal.SIGKILL
    sent = time.time()
    os.kill(target, number)
    return sent


def print_report(run: Path, watch: Watch, began: float) -> None:
    """Print times, memory and the verdict of a run. `began`: Unix time of the command."""
    for key in ("init_start", "init_stop", "run_start", "run_stop"):
        if at := time_of(run, key):
            print(f"{at - began:9.1f} s  {key}")
    records = Run.read(run / "result.txt").records
    shown = ("event", "name", "seconds", "ops", "base_bytes", "base_seconds", "loss")
    for event in records:
        if event["event"] in ("phase", "self_test", "eval"):
            print("          ", {name: value for name, value in event.items() if name in shown})
    print(*steps_line(run, watch), sep="\n")
    gpus = [event["memory_gib"] for event in records if event.get("memory_gib")]
    print(
        f"host memory taken: {(watch.before - watch.least) / 2**30:.1f} GiB"
        + (f"; GPU memory reserved: {max(gpus):.1f} GiB" if gpus else "")
    )
    sys.stdout.flush()  # before the lines of `check`
    subprocess.run([str(ROOT / "run_and_time.sh"), "check", str(run / "result.txt")], check=False)
    failure = run / "failure.json"
    print(failure.read_text() if failure.exists() else "no failure.json")
    print(*(run.parent / "attempts.jsonl").read_text().splitlines()[-1:])


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this program, and the arguments after `--`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=["llama2_70b_lora", "llama31_8b"])
    parser.add_argument("--data-dir", type=Path, help="default: as for ./run_and_time.sh")
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--stop-after", type=float)
    parser.add_argument("--kill-rank", type=int)
    parser.add_argument("--after", type=float, default=10.0)
    end = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end]), words[end + 1 :]


def main() -> None:
    args, options = parse(sys.argv[1:])
    log_dir = args.log_dir.absolute()
    environment = os.environ | {"LOGDIR": str(log_dir)}
    if args.data_dir:
        environment["DATADIR"] = str(args.data_dir.absolute())
    before = set(log_dir.glob(f"{args.benchmark}/*/"))

    def run_of() -> Path | None:
        return next(iter(set(log_dir.glob(f"{args.benchmark}/*/")) - before), None)

    watch = Watch(log_dir)
    watch.start()
    began = time.time()
    command = [str(ROOT / "run_and_time.sh"), args.benchmark, *options]
    child = subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
    )
    try:
        sent = send_signal(args, run_of, child)
        code = child.wait()
    except BaseException:  # such as Ctrl-C, which does not reach the run in its own session
        child.terminate()
        child.wait()
        raise
    ended = time.time()
    run = run_of()
    left = processes_of(run) if run else []
    watch.ended.set()
    watch.join()
    print(
        f"\n{' '.join(command)}\nexit code {code} after {ended - began:.1f} s"
        + (f", {ended - sent:.1f} s after the signal" if sent else "")
    )
    print(f"processes left: {sorted(left) or 'none'}")
    if run:
        print_report(run, watch, began)


if __name__ == "__main__":
    main()
