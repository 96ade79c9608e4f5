"""Test that LoRA continues bit for bit, dropout included, without the base in the checkpoint.

tests/training/test_checkpoint.py does so on two ranks.
"""

from dataclasses import replace

from test_lora_round_trip import TINY, start
from tiny import facts

from common.training import finetuning
from common.training.continuation import BASE_FILES, CHECKPOINTS_FOLDER, base_record, newest

RULES = replace(TINY, target_loss=0.1)


def run_and_continue(processes, folder):
    """Train with checkpoints, then continue from one. Return the facts of both runs.

    Each rank has data of its own. The runs are shared between tests.
    """
    own, changes = folder / f"rank_{processes.rank}", {"micro_batch_size": 2, "max_samples": 96}
    for name, options in (("run", {"checkpoint": "2"}), ("on", {"continues": folder / "run"})):
        _, error = start(own / name, RULES, processes, run_dir=folder / name, **options, **changes)
        assert error.kind == "target_missed", error
    return [vars(facts(folder / name)) for name in ("run", "on")]


def test_a_lora_run_continues_bit_for_bit(processes, tmp_path):
    whole, rest = run_and_continue(processes, tmp_path)
    begin = len(whole["losses"]) - len(rest["losses"])
    assert (
        0 < begin < len(whole["losses"])
        and len(whole["evaluations"]) > len(rest["evaluations"]) > 0
    )
    for key in ("losses", "norms", "rates"):
        assert rest[key] == whole[key][begin:], key
    assert rest["evaluations"] == whole["evaluations"][-len(rest["evaluations"]) :]
    record = newest(tmp_path / "run").facts[BASE_FILES]
    assert record and record == base_record(tmp_path / "rank_0/run/data/base")
    files = list((tmp_path / "run" / CHECKPOINTS_FOLDER).rglob("*.safetensors"))
    base = (tmp_path / "rank_0/run/data/base").rglob("*.safetensors")
    assert len(files) == 1 and sum(path.stat().st_size for path in files) < sum(
        path.stat().st_size for path in base
    )


def test_a_base_that_changes_while_it_is_loaded_is_refused(processes, tmp_path, monkeypatch):
    """Only in runs with checkpoints, which record it."""
    load_base = finetuning.load_base

    def load_and_replace(model, folder, *rest):
        report = load_base(model, folder, *rest)
        path = next(folder.glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return report

    monkeypatch.setattr(finetuning, "load_base", load_and_replace)
    _, error = start(tmp_path / "saves", RULES, processes, checkpoint="2")
    assert error.kind == "weights" and ".safetensors" in error.what
