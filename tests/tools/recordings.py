"""Record commands in a terminal: `python3 -m tests.tools.recordings [NAME...]`. Needs tmux.

Each recording is docs/screens/NAME.txt: what a user has on the screen and above it when the command
has ended. Lines have the width of the terminal. The paths of this machine are replaced.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.paths import ROOT

FOLDER = ROOT / "docs" / "screens"
POLL_S = 0.5
LONGEST_S = 3600.0


@dataclass(frozen=True)
class Recording:
    command: str  # in a shell, in the checkout; $RESULTS is an empty directory
    columns: int = 80
    environment: dict[str, str] = field(default_factory=dict)


FIRST_RUNS = {
    f"first_run{suffix}_{columns}": Recording(f"./run_and_time.sh {benchmark}", columns)
    for benchmark, suffix in (("llama31_8b", ""), ("llama2_70b_lora", "_lora"))
    for columns in (60, 80, 120)
}
RECORDINGS = FIRST_RUNS | {
    "failure": Recording("./run_and_time.sh llama31_8b --set max_samples=1024"),
    "series": Recording(
        "./run_and_time.sh llama31_8b --miniature --max-failures 1 --set max_samples=9216",
        environment={"NEXP": "2"},
    ),
    "convert": Recording(
        "mkdir -p $RESULTS; cat docs/*.md > $RESULTS/docs.txt; "
        "./run_and_time.sh llama31_8b prepare convert --input $RESULTS/docs.txt "
        "--tokenizer data/llama31_8b-miniature/tokenizer.model --output-prefix $RESULTS/docs"
    ),
    "suite": Recording(
        "./run_and_time.sh throughput suite --quick --device cpu --out $RESULTS/suite"
    ),
}


def record(name: str) -> None:
    """Run one recording and write its file."""
    recording = RECORDINGS[name]
    socket = f"recordings-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended"
        results = Path(folder) / "results"
        variables = {"RESULTS": str(results)} | recording.environment
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        script = f"export {settings}; cd {shlex.quote(str(ROOT))}; clear; {recording.command}"
        shell = f"{script}; echo $? > {shlex.quote(str(ended))}; sleep 60"
        tmux = ["tmux", "-L", socket, "-f", "/dev/null"]
        size = ["-x", str(recording.columns), "-y", "40"]
        subprocess.run([*tmux, "new-session", "-d", *size, "bash", "-c", shell], check=True)
        try:
            deadline = time.monotonic() + LONGEST_S
            while not ended.exists() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            pane = subprocess.run(
                [*tmux, "capture-pane", "-p", "-S", "-2000"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)
        code = ended.read_text().strip() if ended.exists() else "none: it was stopped"
        text = pane.rstrip().replace(str(results), "results").replace(str(ROOT), "/llama")
        text = re.sub(r"/tmp/\S*/results", "results", text)
    shown = recording.command.rpartition("; ")[2].replace("$RESULTS/", "")
    before = "".join(f"{key}={value} " for key, value in recording.environment.items())
    lines = [f"$ {before}{shown}   # {recording.columns} columns", text, f"# exit code {code}", ""]
    (FOLDER / f"{name}.txt").write_text("\n".join(lines))
    print(f"written: docs/screens/{name}.txt, exit code {code}", flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:] or RECORDINGS:
        record(each)
