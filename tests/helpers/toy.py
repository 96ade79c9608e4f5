"""Create a project with the real launcher and a toy benchmark whose trainer fails on request.

The environment variable TOY selects what its ranks do:

good                      succeed
wait                      wait to be stopped
held                      wait while a file hold_<attempt> exists in the launcher's directory
fail, kill, hang          rank VICTIM (default: 1) fails, is killed, or falls behind
exit                      rank VICTIM exits with code 1 without a record
unsaved, killed in save   fail, or be killed, while the model is saved (--save)
late                      rank 0 fails after a successful run

FINDINGS is the exit code of its `check`, or minus the signal that kills it.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from common.paths import ROOT

TRAINER = """
import argparse, contextlib, faulthandler, json, os, signal, sys, time
from pathlib import Path
from common.errors import RunError, StorageError, write_rank_record

parser = argparse.ArgumentParser()
for name in ("run-dir", "data-dir", "config-name", "seed", "device"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--save", action="store_true")
args = parser.parse_args()
run_dir, rank, mode = Path(args.run_dir), int(os.environ["RANK"]), os.environ["TOY"]
victim = int(os.environ.get("VICTIM", "1"))

def log(key, **metadata):
    if rank == 0:
        now = int(time.time() * 1000)
        entry = {"key": key, "time_ms": now, "value": None, "metadata": metadata}
        line = ":::MLLOG " + json.dumps(entry)
        if key != "tracked_stats":
            with contextlib.suppress(OSError):
                # As in common/training/mllog.py: descriptor 1, whatever it is.
                os.write(1, line.encode() + b"\\n")
        with (run_dir / "result.txt").open("a") as file:
            file.write(line + "\\n")

def beat(phase, step=2):
    record = {"rank": rank, "pid": os.getpid(), "step": step, "phase": phase, "time": time.time()}
    (run_dir / "ranks" / f"rank_{rank}.heartbeat").write_text(json.dumps(record))

def end(outcome, error=None, **facts):
    write_rank_record(run_dir, rank, outcome, error, **facts)
    os._exit(error.exit_code if error else 0)

def stop(number, frame):
    with contextlib.suppress(FileNotFoundError):  # a test takes the directory away
        log("run_stop", status="aborted", samples_count=1)
        write_rank_record(run_dir, rank, "interrupted")
    os._exit(143)

signal.signal(signal.SIGTERM, stop)
# As in common/training/guard.py.
faulthandler.register(signal.SIGUSR1, open(run_dir / "ranks" / f"rank_{rank}.stack", "w"))
assert (run_dir / "config.toml").is_file()
assert os.environ["CACHE_CLEARED"] == "fadvise"
assert os.environ["FROM_CONFIG"] == "yes"
(run_dir / f"seed_{rank}").write_text(args.seed)
log("run_start", config=args.config_name)
beat("train")
with contextlib.suppress(OSError):
    print("progress line", file=sys.stderr, flush=True)
if mode == "fail" and rank == victim:
    end("failed", RunError("boom", "as told", "nothing"), step=1)
if mode == "exit" and rank == victim:
    os._exit(1)
if mode == "kill" and rank == victim:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "hang":
    for step in range(3, 6 if rank == victim else 12):
        beat("train", step)
if mode in ("fail", "exit", "kill", "hang", "wait"):
    (run_dir / f"waiting_{rank}").write_text("")
    time.sleep(60)
(run_dir / f"pid_{rank}").write_text(str(os.getpid()))
deadline = time.monotonic() + 30
if mode == "held":
    ledger = (run_dir.parent / "attempts.jsonl").read_text().splitlines()
    attempt = sum(json.loads(line)["event"] == "start" for line in ledger)
    while (run_dir.parents[2] / f"hold_{attempt}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
try:
    for step in range(600):
        log("tracked_stats", text="a line to fill the disk" * 4)
except OSError as error:
    failure = StorageError(f"cannot write: {error.strerror}", "the disk is full", "free space")
    end("failed", failure, step=1)
first_record = run_dir / "ranks/rank_0.json"
# Collectives keep real ranks together in the same way.
while mode == "held" and rank and not first_record.exists() and time.monotonic() < deadline:
    time.sleep(0.02)
log("run_stop", status="success", samples_count=32)
if args.save and rank == 0:
    beat("save")
    # A real rank has a record even if torchrun ends it.
    while not (run_dir / "ranks" / "rank_1.json").exists():
        time.sleep(0.01)
if args.save and mode == "unsaved" and rank == 0:
    end("failed", StorageError("the model was not saved", "the disk is full", "free space"), step=2)
if args.save and mode == "killed in save" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "late" and rank == 0:
    end("failed", StorageError("something is missing", "the disk is full", "free space"), step=2)
end("done", step=2)
"""
# In place of launch/processes/torchrun.py: the same processes, signals and findings, without the
# seconds that an import of torch takes.
TORCHRUN = """
import json, os, signal, subprocess, sys, time
folder, arguments = sys.argv[1], sys.argv[2:]
value = lambda name: arguments[arguments.index(name) + 1]
count = int(value("--nproc-per-node"))
node = int(value("--node-rank")) if "--node-rank" in arguments else 0
command = [sys.executable, *arguments[arguments.index("-m"):]]
ranks = range(node * count, (node + 1) * count)
children = {}
for rank in ranks:
    environment = os.environ | {"RANK": str(rank)}
    children[rank] = subprocess.Popen(command, env=environment, start_new_session=True)
def stop(number, frame):
    for child in children.values():
        child.terminate()
signal.signal(signal.SIGTERM, stop)
while True:
    codes = [child.poll() for child in children.values()]
    if None not in codes or any(codes):
        break
    time.sleep(0.02)
codes = {rank: child.poll() for rank, child in children.items()}
stop(None, None)
failed = [
    {"rank": rank, "pid": children[rank].pid, "exit_code": code, "time": time.time()}
    for rank, code in codes.items()
    if code
]
if failed and os.path.isdir(folder):
    open(os.path.join(folder, "torchrun.json"), "w").write(json.dumps(failed))
sys.exit(1 if failed else 0)
"""
RULES = """
from pathlib import Path

from common import benchmarks
from common.config import RunConfig as Config
from common.model.shapes import ModelShape

class Rules(benchmarks.Rules):
    data_files = ("t.bin", "t.idx", "v.bin", "v.idx")

    def weights_folder(self, config, data_dir, environment):
        return Path(environment["MODEL"]) if environment.get("MODEL") else None

MINIATURE = Rules(
    division="miniature",
    shape=ModelShape(2, 32, 48, 4, 2, 61, 10000.0),
    sequence_length=8,
    eval_samples=64,
    eval_interval_samples=16,
    target_loss=1.0,
    adam_beta_1=0.9,
    adam_beta_2=0.95,
    adam_epsilon=1e-5,
    weight_decay=0.1,
    gradient_clip_norm=1.0,
    manifests=("miniature.json",),
    saves_model=True,
)
DIVISIONS = (MINIATURE,)

def rules_of(config):
    return MINIATURE
"""
PREPARE = """
import os, sys, time
from pathlib import Path
if "HOLD_PREPARE" in os.environ:
    Path("preparing").write_text("")
    time.sleep(300)
folder = Path(sys.argv[sys.argv.index("--data-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
for name in ("t.bin", "t.idx", "v.bin", "v.idx"):
    (folder / name).write_text("x")
print("prepared")
"""


def stub(body: str) -> str:
    """Return a command's module, whose options the launcher reads, that runs `body` if started."""
    return STUB + textwrap.indent(body, "    ")


STUB = """
from common.command_line import Parser

def parser(*_):
    stub = Parser("stub")
    stub.add_argument("words", nargs="*")
    stub.add_argument("--some")
    return stub

if __name__ == "__main__":
"""
CHECK = stub("""
import os, pathlib, sys, time
deadline = time.monotonic() + 30
if os.path.exists("hold_check"):
    pathlib.Path("checking").touch()
while os.path.exists("hold_check") and time.monotonic() < deadline:
    time.sleep(0.02)
print('one finding')
code = int(os.environ.get('FINDINGS', 0))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
""")
REPORT = stub(
    "import pathlib, sys; pathlib.Path(sys.argv[1], 'report.html').write_text('<html>'); "
    "print('report.html', 'advice of the toy', sep='\\n')"
)


def shorten(root: Path, module: str, limit: str, instead: str) -> None:
    """Replace the line `limit`, such as "LOST_S = 30.0", in the project's copy of `module`."""
    path = root / module
    source = path.read_text()
    assert limit in source
    path.write_text(source.replace(limit, instead))


def make_project(root: Path, torchrun: str = "") -> Path:
    """Copy the launcher to `root`, and write the toy benchmark there.

    `torchrun`: source that replaces launch/processes/torchrun.py (default: the original).
    """
    for package in ("launch", "common", "system_tuning"):
        shutil.copytree(
            ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "run_and_time.sh", root)
    (root / "submission").mkdir()
    shutil.copy(ROOT / "submission/prerequisites.py", root / "submission")
    config = (
        (ROOT / "configs/llama31_8b/CPU_1x1.toml")
        .read_text()
        .replace("gpus_per_node = 1", "gpus_per_node = 2")
    )
    config = re.sub("opt_learning_rate_warmup_steps = .*\n", "", config.replace("= 16\n", "= 8\n"))
    files = {
        "toy/__init__.py": "",
        "toy/rules.py": RULES,
        "toy/train.py": TRAINER,
        "toy/prepare.py": PREPARE,
        "submission/__init__.py": "",
        "submission/check.py": CHECK,
        "submission/report.py": REPORT,
        "requirements.txt": "pytest\n",
        "requirements-logs.txt": "",
        "configs/toy/CPU_1x1.toml": config.replace(
            "global_batch_size = 8", "global_batch_size = 16"
        )
        + 'FROM_CONFIG = "yes"\n',  # the file ends with its [env]
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if torchrun:
        (root / "launch/processes/torchrun.py").write_text(torchrun)
    return root


def launch(project, cwd, *arguments, benchmark="toy", shell="", **variables):
    """Start run_and_time.sh from `cwd` by a line of bash, on a machine without GPUs.

    Leave out `benchmark` for a command that takes none.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = (
        os.environ
        | {
            "PATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "HIP_VISIBLE_DEVICES": "",
            "LOGDIR": "out",
            "DGXSYSTEM": "CPU_1x1",  # asks for the miniature
        }
        | variables
    )
    command = [
        *(["bash", "-c", shell] if shell else []),
        str(project / "run_and_time.sh"),
        *filter(None, [benchmark]),
        *arguments,
    ]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    """Wait for `process`, 300 s at most. Return its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def alive(tmp_path):
    """Return the command line files of the processes whose command line names `tmp_path`."""
    return [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _bytes(p)]


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def gone(pid: int | str) -> bool:
    """Return whether the process has ended, or is a zombie."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or " Z " in state.read_text()


def wait_until(condition, seconds=60):
    """Poll until `condition()` is true. Raise AssertionError if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()
