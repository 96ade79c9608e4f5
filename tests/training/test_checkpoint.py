"""Test checkpoints: a continued run equals an uninterrupted one bit for bit; invalid ones fail."""

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from failing_calls import fail_once
from ranks import call_on_ranks
from synthetic_run import records
from tiny import FP8_RULES, TINY, facts, run, run_config, write_data
from toy import wait_until

from common.errors import ConfigError, StorageError, TargetMissed, WeightsError
from common.kernels.fp8 import INVERSE, SCALE
from common.model import saved_model
from common.model.shapes import ModelShape
from common.training import checkpoint, continuation, loop, pretraining, timed_run
from common.training.checkpoint import Checkpoints
from common.training.continuation import (
    CHECKPOINTS_FOLDER,
    DATA_FILES,
    FACTS,
    PARTIAL_SUFFIX,
    STOP_REQUEST,
    CheckpointInterval,
    data_record,
    newest,
    parse_interval,
    require_possible,
    require_same,
)
from common.training.metrics import Events, ProgressLog
from common.training.mllog import RunLog
from common.training.pretraining import assemble_random
from common.training.reports import Reports
from common.training.run import Run
from llama31_8b.rules import MINIATURE
from submission.examined_log import examine

# A batch that 1, 2 and 3 ranks divide: evaluations at steps 3, 6 and 9, the last; with "2" the
# checkpoint of step 6 remains.
SIZES = {
    "global_batch_size": 12,
    "micro_batch_size": 2,
    "eval_micro_batch_size": 2,
    "max_samples": 108,
}
BF16_MOMENTS = {"linear": "fp8", "moment_precision": "bf16"}


def values(run_dir):
    found = facts(run_dir)
    return {
        "losses": found.losses,
        "norms": found.norms,
        "rates": found.rates,
        "evaluations": [list(pair) for pair in found.evaluations],
    }


def trained(run_dir, folder, rules=TINY, **options):
    """Train with SIZES on these ranks and return the log and the state before the first step."""
    begun = {}

    def watched(assembly, *arguments):
        begun["weights"] = {
            name: parameter.detach().clone()
            for name, parameter in assembly.model.named_parameters()
        }
        optimizer = assembly.optimizer
        state = optimizer.rule.state()
        moments = zip(begun["weights"], state["first_moment"], state["second_moment"], strict=False)
        begun["moments"] = {
            name: torch.stack([first.float(), second.float()]) for name, first, second in moments
        }
        return TRAIN(assembly, *arguments)

    with mock.patch("common.training.loop.train", watched):
        ended = run(run_dir, folder / "data", rules, **SIZES | options)
    assert ended.error == "target_missed", ended.message
    return values(run_dir) | begun


TRAIN = loop.train


def checkpoints_of(processes, run_dir, config=None, rules=TINY, **changes):
    """Return checkpoints of an assembly that no loop trains."""
    config = config or run_config(**SIZES)
    asked = {
        "config_name": "",
        "seed": 1,
        "device": "cpu",
        "run_dir": run_dir,
        "data_dir": run_dir,
        "checkpoint": "1",
    } | changes
    run = Run(benchmark="llama31_8b", config=config, rank=processes.rank, **asked)
    reports = Reports(RunLog(None), Events(None), ProgressLog(False), mock.Mock())
    checkpoints = Checkpoints(run, reports, assemble_random(config, rules, processes, 1), processes)
    checkpoints.record_data()
    return checkpoints


def as_after(checkpoints, steps: int):
    """Return `checkpoints` with the optimizer's step count set to `steps`.

    A checkpoint whose step differs from the optimizer's is refused as damaged.
    """
    checkpoints.assembly.optimizer.rule.steps.fill_(steps)
    return checkpoints


def run_and_continue(folder, name, ranks, rules=TINY, **options):
    """Train with checkpoints, then continue from the one of step 6. Return both `trained`."""
    whole = trained(folder / name, folder, rules, checkpoint="2", gpus_per_node=ranks, **options)
    return whole, trained(
        folder / f"{name}_on",
        folder,
        rules,
        continues=folder / name,
        gpus_per_node=ranks,
        **options,
    )


