"""Inject a failed system call into runs of open_llama: what it may cost, and what not.

A result is decided at run_stop. What fails later is a late error of a good run, and what only
reports ends no run.
"""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.paths import ROOT

FAULTS = ROOT / "tests/helpers/faults"
LAUNCHER = "launch.run_command"
RANK = "open_llama.train"
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
CONFIG = """
model = "{folder}/config.json"
sequence_length = 16
global_batch_size = 4
max_samples = 48
eval_samples = 4
eval_interval_samples = 16
opt_base_learning_rate = 1e-2
schedule = "constant"
opt_learning_rate_warmup_steps = 2
weight_decay = 0.1
gradient_clip_norm = 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "my_run.toml").write_text(CONFIG.format(folder=folder))
    (folder / "data").mkdir()
    for split in ("train", "validation"):
        writer = IndexedDatasetWriter(folder / "data" / split, MODEL["vocab_size"])
        for _ in range(40):
            writer.add([number % 61 for number in range(60)])
        writer.finish()
    return folder


def run_with(folder: Path, log_dir: Path, fault: str, *arguments: str):
    """Run under `fault`. Return (exit code, stderr, newest run directory, end in the ledger)."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(FAULTS),
        "FAULT": fault,
        "CUDA_VISIBLE_DEVICES": "",
        "DATADIR": str(folder / "data"),
        "LOGDIR": str(log_dir),
        "SEED": "1",
    }
    command = [str(ROOT / "run_and_time.sh"), "open_llama", "--config", str(folder / "my_run.toml")]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    *_, run_dir = sorted(path for path in (log_dir / "open_llama").iterdir() if path.is_dir())
    lines = map(json.loads, (log_dir / "open_llama/attempts.jsonl").read_text().splitlines())
    *_, end = (line for line in lines if line["event"] == "end")
    return done.returncode, done.stderr, run_dir, end


WRITTEN_MODEL = r"/model\.[0-9a-f-]{36}_[^/]*\.partial"  # the folder model/ while it is written
# fault -> (exit code, word of the late error in the ledger, whether the model is saved)
AFTER_RUN_STOP = {
    f"mkdir,{WRITTEN_MODEL},1,{errno.ENOSPC},{RANK}": (17, "not saved", False),
    f"fsync,.safetensors,1,{errno.EDQUOT},{RANK}": (17, "not saved", False),
    f"rename,{WRITTEN_MODEL},1,{errno.ESTALE},{RANK},done": (0, "", True),
    f"fsync,result.txt,1,{errno.EIO},{RANK}": (17, "result.txt", True),
    f"stat,result.txt,1,{errno.ESTALE},submission.check": (0, "not checked", True),
}
REPORTING = [
    f"pwrite,rank_0.heartbeat,9,{errno.EIO},{RANK}",
    f"write,events.jsonl,5,{errno.ETIMEDOUT},{RANK}",
    f"stat,result.txt,2,{errno.ESTALE},{LAUNCHER}",
    f"stat,ranks,2,{errno.EREMOTEIO},{LAUNCHER}",
]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.slow) if number else fault
        for number, fault in enumerate(AFTER_RUN_STOP)
    ],
)
def test_what_fails_after_run_stop_leaves_a_good_run(folder, tmp_path, fault):
    code, word, saved = AFTER_RUN_STOP[fault]
    seen, err, run_dir, end = run_with(folder, tmp_path, fault)
    assert seen == code, err
    assert (end["exit_code"], end["kind"]) == (0, "success")
    assert word in end["reason"] and bool(word) == bool(end["reason"]), end
    assert (run_dir / "model").is_dir() == saved
    assert not (run_dir / "failure.json").exists() and "Traceback" not in err
    page = (run_dir / "report.html").read_text()
    headline = re.search(r'class="banner[^>]*>\s*<strong>(.*?)</strong>', page, re.DOTALL)
    assert headline and word in headline[1] and (": " in headline[1]) == bool(word), headline[1]


@pytest.mark.slow
def test_auto_goes_on_after_a_model_that_was_not_saved(folder, tmp_path):
    unsaved = next(iter(AFTER_RUN_STOP))
    words = ("--checkpoint", "1", "--continue", "auto")
    runs = []
    for fault, expected in ((unsaved, 17), ("", 0), ("", 0)):
        code, err, run_dir, _ = run_with(folder, tmp_path, fault, *words)
        assert code == expected, err
        assert (run_dir / "model").is_dir() == (not code)
        runs.append(re.search("continues .*", err))
    assert not runs[0] and runs[1] and not runs[2], "the first has no checkpoint, the last a model"


@pytest.mark.slow
@pytest.mark.parametrize("fault", REPORTING)
def test_reporting_ends_no_run(folder, tmp_path, fault):
    code, err, run_dir, end = run_with(folder, tmp_path, fault)
    assert (code, end["kind"], end["reason"]) == (0, "success", ""), err
    assert (run_dir / "model").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        f"rename,step_00000004,1,{errno.EIO},{RANK}",  # the previous one, when it is removed
        f"rename,step_00000008.partial,1,{errno.ENOENT},{RANK},done",
        f"fsync,checkpoints,1,{errno.EINVAL},{RANK}",
    ],
)
def test_a_whole_checkpoint_is_saved_whatever_tidying_says(folder, tmp_path, fault):
    code, err, run_dir, end = run_with(folder, tmp_path, fault, "--checkpoint", "1")
    assert (code, end["kind"], end["reason"]) == (0, "success", ""), err
    assert (run_dir / "checkpoints/step_00000008/facts.json").is_file()
