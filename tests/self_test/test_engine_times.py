"""Engines are chosen by time: on which numbers, for how long, and what a run says about it."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from page import read_page
from ranks import call_on_ranks
from synthetic_run import write_run
from timed_engines import AITER, CPU, SIZES, Gfx942

from common import engines
from common.engines import ATTENTION, PRODUCTS, SWIGLU
from common.kernels import fp8
from common.self_test import engine_times
from common.self_test import run as self_test
from common.self_test.kernel_cases import Draw
from common.self_test.results import SelfTestResult
from common.training.metrics import ProgressLog
from common.training.reports import Reports
from common.training.timed_run import run_self_test
from submission import report

# By I 1.1: with AOTriton 0.11.2, torch's backward is the same Triton kernel with and without
# repeated heads. With 0.12, it is AITER's assembly if they are repeated.
AOTRITON_0_11_2 = {"repeated_heads": (12.9, 12.8), "sdpa": (12.2, 12.3)}
AOTRITON_0_12 = {"repeated_heads": (5.3, 5.2), "sdpa": (12.2, 12.3)}
WITH_AITER = {"aiter": (4.1, 4.0), **AOTRITON_0_11_2}


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Return a function that makes the stand-in node, with the same kept times each time."""
    return lambda *packages, **ms: Gfx942(monkeypatch, tmp_path / "cache", *packages, **ms)


def files(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize(
    ("packages", "ms", "engine", "words"),
    [
        ({}, AOTRITON_0_11_2, "sdpa", ("4% faster", "repeated_heads")),
        ({}, AOTRITON_0_12, "repeated_heads", ("first of the list", "2%")),
        (AITER, WITH_AITER, "aiter", ("first of the list", "2%")),
    ],
    ids=["0.11.2", "0.12", "aiter"],
)
def test_a_run_on_gfx942_says_which_engine_it_uses_and_why(
    node, tmp_path, monkeypatch, packages, ms, engine, words
):
    node(packages, **ms)
    monkeypatch.setattr(self_test.Sizes, "of", lambda *_: SIZES)
    screen = io.StringIO()
    reports = replace(Reports.open(tmp_path, 0), progress=ProgressLog(True, screen))
    rules = SimpleNamespace(shape=None, sequence_length=0, lora_rank=0)
    run_self_test(None, rules, SimpleNamespace(world_size=1, device=CPU), reports)
    [line] = screen.getvalue().splitlines()
    assert line.startswith(f"engines    attention by {engine}: ")
    event = json.loads((tmp_path / "events.jsonl").read_text())
    choice = event["engines"][ATTENTION]
    assert choice["engine"] == engine and choice["ms"] == {k: list(v) for k, v in ms.items()}
    assert event["engines"][PRODUCTS] == {
        "engine": "torch",
        "why": "the only usable engine",
        "ms": {},
    }
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_run(run_dir)
    with (run_dir / "events.jsonl").open("a") as file:
        file.write((tmp_path / "events.jsonl").read_text())
    assert report.main([str(run_dir)]) == 0
    page = read_page(run_dir / "report.html")
    for word in words:
        assert word in line and word in choice["why"] and word in page
    for name, (first, second) in ms.items():
        assert f"{name} {(first + second) / 2:.3f}" in line
        assert f"{name} {first:.4f} and {second:.4f}" in page


@pytest.mark.parametrize(
    ("ms", "engine"),
    [
        ({"aiter": (10.0, 10.0), "repeated_heads": (9.85, 9.7), "sdpa": (10, 10)}, "aiter"),
        ({"aiter": (10.0, 10.0), "repeated_heads": (9.0, 9.9), "sdpa": (10, 10)}, "aiter"),
        (
            {"aiter": (10.0, 10.0), "repeated_heads": (9.7, 9.7), "sdpa": (9.6, 9.6)},
            "repeated_heads",
        ),
        ({"aiter": (10.0, 10.0), "repeated_heads": (9.7, 9.7), "sdpa": (9.4, 9.4)}, "sdpa"),
    ],
)
def test_the_order_is_left_for_a_gain_of_more_than_2_percent_each_time(node, ms, engine):
    assert node(AITER, **ms).start().engines[ATTENTION].engine == engine


def test_a_later_start_tests_the_fastest_engine_only(node):
    here = node({}, **AOTRITON_0_11_2)
    first = here.start()
    assert here.timed == [ATTENTION] and here.tested
    second = here.start()
    assert not here.timed and not here.tested  # `tested` lists repeated_heads only
    assert second.attention == first.attention == "flash"
    assert second.engines[ATTENTION].ms == first.engines[ATTENTION].ms
    assert "earlier start" in second.engines[ATTENTION].why
    assert engines.used() == {ATTENTION: "sdpa", PRODUCTS: "torch"}


@pytest.mark.parametrize(
    ("packages", "changes"),
    [
        ({}, {"driver": "6.18.0"}),
        ({"amd-aiter": "0.1.15"}, {}),
        ({}, {"sizes": replace(SIZES, sequence_length=64)}),
        ({}, {"variable": "1"}),
    ],
    ids=["driver", "package", "shape", "variable"],
)
def test_another_driver_package_shape_or_library_is_timed_anew(
    monkeypatch, tmp_path, packages, changes
):
    cache = tmp_path / "cache"
    Gfx942(monkeypatch, cache, AITER, **WITH_AITER).start()
    driver = {"driver": changes["driver"]} if "driver" in changes else {}
    monkeypatch.setattr("timed_engines.SIZES", changes.get("sizes", SIZES))
    if "variable" in changes:
        monkeypatch.setenv("TORCH_ROCM_FA_PREFER_CK", changes["variable"])
    slow = WITH_AITER | {"aiter": (30.0, 30.0)}
    other = Gfx942(monkeypatch, cache, {**AITER, **packages}, **driver, **slow)
    assert other.start().engines[ATTENTION].engine == "sdpa" and other.timed == [ATTENTION]
    assert len(files(tmp_path)) == 2


def test_the_number_of_layers_does_not_matter(node, monkeypatch):
    node(AITER, **WITH_AITER).start()
    deeper = replace(SIZES, shape=replace(SIZES.shape, num_layers=99))
    monkeypatch.setattr("timed_engines.SIZES", deeper)
    here = node(AITER, **WITH_AITER)
    here.start()
    assert not here.timed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        lambda kept: kept | {"ms": {"aiter": [1.0, 1.0]}},
        lambda kept: kept | {"ms": kept["ms"] | {"aiter": [1.0]}},
        lambda kept: kept | {"ms": kept["ms"] | {"aiter": [1.0, float("nan")]}},
        lambda kept: kept | {"ms": kept["ms"] | {"aiter": [-1.0, 1.0]}},
        lambda kept: kept | {"ms": kept["ms"] | {"aiter": 4.0}},
        lambda kept: kept | {"key": kept["key"] | {"gpu": "another"}},
    ],
)
def test_a_damaged_file_is_described_and_made_again(node, tmp_path, content):
    here = node(AITER, **WITH_AITER)
    first = here.start()
    [path] = files(tmp_path)
    whole = path.read_bytes()
    if callable(content):
        content = json.dumps(content(json.loads(whole))).encode()
    path.write_bytes(content)
    again = here.start()
    assert again.engines[ATTENTION] == first.engines[ATTENTION] and here.timed == [ATTENTION]
    [note] = again.notes
    assert str(path) in note and f"NOTE       {note}" in again.engine_lines()
    assert path.read_bytes() == whole
    assert not here.start().notes