def on_two_ranks(processes, folder):
    return run_and_continue(folder, "run", 2)


def on_three_ranks(processes, folder):
    """Continue a run of two ranks, and a model whose norms leave the third rank without a row."""
    found = trained(folder / "run_on_3", folder, continues=folder / "run", gpus_per_node=3)
    config = run_config(**SIZES, gpus_per_node=3)
    rules = replace(TINY, shape=ModelShape(1, 4, 6, 2, 1, 61, 10000.0))
    saving = checkpoints_of(processes, folder / "narrow", config, rules)
    as_after(saving, 7).offer(7, evaluated=True)
    saving.finish()
    loading = checkpoints_of(
        processes, folder / "elsewhere", config, rules, seed=1, continues=folder / "narrow"
    )
    for part in loading.parts.values():
        part.live.fill_(-1.0)
    assert loading.load() == 7
    assert all(
        torch.equal(part.live, loading.parts[name].live) for name, part in saving.parts.items()
    )
    return found | {
        "without a row": sorted(
            name for name, part in saving.parts.items() if "master" in name and not len(part.live)
        )
    }


def fp8_on_two_ranks(processes, folder):
    return run_and_continue(folder, "run", 2, FP8_RULES, **BF16_MOMENTS)


def lora_on_two_ranks(processes, folder):
    from test_lora_checkpoint import run_and_continue

    return run_and_continue(processes, folder / "lora")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A run of two ranks and its continuations on two and three: folder, results by rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_data(folder / "data")
    pair = call_on_ranks(2, "test_checkpoint:on_two_ranks", folder)
    return folder, pair, call_on_ranks(3, "test_checkpoint:on_three_ranks", folder)


