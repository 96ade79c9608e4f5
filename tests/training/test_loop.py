"""Test the training loop with the real trainer and a tiny model: curves, evaluations, end, log."""

import json
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from plain_block import plain_llama
from ranks import start_ranks
from synthetic_run import find, records
from tiny import (
    TINY,
    TINY_PROGRAM,
    evaluation,
    evaluation_sequences,
    facts,
    run,
    run_config,
    write_data,
)
from torch.nn import functional as F

from common.data.gpt_dataset import TrainData
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import NonFinite, TargetMissed
from common.model.initialization import copy_weight, init_weights
from common.model.linear_layers import LinearLayers
from common.sharding.optimizer import UPDATE_RULES
from common.sharding.processes import Processes
from common.sharding.replicated import ReplicatedOptimizer
from common.training import loop, pretraining, timed_run
from common.training.assembly import Assembly
from common.training.loop import next_token_pairs, rank_micro_batches
from common.training.metrics import Meter
from common.training.mllog import RunLog
from llama31_8b.rules import CLOSED
from submission import check, compliance_checker, official_tools
from submission.examined_log import examine


@pytest.fixture(scope="module")
def plain(processes, tiny_data, tmp_path_factory):
    """A run of 12 steps in 3 blocks that misses its target.

    A step has two micro-batches of 4.
    """
    return run(tmp_path_factory.mktemp("plain") / "run", tiny_data)


def assert_same_curve(curve, other, tolerance: float) -> None:
    """Compare losses, gradient norms and evaluations to a relative `tolerance` (0: bit for bit)."""
    pairs = [
        (curve.losses, other.losses),
        (curve.norms, other.norms),
        *zip(curve.evaluations, other.evaluations, strict=True),
    ]
    for ours, theirs in pairs:
        assert len(ours) == len(theirs) > 0
        assert ours == pytest.approx(theirs, rel=tolerance, abs=0)


# --- the curve ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_tiny_model_learns(plain):
    assert plain.losses[-1] < 0.7 * plain.losses[0] and plain.losses[0] == pytest.approx(
        math.log(61), abs=0.1
    )


@pytest.mark.quick
def test_the_run_is_what_a_plain_torch_loop_computes(plain, tiny_data):
    """The plain loop has no sharding, micro-batches or fused clipping."""
    model = plain_llama(TINY.shape, TINY.sequence_length)
    init_weights(model, TINY.shape.num_layers, 1, TINY.init_std, copy_weight)
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": TINY.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(TINY.adam_beta_1, TINY.adam_beta_2), eps=TINY.adam_epsilon, foreach=False
    )
    config = run_config()
    data = TrainData(
        tiny_data / TINY.train_prefix,
        TINY.sequence_length,
        config.max_samples,
        1,
        TINY.shape.vocab_size,
    )
    base = config.opt_base_learning_rate
    end = 0.1 * config.opt_base_learning_rate
    warmup = config.opt_learning_rate_warmup_steps
    losses, norms, rates = [], [], []
    for step in range(len(plain.losses)):
        windows = torch.tensor(
            np.stack([data[i] for i in range(8 * step, 8 * step + 8)]), dtype=torch.int64
        )
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), TINY.gradient_clip_norm))
        )
        cosine = (
            end
            + (base - end)
            * (1 + math.cos(math.pi * (step - warmup) / (TINY.max_steps - warmup)))
            / 2
        )
        rates.append(base * (step + 1) / (warmup + 1) if step < warmup else cosine)
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    # The same sums in another order, as below.
    assert plain.losses == pytest.approx(losses, rel=1e-5)
    assert plain.norms == pytest.approx(norms, rel=1e-5)
    assert plain.rates == pytest.approx(rates, rel=1e-12)


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_curve(
    plain, processes, tiny_data, tmp_path
):
    assert_same_curve(run(tmp_path / "again", tiny_data), plain, tolerance=0)
    other = run(tmp_path / "other", tiny_data, seed=2, max_samples=32)
    assert all(abs(a - b) > 1e-4 for a, b in zip(other.losses, plain.losses, strict=False))


