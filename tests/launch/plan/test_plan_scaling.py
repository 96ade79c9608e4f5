"""`plan --scaling`: samples from the reference, traffic from the code, and its limits."""

from __future__ import annotations

import json

import pytest
from probes import make_visible

from common.benchmarks import divisions
from common.errors import ConfigError, OutOfMemory, StorageError
from common.estimate.links import LINK_SHARE
from common.gpu_kinds import GIB, KINDS
from common.machine.hardware import Device, Probe
from common.paths import ROOT
from common.records import rcp
from common.records.published import RESULTS
from launch.plan import scaling
from launch.plan.command import main
from launch.plan.scaling_table import HEAD, row

RULES = divisions("llama31_8b")["closed"]
H200 = KINDS["H200"]


def exposed_s(gpus: int, batch: int, network: float = 50.0) -> float:
    """Return the exposed time of a step on MI355X, which has no file for several nodes."""
    point = scaling.benchmark_point("llama31_8b", KINDS["MI355X"], gpus, network, batch)
    assert point.config.global_batch_size == batch
    return point.speed.exposed_s


def test_values_between_two_batches_are_on_the_line_between_them():
    values = {16: 100.0, 32: 200.0, 64: 600.0}
    assert rcp.at_batch(values, 32) == (200.0, rcp.MEASURED)
    for batch, value, word in ((24, 150.0, "interpolated"), (48, 400.0, "interpolated")):
        found, source = rcp.at_batch(values, batch)
        assert found == value and word in source
    assert rcp.at_batch(values, 128)[0] == 1400.0, "the last line goes on"
    assert "beyond" in rcp.at_batch(values, 128)[1]
    with pytest.raises(ConfigError, match="8"):
        rcp.at_batch(values, 8)


def test_one_gpu_has_no_traffic_and_more_gpus_wait_for_links():
    assert exposed_s(1, 16) == 0.0
    assert 0.0 < exposed_s(8, 16) < exposed_s(16, 16)
    assert exposed_s(16, 16, network=1.0) > 10 * exposed_s(16, 16)


def test_a_slow_network_adds_the_traffic_that_no_arithmetic_hides():
    """1 GB/s: an all-reduce over 2 nodes sends 1 / 8 of 16 GB of gradients, at 0.703 of that."""
    values = 2 * RULES.shape.num_parameters
    seconds = values / 8 / (1e9 * LINK_SHARE)
    assert exposed_s(16, 16, network=1.0) == pytest.approx(seconds, rel=0.25)


def test_every_group_of_gpus_that_share_sequences_gets_whole_ones():
    best = scaling.benchmark_points("llama31_8b", H200)
    for gpus, found in best.items():
        assert found is not None
        assert found.config.global_batch_size % found.config.data_ranks == 0
        assert found.gpus == gpus
        assert found.measured == (found.config.global_batch_size in RULES.reference_runs)
    assert list(best) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_trays_of_a_rack_are_linked_by_nvlink():
    rack, racks = (
        scaling.benchmark_point("llama31_8b", KINDS["GB300"], gpus, batch=128).speed.exposed_s
        for gpus in (64, 128)
    )
    assert racks > 5 * rack


def test_scaling_stops_paying_where_the_reference_needs_more_sequences():
    """A nearly fixed rate per GPU and the reference's samples: 128 to 256 GPUs saves 24 %."""
    assert scaling.last_paying(scaling.benchmark_points("llama31_8b", H200)) == 128


def test_a_row_is_the_config_that_its_command_starts(capsys, monkeypatch):
    """On a slow network, with the batch of the row."""
    for network in ([], ["--network", "1"]):
        assert main("llama31_8b", ["--scaling", "MI355X", "--json", *network]) == 0
        rows = {row["GPUs"]: row for row in json.loads(capsys.readouterr().out)}
        for gpus in ("16", "64"):
            row = rows[gpus]
            words = ["--set", f"global_batch_size={row['global batch']}"] if network else []
            monkeypatch.setenv("DGXSYSTEM", f"MI355X_{int(gpus) // 8}x8")
            assert main("llama31_8b", ["--json", *words]) == 0
            (plan,) = json.loads(capsys.readouterr().out).values()
            config = plan["config"]
            assert str(config["global_batch_size"]) == row["global batch"]
            assert f"{config['opt_base_learning_rate']:.2g}" == row["learning rate"]
        assert (rows["16"]["global batch"] == "16") == (not network)


