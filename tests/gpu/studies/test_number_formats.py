"""Test the study of number formats: its table, the format of each run, and continuation."""

import json
import shutil

import convergence
import number_formats
import pytest
from number_formats import HEALED, RECIPES, main, options_of, seeds_of, table

from common.data.indexed_dataset import Index
from llama31_8b.rules import MINIATURE


def test_every_recipe_is_a_config():
    for name in RECIPES:
        number_formats.config_of(options_of(name, 500))
    assert options_of(HEALED[0], 500) == {"linear": "mxfp4+hadamard until step 300, then fp8"}
    assert seeds_of("1-3,7") == [1, 2, 3, 7]


def test_the_table_pairs_by_seed():
    falling = [10.0 - step / 100 for step in range(500)]
    curves = {
        "bf16": {"1": falling, "2": [loss + 1 for loss in falling], "3": falling},
        "MXFP4": {"1": [loss + 0.5 for loss in falling], "2": [loss + 1.5 for loss in falling]},
    }
    bf16, mxfp4 = (line.split(" | ") for line in table(curves).splitlines()[2:])
    assert bf16[:4] == ["| bf16", "3", "5.5883", "0.3333"]
    assert mxfp4[:7] == ["| MXFP4", "2", "6.2550", "0.5000", "+0.5000", "0.0000", "+8.69%"]
    assert mxfp4[7] == "450 of 500 |", "0.01 per step: 50 steps earlier"


@pytest.fixture
def small(processes, miniature_data, tmp_path, monkeypatch):
    """The arguments that all calls have. Its text: the standard library's and a small package's."""
    monkeypatch.setattr(number_formats, "TEXT_PACKAGES", ("iniconfig",))
    shutil.copytree(miniature_data, tmp_path / "data")
    monkeypatch.setattr(number_formats, "start_processes", lambda *arguments: processes)
    for name in ("SEQUENCE", "BATCH"):  # which --small changes
        monkeypatch.setattr(convergence, name, getattr(convergence, name))
    return ["--small", "--data-dir", str(tmp_path / "data"), "--steps", "5"]


@pytest.mark.slow
def test_a_later_call_goes_on(small, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    common = [*small, "--only", f"bf16;MXFP4;{HEALED[0]}"]
    main([*common, "--seeds", "1", "--out", str(first)])
    main(
        [
            *common,
            "--seeds",
            "1-2",
            "--out",
            str(second),
            "--add",
            str(first),
            "--plot",
            str(tmp_path / "plot.png"),
        ]
    )
    curves = json.loads(second.read_text())
    assert [list(curves[name]) for name in ("bf16", "MXFP4", HEALED[0])] == [["1", "2"]] * 3
    assert all(curves[name]["1"] == json.loads(first.read_text())[name]["1"] for name in curves)
    losses = {tuple(by_seed[seed]) for by_seed in curves.values() for seed in by_seed}
    assert len(losses) == 6 and all(len(each) == 5 for each in losses)
    assert (
        "| MXFP4 | 2 |" in capsys.readouterr().out
        and (tmp_path / "plot.png").stat().st_size > 10_000
    )
    main([*common, "--seeds", "3", "--out", str(second), "--minutes", "0"])
    assert (
        "0.0 minutes are over" in capsys.readouterr().out and json.loads(second.read_text()) == {}
    )


@pytest.mark.slow
def test_the_text_holds_each_document_once_and_is_never_read_twice(small, tmp_path, capsys):
    texts = Index.read(number_formats.prepare_text(tmp_path / "data"))
    alone = [
        Index.read(tmp_path / "data" / prefix)
        for prefix in (MINIATURE.train_prefix, MINIATURE.validation_prefix)
    ]
    more = texts.num_tokens - sum(index.num_tokens for index in alone)
    assert texts.num_documents > sum(index.num_documents for index in alone) and 0 < more < 20_000
    with pytest.raises(SystemExit):
        main([*small, "--steps", "10000", "--out", str(tmp_path / "out.json")])
    assert "read twice" in capsys.readouterr().err


@pytest.mark.slow
def test_stochastic_rounding_hangs_on_the_seed_alone(small, tmp_path):
    found = []
    for only in ("MXFP4, stochastic", "bf16;MXFP4, stochastic"):
        main([*small, "--seeds", "1", "--only", only, "--out", str(tmp_path / "out.json")])
        found.append(json.loads((tmp_path / "out.json").read_text())["MXFP4, stochastic"])
    assert found[0] == found[1]


def test_micro_batches_share_a_step_and_other_texts_are_read(small, tmp_path, monkeypatch):
    read = []
    batches = number_formats.text_batches
    monkeypatch.setattr(
        number_formats,
        "text_batches",
        lambda prefix, steps, *rest: read.append((prefix, steps)) or batches(prefix, steps, *rest),
    )
    prefix, out = tmp_path / "data" / MINIATURE.validation_prefix, tmp_path / "out.json"
    main(
        [
            *small,
            "--seeds",
            "1",
            "--only",
            "bf16",
            "--out",
            str(out),
            "--text",
            str(prefix),
            "--micro-batches",
            "3",
        ]
    )
    assert read == [(prefix, 15)] and len(json.loads(out.read_text())["bf16"]["1"]) == 5