def test_a_folder_that_cannot_be_written_is_said_and_changes_nothing(node, tmp_path):
    (tmp_path / "cache").write_text("a file")
    here = node(AITER, **WITH_AITER)
    for _ in range(2):
        result = here.start()
        assert result.engines[ATTENTION].engine == "aiter" and here.timed == [ATTENTION]
        assert any("cannot be written" in note for note in result.notes)


def test_a_pinned_engine_is_not_timed_and_no_other_is_tested(node, tmp_path, monkeypatch):
    here = node(AITER, **WITH_AITER)
    monkeypatch.setenv("ATTENTION_ENGINE", "repeated_heads")
    result = here.start()
    choice = result.engines[ATTENTION]
    assert (choice.engine, choice.ms) == ("repeated_heads", {})
    assert "ATTENTION_ENGINE" in choice.why and set(here.tested) == {"repeated_heads"}
    assert not here.timed and not files(tmp_path) and not result.engine_lines()


def test_an_engine_that_computes_wrongly_is_not_timed_and_nothing_is_kept(
    node, tmp_path, monkeypatch
):
    here = node(AITER, **WITH_AITER)
    monkeypatch.setattr(here, "wrong", ("aiter",))
    result = here.start()
    assert not result.bad and result.engines[ATTENTION].engine == "sdpa"
    assert list(result.engines[ATTENTION].ms) == ["repeated_heads", "sdpa"]
    assert any("aiter" in line and "self-test" in line for line in result.missing)
    assert not files(tmp_path), "the next start tests it again"


def test_a_kept_engine_that_computes_wrongly_gives_way_to_the_first_of_the_order(node, monkeypatch):
    here = node(AITER, **WITH_AITER)
    here.start()
    monkeypatch.setattr(here, "wrong", ("aiter", "repeated_heads"))
    result = here.start()
    choice = result.engines[ATTENTION]
    assert not result.bad and (choice.engine, choice.ms) == ("sdpa", {}) and not here.timed
    assert "not timed" in choice.why and any("aiter" in line for line in result.missing)


