"""Files that are replaced during a run, and token files that no run may read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import write_int64
from synthetic_run import records
from test_open_run import CONFIG, MODEL
from tiny import run_here
from toy import wait_until

from common.config import load
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import ConfigError, DataError
from common.paths import ROOT
from common.training.continuation import newest, require_same_data
from common.training.run import Run
from open_llama import train
from open_llama.rules import Config, rules_of


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a run with the config and the data in `folder`."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "DATADIR": str(folder / "data"),
        "LOGDIR": str(folder / "results"),
    }
    command = [str(ROOT / "run_and_time.sh"), "open_llama", "--config", str(folder / "run.toml")]
    return subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and stderr."""
    _, error = process.communicate(timeout=120)
    return process.returncode, error


def prepared(folder: Path) -> Path:
    """Write a config, token files and a tokenizer to `folder`. A run takes 4,000 sequences."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = CONFIG.format(folder=folder).replace("max_samples = 256", "max_samples = 4000")
    (folder / "run.toml").write_text(config.replace("samples = 64", "samples = 2000"))
    (folder / "data").mkdir()
    random = np.random.RandomState(1)
    for name, documents in (("train", 200), ("validation", 40)):
        writer = IndexedDatasetWriter(folder / "data" / name, MODEL["vocab_size"])
        for _ in range(documents):
            writer.add(random.randint(0, MODEL["vocab_size"], 40))
        writer.finish()
    (folder / "data/tokenizer.model").write_bytes(b"the tokenizer of these tokens")
    return folder


def replace(path: Path, content: bytes) -> None:
    path.with_name("new").write_bytes(content)
    path.with_name("new").replace(path)


def replace_files(data: Path) -> None:
    """Replace training data and tokenizer by others of the same sizes."""
    for name in ("train.bin", "tokenizer.model"):
        replace(data / name, (data / name).read_bytes()[::-1])


def test_another_tokenizer_is_not_saved_nor_other_data_continued_with(tmp_path, monkeypatch):
    """They are replaced after four of eight steps, within this process."""
    folder = prepared(tmp_path)
    text = (folder / "run.toml").read_text()
    text = text.replace("max_samples = 4000", "max_samples = 64").replace("= 2000", "= 32")
    # The launcher does this on a CPU. Without it, the kernels would run in Triton's interpreter.
    (folder / "run.toml").write_text(f'gpu = "CPU"\n{text}')
    config = load(folder / "run.toml", Config)
    rules = rules_of(config)
    data = folder / "data"
    files = rules.recorded_files(data)
    steps = []

    def rate(step: int) -> float:
        steps.append(step)
        if step == 4:
            replace_files(data)
        return 1e-3

    monkeypatch.setattr(train, "learning_rate", lambda config: rate)
    asked = Run(
        benchmark="open_llama",
        config=config,
        config_name="run.toml",
        seed=1,
        rank=0,
        device="cpu",
        run_dir=folder / "run",
        data_dir=data,
        checkpoint="1",
    )
    asked.run_dir.mkdir()
    error = run_here(train, rules, asked)
    assert isinstance(error, DataError) and "tokenizer.model" in error.what
    assert str(folder / "run/model") in error.why
    assert records(folder / "run/result.txt")[-1]["metadata"]["status"] == "success"
    saved = [path.name for path in (folder / "run/model").iterdir()]
    assert "config.json" in saved and any(name.endswith(".safetensors") for name in saved)
    assert "tokenizer.model" not in saved and steps[-1] == 7
    with pytest.raises(ConfigError, match="cannot be continued") as caught:
        require_same_data(*newest(folder / "run"), data, files)
    assert {"train.bin", "tokenizer.model"} <= set(re.findall(r"[\w.]+\w", caught.value.lines()))
    replace_files(data)  # the files of the run again
    require_same_data(*newest(folder / "run"), data, files)


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> tuple[Path, Path, int, str]:
    """A run whose training data and tokenizer are replaced while it trains.

    Return its folder, its directory, its exit code and its messages.
    """
    folder = prepared(tmp_path_factory.mktemp("changed"))
    process = start(folder, "--checkpoint", "1")

    def trains() -> bool:
        logs = list(folder.glob("results/open_llama/*/result.txt"))
        return bool(logs) and "block_start" in logs[0].read_text()

    wait_until(trains)
    train = folder / "data/train.bin"
    replace(train, train.read_bytes()[::-1])
    replace(folder / "data/tokenizer.model", b"five!")
    code, error = finish(process)
    (run_dir,) = (path for path in (folder / "results/open_llama").iterdir() if path.is_dir())
    return folder, run_dir, code, error


@pytest.mark.slow
def test_the_command_saves_no_other_tokenizer_with_the_model(changed):
    _, run_dir, code, error = changed
    assert code == 17, error
    assert "tokenizer.model" in error and str(run_dir / "model") in error
    assert records(run_dir / "result.txt")[-1]["metadata"]["status"] == "success"
    saved = [path.name for path in (run_dir / "model").iterdir()]
    assert "config.json" in saved and any(name.endswith(".safetensors") for name in saved)
    assert "tokenizer.model" not in saved
    line = (run_dir.parent / "attempts.jsonl").read_text().splitlines()[-2]
    assert json.loads(line)["exit_code"] == 0, "the run itself is good"


@pytest.mark.slow
def test_the_command_does_not_continue_with_the_data_that_replaced_its_own(changed):
    folder, run_dir, _, _ = changed
    code, error = finish(start(folder, "--checkpoint", "1", "--continue", str(run_dir)))
    assert code == 2, error
    assert "cannot be continued" in error and "train.bin" in error and "tokenizer.model" in error


@pytest.mark.slow
def test_ids_beyond_32_bits_end_a_run(tmp_path):
    folder = prepared(tmp_path)
    documents = np.random.RandomState(1).randint(0, MODEL["vocab_size"], (200, 40))
    write_int64(folder / "data/train", documents + 2**32)
    code, error = finish(start(folder))
    assert code == 15, error
    assert "train" in error and str(MODEL["vocab_size"] - 1) in error
