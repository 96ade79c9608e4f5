"""Test the program whole_run.py without a GPU."""

import sys

import pytest
import whole_run

TERMINATED = "terminated"
COMMAND = f"""#!/usr/bin/env bash
trap 'touch "$LOGDIR/{TERMINATED}"; exit' TERM
touch "$LOGDIR/started"
while true; do sleep 0.05; done
"""


def test_arguments_may_have_spaces():
    words = ["llama31_8b", "--log-dir", "a b", "--", "--continue", "c d"]
    args, options = whole_run.parse(words)
    assert (str(args.log_dir), options) == ("a b", ["--continue", "c d"])
    assert whole_run.parse(words[:3])[1] == []


def test_an_interrupted_program_ends_the_run(tmp_path, monkeypatch):
    command = tmp_path / "run_and_time.sh"
    command.write_text(COMMAND)
    command.chmod(0o755)

    def interrupt(*arguments):
        while not (tmp_path / "started").exists():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_run, "ROOT", tmp_path)
    monkeypatch.setattr(whole_run, "send_signal", interrupt)
    monkeypatch.setattr(sys, "argv", ["whole_run", "llama31_8b", "--log-dir", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        whole_run.main()
    assert (tmp_path / TERMINATED).exists()
