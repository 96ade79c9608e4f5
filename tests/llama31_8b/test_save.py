"""Test `--save`: transformers loads model/, and a failed save leaves the run valid."""

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ranks import PYTHONPATH, call_on_ranks
from synthetic_run import records
from tiny import TINY, run, run_config, write_data

from common.atomic_write import SUFFIX
from common.errors import ConfigError, StorageError, WeightsError
from common.model import saved_model as save
from common.model.checkpoint_reader import open_checkpoint
from common.model.families import shape_of
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.shapes import RopeScaling
from common.training import pretraining
from llama31_8b import train
from llama31_8b.rules import MINIATURE

pytestmark = pytest.mark.quick

# The miniature's model, with Llama 3.1's rotation and a vocabulary that neither two nor three ranks
# divide; the first evaluation ends the run.
SHAPE = replace(MINIATURE.shape, vocab_size=2047, rope_scaling=RopeScaling(original_context=16))
RULES = replace(TINY, shape=SHAPE, target_loss=100.0)
TOKENS = torch.arange(32).view(2, 16) * 61 % SHAPE.vocab_size


def saved_run(processes, folder):
    """Run with --save and return the final model's logits and the files in the run directory."""
    made = []
    if not (folder / "data").exists():
        write_data(folder / "data", RULES)

    def assemble(*arguments):
        made.append(ASSEMBLE(*arguments))
        return made[0]

    run_dir = folder / f"run_{processes.rank}"
    with mock.patch.object(pretraining, "assemble_full", assemble):
        facts = run(
            run_dir,
            folder / "data",
            RULES,
            save=True,
            gpus_per_node=processes.world_size,
            global_batch_size=12,
            micro_batch_size=2,
        )
    assert not facts.error, facts.message
    with torch.no_grad():
        logits = made[0].model(TOKENS)
    return {
        "logits": logits,
        "files": sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.safetensors")),
    }


ASSEMBLE = pretraining.assemble_full


def their_logits(folder: Path) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32, "that of the parameters on a CPU"
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2)), 3]
)
def test_transformers_computes_the_logits_of_the_trained_model(processes, tmp_path, ranks):
    if ranks == 1:
        found = [saved_run(processes, tmp_path)]
    else:
        write_data(tmp_path / "data", RULES)
        found = call_on_ranks(ranks, "test_save:saved_run", tmp_path)
    assert [rank["files"] for rank in found] == [
        ["model/model-00001-of-00001.safetensors"],
        [],
        [],
    ][:ranks], "rank 0 alone writes"
    torch.testing.assert_close(
        their_logits(tmp_path / "run_0/model"), found[0]["logits"], rtol=1e-4, atol=1e-4
    )
    assert shape_of(str(tmp_path / "run_0/model")) == SHAPE


def missed(processes, folder):
    """Run with --save and miss the target.

    Returns the kind of the error, the end of the log, and whether the model exists when this rank
    ends.
    """
    changes = {
        "gpus_per_node": processes.world_size,
        "global_batch_size": 12,
        "micro_batch_size": 2,
        "max_samples": 36,
    }

    def takes_a_second(*arguments, **options):
        time.sleep(1.0)
        return WRITE(*arguments, **options)

    with mock.patch.object(save, "write_checkpoint", takes_a_second):
        found = run(
            folder / f"run_{processes.rank}",
            folder / "data",
            replace(RULES, target_loss=0.1),
            save=True,
            **changes,
        )
    return found.error, found.status, (folder / "run_0" / save.MODEL_FOLDER).exists()


WRITE = save.write_checkpoint


def test_a_run_that_missed_its_target_is_saved_and_no_rank_ends_before(tmp_path):
    write_data(tmp_path / "data", RULES)
    assert call_on_ranks(2, "test_save:missed", tmp_path) == [
        ("target_missed", "aborted", True),
        ("target_missed", "", True),
    ]
    assert (tmp_path / "run_0/events.jsonl").read_text().count('"verdict"') == 1


def test_a_run_without_save_writes_no_weights(processes, tmp_path):
    assert not run(tmp_path / "run", write_data(tmp_path / "data", RULES), RULES).error
    assert (
        not list(tmp_path.rglob("*.safetensors"))
        and not (tmp_path / "run" / save.MODEL_FOLDER).exists()
    )


def random_model(dtype=torch.bfloat16):
    model = fused_llama(SHAPE, 16).to(dtype)
    init_weights(model, SHAPE.num_layers, 5, 0.5, copy_weight)
    return model


