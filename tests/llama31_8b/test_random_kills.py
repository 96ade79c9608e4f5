"""Kill `prepare convert` and --save at random moments: every file with a final name is complete."""

import os
import random
import signal
import time

import pytest
from ranks import rank_server
from test_prepare import write_inputs
from test_save import random_model

from common.atomic_write import SUFFIX
from common.data.indexed_dataset_header import index_path, tokens_path
from common.model import saved_model as save
from llama31_8b.convert import convert

KILLS = 60


def convert_on_and_on(folder, tokenizer, ready):
    """Into p0, p1, ...; the one that was killed first."""
    number = next(n for n in range(10**6) if not index_path(folder / f"p{n}").exists())
    while True:
        ready.touch()
        inputs = [folder / "a.jsonl", folder / "b.json.gz"]
        convert(inputs, tokenizer, folder / f"p{number}", "text", 1)
        number += 1


def save_on_and_on(folder, ready):
    """Run after run, each in its own directory."""
    save.FILE_BYTES, model = 500_000, random_model()
    number = sum(1 for _ in folder.glob("run_*"))
    while True:
        (folder / f"run_{number}").mkdir()
        ready.touch()
        save.save_model(model, folder / f"run_{number}", lambda: None)
        number += 1


def seconds_of(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began


def kills(body, ready, seconds, *arguments):
    """Kill `body` at random moments after it has begun; yields after each kill.

    `seconds`: how long one piece of its work takes on this machine. Up to two pass before a kill.
    """
    seed = time.time_ns()
    print(f"random seed {seed}")
    moments = random.Random(seed)
    for _ in range(KILLS):
        process = rank_server().Process(target=body, args=(*arguments, ready))
        process.start()
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 2 * seconds))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended by itself"
        ready.unlink()
        yield


def names_in(folder):
    """Return the names in a folder. A temporary name is SUFFIX."""
    return [SUFFIX if path.suffix == SUFFIX else path.name for path in folder.iterdir()]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_no_kill_of_convert_leaves_half_a_pair_that_looks_whole(miniature_data, tmp_path):
    inputs, tokenizer, partial = write_inputs(tmp_path), miniature_data / "tokenizer.model", 0
    convert(inputs, tokenizer, tmp_path / "right", "text", 1)
    expected = [path(tmp_path / "right").read_bytes() for path in (tokens_path, index_path)]
    # The first conversion also imports.
    seconds = seconds_of(lambda: convert(inputs, tokenizer, tmp_path / "again", "text", 1))
    for _ in kills(convert_on_and_on, tmp_path / "ready", seconds, tmp_path, tokenizer):
        whole = [tmp_path / path.stem for path in tmp_path.glob("p*.idx")]
        assert all(
            [path(prefix).read_bytes() for path in (tokens_path, index_path)] == expected
            for prefix in whole
        )
        partial += any(tmp_path.glob(".p*.parts"))
    assert len(whole) > 5, (
        "conversions came to an end between the kills, and those that were killed continued"
    )
    assert partial > KILLS // 4, "kills hit conversions in the middle"


@pytest.mark.slow
def test_no_kill_of_save_leaves_half_a_model_that_looks_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "FILE_BYTES", 500_000)
    (tmp_path / "right").mkdir()
    expected = contents(save.save_model(random_model(), tmp_path / "right", lambda: None))
    (tmp_path / "again").mkdir()
    model = random_model()
    seconds = seconds_of(lambda: save.save_model(model, tmp_path / "again", lambda: None))
    for _ in kills(save_on_and_on, tmp_path / "ready", seconds, tmp_path):
        for run in tmp_path.glob("run_*"):
            names = names_in(run)
            assert names in ([], [SUFFIX], [save.MODEL_FOLDER])
            assert names != [save.MODEL_FOLDER] or contents(run / save.MODEL_FOLDER) == expected
    ended = [names_in(run) for run in tmp_path.glob("run_*")]
    assert ended.count([save.MODEL_FOLDER]) > 5 and ended.count([SUFFIX]) > KILLS // 4, (
        "kills hit saves in the middle, and others ended"
    )
