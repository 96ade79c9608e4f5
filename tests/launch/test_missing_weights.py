"""Missing weights are found before the clock line, as missing data files are."""

import pytest
from jobs import job_of

from common.errors import WeightsError
from common.paths import ROOT
from launch import run, series
from launch.job import ensure_data

pytestmark = pytest.mark.quick

LORA = ROOT / "configs/llama2_70b_lora/H200_1x1.toml"
OPEN = ROOT / "open_llama/examples/lora_8b.toml"


@pytest.mark.parametrize("given", [False, True])
def test_a_run_without_base_weights_starts_nothing(tmp_path, monkeypatch, capfd, given):
    environment = {"MODEL": str(tmp_path / "model")} if given else {}
    folder = tmp_path / ("model" if given else "data/base")
    job = job_of("llama2_70b_lora", LORA, tmp_path, environment)
    monkeypatch.setattr(run, "run_once", lambda *arguments: pytest.fail("a run was started"))
    with pytest.raises(WeightsError) as caught:
        run.run_all(job, series.SeriesRequest(1, 0))
    assert caught.value.exit_code == 16
    assert str(folder) in caught.value.what and "MODEL" in caught.value.do and caught.value.why
    assert "TIMING" not in capfd.readouterr().out
    assert not job.log_dir.exists()
    folder.mkdir()
    (folder / "model-00001-of-00001.safetensors").touch()
    ensure_data(job)


def test_a_config_whose_weights_are_missing_starts_nothing(tmp_path):
    job = job_of("open_llama", OPEN, tmp_path, weights=str(tmp_path / "model"))
    with pytest.raises(WeightsError) as caught:
        ensure_data(job)
    assert str(tmp_path / "model") in caught.value.what and "weights" in caught.value.do
    ensure_data(job_of("open_llama", OPEN, tmp_path, weights="", lora_rank=0))