@pytest.fixture(scope="module")
def other_pairs(tmp_path_factory):
    """Two ranks in FP8 with moments in bf16, and two of LoRA: folder, results of each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_data(folder / "data", FP8_RULES)
    (folder / "lora").mkdir()
    return folder, *(
        call_on_ranks(2, f"test_checkpoint:{name}", folder)
        for name in ("fp8_on_two_ranks", "lora_on_two_ranks")
    )


def assert_continues(whole, rest, steps):
    """Check that `rest` has the values of `whole` after `steps` steps, bit for bit."""
    assert len(rest["losses"]) == len(whole["losses"]) - steps > 0
    for key in ("losses", "norms", "rates"):
        assert rest[key] == whole[key][steps:], key
    assert (
        rest["evaluations"] == whole["evaluations"][-len(rest["evaluations"]) :]
        and rest["evaluations"]
    )


def test_one_rank_continues_bit_for_bit_and_saving_changes_nothing(processes, tmp_path):
    write_data(tmp_path / "data")
    whole, rest = run_and_continue(tmp_path, "run", 1)
    assert_continues(whole, rest, 6)
    plain = trained(tmp_path / "plain", tmp_path)
    assert (
        all(plain[key] == whole[key] for key in ("losses", "norms", "evaluations"))
        and not (tmp_path / "plain" / CHECKPOINTS_FOLDER).exists()
    )


@pytest.mark.parametrize("steps", [1, 3])  # without an evaluation, and after one
def test_a_run_that_is_asked_to_stop_saves_the_next_step(processes, tmp_path, monkeypatch, steps):
    def request_after(self, step, evaluated):
        if step == steps:
            (self.run.run_dir / STOP_REQUEST).touch()

    monkeypatch.setattr(Checkpoints, "offer", request_after)
    if steps == 1:  # `offer` is called at logged steps only
        request = tmp_path / "stopped" / STOP_REQUEST
        request.parent.mkdir(parents=True)
        request.touch()
    write_data(tmp_path / "data")
    ended = run(tmp_path / "stopped", tmp_path / "data", TINY, **SIZES, checkpoint="600s")
    assert ended.error == "interrupted", ended.message
    assert newest(tmp_path / "stopped").facts["step"] == steps
    before = values(tmp_path / "stopped")
    whole = trained(tmp_path / "whole", tmp_path)
    rest = trained(tmp_path / "on", tmp_path, continues=tmp_path / "stopped")
    assert len(before["losses"]) == steps
    assert before["losses"] + rest["losses"] == whole["losses"]
    assert before["evaluations"] + rest["evaluations"] == whole["evaluations"]


def test_two_ranks_continue_bit_for_bit(shared):
    assert_continues(*shared[1][0], 6)


@pytest.mark.slow
def test_two_ranks_continue_bit_for_bit_in_fp8_and_lora_with_its_dropout(other_pairs):
    _, fp8, lora = other_pairs
    assert_continues(*fp8[0], 6)
    assert_continues(*lora[0], len(lora[0][0]["losses"]) - len(lora[0][1]["losses"]))


def test_another_number_of_ranks_begins_with_the_same_bits(processes, shared):
    folder, pair, three = shared
    whole = pair[0][0]
    alone = trained(folder / "run_on_1", folder, continues=folder / "run", gpus_per_node=1)
    begun = [rank[1] for rank in pair]
    for others in ([alone], three):
        for name, weight in begun[0]["weights"].items():
            assert all(torch.equal(rank["weights"][name], weight) for rank in others), name
            rows = [
                torch.cat([rank["moments"][name] for rank in ranks], dim=1)[:, : len(weight)]
                for ranks in (begun, others)
            ]
            assert torch.equal(*rows) and rows[0].any(), name
        rest = others[0]
        # The same sums in another order.
        assert (
            rest["losses"] == pytest.approx(whole["losses"][6:], rel=1e-4)
            and rest["rates"] == whole["rates"][6:]
        )
        assert [loss for _, loss in rest["evaluations"]] == pytest.approx(
            [loss for _, loss in whole["evaluations"][2:]], rel=1e-4
        )


def test_a_rank_may_have_no_row_of_a_weight(shared):
    assert [len(rank["without a row"]) for rank in shared[2]] == [0, 0, 5], (
        "three norms, o and down"
    )


@pytest.mark.slow
def test_fp8_continues_on_another_number_of_ranks_with_the_smallest_scales(processes, other_pairs):
    folder, pair, _ = other_pairs
    begun, train = {}, TRAIN

    def watched(assembly, *arguments):
        begun["fp8"] = [tensor.clone() for tensor in assembly.linear.state().values()]
        begun["quantizers"] = assembly.linear.quantizers
        return train(assembly, *arguments)

    with mock.patch(f"{__name__}.TRAIN", watched):
        rest = trained(
            folder / "run_on_1",
            folder,
            FP8_RULES,
            continues=folder / "run",
            gpus_per_node=1,
            **BF16_MOMENTS,
        )
    assert rest["losses"] == pytest.approx(pair[0][0]["losses"][6:], rel=0.05)
    state, history = begun["fp8"]
    states, histories = (
        torch.stack(tensors) for tensors in zip(*saved_fp8(folder / "run"), strict=True)
    )
    gradient = torch.tensor([quantizer.gradient for quantizer in begun["quantizers"]])
    # Two ranks before, one now: a power of two, so these are exact.
    ratio = torch.where(gradient, 0.5, 1.0)
    assert torch.equal(state[:, SCALE], states[:, :, SCALE].amin(0) / ratio)
    assert torch.equal(state[:, INVERSE], states[:, :, INVERSE].amax(0) * ratio)
    assert torch.equal(history, histories.amax(0) * ratio) and history.any() and gradient.any()


def saved_fp8(run_dir):
    from safetensors.torch import load_file

    folder, found = newest(run_dir)
    files = [load_file(folder / f"rank_{rank}.safetensors") for rank in range(found["ranks"])]
    return [
        [file[f"rank_{rank}.fp8_{name}"] for name in ("state", "history")]
        for rank, file in enumerate(files)
    ]


def test_a_checkpoint_between_evaluations_continues_bit_for_bit_in_fp8(
    processes, tmp_path, monkeypatch
):
    write_data(tmp_path / "data", FP8_RULES)
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 1)
    monkeypatch.setattr(Checkpoints, "due", lambda self, interval, evaluated: self.step == 5)
    whole, rest = run_and_continue(tmp_path, "run", 1, FP8_RULES, **BF16_MOMENTS)
    assert_continues(whole, rest, 5)


def test_the_pause_of_a_save_is_not_part_of_a_step(processes, tmp_path, monkeypatch):
    write_data(tmp_path / "data")
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 1)
    monkeypatch.setattr(Checkpoints, "due", lambda self, interval, evaluated: time.sleep(0.5))
    run(tmp_path / "run", tmp_path / "data", checkpoint="600s", max_samples=32)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = map(json.loads, lines)
    times_ms = [event["step_time_ms"] for event in events if event["event"] == "step"]
    assert len(times_ms) == 4 and min(times_ms[1:]) < 400


def test_the_log_says_that_it_was_resumed_and_is_clean_otherwise(shared):
    folder, _, _ = shared
    log = records(folder / "run_on/result.txt")
    (line,) = [record for record in log if record["key"] == "resumed"]
    assert line["value"] == 72 and line["metadata"]["run"] == "run"
    assert (
        next(record for record in log if record["key"] == "block_start")["metadata"][
            "samples_count"
        ]
        == 72
    )
    assert log[-1]["metadata"] | {"file": "", "lineno": 0} == {
        "samples_count": 108,
        "status": "aborted",
        "file": "",
        "lineno": 0,
    }
    assert not any(record["key"] == "resumed" for record in records(folder / "run/result.txt"))
    found = {
        finding.rule: finding.warning for finding in examine(folder / "run_on/result.txt").findings
    }
    assert found["resumed"] is True and not {"samples_count", "order"} & found.keys()
    events = [json.loads(text) for text in (folder / "run/events.jsonl").read_text().splitlines()]
    assert [event["samples"] for event in events if event["event"] == "checkpoint"] == [72]


# --- when, and beside what


def test_the_checkpoint_option_takes_evaluations_or_seconds():
    assert parse_interval("3") == CheckpointInterval(3, 0.0)
    for text in ("600s", "10m"):
        assert parse_interval(text) == CheckpointInterval(0, 600.0)
    for text in ("0", "-1", "0s", "1.5", "10x", "", "s"):
        with pytest.raises(ConfigError, match="--checkpoint"):
            parse_interval(text)


@pytest.fixture
def made(processes, tmp_path):
    return lambda config=None, **args: checkpoints_of(
        processes, **{"run_dir": tmp_path, "config": config} | args
    )


def test_saves_come_every_second_evaluation_or_every_ten_seconds(made, monkeypatch):
    def begin_save(*args, **options):
        saved.append(checkpoints.step)
        return mock.Mock(done=lambda: False)

    monkeypatch.setattr(
        checkpoint.dcp,
        "async_save",
        begin_save,
    )
    monkeypatch.setattr(Checkpoints, "finish", lambda self: None)
    saved = []
    checkpoints = made(checkpoint="2")
    for step in range(1, 13):
        checkpoints.offer(step, evaluated=step % 3 == 0)
    assert saved == [6, 12]
    saved, checkpoints, now = [], made(checkpoint="10s"), [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    checkpoints.last_save = 0.0
    for step in range(1, 13):
        now[0] = 4.0 * step
        checkpoints.offer(step, evaluated=False)
    assert saved == [3, 6, 9, 12]


def test_training_goes_on_while_a_save_is_written_and_the_next_save_waits(
    made, tmp_path, monkeypatch
):
    gate, order, write = threading.Event(), [], checkpoint.write_file

    def slow(path, *rest, **options):
        assert gate.wait(30)
        order.append(path.parent.name)
        write(path, *rest, **options)

    monkeypatch.setattr(checkpoint, "write_file", slow)
    checkpoints = made()
    weights = checkpoints.assembly.optimizer.weights
    checkpoints.offer(1, evaluated=True)
    assert not checkpoints.saving.done(), "the save is held, and offer() came back"
    for weight in weights:
        weight.add_(1.0)  # a step
    threading.Timer(0.2, gate.set).start()
    as_after(checkpoints, 2).offer(2, evaluated=True)
    assert order[0] == f"step_00000001{PARTIAL_SUFFIX}" and gate.is_set(), (
        "the second save waited for the first"
    )
    checkpoints.finish()
    assert [path.name for path in (tmp_path / CHECKPOINTS_FOLDER).iterdir()] == ["step_00000002"]
    loaded = made(continues=tmp_path)
    assert loaded.load() == 2 and all(
        torch.equal(*pair) for pair in zip(loaded.assembly.optimizer.weights, weights, strict=True)
    )


def test_a_save_holds_the_weights_of_the_moment_it_began(made, tmp_path, monkeypatch):
    gate, write = threading.Event(), checkpoint.write_file
    monkeypatch.setattr(
        checkpoint, "write_file", lambda *rest, **options: (gate.wait(30), write(*rest, **options))
    )
    checkpoints = made()
    weights = checkpoints.assembly.optimizer.weights
    before = [weight.clone() for weight in weights]
    as_after(checkpoints, 1).offer(1, evaluated=True)
    for weight in weights:
        weight.zero_()
    gate.set()
    checkpoints.finish()
    loaded = made(continues=tmp_path)
    assert loaded.load() == 1 and all(map(torch.equal, loaded.assembly.optimizer.weights, before))


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(
    processes, tmp_path, monkeypatch
):
    write_data(tmp_path / "data")
    write, calls = checkpoint.write_file, []

    def full(path, *rest, **options):
        calls.append(path)
        write(path, *rest, **options)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_file", full)
    ended = run(tmp_path / "run", tmp_path / "data", checkpoint="1", **SIZES)
    assert (
        ended.error == "storage" and ended.status == "aborted" and "No space left" in ended.message
    )
    assert [path.name for path in (tmp_path / "run" / CHECKPOINTS_FOLDER).iterdir()] == [
        "step_00000003"
    ]
    rest = run(tmp_path / "on", tmp_path / "data", continues=tmp_path / "run", **SIZES)
    assert rest.error == "target_missed" and len(rest.losses) == 6


@pytest.mark.parametrize("full", [False, True])
def test_a_save_that_ends_after_the_target_was_reached_leaves_the_success(
    processes, tmp_path, monkeypatch, full
):
    write_data(tmp_path / "data")
    log, write = tmp_path / "run/result.txt", checkpoint.write_file

    def late(path, *rest, **options):
        wait_until(lambda: '"run_stop"' in log.read_text())
        if full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, *rest, **options)

    monkeypatch.setattr(checkpoint, "write_file", late)
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 1)
    monkeypatch.setattr(Checkpoints, "due", lambda self, interval, evaluated: self.step == 1)
    ended = run(
        tmp_path / "run",
        tmp_path / "data",
        replace(TINY, target_loss=100.0),
        checkpoint="1",
        **SIZES,
    )
    assert (ended.status, ended.error) == ("success", "storage" if full else "")
    assert len(list((tmp_path / "run" / CHECKPOINTS_FOLDER).iterdir())) == (not full)


def test_a_checkpoint_that_fails_after_the_run_does_not_cost_the_trained_model(
    processes, tmp_path, monkeypatch
):
    write_data(tmp_path / "data")
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(checkpoint, "write_file", full)
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 1)
    monkeypatch.setattr(Checkpoints, "due", lambda self, interval, evaluated: self.step == 2)
    ended = run(
        tmp_path / "run",
        tmp_path / "data",
        replace(TINY, target_loss=100.0),
        checkpoint="1",
        save=True,
        **SIZES,
    )
    assert (ended.status, ended.error) == ("success", "storage")
    assert (tmp_path / "run" / "model").is_dir()


def test_a_target_missed_stays_missed_if_checkpoint_and_model_are_not_saved(
    processes, tmp_path, monkeypatch
):
    write_data(tmp_path / "data")
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(checkpoint, "write_file", full)
    monkeypatch.setattr(saved_model, "write_checkpoint", full)
    monkeypatch.setattr(Checkpoints, "due", lambda self, interval, evaluated: self.step == 9)
    with mock.patch.object(timed_run, "_raise_first", side_effect=timed_run._raise_first) as ends:
        ended = run(tmp_path / "run", tmp_path / "data", checkpoint="1", save=True, **SIZES)
    (failures,) = ends.call_args.args
    assert (ended.status, ended.error) == ("aborted", "target_missed")
    assert [type(failure) for failure in failures] == [TargetMissed, StorageError, StorageError]
    assert "no checkpoint was saved" in failures[0].why and "model" in failures[0].why


# fault: function of os, end of the path, errno, whether it is done nevertheless
@pytest.mark.parametrize(
    ("fault", "remain"),
    [
        (("rename", "step_00000003", errno.EIO, False), {"step_00000003", "step_00000006"}),
        (("rename", "step_00000006.partial", errno.ENOENT, True), {"step_00000006"}),
        (("rename", "step_00000006.partial", errno.ESTALE, True), {"step_00000006"}),
        (("fsync", "checkpoints", errno.EINVAL, False), {"step_00000006"}),
        (("fsync", "checkpoints", errno.EIO, False), {"step_00000003", "step_00000006"}),
        (("fsync", "step_00000006.partial", errno.EINVAL, False), {"step_00000006"}),
    ],
)
def test_a_whole_checkpoint_is_saved_whatever_tidying_says(
    made, tmp_path, monkeypatch, fault, remain
):
    name, end, number, done = fault
    checkpoints = made()
    as_after(checkpoints, 3).offer(3, evaluated=True)
    checkpoints.finish()
    with monkeypatch.context() as failing:
        failing.setattr(os, name, fail_once(getattr(os, name), end, 1, number, done))
        as_after(checkpoints, 6).offer(6, evaluated=True)
        checkpoints.finish()
    folder = tmp_path / CHECKPOINTS_FOLDER
    assert {path.name for path in folder.iterdir()} == remain
    assert made(checkpoint=None, continues=tmp_path).load() == 6
    as_after(checkpoints, 9).offer(9, evaluated=True)
    checkpoints.finish()
    assert [path.name for path in folder.iterdir()] == ["step_00000009"]


@pytest.mark.parametrize("end", ["step_00000003.partial", "rank_0.safetensors"])
def test_a_checkpoint_that_is_not_whole_is_not_saved(made, monkeypatch, end):
    name = "rename" if end.endswith("partial") else "fsync"
    monkeypatch.setattr(os, name, fail_once(getattr(os, name), end, 1, errno.EIO, False))
    checkpoints = made()
    as_after(checkpoints, 3).offer(3, evaluated=True)
    with pytest.raises(StorageError):
        checkpoints.finish()


def test_files_of_a_killed_save_are_not_part_of_the_next_save(processes, tmp_path):
    """The killed run may have had more ranks, and its last file may be cut off."""
    left = tmp_path / CHECKPOINTS_FOLDER / f"step_00000003{PARTIAL_SUFFIX}"
    left.mkdir(parents=True)
    (left / "rank_1.safetensors").write_bytes(b"cut off")
    saving = checkpoints_of(processes, tmp_path)
    as_after(saving, 3).offer(3, evaluated=True)
    saving.finish()
    assert not (tmp_path / CHECKPOINTS_FOLDER / "step_00000003/rank_1.safetensors").exists()
    assert (
        checkpoints_of(processes, tmp_path / "on", checkpoint=None, continues=tmp_path).load() == 3
    )


def test_another_failure_of_a_save_is_not_called_a_full_disk(made, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_file", mock.Mock(side_effect=ZeroDivisionError))
    checkpoints = made()
    checkpoints.offer(1, evaluated=True)
    with pytest.raises(BaseException, match="ZeroDivisionError") as failure:
        checkpoints.finish()
    assert not isinstance(failure.value, StorageError)


# --- refusals


@pytest.fixture(scope="module")
def saved(shared):
    """The directory of a run of two ranks with a checkpoint. Tests copy it and do not change it."""
    return shared[0] / "run"


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved / CHECKPOINTS_FOLDER, tmp_path / "before" / CHECKPOINTS_FOLDER)
    return tmp_path / "before"


REFUSED = [
    ({"opt_base_learning_rate": 2e-2}, {}, "opt_base_learning_rate was 0.01, now 0.02"),
    ({"global_batch_size": 24}, {}, "global_batch_size was 12, now 24"),
    ({"max_samples": 120}, {}, "max_samples was 108, now 120"),
    ({"linear": "fp8"}, {}, "linear was bf16, now fp8"),
    ({}, {"seed": 2}, "seed was 1, now 2"),
]


@pytest.mark.parametrize(("changes", "args", "said"), REFUSED, ids=[row[2] for row in REFUSED])
def test_continuing_with_another_config_or_seed_is_refused(made, copied, changes, args, said):
    if changes.get("linear"):  # its shape is no FP8 shape
        with pytest.raises(ConfigError, match=said):
            require_same(*newest(copied), "llama31_8b", 1, run_config(**SIZES | changes))
        return
    with pytest.raises(ConfigError, match=said):
        made(run_config(**SIZES | changes), continues=copied, **args).load()


def test_a_run_that_saves_nothing_keeps_no_copy_of_the_state(made, copied):
    loading = made(checkpoint=None, continues=copied)
    assert loading.load() == 6 and not loading.parts
    loading.offer(7, evaluated=True)


def test_continuing_on_another_device_is_not_called_damage(made, copied):
    change_facts(device="cuda")(newest(copied).folder)
    with pytest.raises(ConfigError, match="--device cpu") as refused:
        made(continues=copied).load()
    assert "--device cuda" in refused.value.do


def test_another_benchmark_is_refused(copied):
    with pytest.raises(ConfigError, match="benchmark"):
        require_same(*newest(copied), "llama2_70b_lora", 1, run_config(**SIZES))


def test_what_only_concerns_speed_may_change(copied):
    changes = {
        "gpus_per_node": 3,
        "eval_micro_batch_size": 1,
        "micro_batch_size": 1,
        "recompute_layers": 1,
        "hang_timeout_s": 5.0,
    }
    require_same(*newest(copied), "llama31_8b", 1, run_config(**SIZES | changes))
    assert run_config().__dataclass_fields__.keys() > continuation.MAY_DIFFER - {
        "frozen_base",
        "offload_layers",
        "transposed_layers",
    }


def test_a_folder_without_a_complete_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint") as missing:
        newest(tmp_path / "nowhere")
    assert "does not exist" in missing.value.why
    (tmp_path / CHECKPOINTS_FOLDER / f"step_00000003{PARTIAL_SUFFIX}").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no checkpoint") as missing:
        newest(tmp_path)
    assert "complete" in missing.value.why


def test_the_newest_checkpoint_is_loaded(copied):
    folder, _ = newest(copied)
    shutil.copytree(folder, folder.with_name("step_00000005"))
    assert newest(copied)[0] == folder


def test_a_checkpoint_records_the_data_of_the_run(shared):
    names = MINIATURE.data_files
    assert newest(shared[0] / "run")[1][DATA_FILES] == data_record(shared[0] / "data", names)
    assert len(data_record(shared[0] / "data", names)) == 4


def test_data_that_are_replaced_after_they_were_opened_are_recorded_as_they_were(
    processes, tmp_path, monkeypatch
):
    write_data(tmp_path / "data")
    (name,) = (name for name in MINIATURE.data_files if "train" in name and name.endswith(".bin"))
    path = tmp_path / "data" / name
    before = data_record(path.parent, MINIATURE.data_files)
    open_data = pretraining.open_token_files

    def open_and_replace(*arguments):
        opened = open_data(*arguments)
        train_on = loop.train

        def replace_and_train(*rest):
            (tmp_path / "other").write_bytes(path.read_bytes()[::-1])
            (tmp_path / "other").replace(path)
            return train_on(*rest)

        monkeypatch.setattr(loop, "train", replace_and_train)
        return opened

    monkeypatch.setattr(pretraining, "open_token_files", open_and_replace)
    run(tmp_path / "run", path.parent, checkpoint="1", **SIZES | {"gpus_per_node": 1})
    assert data_record(path.parent, MINIATURE.data_files) != before
    assert newest(tmp_path / "run").facts[DATA_FILES] == before


def test_data_that_change_while_they_are_opened_are_refused(processes, tmp_path, monkeypatch):
    write_data(tmp_path / "data")
    open_data = pretraining.open_token_files

    def replace_and_open(*arguments):
        for path in (tmp_path / "data").glob("*validation*.bin"):
            path.write_bytes(path.read_bytes()[::-1])
        return open_data(*arguments)

    monkeypatch.setattr(pretraining, "open_token_files", replace_and_open)
    sizes = SIZES | {"gpus_per_node": 1}
    ended = run(tmp_path / "run", tmp_path / "data", checkpoint="1", **sizes)
    assert ended.error == "data" and "validation" in ended.message


def test_checkpoints_on_two_nodes_are_refused():
    with pytest.raises(ConfigError, match="one node"):
        require_possible(run_config(nodes=2))


def flip(folder):
    path = folder / "rank_1.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(folder):
    path = folder / "rank_1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change_facts(**changes):
    return lambda folder: (folder / FACTS).write_text(
        json.dumps(json.loads((folder / FACTS).read_text()) | changes)
    )


# name -> (function that damages a checkpoint's folder, words of the reason; "": any reason)
DAMAGE = {
    "a bit flipped": (flip, "differ from the saved"),
    "a file cut short": (cut, ""),
    "a file missing": (lambda folder: (folder / "rank_1.safetensors").unlink(), ""),
    "an empty file": (lambda folder: (folder / "rank_0.safetensors").write_bytes(b""), ""),
    "facts cut short": (
        lambda folder: (folder / FACTS).write_text((folder / FACTS).read_text()[:50]),
        FACTS,
    ),
    "facts missing": (lambda folder: (folder / FACTS).unlink(), FACTS),
    "facts that are no facts": (lambda folder: (folder / FACTS).write_text("[]"), FACTS),
    "facts without a digest": (lambda folder: (folder / FACTS).write_text('{"step": 6}'), FACTS),
    "one rank more": (change_facts(ranks=3), "ranks is 3"),
    "another seed": (change_facts(seed=2), ""),
    "other steps": (change_facts(step=3, samples=36), ""),
    "no step": (change_facts(step=0, samples=0), "step is 0"),
    "other samples": (change_facts(samples=84), "samples is 84"),
    "steps as text": (change_facts(step="6"), "wrong type"),
    "a config that is a list": (change_facts(config=[]), "wrong type"),
    "brackets": (lambda folder: (folder / FACTS).write_text("[" * 100_000), FACTS),
    "a pipe": (
        lambda folder: ((folder / FACTS).unlink(), os.mkfifo(folder / FACTS)),
        "regular file",
    ),
    "pickle in place of safetensors": (
        lambda folder: torch.save({"a": 1}, folder / "rank_1.safetensors"),
        "",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(made, copied, name):
    harm, said = DAMAGE[name]
    folder, _ = newest(copied)
    harm(folder)
    with pytest.raises(WeightsError, match="is damaged") as failure:
        made(continues=copied, **({"seed": 2} if name == "another seed" else {})).load()
    assert failure.value.exit_code == 16 and str(folder) in failure.value.what
    assert said in failure.value.why


def test_no_file_of_a_checkpoint_is_pickle(saved):
    folder, found = newest(saved)
    assert sorted(path.name for path in folder.iterdir()) == [
        FACTS,
        "rank_0.safetensors",
        "rank_1.safetensors",
    ]
    assert (
        found["step"] == 6
        and found["samples"] == 72
        and found["ranks"] == 2
        and found["config"] == vars(run_config(**SIZES, gpus_per_node=2))
    )