def test_many_files_hold_each_tensor_once_and_none_is_larger_than_its_share_and_a_tensor(
    tmp_path, monkeypatch
):
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(save, "FILE_BYTES", 500_000)
    model, beats = random_model(), []
    folder = save.save_model(model, tmp_path, lambda: beats.append(1))
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    loaded = {
        name: (file.name, tensor)
        for file in files
        for name, tensor in safetensors.load_file(file).items()
    }
    assert (
        index["weight_map"] == {name: file for name, (file, _) in loaded.items()}
        and len(loaded) == len(beats) == 4 * 9 + 3
    )
    assert index["metadata"]["total_size"] == 2 * SHAPE.num_parameters
    assert (
        len(files) > 3
        and max(file.stat().st_size for file in files) <= 500_000 + 2 * 2047 * 128 + 8192
    )
    query = loaded["model.layers.3.self_attn.q_proj.weight"][1]
    assert query.dtype == torch.bfloat16 and torch.equal(query, model.blocks[3].qkv.weight[:128])
    assert torch.equal(
        loaded["model.layers.3.mlp.up_proj.weight"][1], model.blocks[3].gate_up.weight[384:]
    )
    assert {file.name for file in open_checkpoint(folder, SHAPE).files} == {
        file.name for file in files
    }


# --- what goes wrong


KILLED = """
import os, signal, sys
from pathlib import Path
import test_save
from common.model import saved_model as save
place, point = Path(sys.argv[1]), sys.argv[2]
end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
beats = iter(range(1000))
save.FILE_BYTES = 500_000
if point == "rename":
    rename = Path.rename
    Path.rename = lambda path, target: end() if path.is_dir() else rename(path, target)
if point == "index":
    import json
    dumps = json.dumps
    def dumps_or_end(content, **options):
        return end() if "weight_map" in content else dumps(content, **options)
    json.dumps = dumps_or_end
def beat():
    if point == str(next(beats)):
        end()
save.save_model(test_save.random_model(), place, beat)
"""


@pytest.mark.parametrize(
    "point",
    [
        *(pytest.param(file, marks=pytest.mark.slow) for file in ("0", "20", "38", "index")),
        "rename",
    ],
)
def test_what_a_kill_leaves_does_not_look_like_a_checkpoint(tmp_path, point):
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", KILLED, str(tmp_path), point]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = tmp_path.iterdir()
    assert left.suffix == SUFFIX
    index = left / "model.safetensors.index.json"
    assert index.exists() == (point == "rename"), "the index comes last"
    if point not in ("index", "rename"):  # only then all weights are there
        with pytest.raises(WeightsError):
            open_checkpoint(left, SHAPE)
    save.require_absent(tmp_path)
    save.save_model(random_model(), tmp_path, lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == [save.MODEL_FOLDER]
    with pytest.raises(ConfigError, match="model exists"):
        save.require_absent(tmp_path)


def test_a_full_disk_is_a_storage_error_and_the_partial_model_is_removed(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = random_model()
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))  # python ignores SIGXFSZ
    try:
        with pytest.raises(StorageError, match="File too large") as failure:
            save.save_model(model, tmp_path, lambda: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        failure.value.exit_code == 17
        and "free space" in failure.value.why
        and not list(tmp_path.iterdir())
    )


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    model = random_model()
    with torch.no_grad():
        model.embedding.weight[3, 1] = math.inf
    with pytest.raises(WeightsError, match="embed_tokens"):
        save.save_model(model, tmp_path, lambda: None)
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_be_saved_was_a_success(processes, tmp_path):
    data = write_data(tmp_path / "data", RULES)
    with mock.patch.object(
        save, "write_checkpoint", side_effect=OSError(errno.ENOSPC, "No space left on device")
    ):
        facts = run(tmp_path / "run", data, RULES, save=True)
    assert facts.error == "storage" and facts.status == "success"
    assert records(tmp_path / "run/result.txt")[-1]["key"] == "run_stop"
    assert (
        json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[-1])["status"]
        == "success"
    )


def test_an_existing_folder_is_refused_before_anything_starts(tmp_path):
    (tmp_path / save.MODEL_FOLDER).mkdir()
    asked = SimpleNamespace(
        config=run_config(), run_dir=tmp_path, data_dir=tmp_path, seed=1, save=True
    )
    with pytest.raises(ConfigError, match="model exists"):
        train.run_rank(asked, mock.Mock())