# Another cut of the batch sums the same gradients in another order, and fp32 addition is not
# associative; the matrix products of another size are blocked otherwise. Each is a rounding of
# 6e-8; 12 steps of training amplify them somewhat.
@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_the_micro_batch_size_does_not_change_the_curve(
    plain, processes, tiny_data, tmp_path, micro_batch_size
):
    assert_same_curve(
        run(tmp_path / "run", tiny_data, micro_batch_size=micro_batch_size), plain, tolerance=1e-5
    )


@pytest.mark.parametrize("changes", [{"recompute_layers": 1}, {"recompute_layers": 2}], ids=str)
def test_recomputation_changes_no_bit(plain, processes, tiny_data, tmp_path, changes):
    assert_same_curve(run(tmp_path / "run", tiny_data, **changes), plain, tolerance=0)


@pytest.mark.parametrize("name", ["plain", "recompute", "whole micro-batch"])
def test_two_ranks_train_as_one_process_does(plain, two_ranks, name):
    curve = two_ranks[0]["runs"][name]
    assert_same_curve(
        replace(plain, **{key: curve[key] for key in ("losses", "norms", "evaluations")}),
        plain,
        tolerance=1e-4,
    )
    for rank in two_ranks:
        assert rank["runs"][name]["error"] == plain.error == "target_missed"


def test_recomputation_changes_no_bit_on_two_ranks(two_ranks):
    runs = two_ranks[0]["runs"]
    assert runs["recompute"]["losses"] == runs["plain"]["losses"]
    assert runs["recompute"]["norms"] == runs["plain"]["norms"]


# --- evaluation -----------------------------------------------------------------------------------


def by_hand(data_dir) -> float:
    """Return the mean over sequences of the mean -log softmax over labels, in fp64."""
    model = plain_llama(TINY.shape, TINY.sequence_length)
    init_weights(model, TINY.shape.num_layers, 7, TINY.init_std, copy_weight)
    means = []
    for tokens, labels in torch.from_numpy(evaluation_sequences(data_dir)):
        with torch.no_grad():
            logits = model(tokens[None])[0].double()
        losses = [
            math.log(sum(math.exp(z) for z in row)) - row[label]
            for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
            if label >= 0
        ]
        if losses:
            means.append(sum(losses) / len(losses))
    assert len(means) == TINY.eval_samples - 1
    return sum(means) / len(means)


def test_an_evaluation_is_the_mean_over_sequences_computed_by_hand(processes, two_ranks, tiny_data):
    """10 sequences in micro-batches of 4, on 1 and 2 ranks, need 2 and 6 sequences of padding.

    One sequence has no labels.
    """
    expected = by_hand(tiny_data)
    found = [evaluation(processes, tiny_data), *(rank["evaluation"] for rank in two_ranks)]
    # fp32 losses, and another blocking of the products.
    assert found == pytest.approx([expected] * 3, rel=1e-6)
    assert found[1] == found[2]


@pytest.mark.quick
@pytest.mark.parametrize("micro_batch_size", [1, 3, 10, 64])
def test_padding_has_no_weight_and_ranks_have_equal_work(processes, tiny_data, micro_batch_size):
    sequences = evaluation_sequences(tiny_data)
    for world_size in (1, 2, 3, 8):
        shares = [
            rank_micro_batches(
                sequences,
                Processes(rank, world_size, torch.device("cpu"), processes.mesh),
                micro_batch_size,
            )
            for rank in range(world_size)
        ]
        assert len({len(share) for share in shares}) == 1, (
            "a rank with fewer forwards would hang the others"
        )
        rows = torch.cat([batch for share in shares for batch in share])
        assert torch.equal(rows[: len(sequences)], torch.from_numpy(sequences))
        assert (rows[len(sequences) :, 1] == -100).all()