def test_published_results_of_several_nodes_are_calculated_within_their_spread():
    """Software of others on the same GPUs: the median error is within 15 %."""
    errors = []
    for result in RESULTS:
        kind = KINDS.get(result.gpu or "")
        if kind is None or not (result.gpus and result.batch and result.samples_per_s):
            continue
        nodes = result.gpus // scaling.gpus_per_node(kind, result.gpus)
        if nodes > 1 and result.batch % result.gpus == 0:
            found = scaling.benchmark_point(result.benchmark, kind, result.gpus, batch=result.batch)
            published = result.samples_per_s * 8192 / result.gpus
            errors.append(abs(found.speed.tokens_per_s_per_gpu / published - 1))
    assert len(errors) > 10
    assert sorted(errors)[len(errors) // 2] < 0.15


def test_the_highest_published_rate_stands_beside_a_row():
    """Also of one log without a score: Cisco's 16 H200 of v6.0."""
    column = HEAD.index("published tok/s/GPU")
    rates = []
    for gpus in (16, 32):
        point = scaling.benchmark_point("llama31_8b", H200, gpus)
        rates.append(row(gpus, point, HEAD, "llama31_8b")[column])
    assert rates == ["13,873 (batch 32)", "-"]


def test_the_command_prints_json_and_writes_a_page(tmp_path, capsys):
    page = tmp_path / "scaling.html"
    assert main("llama2_70b_lora", ["--scaling", "MI355X", "--json", "--page", str(page)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["GPUs"] for row in rows][-1] == "512"
    assert "GPU-hours" in page.read_text()
    missing = tmp_path / "missing/scaling.html"
    with pytest.raises(StorageError, match=f"{missing}$"):
        main("llama2_70b_lora", ["--scaling", "MI355X", "--page", str(missing)])


EXAMPLE = "open_llama/examples/pretrain_1b.toml"


def open_llama(*words: str) -> int:
    return main("open_llama", ["--config", str(ROOT / EXAMPLE), *words])


def test_a_config_of_open_llama_keeps_its_batch_and_its_sequences(capsys):
    """Up to 8 GPUs share one of its 64 sequences, and more cannot."""
    assert open_llama("--scaling", "H200", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [int(row["GPUs"]) for row in rows] == [2**power for power in range(10)]
    sharing = {row["GPUs"]: row["GPUs a sequence"] for row in rows}
    assert (sharing["64"], sharing["128"], sharing["512"]) == ("1", "2", "8")
    assert {(row["global batch"], row["sequences to target"]) for row in rows} == {("64", "64,000")}
    minutes = [float(row["minutes"]) for row in rows]
    before_sharing = minutes[:7]  # on up to 64 GPUs
    assert before_sharing == sorted(before_sharing, reverse=True)
    assert open_llama("--scaling", "H200", "--json", "--set", "max_samples=128000") == 0
    twice = json.loads(capsys.readouterr().out)
    assert float(twice[0]["minutes"]) == pytest.approx(2 * minutes[0], rel=0.02)


def test_a_config_is_needed_where_no_reference_was_run_and_refused_where_it_is_chosen():
    with pytest.raises(ConfigError, match="config"):
        main("open_llama", ["--scaling", "H200"])
    file = str(ROOT / "configs/llama31_8b/H200_1x8.toml")
    for more in (["--config", file], ["--set", "max_samples=1"], ["--all"]):
        with pytest.raises(ConfigError, match="--scaling"):
            main("llama31_8b", ["--scaling", "H200", *more])
    with pytest.raises(ConfigError, match="max_samples"):  # an error of the config is not hidden
        open_llama("--scaling", "H200", "--set", "max_samples=0")


def any_model_rows(capsys, *words: str) -> list[dict]:
    assert main("", ["--gpu", "H200", "--scaling", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_without_a_config_keeps_the_sequences_of_a_gpu(capsys, tmp_path):
    page = tmp_path / "scaling.html"
    words = ["--model", "qwen3-4b", "--seq", "4096", "--batch", "2", "--train-tokens", "1e12"]
    rows = any_model_rows(capsys, *words, "--page", str(page))
    assert [int(row["global batch"]) for row in rows] == [2 * int(row["GPUs"]) for row in rows]
    last = rows[-1]
    rate = float(last["tok/s/GPU"].replace(",", "")) * 512
    assert float(last["days"]) == pytest.approx(1e12 / rate / 86_400, rel=0.01)
    assert "days" in page.read_text()
    slow = any_model_rows(capsys, *words, "--network", "1")
    assert float(slow[-1]["days"]) > 2 * float(last["days"])
    assert slow[0] == rows[0]


def test_the_gpu_may_be_named_in_one_way_only(capsys, monkeypatch):
    """--scaling GPU, --gpu GPU --scaling, or none of both for the GPUs of this machine."""
    card = Device("NVIDIA H200", "sm_90", 141 * GIB)
    make_visible(monkeypatch, Probe("nvidia", (card,)))
    model = ["--model", "qwen3-4b", "--json"]
    words = (["--scaling", "H200"], ["--gpu", "H200", "--scaling"], ["--scaling"])
    texts = []
    for each in words:
        assert main("", [*model, *each]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and "GPU-hours" in texts[0]
    assert main("llama31_8b", ["--json", "--scaling"]) == 0
    here = capsys.readouterr().out
    assert main("llama31_8b", ["--json", "--scaling", "H200"]) == 0
    assert capsys.readouterr().out == here


def test_a_model_that_fits_nowhere_has_the_exit_code_of_memory(capsys):
    words = ["--gpu", "H200", "--scaling"]
    assert main("", [*words, "--model", "llama3.1-405b"]) == OutOfMemory.exit_code
    with pytest.raises(ConfigError, match="--train-tokens"):
        main("", [*words, "--model", "llama2-70b", "--lora"])
