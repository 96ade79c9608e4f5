"""Make one system call of a command fail, and judge whether the command told the truth about it.

    python3 -m tests.tools.inject_faults [--seeds 0:200] [--jobs 2] [--folder DIR] [--keep]

A seed chooses a phase, a call on a file that the phase makes, and what happens there: an errno, a
short read or write, or SIGKILL. A command tells the truth under these conditions:

- Its exit code is 0 if and only if log, ledger and every requested output are complete.
- It loses nothing that existed before.
- After it, the same command without a fault succeeds, and its outputs are those of a run without
  any fault.

Prints a table of phases and outcomes. Exit code: 0 if every command told the truth, 1 if one did
not, 2 for wrong usage, 18 without gcc. Not part of CI, which runs 20 seeds (test_inject_faults.py).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fnmatch
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.errors import PreflightError
from common.model.peft_adapter import save_peft_adapter
from common.model.shapes import ModelShape
from common.paths import ROOT
from common.text_tables import align

SOURCE = Path(__file__).with_suffix(".c")
LIMIT_S = 600.0  # for a command
END_S = 20.0  # for the processes of a command that was killed
HIDDEN = ("SEED", "NEXP", "DGXSYSTEM", "DGXNGPU", "GPU_KIND", "MODEL", "LD_PRELOAD")
LAUNCHER = "launch.run_command"

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CONFIG = """
gpu = "CPU"
model = "{folder}/model.json"
sequence_length = 32
global_batch_size = 4
micro_batch_size = 4
eval_micro_batch_size = 4
max_samples = {samples}
eval_samples = 8
eval_interval_samples = {interval}
opt_base_learning_rate = 3e-3
schedule = "cosine"
opt_learning_rate_warmup_steps = 4
weight_decay = 0.1
gradient_clip_norm = 1.0
"""


# --- the shim -------------------------------------------------------------------------------------


def build_shim(folder: Path) -> Path:
    """Compile inject_faults.c into `folder`. Raises PreflightError without gcc."""
    if not shutil.which("gcc"):
        raise PreflightError(
            "no gcc",
            "faults are injected by a library that is compiled first",
            "install gcc, for example by apt-get install gcc libc6-dev",
        )
    shim = folder / "inject_faults.so"
    command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-D_LARGEFILE64_SOURCE"]
    built = subprocess.run(
        [*command, "-o", shim, SOURCE, "-ldl"], capture_output=True, text=True, check=False
    )
    if built.returncode:
        raise PreflightError("gcc failed", built.stderr.strip(), "install gcc and libc6-dev")
    return shim


@dataclass(frozen=True)
class Call:
    """A call that a process made on a file, relative to the folder of the case."""

    pid: int
    process: str
    name: str
    path: str


def read_calls(log: Path) -> list[Call]:
    """Return the calls that the shim wrote to `log`, which may not exist."""
    calls = []
    if log.exists():
        for line in log.read_text(errors="replace").splitlines():
            pid, process, name, path = line.split("\t")
            calls.append(Call(int(pid), process, name, path))
    return calls


def unsynced(calls: list[Call]) -> list[str]:
    """Return the names that files and folders got before their content was on the disk.

    Their names before, as common/atomic_write.py chooses them, are NAME.<random>.partial.
    """
    content: dict[str, bool] = {}  # path -> whether its content is on the disk
    found = []
    for call in calls:
        if call.name in ("create", "write"):
            content[call.path] = False
        elif call.name == "fsync":
            content[call.path] = True
        elif call.name == "rename":
            moved = [path for path in content if _becomes(path, call.path)]
            if not all(content[path] for path in moved):
                found.append(call.path)
            for path in moved:
                content[_becomes(path, call.path)] = content.pop(path)
    return found


def _becomes(path: str, target: str) -> str:
    """Return the path of a file after a rename of its partial name to `target`, "" if it stays."""
    match = re.match(re.escape(target) + r"(\.[^/]*)?\.partial(?=/|$)", path)
    return target + path[match.end() :] if match else ""


@dataclass(frozen=True)
class Fault:
    """What happens at the `number`-th call `call` of `process` on a file that matches `path`.

    `action`: an errno, short, kill or killed. `repeats`: later calls fail as well.
    """

    process: str
    call: str
    path: str
    number: int
    action: str
    repeats: bool

    @property
    def rule(self) -> str:
        """The fault as FAULT_RULE of the shim."""
        number = f"{self.number}{'+' if self.repeats else ''}"
        return f"{self.process}|{self.call}|{self.path}|{number}|{self.action}"

    @property
    def kills(self) -> bool:
        """Whether it ends the process."""
        return self.action.startswith("kill")

    def __str__(self) -> str:
        action = self.action
        if action.isdigit():
            action = errno.errorcode[int(action)]
        times = f"{self.number}th{' and later' if self.repeats else ''}"
        return f"{action} at the {times} {self.call} of {self.path} in {self.process}"


def errnos(*names: str) -> tuple[str, ...]:
    return tuple(str(getattr(errno, name)) for name in names)


ACTIONS = {
    "open": (*errnos("EIO", "ESTALE"), "kill"),
    "create": (*errnos("ENOSPC", "EIO"), "kill"),
    "read": (*errnos("EIO"), "short", "kill"),
    "write": (*errnos("ENOSPC", "EIO", "EDQUOT"), "short", "kill"),
    "fsync": (*errnos("EIO", "ENOSPC"), "kill"),
    "rename": (*errnos("EIO", "ENOSPC"), "kill", "killed"),
    "mkdir": (*errnos("ENOSPC", "EROFS"), "kill", "killed"),
}


# --- commands, and what they write ----------------------------------------------------------------

Outputs = dict[str, object]


@dataclass(frozen=True)
class Command:
    """A command of run_and_time.sh.

    `arguments`: {case} is the folder of the case, {inputs} that of the inputs, {run} the newest
        run before the command.
    `needs`: folders that the case begins with.
    `outputs`: returns what must be equal after two commands, without times. `by_products`: returns
        files that are missing or incomplete although the run does not depend on them.
    `goes_on`: further arguments of the command that goes on after a fault.
    """

    arguments: str
    needs: tuple[str, ...]
    outputs: Callable[[Path, str], Outputs]
    goes_on: str = ""
    by_products: Callable[[Path], list[str]] = lambda case: []


def digests(folder: Path) -> Outputs:
    """Return name -> SHA-256 of the files in `folder`. Temporary files and locks do not count."""
    found: Outputs = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.endswith((".partial", ".lock")):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def files_in(folder: str) -> Callable[[Path, str], Outputs]:
    """Return a function that digests the files in a folder of the case."""

    def outputs(case: Path, stdout: str) -> Outputs:
        return digests(case / folder)

    return outputs


def printed(case: Path, stdout: str) -> Outputs:
    """Return the output without paths and times."""
    text = stdout.replace(str(case), "{case}")
    return {"stdout": re.sub(r"[0-9.,]+ ?(s|ms|tok/s|tokens/s)\b", "", text)}


def page(case: Path, stdout: str) -> Outputs:
    """Return whether the newest run has a complete page."""
    return {"page": is_page(newest_run(case / "results") / "report.html")} | printed(case, stdout)


def is_page(path: Path) -> bool:
    return path.is_file() and path.read_text(errors="replace").rstrip().endswith("</html>")


def newest_run(log_dir: Path) -> Path:
    """Return the newest run of open_llama in `log_dir`, or a folder that does not exist."""
    runs = [path for path in (log_dir / "open_llama").glob("*_seed*") if path.is_dir()]
    return max(runs, key=lambda path: path.stat().st_ctime_ns, default=log_dir / "none")


def log_lines(run: Path) -> list[object]:
    """Return key, value, samples and status of each line of the log. Times are left out."""
    lines: list[object] = []
    path = run / "result.txt"
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line.removeprefix(":::MLLOG "))
        except ValueError:
            lines.append(f"damaged: {line}")
            continue
        metadata = record["metadata"]
        value = record["value"]
        if record["key"] in ("tracked_stats", "cache_clear"):  # a page cache may refuse
            value = None
        if record["key"] == "resumed":
            value = "a run"
        entry = [record["key"], value, metadata.get("samples_count"), metadata.get("status")]
        lines.append(entry)
    return lines


def ledger_lines(log_dir: Path, run: Path) -> list[object]:
    """Return event, kind and exit code of the lines of the newest series."""
    path = log_dir / "open_llama" / "attempts.jsonl"
    lines = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            record = {"event": f"damaged: {line}"}
        if record["event"] == "series":
            lines = []
        lines.append([record["event"], record.get("kind"), record.get("exit_code")])
    return lines


def run_outputs(case: Path, stdout: str) -> Outputs:
    """Return log, ledger, checkpoint and model of the newest run."""
    run = newest_run(case / "results")
    # The newest one. An older one is left if the disk has failed after the newest had its name.
    checkpoints = max((run / "checkpoints").glob("step_????????"), default=run / "none")
    return {
        "log": log_lines(run),
        "ledger": ledger_lines(case / "results", run),
        "checkpoint": digests(checkpoints) if checkpoints.is_dir() else {},
        "model": digests(run / "model") if (run / "model").is_dir() else {},
    }


def run_by_products(case: Path) -> list[str]:
    """Return the files of the newest run, of those that no result needs, that are not complete."""
    run = newest_run(case / "results")
    missing = []
    if not is_page(run / "report.html"):
        missing.append("report.html")
    check = run / "check.txt"
    if not check.is_file() or "errors" not in check.read_text(errors="replace"):
        missing.append("check.txt")
    events = run / "events.jsonl"
    text = events.read_text(errors="replace") if events.is_file() else ""
    if text.count('"event": "step"') < 1 or not all(map(is_json, text.splitlines())):
        missing.append("events.jsonl")
    return missing


def is_json(line: str) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(json.loads(line), dict)
    return False


def submission(case: Path, stdout: str) -> Outputs:
    """Return the names of the files of a package, and its verdict."""
    folder = case / "package"
    verdicts = [json.loads(path.read_text()).get("passed") for path in folder.glob("verdict_*")]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {"names": [re.sub(r"[0-9a-f]{8,}", "*", name) for name in names], "verdicts": verdicts}


RUN = "open_llama --config {inputs}/config.toml --checkpoint 1"
COMMANDS = {
    "prepare miniature": Command(
        "llama31_8b prepare miniature --data-dir {case}/miniature", (), files_in("miniature")
    ),
    "prepare text": Command(
        "open_llama prepare text --input {inputs}/corpus --train-tokenizer 512 --processes 2 "
        "--validation-fraction 0.2 --data-dir {case}/text",
        (),
        files_in("text"),
    ),
    "run": Command(
        RUN, ("data",), run_outputs, goes_on="--continue auto", by_products=run_by_products
    ),
    "continue": Command(
        f"{RUN} --continue auto", ("data", "stopped"), run_outputs, by_products=run_by_products
    ),
    "eval": Command(
        "open_llama eval {run}/model --data {case}/data/validation --sequences 8",
        ("data", "results"),
        printed,
    ),
    "generate": Command(
        "open_llama generate {run}/model --prompt def --tokens 4 --temperature 0",
        ("results",),
        printed,
    ),
    "check": Command("check {run}", ("results",), printed),
    "report": Command("report {run}", ("results",), page),
    "export": Command(
        "open_llama export {run} --out {case}/exported", ("data", "results"), files_in("exported")
    ),
    "merge": Command(
        "open_llama merge --base {run}/model --adapter {case}/adapter --out {case}/merged",
        ("results", "adapter"),
        files_in("merged"),
    ),
    "package": Command("package --rehearse --out {case}/package", (), submission),
}


@dataclass(frozen=True)
class Phase:
    """Calls of a command that belong together, by patterns of their process and path."""

    command: str
    process: str = "*"
    paths: tuple[str, ...] = ("*",)
    except_paths: tuple[str, ...] = ()

    def has(self, call: Call) -> bool:
        """Return whether the call belongs to this phase."""
        return (
            fnmatch.fnmatchcase(call.process, self.process)
            and any(fnmatch.fnmatchcase(call.path, pattern) for pattern in self.paths)
            and not any(fnmatch.fnmatchcase(call.path, pattern) for pattern in self.except_paths)
        )


TRAINER = "open_llama.train"
CHECKPOINTS = "*/checkpoints*"
SAVED = "*/model*"
PHASES = {
    "prepare miniature": Phase("prepare miniature"),
    "prepare text": Phase("prepare text"),
    "start and ledger": Phase("run", "launch*"),
    "training": Phase("run", TRAINER, except_paths=(CHECKPOINTS, SAVED)),
    "checkpoint": Phase("run", TRAINER, (CHECKPOINTS,)),
    "save": Phase("run", TRAINER, (SAVED,)),
    "continue": Phase("continue"),
    "log check of a run": Phase("run", "submission.check"),
    "report of a run": Phase("run", "submission.report"),
    "evaluation": Phase("eval"),
    "check": Phase("check"),
    "report": Phase("report"),
    "package": Phase("package"),
    "merge": Phase("merge"),
    "export": Phase("export"),
    "generate": Phase("generate"),
}


# --- running a command ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int | None  # None: it did not end within LIMIT_S
    out: str
    err: str
    orphans: bool  # whether processes of it were left after END_S


class Workshop:
    """A folder with the shim, the inputs, and what the cases begin with."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.inputs = folder / "inputs"
        self.before = folder / "before"

    def build(self) -> None:
        """Build everything, and record the calls of each command without a fault."""
        build_shim(self.folder)
        self.inputs.mkdir()
        (self.inputs / "model.json").write_text(json.dumps(MODEL))
        (self.inputs / "config.toml").write_text(
            CONFIG.format(folder=self.inputs, samples=96, interval=32)
        )
        corpus = self.inputs / "corpus"
        corpus.mkdir()
        for path in sorted((ROOT / "docs").glob("*.md")):
            shutil.copy(path, corpus)
        self._record("prepare text")
        shutil.copytree(self.reference("prepare text") / "text", self.before / "data")
        self._record("run")
        shutil.copytree(self.reference("run") / "results", self.before / "results")
        self._stop_a_run()
        self._write_adapter()
        for name in COMMANDS:
            if not self.reference(name).exists():
                self._record(name)

    def reference(self, command: str) -> Path:
        """Return the folder of a command without a fault."""
        return self.folder / "references" / command.replace(" ", "_")

    def calls(self, command: str) -> list[Call]:
        """Return the calls of a command without a fault."""
        return read_calls(self.reference(command).with_suffix(".calls"))

    def outputs(self, command: str) -> Outputs:
        """Return the outputs of a command without a fault."""
        return json.loads(self.reference(command).with_suffix(".json").read_text())

    def _record(self, name: str) -> None:
        case = self.reference(name)
        self.begin(name, case)
        log = case.with_suffix(".calls")
        ended = self.start(name, case, log=log)
        assert ended.code == 0, f"{name}: {ended.err}"
        outputs = COMMANDS[name].outputs(case, ended.out)
        case.with_suffix(".json").write_text(json.dumps(outputs))

    def _stop_a_run(self) -> None:
        """Make a run whose rank was killed after its second checkpoint, as `before`/stopped."""
        case = self.folder / "stopped"
        self.begin("run", case)
        fault = Fault(TRAINER, "write", "*/result.txt", self._stop_at(), "kill", False)
        ended = self.start("run", case, fault, case / "hits")
        assert ended.code == 14, f"{ended.code}: {ended.err}"
        shutil.copytree(case / "results", self.before / "stopped")

    def _stop_at(self) -> int:
        """Return the number of the write of the log after the second evaluation."""
        keys = [entry[0] for entry in log_lines(newest_run(self.before / "results"))]
        evaluations = [number for number, key in enumerate(keys) if key == "eval_stop"]
        return evaluations[1] + 3

    def _write_adapter(self) -> None:
        """Write a LoRA adapter of the model in the layout of peft."""
        shape = ModelShape(2, 32, 64, 4, 2, MODEL["vocab_size"], MODEL["rope_theta"])
        tensors = {}
        for layer in range(shape.num_layers):
            for part, size in (("qkv", shape.qkv_size), ("o", shape.hidden_size)):
                tensors[f"blocks.{layer}.{part}.lora_a"] = torch.full((2, shape.hidden_size), 0.5)
                tensors[f"blocks.{layer}.{part}.lora_b"] = torch.full((size, 2), 0.25)
        base = newest_run(self.before / "results") / "model"
        save_peft_adapter(self.before / "adapter", tensors, shape, 2, 4, 0.0, base)

    def begin(self, command: str, case: Path) -> None:
        """Create the folder of a case with what its command needs."""
        case.mkdir(parents=True)
        for name in COMMANDS[command].needs:
            to = "results" if name == "stopped" else name
            shutil.copytree(self.before / name, case / to, copy_function=shutil.copy2)

    def start(
        self,
        command: str,
        case: Path,
        fault: Fault | None = None,
        log: Path | None = None,
        more: str = "",
    ) -> Ended:
        """Run a command to its end. `log`: of the calls, or of the fault."""
        text = COMMANDS[command].arguments.format(
            case=case, inputs=self.inputs, run=newest_run(case / "results")
        )
        return self.launch(f"{text} {more}", case, fault, log)

    def launch(
        self, arguments: str, case: Path, fault: Fault | None = None, log: Path | None = None
    ) -> Ended:
        """Run run_and_time.sh with `arguments` to its end."""
        environment = {name: text for name, text in os.environ.items() if name not in HIDDEN}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "DATADIR": str(case / "data"),
            "LOGDIR": str(case / "results"),
            "SEED": "2814749767",
            "FAULT_ROOT": str(case),
        }
        if log:
            environment |= {
                "LD_PRELOAD": str(self.folder / "inject_faults.so"),
                "FAULT_LOG": str(log),
            }
        if fault:
            environment["FAULT_RULE"] = fault.rule
        process = subprocess.Popen(
            [str(ROOT / "run_and_time.sh"), *arguments.split()],
            env=environment,
            cwd=case,
            stdin=subprocess.DEVNULL,
            stdout=(case.parent / f"{case.name}.out").open("w"),
            stderr=(case.parent / f"{case.name}.err").open("w"),
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(LIMIT_S)
        deadline = time.monotonic() + END_S
        while (left := processes_of(case)) and code is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        out = (case.parent / f"{case.name}.out").read_text(errors="replace")
        err = (case.parent / f"{case.name}.err").read_text(errors="replace")
        return Ended(code, out, err, bool(left))


def processes_of(case: Path) -> list[int]:
    """Return the processes of the commands of a case."""
    mark = f"FAULT_ROOT={case}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


# --- choosing a fault -----------------------------------------------------------------------------


def pattern_of(path: str) -> str:
    """Return a pattern for the same file in another run: names with times and random parts."""
    path = re.sub(r"\.[^/]*\.partial", ".*.partial", path)
    return re.sub(r"[0-9a-f]{8}[0-9a-f-]*", "*", path)


def choose(seed: int, workshop: Workshop) -> tuple[str, Fault]:
    """Return the phase and the fault of a seed. Seeds one after another take turns at phases."""
    name = list(PHASES)[seed % len(PHASES)]
    phase = PHASES[name]
    numbers: dict[tuple[str, str, str], Counter[int]] = {}
    for call in workshop.calls(phase.command):
        if phase.has(call):
            site = (call.process, call.name, pattern_of(call.path))
            numbers.setdefault(site, Counter())[call.pid] += 1
    generator = random.Random(seed)
    site = generator.choice(sorted(numbers))
    number = generator.randint(1, max(numbers[site].values()))
    action = generator.choice(ACTIONS[site[1]])
    repeats = action.isdigit() and generator.random() < 0.3
    return name, Fault(*site, number, action, repeats)


# --- judging --------------------------------------------------------------------------------------

NOT_REACHED = "not reached"
COMPLETE = "complete"
NOTED = "complete, note"
REFUSED = "error"
KILLED = "killed"
UNTRUE = "UNTRUE"
OUTCOMES = (COMPLETE, NOTED, REFUSED, KILLED, NOT_REACHED, UNTRUE)


@dataclass
class Verdict:
    """What became of one fault."""

    seed: int
    phase: str
    fault: Fault
    code: int | None = None
    outcome: str = NOT_REACHED
    untruths: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.phase}: {self.fault}: {self.outcome} ({self.code})"]
        return "\n    ".join(lines + self.untruths)