@pytest.mark.quick
def test_labels_are_the_tokens_that_follow():
    windows = torch.arange(10, dtype=torch.int32).view(2, 5).numpy()
    assert next_token_pairs(windows).tolist() == [
        [[0, 1, 2, 3], [1, 2, 3, 4]],
        [[5, 6, 7, 8], [6, 7, 8, 9]],
    ]


@pytest.mark.quick
def test_evaluations_come_after_every_interval_from_the_first_on(plain):
    assert [samples for samples, _ in plain.evaluations] == [32, 64, 96]


def test_evaluation_intervals_are_whole_global_batches(processes, tiny_data, tmp_path):
    # 32 -> 36.
    curve = run(
        tmp_path / "run", tiny_data, global_batch_size=12, micro_batch_size=4, max_samples=80
    )
    assert [samples for samples, _ in curve.evaluations] == [36, 72]
    assert curve.error == "target_missed" and len(curve.losses) >= 6


# --- the end --------------------------------------------------------------------------------------


def test_a_loss_equal_to_the_target_ends_the_run_as_a_success(
    plain, processes, tiny_data, tmp_path
):
    samples, loss = plain.evaluations[1]
    curve = run(tmp_path / "run", tiny_data, rules=replace(TINY, target_loss=loss))
    assert (curve.status, curve.error) == ("success", "")
    assert curve.evaluations == plain.evaluations[:2] and len(curve.losses) == samples // 8
    log = records(tmp_path / "run" / "result.txt")
    assert log[-1]["key"] == "run_stop" and log[-1]["metadata"]["samples_count"] == samples


def test_a_loss_just_above_the_target_does_not_end_the_run(plain, processes, tiny_data, tmp_path):
    below = math.nextafter(plain.evaluations[1][1], 0.0)
    curve = run(tmp_path / "run", tiny_data, rules=replace(TINY, target_loss=below))
    assert curve.evaluations == plain.evaluations and curve.status == "success"


def test_a_target_out_of_reach_is_missed_at_max_samples(plain):
    assert (plain.status, plain.error) == ("aborted", TargetMissed.kind)
    assert "96 sequences" in plain.message and len(plain.losses) == 96 // 8


