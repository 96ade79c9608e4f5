"""Token files with too few sequences are found before the clock line."""

import pytest
from jobs import job_of

from common.errors import DataError
from common.paths import ROOT
from launch import run, series
from launch.job import ensure_data
from open_llama.data import validation_pairs

pytestmark = pytest.mark.quick

STREAM = ROOT / "open_llama/examples/pretrain_1b.toml"  # sequences of 2,048 tokens
DOCUMENTS = ROOT / "open_llama/examples/lora_8b.toml"
LLAMA31_8B = ROOT / "configs/llama31_8b/H200_1x1.toml"
TRAIN = "c4-train.en_6_text_document"
VALIDATION = "c4-validation-91205-samples.en_text_document"


def open_job(path, folder, train, validation):
    """Return a job of `open_llama` on token files with documents of these lengths."""
    data = {"train": train, "validation": validation}
    return job_of("open_llama", path, folder, data=data, weights="", lora_rank=0)


def test_too_few_sequences_for_an_evaluation_start_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(run, "run_once", lambda *arguments: pytest.fail("a run was started"))
    job = open_job(STREAM, tmp_path, [2049], [67 * 2048 + 1])
    with pytest.raises(DataError) as caught:
        run.run_all(job, series.SeriesRequest(1, 0))
    error = caught.value
    assert error.exit_code == 15 and error.why
    for word in (str(tmp_path / "data/validation"), "128", "67", "2048"):
        assert word in error.what
    for word in ("eval_samples", "67", "prepare text", "--validation-fraction"):
        assert word in error.do
    assert "TIMING" not in capfd.readouterr().out
    assert not job.log_dir.exists()


@pytest.mark.parametrize(
    ("path", "train", "validation", "numbers"),
    [
        (STREAM, [2049], [128 * 2048 + 1], None),
        (STREAM, [2049], [100 * 2048, 28 * 2048], (128, 127)),
        (STREAM, [2049], [1], (128, 0)),
        (STREAM, [2048], [128 * 2048 + 1], (2048, 0)),
        (DOCUMENTS, [2], [2] * 64, None),
        (DOCUMENTS, [2], [2] * 63 + [1, 1], (64, 63)),
        (DOCUMENTS, [1, 1], [2] * 64, ("to predict", 0)),
    ],
)
def test_sequences_and_documents_are_counted(tmp_path, path, train, validation, numbers):
    job = open_job(path, tmp_path, train, validation)
    if numbers is None:
        ensure_data(job)
        return
    with pytest.raises(DataError) as caught:
        ensure_data(job)
    expected, got = numbers
    assert str(expected) in caught.value.what and f"got {got}" in caught.value.what
    assert ("eval_samples" in caught.value.do) == (got > 0)
    assert "prepare text" in caught.value.do


@pytest.mark.parametrize(
    ("train", "validation", "word", "got"),
    [
        ([8193], [1024 * 8192], "validation", 1023),
        ([8192], [1024 * 8192 + 1], "training", 0),
        ([8193], [1024 * 8192 + 1], "", None),
    ],
)
def test_short_files_of_the_benchmark(tmp_path, train, validation, word, got):
    job = job_of("llama31_8b", LLAMA31_8B, tmp_path, data={TRAIN: train, VALIDATION: validation})
    if got is None:
        ensure_data(job)
        return
    with pytest.raises(DataError) as caught:
        ensure_data(job)
    assert f"got {got}" in caught.value.what and word in caught.value.do
    assert "fetch" in caught.value.do


def test_a_damaged_index_is_found_too(tmp_path):
    job = open_job(STREAM, tmp_path, [2049], [128 * 2048 + 1])
    (tmp_path / "data/validation.idx").write_bytes(b"x" * 64)
    with pytest.raises(DataError, match=r"validation\.idx"):
        ensure_data(job)


@pytest.mark.parametrize("path", [STREAM, DOCUMENTS])
def test_a_rank_says_the_same(tmp_path, path):
    """The files of its node may have changed since the launcher read them."""
    job = open_job(path, tmp_path, [2049], [2048, 2049, 1])
    with pytest.raises(DataError) as caught:
        validation_pairs(job.config, job.rules, job.data_dir)
    assert "eval_samples" in caught.value.do and caught.value.what.endswith(" 2")