def test_engines_that_cannot_be_timed_keep_the_order(node, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    here = node(AITER, **WITH_AITER)
    monkeypatch.setattr(engine_times, "times_in_turns", fail)
    result = here.start()
    choice = result.engines[ATTENTION]
    assert choice.engine == "aiter" and "not timed" in choice.why and not choice.ms
    assert result.notes == ["attention is not timed: CUDA out of memory"] and not files(tmp_path)


def test_ten_starts_with_nearly_equal_times_make_one_choice(node, tmp_path):
    """With the file, the first times count. Without it, each gain is too small."""
    noise = (0.99, 1.01, 0.985, 1.0, 1.012, 0.99, 1.0, 0.995, 1.01, 0.988)
    chosen = set()
    for is_kept in (True, False):
        for factor in noise:
            here = node(AITER, **WITH_AITER | {"sdpa": (4.1 * factor, 4.0 * factor)})
            if not is_kept:
                for path in files(tmp_path):
                    path.unlink()
            chosen.add(here.start().engines[ATTENTION].engine)
    assert chosen == {"aiter"}


def test_over_the_ranks_the_engine_is_the_one_whose_slowest_rank_is_fastest(tmp_path):
    """Rank 0 alone would take repeated_heads (5 ms), which takes 12 ms on rank 1. Rank 0 keeps."""
    first, second = call_on_ranks(2, "timed_engines:choose_on_a_rank", tmp_path)
    for rank in (first, second):
        assert rank["engines"] == ["sdpa", "sdpa"]
        assert rank["ms"] == {"aiter": [9, 9], "repeated_heads": [12, 12], "sdpa": [8, 8]}
        assert rank["timed"] == [[ATTENTION], []]
    assert (first["files"], second["files"]) == (1, 0)


# --- what is timed --------------------------------------------------------------------------------


def test_engines_take_turns_in_two_measurements(monkeypatch):
    monkeypatch.setattr(engine_times, "LOAD_S", 0.0)
    monkeypatch.setattr(engine_times, "BLOCK_S", 0.0)
    calls = []
    operation = engine_times.Operation(ATTENTION, None, None, None)
    times = engine_times.times_in_turns(
        operation, ["a", "b"], lambda: calls.append(engines.used()[ATTENTION]), CPU
    )
    rounds = engine_times.MEASUREMENTS * engine_times.ROUNDS
    assert calls == ["a", "a", "b", "b"] + ["a", "b"] * rounds
    assert [len(of_engine) for of_engine in times.values()] == [2, 2]


@pytest.mark.parametrize(("lora_rank", "products"), [(0, 12), (4, 8)])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_the_products_of_a_layer(monkeypatch, in_fp8, lora_rank, products):
    sizes = replace(SIZES, fp8=in_fp8, lora_rank=lora_rank)
    work = self_test.product_work(sizes, Draw(CPU))
    shapes = []
    product = fp8.product

    def recorded(a, b, *scales):
        shapes.append((*a.shape, b.shape[1]))
        assert (a.dtype.itemsize == 1) == in_fp8
        return product(a, b, *scales)

    monkeypatch.setattr(fp8, "product", recorded)
    work()
    assert len(shapes) == products
    shape = sizes.shape
    assert (sizes.tokens, shape.hidden_size, 2 * shape.ffn_hidden_size) in shapes


def test_attention_of_a_layer_runs_forward_and_backward():
    work = self_test.attention_work(SIZES, Draw(CPU))
    with torch.profiler.profile() as profile:
        work()
    names = {event.key for event in profile.key_averages()}
    assert {name for name in names if "attention" in name and "backward" in name}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_swiglu_of_a_layer_runs_in_the_epilogues_of_an_engine(monkeypatch, lora_rank):
    calls = []
    epilogues = SimpleNamespace(
        gate_up_swiglu=lambda *_: calls.append("forward"),
        down_swiglu_backward=lambda *_: calls.append("backward"),
    )
    monkeypatch.setattr("common.model.linear_layers.swiglu_epilogues", lambda *_: epilogues)
    self_test.swiglu_work(replace(SIZES, fp8=True, lora_rank=lora_rank), Draw(CPU))()
    assert calls == ["forward", "backward"]


def test_operations_are_chosen_in_the_order_in_which_they_depend_on_each_other(monkeypatch):
    monkeypatch.setattr(self_test, "may_fuse_swiglu", lambda sizes: True)
    chosen = self_test.operations(SIZES, CPU, SelfTestResult())
    assert [operation.name for operation in chosen] == [ATTENTION, PRODUCTS, SWIGLU]