def test_max_samples_that_are_no_whole_steps_end_with_a_whole_step_even_where_the_data_end(
    processes, tmp_path
):
    data_dir = write_data(tmp_path / "data", train_documents=6)
    held = (int(Index.read(data_dir / TINY.train_prefix).num_tokens) - 1) // TINY.sequence_length
    assert held % 8, "the last step must need more than one pass holds"
    curve = run(tmp_path / "run", data_dir, max_samples=held)
    assert curve.error == "target_missed" and len(curve.losses) == -(-held // 8)
    assert (
        records(tmp_path / "run" / "result.txt")[-1]["metadata"]["samples_count"]
        == -(-held // 8) * 8
    )


def test_another_number_of_processes_than_the_config_says_is_refused(
    processes, tiny_data, tmp_path
):
    """Else the global batch would silently be another one than the log says."""
    curve = run(tmp_path / "run", tiny_data, gpus_per_node=2)
    assert curve.error == "config" and "1 process" in curve.message and not curve.losses


def test_a_run_is_stopped_at_the_first_step_that_is_not_finite(processes, tiny_data, tmp_path):
    curve = run(tmp_path / "run", tiny_data, opt_base_learning_rate=2e9)
    assert (curve.status, curve.error) == ("aborted", NonFinite.kind)
    # JSON has no NaN: null stands for it.
    first_bad = next(
        index
        for index, pair in enumerate(zip(curve.losses, curve.norms, strict=True))
        if None in pair
    )
    assert curve.message.startswith(f"step {first_bad + 1}:") and len(curve.losses) == first_bad + 1
    assert records(tmp_path / "run" / "result.txt")[-1]["metadata"]["status"] == "aborted"


def test_a_step_after_the_last_evaluation_that_is_not_finite_ends_the_run_so(
    processes, tiny_data, tmp_path
):
    # Evaluations come every 32 sequences, so none comes after the third step.
    curve = run(tmp_path / "run", tiny_data, opt_base_learning_rate=2e9, max_samples=24)
    assert curve.error == NonFinite.kind and None in (*curve.losses, *curve.norms)


# --- the clock and the files ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tiny_data, tmp_path_factory):
    """Run `python -m llama31_8b.train` in its own process.

    Returns (exit code, stdout, stderr, folder of the run, token files opened).
    """
    folder = tmp_path_factory.mktemp("process")
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text(run_config().as_toml())
    arguments = [
        "--run-dir",
        str(folder / "run"),
        "--data-dir",
        str(tiny_data),
        "--config-name",
        "CPU_1x1.toml",
        "--device",
        "cpu",
    ]
    (process,) = start_ranks(1, [str(TINY_PROGRAM), str(folder / "opens"), *arguments])
    stdout, stderr = process.communicate(timeout=120)
    assert (folder / "opens").exists(), stderr
    return (
        process.returncode,
        stdout,
        stderr,
        folder / "run",
        [json.loads(line) for line in (folder / "opens").read_text().splitlines()],
    )


def test_versions_json_has_what_ran_when_the_clock_started(
    processes, tiny_data, tmp_path, monkeypatch
):
    """The defaults of engines' modules are not in it: a later run may not import the module."""
    planned = {"commit": "c", "engines": {"attention": "planned"}, "variables": {"NCCL_ALGO": "x"}}
    (tmp_path / "versions.json").write_text(json.dumps(planned))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    before = []
    run_start = RunLog.run_start

    def start(log):
        before.append((tmp_path / "versions.json").read_text())
        run_start(log)

    def self_test(*_):
        monkeypatch.setenv("NVTE_FUSED_ATTN", "1")  # as an engine's module does

    monkeypatch.setattr(RunLog, "run_start", start)
    monkeypatch.setattr(timed_run, "run_self_test", self_test)
    monkeypatch.setattr(timed_run, "state", lambda: {"governor": "good"})
    run(tmp_path, tiny_data, max_samples=8)
    (text,) = before
    versions = json.loads(text)
    assert versions["engines"] == {"attention": "sdpa", "products": "torch"}
    expected = {"NCCL_ALGO": "Ring"}
    assert expected.items() <= versions["variables"].items()
    assert "NVTE_FUSED_ATTN" not in versions["variables"]
    assert versions["system_tuning"] == {"governor": "good"} and versions["commit"] == "c"
    assert "hf_secret" not in text and text == (tmp_path / "versions.json").read_text()


def test_no_token_file_is_opened_before_the_clock_runs(trained):
    opens = trained[-1]
    tokens = [(path, started) for path, started in opens if path.endswith(".bin")]
    assert {path.rpartition("/")[2] for path, _ in tokens} == {
        f"{TINY.train_prefix}.bin",
        f"{TINY.validation_prefix}.bin",
    }
    assert all(started for _, started in tokens)
    assert [path for path, started in opens if not started], (
        "the hook saw no file before run_start: does it still see anything?"
    )


def test_stdout_holds_the_log_and_nothing_else(trained):
    _, stdout, stderr, run_dir, _ = trained
    assert stdout == (run_dir / "result.txt").read_text() and stdout.startswith(":::MLLOG ")
    assert ":::MLLOG" not in stderr


def test_a_failure_after_run_start_is_logged_recorded_and_is_the_exit_code(trained):
    code, _, _, run_dir, _ = trained
    log = records(run_dir / "result.txt")
    record = json.loads((run_dir / "ranks" / "rank_0.json").read_text())
    assert code == TargetMissed.exit_code == record["exit_code"]
    assert (record["kind"], record["secondary"], record["step"]) == ("target_missed", False, 12)
    last = [line["value"] for line in log if line["key"] == "eval_accuracy"][-1]
    target = next(line["value"] for line in log if line["key"] == "target_accuracy")
    assert f"{last:.4f}" in record["why"] and str(target) in record["why"]
    assert (
        log[-1]["key"] == "run_stop"
        and log[-1]["metadata"]["status"] == "aborted"
        and log[-1]["metadata"]["samples_count"] == 96
    )
    verdict = json.loads((run_dir / "events.jsonl").read_text().splitlines()[-1])
    assert (verdict["event"], verdict["status"], verdict["samples"]) == ("verdict", "aborted", 96)


@pytest.mark.parametrize(
    ("config", "words"),
    [("", "config.toml: no such config"), ("global_batch_size = 7", "global_batch_size = 7")],
)
def test_a_rank_without_a_usable_config_says_so_in_three_lines(tmp_path, config, words):
    """Started by hand or by torchrun without the launcher."""
    (tmp_path / "run").mkdir()
    if config:
        (tmp_path / "run/config.toml").write_text(
            run_config().as_toml().replace("global_batch_size = 8", config)
        )
    arguments = [
        "--run-dir",
        str(tmp_path / "run"),
        "--data-dir",
        str(tmp_path),
        "--config-name",
        "CPU_1x1.toml",
        "--device",
        "cpu",
    ]
    (process,) = start_ranks(1, [str(TINY_PROGRAM), str(tmp_path / "opens"), *arguments])
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2 and words in stderr, stderr
    assert [line.split(":")[0].strip() for line in stderr.splitlines()] == ["error", "why", "do"]
    assert not (tmp_path / "run/result.txt").exists()


def test_a_config_for_another_number_of_processes_is_refused(processes, tiny_data, tmp_path):
    ended = run(tmp_path / "run", tiny_data, gpus_per_node=2)
    assert (ended.error, ended.status) == ("config", "") and "1 process" in ended.message
    assert [record["key"] for record in records(tmp_path / "run/result.txt")] == [
        "cache_clear",
        "init_start",
    ]


def test_a_trainer_process_trains_as_a_call_in_this_process_does(trained, plain):
    assert_same_curve(facts(trained[3]), plain, tolerance=1e-6)


def test_steps_that_do_not_log_never_wait_for_the_device(
    processes, tiny_data, tmp_path, monkeypatch
):
    """Every conversion of a tensor to a Python number is watched, as it would block the host."""
    reads, inside = {"step": 0, "flush": 0}, []

    def watch(name):
        original = getattr(torch.Tensor, name)

        def watched(tensor, *args, **options):
            if inside:
                reads[inside[-1]] += 1
            return original(tensor, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, watched)

    for name in (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "nonzero",
    ):
        watch(name)

    def marked(original, name):
        def call(*args, **options):
            inside.append(name)
            try:
                return original(*args, **options)
            finally:
                inside.pop()

        return call

    monkeypatch.setattr(loop, "train_step", marked(loop.train_step, "step"))
    monkeypatch.setattr(Meter, "record", marked(Meter.record, "step"))
    monkeypatch.setattr(Meter, "flush", marked(Meter.flush, "flush"))
    curve = run(tmp_path / "run", tiny_data, max_samples=32, micro_batch_size=2)
    assert len(curve.losses) == 4
    assert reads["step"] == 0 and reads["flush"] > 0, reads


# --- a full log of the closed division ------------------------------------------------------------


class Scripted(torch.nn.Module):
    """Stand-in for the 8B: one weight, and a loss that falls with every training step."""

    def __init__(self, losses: list[float]):
        super().__init__()
        self.shape = CLOSED.shape
        self.max_sequence_length = CLOSED.sequence_length
        self.losses = iter([9.9, *losses])  # the first one is that of the warm-up
        self.weight = torch.nn.Parameter(torch.ones(1, 1))

    def forward(self, tokens, labels):
        count = torch.full((len(tokens),), float(tokens.shape[1]))
        loss = self.weight.square().sum() if torch.is_grad_enabled() else next(self.losses)
        return count * loss, count


@pytest.fixture(scope="module")
def closed_data(tmp_path_factory):
    """1,024 validation sequences of 8,192 tokens and 40 repeated training sequences, all zeros."""
    folder = tmp_path_factory.mktemp("closed_data")
    for prefix, sequences in (
        (CLOSED.train_prefix, 40),
        (CLOSED.validation_prefix, CLOSED.eval_samples),
    ):
        writer = IndexedDatasetWriter(folder / prefix, 60_000)  # ids of 2 bytes
        writer.add(torch.zeros(sequences * CLOSED.sequence_length + 1, dtype=torch.int32).numpy())
        writer.finish()
    return folder


def closed_log(run_dir, data_dir, losses, global_batch_size, **rules):
    """The log of the real trainer, loop and RunLog; of the run only the model is not real."""

    def assemble(config, rules, processes, fill_masters):
        model = Scripted(losses)
        make_rule = UPDATE_RULES["adamw"](rules, "reference", torch.float32)
        return Assembly(
            model, ReplicatedOptimizer(model.parameters(), processes, make_rule), LinearLayers()
        )

    changes = {
        "gpu": "H200",
        "miniature": False,
        "opt_base_learning_rate": 4e-4,
        "max_samples": 100_000,
    }
    changes |= {
        "global_batch_size": global_batch_size,
        "micro_batch_size": global_batch_size,
        "eval_micro_batch_size": 1024,
    }
    changes |= {"opt_learning_rate_warmup_steps": 16}
    # At the 8B's shapes it takes a GPU.
    untested = mock.patch.object(timed_run, "run_self_test")
    with (
        mock.patch.object(pretraining, "assemble_full", assemble),
        mock.patch.dict("os.environ", {"CACHE_CLEARED": "yes"}),
        untested,
    ):
        run(
            run_dir,
            data_dir,
            rules=replace(CLOSED, **rules),
            config_name="H200_1x1.toml",
            seed=3123456789,
            **changes,
        )
    return run_dir / "result.txt"


@pytest.mark.parametrize(
    ("global_batch_size", "losses"), [(32, [3.9, 3.31, 3.3]), (16, [3.4, 3.2999])]
)
def test_a_closed_log_passes_every_round_and_our_rules(
    processes, closed_data, tmp_path, capsys, global_batch_size, losses
):
    path = closed_log(tmp_path / "run", closed_data, losses, global_batch_size)
    verdicts = [
        compliance_checker.closed_verdict(path, ruleset)
        for ruleset in official_tools.CLOSED_RULESETS
    ]
    assert verdicts == [
        compliance_checker.LogVerdict(ruleset, True, ())
        for ruleset in official_tools.CLOSED_RULESETS
    ]
    assert examine(path).errors() == []
    assert check.main([str(path)]) == 0
    log = records(path)
    samples = [
        record["metadata"]["samples_count"] for record in log if record["key"] == "eval_accuracy"
    ]
    assert samples == [12288 * number for number in range(1, len(losses) + 1)]
    assert [record["value"] for record in log if record["key"] == "eval_accuracy"] == pytest.approx(
        losses, rel=1e-7
    )
    values = {
        key: log[find(log, key)]["value"]
        for key in (
            "eval_samples",
            "max_steps",
            "target_accuracy",
            "global_batch_size",
            "cache_clear",
        )
    }
    assert values == {
        "eval_samples": 1024,
        "max_steps": 1_200_000,
        "target_accuracy": 3.3,
        "global_batch_size": global_batch_size,
        "cache_clear": True,
    }


@pytest.mark.parametrize(
    ("rules", "finding"),
    [
        ({"eval_interval_samples": 6144}, "eval_interval"),
        ({"end_learning_rate_ratio": 0.01}, "end_learning_rate"),
    ],
    ids=["interval of 6144", "end learning rate of 1 %"],
)
def test_what_the_official_checker_lets_pass_is_refused_by_ours(
    processes, closed_data, tmp_path, capsys, rules, finding
):
    path = closed_log(tmp_path / "run", closed_data, [3.2], 32, **rules)
    assert compliance_checker.closed_verdict(path, "6.1.0").passed
    assert {found.rule for found in examine(path).errors()} == {finding}
    assert check.main([str(path), "--ruleset", "6.1.0"]) == 20
    assert "passed" in capsys.readouterr().out