def differences(outputs: Outputs, expected: Outputs) -> list[str]:
    """Return the names of outputs that differ from the expected ones."""
    found = []
    for name in sorted(outputs.keys() | expected.keys()):
        if json.dumps(outputs.get(name)) != json.dumps(expected.get(name)):
            found.append(name)
    return found


def lost_files(contents: dict[str, bytes], case: Path) -> list[str]:
    """Return the files of `contents` that are gone or changed.

    The ledger may have more lines, and a page may be a new one.
    """
    lost = []
    for name, content in contents.items():
        path = case / name
        if not path.is_file():
            lost.append(f"{name} is gone")
        elif name.endswith(("attempts.jsonl", ".html")):
            is_longer = path.read_bytes().startswith(content)
            if not is_longer and not is_page(path):
                lost.append(f"{name} is damaged")
        elif path.read_bytes() != content:
            lost.append(f"{name} changed")
    return lost


def read_files(case: Path) -> dict[str, bytes]:
    """Return name -> content of the files of a case."""
    return {
        str(path.relative_to(case)): path.read_bytes()
        for path in case.rglob("*")
        if path.is_file() and not path.name.endswith((".lock", ".partial"))
    }


def try_seed(seed: int, workshop: Workshop, keep: bool = False) -> Verdict:
    """Return what became of the fault of a seed."""
    return try_fault(Verdict(seed, *choose(seed, workshop)), workshop, keep)


