"""`plan --scaling`: samples from the reference, traffic from the code, and its limits."""

from __future__ import annotations

import json

import pytest

from common.benchmarks import divisions
from common.gpu_kinds import KINDS
from common.paths import ROOT
from common.records.published import RESULTS
from launch.plan import scaling
from launch.plan.command import main

RULES = divisions("llama31_8b")["closed"]
H200 = KINDS["H200"]


def point(gpus: int, batch: int, network: float = 50.0) -> scaling.ScalingPoint:
    return scaling.point(ROOT, "llama31_8b", H200, gpus, batch, network)


def test_samples_between_two_batches_are_on_the_line_between_them():
    values = {16: 100.0, 32: 200.0, 64: 600.0}
    assert scaling.interpolated(values, 32) == (200.0, True)
    assert scaling.interpolated(values, 24) == (150.0, False)
    assert scaling.interpolated(values, 48) == (400.0, False)
    assert scaling.interpolated(values, 128) == (1400.0, False), "the last line goes on"
    with pytest.raises(ValueError, match="16"):
        scaling.interpolated(values, 8)


def test_one_gpu_has_no_traffic_and_more_gpus_wait_for_links():
    assert point(1, 16).exposed_s == 0.0
    assert 0.0 < point(8, 16).exposed_s < point(16, 16).exposed_s
    assert point(16, 16, network=1.0).exposed_s > 10 * point(16, 16).exposed_s


def test_a_slow_network_adds_the_traffic_that_no_arithmetic_hides():
    """1 GB/s: an all-reduce over 2 nodes sends 1 / 8 of 16 GB of gradients, at 0.703 of that."""
    values = 2 * RULES.shape.num_parameters
    seconds = values / 8 / (1e9 * scaling.LINK_SHARE)
    slow = point(16, 16, network=1.0)
    assert slow.exposed_s == pytest.approx(seconds, rel=0.25)


def test_every_gpu_gets_a_whole_sequence():
    best = scaling.best_points(ROOT, "llama31_8b", H200, RULES, 50.0)
    for gpus, found in best.items():
        assert found is not None
        assert found.config.global_batch_size % gpus == 0
        assert found.measured == (found.config.global_batch_size in RULES.reference_runs)
    assert list(best) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_trays_of_a_rack_are_linked_by_nvlink():
    rack, racks = (
        scaling.point(ROOT, "llama31_8b", KINDS["GB300"], gpus, 128, 50.0) for gpus in (64, 128)
    )
    assert racks.exposed_s > 5 * rack.exposed_s


def test_scaling_stops_paying_where_the_reference_needs_more_sequences():
    """A fixed rate per GPU and the reference's samples: 64 to 128 GPUs saves 24 %."""
    best = scaling.best_points(ROOT, "llama31_8b", H200, RULES, 50.0)
    assert scaling.last_paying(best) == 64


def test_published_results_of_several_nodes_are_calculated_within_their_spread():
    """Software of others on the same GPUs: the median error is within 15 %."""
    errors = []
    for result in RESULTS:
        kind = KINDS.get(result.gpu or "")
        if kind is None or not (result.gpus and result.batch and result.samples_per_s):
            continue
        nodes = result.gpus // scaling.gpus_per_node(kind, result.gpus)
        if nodes > 1 and result.batch % result.gpus == 0:
            found = scaling.point(ROOT, result.benchmark, kind, result.gpus, result.batch, 50.0)
            published = result.samples_per_s * 8192 / result.gpus
            errors.append(abs(found.tokens_per_s_per_gpu / published - 1))
    assert len(errors) > 10
    assert sorted(errors)[len(errors) // 2] < 0.15


def test_the_command_prints_json_and_writes_a_page(tmp_path, capsys):
    page = tmp_path / "scaling.html"
    assert (
        main(ROOT, "llama2_70b_lora", ["--scaling", "MI355X", "--json", "--page", str(page)]) == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert [row["GPUs"] for row in rows][-1] == "512"
    assert "GPU-hours" in page.read_text()
