"""Test the program train_open_llama.py on runs that are made up."""

import json

import pytest
import train_open_llama


def write_run(folder, losses):
    folder.mkdir()
    events = [json.dumps({"event": "step", "loss": loss}) for loss in losses]
    (folder / "events.jsonl").write_text("\n".join(events))
    return folder


@pytest.mark.parametrize("steps", [100, 400])
def test_plot_prints_the_differences_of_short_and_long_runs(tmp_path, capsys, steps):
    pytest.importorskip("matplotlib")
    runs = {
        "a": write_run(tmp_path / "a", [2.0] * steps),
        "b": write_run(tmp_path / "b", [2.5] * steps),
    }
    train_open_llama.plot(runs, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"to step {steps}: b minus a +0.5000"
    assert len(lines) == min(10, steps // train_open_llama.MEAN_OF)


def test_plot_refuses_a_run_that_is_shorter_than_a_mean(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="19 steps"):
        train_open_llama.plot({"a": write_run(tmp_path / "a", [2.0] * 19)}, tmp_path / "out.png")