def try_fault(verdict: Verdict, workshop: Workshop, keep: bool = False) -> Verdict:
    """Inject a fault, judge the command, go on without the fault, and complete the verdict."""
    began = time.monotonic()
    seed = verdict.seed
    name = PHASES[verdict.phase].command
    case = workshop.folder / "cases" / str(seed)
    shutil.rmtree(case, ignore_errors=True)
    workshop.begin(name, case)
    contents = read_files(case)
    hits = case.with_name(f"{seed}.hits")
    hits.unlink(missing_ok=True)
    ended = workshop.start(name, case, verdict.fault, hits)
    verdict.code = ended.code
    judge(verdict, ended, workshop, case)
    verdict.untruths += lost_files(contents, case)
    if hits.exists():
        go_on(verdict, workshop, case)
    else:
        verdict.outcome = NOT_REACHED
    if verdict.untruths:
        verdict.outcome = UNTRUE
    if not (keep or verdict.untruths):
        shutil.rmtree(case)
    verdict.seconds = time.monotonic() - began
    return verdict


def judge(verdict: Verdict, ended: Ended, workshop: Workshop, case: Path) -> None:
    """Compare the exit code with the outputs, and the words with the outcome."""
    name = PHASES[verdict.phase].command
    command = COMMANDS[name]
    differing = differences(command.outputs(case, ended.out), workshop.outputs(name))
    missing = command.by_products(case)
    tell = verdict.untruths.append
    if ended.orphans:
        tell("processes are left")
    if ended.code is None:
        tell(f"no end after {LIMIT_S:.0f} s")
    elif ended.code == 0:
        verdict.outcome = NOTED if missing else COMPLETE
        if differing:
            tell(f"exit code 0, but not as without a fault: {', '.join(differing)}")
        if missing and not re.search("note|error|cannot", ended.err, re.IGNORECASE):
            tell(f"exit code 0 and no note, but incomplete: {', '.join(missing)}")
    elif ended.code == -signal.SIGKILL:
        verdict.outcome = KILLED
    else:
        verdict.outcome = REFUSED
        if "Traceback" in ended.err or ended.code == 1:
            tell(f"no error for users: exit code {ended.code}: {ended.err[-600:]}")
        elif not re.search("^ *error", ended.err, re.MULTILINE):
            tell(f"exit code {ended.code} without an error: {ended.err[-300:]}")
        if not differing and not missing and verdict.fault.call != "fsync":
            tell(f"exit code {ended.code}, but everything is complete: {ended.err[-300:]}")
    if name in ("run", "continue"):
        verdict.untruths += disagreements(verdict, case)


def disagreements(verdict: Verdict, case: Path) -> list[str]:
    """Return how log and ledger of the newest run contradict each other."""
    run = newest_run(case / "results")
    log = log_lines(run)
    ledger = ledger_lines(case / "results", run)
    found = [str(line) for line in [*log, *ledger] if "damaged" in str(line)]
    succeeded = any(line[0] == "run_stop" and line[3] == "success" for line in log if line)
    ends = [line for line in ledger if line[0] == "end"]
    launcher_wrote = verdict.code != -signal.SIGKILL and "attempts.jsonl" not in verdict.fault.path
    if launcher_wrote and ledger and not ends:
        found.append("the ledger lacks the end of the run")
    for _, kind, code in ends:
        if (kind == "success") != succeeded:
            found.append(f"the log says success: {succeeded}, the ledger {kind} ({code})")
    return found


def go_on(verdict: Verdict, workshop: Workshop, case: Path) -> None:
    """Repeat the command without a fault, unless its outputs are complete."""
    name = PHASES[verdict.phase].command
    command = COMMANDS[name]
    out = (case.parent / f"{case.name}.out").read_text(errors="replace")
    expected = workshop.outputs(name)
    if not differences(command.outputs(case, out), expected):
        if name in ("run", "continue"):
            checked = workshop.launch(f"check {newest_run(case / 'results')}", case)
            if checked.code:
                verdict.untruths.append(f"then check: exit code {checked.code}")
        return
    again = workshop.start(name, case, more=command.goes_on)
    if again.code or again.orphans:
        verdict.untruths.append(f"then: exit code {again.code}: {again.err[-600:]}")
        return
    outputs = command.outputs(case, again.out)
    if name in ("run", "continue"):
        # A continued run logs fewer steps than one from the beginning, and saves fewer checkpoints.
        outputs |= {"log": outputs["log"][-1:], "checkpoint": {}}  # type: ignore[index]
        expected = expected | {"log": expected["log"][-1:], "checkpoint": {}}  # type: ignore[index]
    if differing := differences(outputs, expected):
        verdict.untruths.append(f"then: not as without a fault: {', '.join(differing)}")


# --- the command line -----------------------------------------------------------------------------


def table(verdicts: list[Verdict]) -> str:
    """Return phases x outcomes."""
    rows = [["phase", "faults", *OUTCOMES]]
    for phase in PHASES:
        counts = Counter(each.outcome for each in verdicts if each.phase == phase)
        rows.append([phase, str(counts.total()), *(str(counts[each]) for each in OUTCOMES)])
    total = Counter(each.outcome for each in verdicts)
    rows.append(["all", str(total.total()), *(str(total[each]) for each in OUTCOMES)])
    alignment = "<" + ">" * (len(OUTCOMES) + 1)
    return "\n".join("  ".join(row) for row in align(rows, alignment))


@contextlib.contextmanager
def workshop_in(folder: Path | None) -> Iterator[Workshop]:
    """Build a workshop in `folder`, or take the one that is there. Default: a temporary folder."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            workshop = Workshop(Path(temporary).resolve())
            workshop.build()
            yield workshop
        return
    workshop = Workshop(folder.resolve())
    if not folder.exists():
        folder.mkdir(parents=True)
        workshop.build()
    yield workshop


def seeds_of(text: str) -> list[int]:
    """Return the seeds of --seeds."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, end = part.partition(":")
        seeds += range(int(first), int(end or int(first) + 1))
    return seeds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.tools.inject_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "seeds from A up to B, or several such, separated by commas (default: %(default)s)"
    parser.add_argument("--seeds", default="0:200", metavar="A:B", help=text)
    parser.add_argument("--jobs", type=int, default=2, help="at the same time, default: 2")
    parser.add_argument("--folder", type=Path, help="of the cases (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the files of all cases")
    options = parser.parse_args(arguments)
    seeds = seeds_of(options.seeds)
    verdicts = []
    try:
        with workshop_in(options.folder) as workshop, ThreadPoolExecutor(options.jobs) as pool:
            for verdict in pool.map(lambda seed: try_seed(seed, workshop, options.keep), seeds):
                verdicts.append(verdict)
                print(f"{verdict}, {verdict.seconds:.0f} s", flush=True)
    except PreflightError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    print(table(verdicts))
    return int(any(verdict.untruths for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
