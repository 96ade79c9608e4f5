"""GEMM tuning: its files, the proof of a solution, what a run does with a file, and the verb; on a GPU, the whole way with TunableOp.

On a CPU a fake TunableOp has the tables and torch does the arithmetic.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny import run_config

from common.errors import ConfigError, PreflightError, StorageError
from common.gemm_tuning import cli as door
from common.gemm_tuning import file as gemm_file
from common.gemm_tuning import tune as gemm_tuning
from common.gemm_tuning.file import Tuned, read_recorded, read_tuned, require_same_versions, write_tuned
from common.gemm_tuning.tune import fault, operands, parse, product, require_loaded, tune

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
VERSIONS = {"PT_VERSION": "2.11.0", "HIPBLASLT_VERSION": "100000-abc", "GCN_ARCH_NAME": "gfx942:sramecc+:xnack-"}
MM = ("GemmTunableOp_BFloat16_TN", "tn_96_128_64_ld_64_64_96")
WGRAD = ("GemmTunableOp_BFloat16_NT", "nt_64_96_128_ld_64_96_64")
NARROW = ("GemmTunableOp_float_NN", "nn_5_7_3_ld_9_4_5")  # parts of larger matrices
BATCHED = ("GemmStridedBatchedTunableOp_BFloat16_TN", "tn_32_32_16_B_4_ld_16_16_32")
BIAS = ("GemmAndBiasTunableOp_BFloat16_TN", "tn_48_16_32_ld_32_32_48")
FP8 = ("ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN", "tn_48_32_64_ld_64_64_48_rw_0_bias_None")
FP8_GRAD = ("ScaledGemmTunableOp_Float8_e5m2_Float8_e4m3fn_BFloat16_TN", "tn_48_32_64_ld_64_64_48_rw_0_bias_None")
FP8_ROWS = ("ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN", "tn_48_32_64_ld_64_64_48_rw_1_bias_BFloat16")
ALL = (MM, WGRAD, NARROW, BATCHED, BIAS, FP8, FP8_GRAD, FP8_ROWS)


# --- files ------------------------------------------------------------------------------------------------------------


def tuned_file(path, *keys, **validators):
    write_tuned(path, Tuned(validators or VERSIONS, {key: ("Gemm_Hipblaslt_17", "0.01") for key in keys or (MM,)}))
    return path


def test_a_tuned_file_is_read_as_it_was_written(tmp_path):
    tuned = Tuned(VERSIONS, {MM: ("Gemm_Hipblaslt_17", "0.0188931"), WGRAD: ("Default", "")})
    write_tuned(tmp_path / "new" / "a.csv", tuned)
    assert read_tuned(tmp_path / "new" / "a.csv") == tuned
    lines = (tmp_path / "new" / "a.csv").read_text().splitlines()
    assert lines[:3] == sorted(lines[:3]) and lines[3:] == sorted(lines[3:]) and lines[4] == f"{','.join(MM)},Gemm_Hipblaslt_17,0.0188931"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.csv"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("", "has no versions"),
        ("Validator,PT_VERSION,2.11.0\n", "has no solutions"),
        (f"{','.join(MM)},Default\n", "has no versions"),
        (f"Validator,PT_VERSION,2.11.0\n{','.join(MM)}\n", "line 2 is no line"),
        ("Validator,PT_VERSION,2.11.0\n# comment\n", "line 2 is no line"),
        ("\x00\xff", "has no|cannot read|no line"),
    ],
)
def test_what_is_no_tuned_file_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words):
        read_tuned(tmp_path / "a.csv")


def test_recorded_files_of_all_ranks_are_one_list(tmp_path):
    (tmp_path / "untuned_0_gpu0.csv").write_text(f"{','.join(MM)}\n{','.join(FP8)},BLAS_PARAMS: x\n")
    (tmp_path / "untuned_1_gpu3.csv").write_text(f"{','.join(MM)}\n\n{','.join(WGRAD)}\nnoise\n")
    assert read_recorded(tmp_path) == sorted([MM, WGRAD, FP8])
    with pytest.raises(ConfigError, match="no recorded GEMMs"):
        read_recorded(tmp_path / "absent")


def test_every_version_that_differs_is_named():
    tuned = Tuned(VERSIONS, {MM: ("Default", "")})
    require_same_versions(tuned, dict(VERSIONS), Path("a.csv"))
    here = VERSIONS | {"HIPBLASLT_VERSION": "100100-def", "ROCBLAS_VERSION": "5"}
    with pytest.raises(ConfigError) as caught:
        require_same_versions(tuned, here, Path("a.csv"))
    assert (
        "HIPBLASLT_VERSION was 100000-abc and is 100100-def" in caught.value.what and "ROCBLAS_VERSION was not there" in caught.value.what
    )
    assert "PT_VERSION" not in caught.value.what and caught.value.exit_code == 2 and "tune again" in caught.value.do
    with pytest.raises(ConfigError, match=r"GCN_ARCH_NAME was gfx942.* and is not there"):
        require_same_versions(tuned, {"PT_VERSION": "2.11.0", "HIPBLASLT_VERSION": "100000-abc"}, Path("a.csv"))


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tuned_file(tmp_path / "a.csv")
    old = path.read_text()

    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gemm_file.Path, "write_text", full)
    with pytest.raises(StorageError, match="No space left"):
        write_tuned(path, Tuned(VERSIONS, {WGRAD: ("Default", "")}))
    assert path.read_text() == old and list(tmp_path.iterdir()) == [path]


# --- a recorded GEMM, made again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ALL, ids=lambda key: key[0])
def test_a_recorded_gemm_is_made_again(key):
    """Sizes and strides are those that BLAS was called with: a and b are its second and first operand, stored by rows."""
    gemm = parse(key)
    a, b = operands(gemm, CPU)
    n, m, k = (int(word) for word in key[1].split("_")[1:4])
    ldb, lda = (int(word) for word in key[1].split("_ld_")[1].split("_")[:2])
    batch = [4] if key is BATCHED else []
    assert [*a.shape] == [*batch, m, k] and [*b.shape] == [*batch, k, n]
    layout = key[0][-2:]
    assert b.stride(-1 if layout[0] == "N" else -2) == 1 and b.stride(-2 if layout[0] == "N" else -1) == ldb
    assert a.stride(-1 if layout[1] == "N" else -2) == 1 and a.stride(-2 if layout[1] == "N" else -1) == lda
    scale_a, scale_b = gemm_tuning.scales(gemm, (2.0, 0.5), CPU)
    found = product(gemm, a, b, scale_a, scale_b)
    assert [*found.shape] == [*batch, m, n] and found.dtype == gemm.out and torch.isfinite(found.float()).all()


def test_types_are_not_mistaken_for_others():
    fnuz = parse(("ScaledGemmTunableOp_Float8_e5m2fnuz_Float8_e4m3fnuz_Float8_e4m3fnuz_TN", FP8[1]))
    assert (fnuz.a, fnuz.b, fnuz.out) == (torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e4m3fnuz)
    assert parse(FP8_ROWS).rowwise and parse(FP8_ROWS).bias == "BFloat16" and not parse(FP8).rowwise and parse(FP8).bias == ""
    for unknown in (
        ("GemmTunableOp_double_TN", MM[1]),
        ("GemmOtherTunableOp_BFloat16_TN", MM[1]),
        (MM[0], "tn_1_2"),
        ("GemmTunableOp", ""),
    ):
        assert parse(unknown) is None


# --- proof and tuning, with a fake TunableOp --------------------------------------------------------------------------


class Fake:
    """torch.cuda.tunable with a table; `bad` keys get a solution whose product is spoilt while TunableOp is on."""

    def __init__(self, bad=(), never=(), elsewhere=()):
        self.table, self.on, self.tuning, self.recording, self.filename = {}, False, True, False, ""
        self.bad, self.never, self.elsewhere, self.settings = bad, never, elsewhere, {}

    def enable(self, value=True):
        self.on = value

    def is_enabled(self):
        return self.on

    def tuning_enable(self, value=True):
        self.tuning = value

    def tuning_is_enabled(self):
        return self.tuning

    def record_untuned_enable(self, value=True):
        self.recording = value

    def record_untuned_is_enabled(self):
        return self.recording

    def get_validators(self):
        return tuple(VERSIONS.items())

    def get_results(self):
        return tuple((*key, *value) for key, value in self.table.items())

    def get_filename(self):
        return self.filename

    def set_filename(self, name):
        self.filename = name

    def set_rotating_buffer_size(self, mb):
        self.settings["rotating"] = mb

    def set_max_tuning_duration(self, ms):
        self.settings["duration"] = ms

    def tune_gemm_in_file(self, path):
        assert self.on and self.tuning and not self.recording
        for line in Path(path).read_text().splitlines():
            key = tuple(line.split(",")[:2])
            if key not in self.never:
                self.table[key] = ("Gemm_Hipblaslt_320617" if key in self.bad else "Gemm_Hipblaslt_17", 0.0123456789)


@pytest.fixture
def fake(monkeypatch):
    def install(spoil=None, **options):
        made = Fake(**options)
        monkeypatch.setattr(gemm_tuning, "tunable", made)
        honest = product

        def through_the_table(gemm, a, b, scale_a, scale_b):
            found = honest(gemm, a, b, scale_a, scale_b)
            if made.on:
                key = next((key for key in ALL if parse(key) == gemm), None)
                if key in made.elsewhere:
                    made.table["another", f"key_{len(made.table)}"] = ("Default", 0.1)
                if key in made.bad:
                    return spoil(found, scale_a, scale_b)
            return found

        monkeypatch.setattr(gemm_tuning, "product", through_the_table)
        return made

    return install


def nan_at_tiny_scales(found, scale_a, scale_b):
    """As hipBLASLt's solution 320617 did: right at common scales."""
    return torch.full_like(found, float("nan")) if float(scale_a.min()) < 1e-10 else found


@pytest.mark.parametrize("key", ALL, ids=lambda key: key[0])
def test_a_right_solution_passes_at_every_scale(fake, key):
    fake().enable()
    assert fault(key, CPU) == ""


@pytest.mark.parametrize("key", [FP8, FP8_GRAD, FP8_ROWS], ids=lambda key: key[0])
def test_a_solution_that_breaks_at_extreme_scales_is_found(fake, key):
    fake(bad=(key,), spoil=nan_at_tiny_scales)
    assert "relative error nan" in fault(key, CPU) and "1e-15 and 1" in fault(key, CPU)


@pytest.mark.parametrize("spoil", [lambda y, *_: y * 1.05, lambda y, *_: y.roll(1, 0), lambda y, *_: y * 0, lambda y, *_: y * float("inf")])
def test_a_wrong_solution_is_found(fake, spoil):
    fake(bad=(MM,), spoil=spoil)
    assert "relative error" in fault(MM, CPU)


def test_what_cannot_be_proven_is_a_fault(fake):
    fake(elsewhere=(MM,))
    assert "could not be made again" in fault(MM, CPU)
    assert "do not know this operation" in fault(("GemmTunableOp_double_TN", MM[1]), CPU)


def test_tune_writes_only_what_was_proven(fake, tmp_path):
    made = fake(bad=(FP8_GRAD,), spoil=nan_at_tiny_scales, never=(BIAS,))
    out = tmp_path / "MI355X.csv"
    lines = list(tune([MM, FP8_GRAD, BIAS, FP8], out, CPU))
    tuned = read_tuned(out)
    assert tuned.validators == VERSIONS and tuned.solutions == dict.fromkeys((MM, FP8), ("Gemm_Hipblaslt_17", "0.0123457"))
    assert (
        "left to the default" in lines[1]
        and "does not tune it offline" in lines[2]
        and lines[-1].startswith("2 of 4 GEMMs tuned and proven")
    )
    assert made.settings["rotating"] == 512 and not made.on


def test_tuning_adds_to_a_file_of_the_same_versions_and_drops_what_became_wrong(fake, tmp_path):
    out = tuned_file(tmp_path / "a.csv", MM, FP8, WGRAD)
    fake(bad=(FP8,), spoil=nan_at_tiny_scales)
    list(tune([MM, FP8], out, CPU))
    assert read_tuned(out).solutions == {MM: ("Gemm_Hipblaslt_17", "0.0123457"), WGRAD: ("Gemm_Hipblaslt_17", "0.01")}


def test_a_file_of_other_versions_is_not_added_to(fake, tmp_path):
    fake()
    out = tuned_file(tmp_path / "a.csv", PT_VERSION="1.0")
    old = out.read_text()
    with pytest.raises(ConfigError, match=r"PT_VERSION was 1\.0 and is 2\.11\.0"):
        list(tune([MM], out, CPU))
    assert out.read_text() == old


def test_nothing_proven_writes_nothing(fake, tmp_path):
    fake(never=(MM,))
    with pytest.raises(PreflightError, match="no GEMM could be tuned"):
        list(tune([MM], tmp_path / "a.csv", CPU))
    assert not (tmp_path / "a.csv").exists()


def test_check_lists_and_compares(fake, tmp_path):
    fake()
    assert list(gemm_tuning.check(tuned_file(tmp_path / "a.csv")))[-1] == "the versions are those of this machine"
    with pytest.raises(ConfigError, match="other versions"):
        list(gemm_tuning.check(tuned_file(tmp_path / "b.csv", PT_VERSION="1.0")))


# --- at the start of a run --------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 1)


@pytest.fixture
def rank(fake, tmp_path, monkeypatch):
    """A rank on GPU 1 whose launcher has done its part for a file of two GEMMs."""
    tuned_file(tmp_path / "configs.csv", MM, FP8)
    config = run_config(gpus_per_node=2, gemm_tuning_file="configs.csv")
    for name, value in door.environment(config, tmp_path, tmp_path).items():
        monkeypatch.setenv(name, value)
    made = fake()
    made.on, made.tuning = True, False
    made.table = dict.fromkeys((MM, FP8), ("Gemm_Hipblaslt_17", 0.01))
    return config, made


def test_a_run_with_its_file_in_use_starts(rank):
    require_loaded(rank[0], GPU)


def test_a_run_without_a_file_asks_nothing(monkeypatch):
    monkeypatch.setattr(gemm_tuning, "tunable", None)
    require_loaded(run_config(), CPU)


def test_other_versions_stop_a_run_and_are_named(rank, tmp_path):
    tuned_file(tmp_path / door.COPY.format(1), MM, FP8, **VERSIONS | {"HIPBLASLT_VERSION": "9"})
    with pytest.raises(ConfigError, match=r"configs.csv was tuned with other versions: HIPBLASLT_VERSION was 9 and is 100000-abc"):
        require_loaded(rank[0], GPU)


def test_solutions_that_torch_did_not_take_stop_a_run(rank):
    del rank[1].table[FP8]
    with pytest.raises(ConfigError, match="has not taken 1 of 2 solutions"):
        require_loaded(rank[0], GPU)


@pytest.mark.parametrize("change", [{"on": False}, {"tuning": True}, {"recording": True}])
def test_switches_of_somebody_else_stop_a_run(rank, change):
    for name, value in change.items():
        setattr(rank[1], name, value)
    with pytest.raises(ConfigError, match="not switched on"):
        require_loaded(rank[0], GPU)


def test_a_file_on_a_cpu_or_without_the_launcher_stops_a_run(rank, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        require_loaded(rank[0], CPU)
    assert "for GPUs" in caught.value.why
    monkeypatch.delenv(gemm_tuning.FILE_VARIABLE)
    with pytest.raises(ConfigError, match="not switched on"):
        require_loaded(rank[0], GPU)


# --- the launcher and the verb ----------------------------------------------------------------------------------------


def test_the_launcher_gives_every_rank_a_copy(tmp_path):
    tuned_file(tmp_path / "configs.csv")
    (tmp_path / "run").mkdir()
    variables = door.environment(
        run_config(gpus_per_node=3, global_batch_size=12, gemm_tuning_file="configs.csv"), tmp_path, tmp_path / "run"
    )
    copies = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in copies] == [f"gemm_tuning_{rank}.csv" for rank in range(3)]
    assert {path.read_bytes() for path in copies} == {(tmp_path / "configs.csv").read_bytes()}
    switches = {"PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_TUNING": "0", "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "0"}
    assert variables == switches | {"PYTORCH_TUNABLEOP_FILENAME": str(tmp_path / "run" / "gemm_tuning_%d.csv")}
    assert door.environment(run_config(), tmp_path, tmp_path / "run") == {}


def test_a_missing_file_stops_before_anything_starts(tmp_path):
    arguments = ["--device", "cpu", "--set", "gemm_tuning_file=configs/gemm/absent.csv"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOGDIR": str(tmp_path), "DATADIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "launch", "llama31_8b", *arguments], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 2 and "absent.csv: cannot read" in done.stderr and list(tmp_path.iterdir()) == []


def options(*words):
    return door._parse(list(words))


@pytest.fixture
def commands(monkeypatch):
    """Stands in for the processes that the verb starts; a bench leaves a record."""
    made = []

    def run(command, env, **_):
        made.append((command, env))
        if name := env.get("PYTORCH_TUNABLEOP_UNTUNED_FILENAME"):
            Path(name.replace(".csv", "0.csv")).write_text(f"{','.join(MM)}\n")
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(door.subprocess, "run", run)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_TUNING", "1")
    return made


def settings(command):
    return dict(word.split("=", 1) for flag, word in pairwise(command) if flag == "--set")


def test_record_benches_training_and_evaluation_sizes(commands, tmp_path, capsys):
    config = run_config(gpus_per_node=2, micro_batch_size=2, eval_micro_batch_size=4, gemm_tuning_file="x.csv")
    assert door.record("llama31_8b", config, options("record", "--out", str(tmp_path / "new"), "--set", "compile=false")) == 0
    assert [settings(command)["micro_batch_size"] for command, _ in commands] == ["2", "4"]
    for command, env in commands:
        assert (
            settings(command)["gemm_tuning_file"] == '""'
            and settings(command)["compile"] == "false"
            and command[3:5] == ["llama31_8b", "bench"]
        )
        assert int(settings(command)["global_batch_size"]) == 2 * 2 * int(settings(command)["micro_batch_size"])
        assert (env["PYTORCH_TUNABLEOP_TUNING"], env["PYTORCH_TUNABLEOP_RECORD_UNTUNED"]) == ("0", "1")
    assert "1 GEMMs recorded; next: ./run_and_time.sh llama31_8b gemms tune" in capsys.readouterr().out
    with pytest.raises(StorageError, match="cannot make"):
        door.record("llama31_8b", config, options("record", "--out", str(tmp_path / "new")))


def test_equal_sizes_are_recorded_once(commands, tmp_path):
    door.record("llama31_8b", run_config(), options("record", "--out", str(tmp_path / "new")))
    assert len(commands) == 1


def test_tune_runs_in_the_configs_environment_without_switches_of_others(commands, tmp_path):
    (tmp_path / "untuned0.csv").write_text(f"{','.join(MM)}\n")
    config = replace(run_config(), gpu="MI300X", env={"HIPBLASLT_WORKSPACE_SIZE": "131072"})
    assert door.tune("llama31_8b", config, options("tune", str(tmp_path))) == 0
    ((command, env),) = commands
    assert command[-3:] == ["tune", str(tmp_path), str(ROOT / "configs/gemm/MI300X.csv")]
    assert env["HIPBLASLT_WORKSPACE_SIZE"] == "131072" and not any(name.startswith(door.OURS) for name in env)
    with pytest.raises(ConfigError, match="which directory"):
        door.tune("llama31_8b", config, options("tune"))
    with pytest.raises(ConfigError, match="no recorded GEMMs"):
        door.tune("llama31_8b", config, options("tune", str(tmp_path / "absent")))


def test_check_takes_the_configs_file_or_another(commands, tmp_path):
    with pytest.raises(ConfigError, match="which file"):
        door.check("llama31_8b", run_config(), options("check"))
    path = tuned_file(tmp_path / "a.csv")
    for config, words in ((run_config(), ("check", str(path))), (run_config(gemm_tuning_file=str(path)), ("check",))):
        assert door.check("llama31_8b", config, options(*words)) == 0 and commands[-1][0][-2:] == ["check", str(path)]


# --- on a GPU, with torch's TunableOp ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_record_tune_check_and_use_on_a_gpu(tmp_path):
    """The whole way with the miniature: record, tune, check; a bench that uses the file, and one that refuses it after an upgrade."""

    def launch(*words, good=True):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "LOGDIR": str(tmp_path)}
        where = ["--config", str(ROOT / "configs/llama31_8b/CPU_1x1.toml"), "--device", "cuda"]
        command = [sys.executable, "-m", "launch", "llama31_8b", *words, *where]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
        assert (done.returncode == 0) == good, done.stdout + done.stderr
        return done

    launch("gemms", "record", "--out", str(tmp_path / "recorded"))
    keys = read_recorded(tmp_path / "recorded")
    out = tmp_path / "gemms.csv"
    lines = launch("gemms", "tune", str(tmp_path / "recorded"), "--out", str(out)).stdout.splitlines()
    tuned = read_tuned(out)
    print(json.dumps({"recorded": len(keys), "tuned": len(tuned.solutions), "last": lines[-1]}))
    assert set(tuned.solutions) <= set(keys) and len(tuned.solutions) >= len(keys) // 2, lines
    assert "the versions are those" in launch("gemms", "check", str(out)).stdout
    before = out.read_bytes()
    use = ("bench", "--steps", "1", "--warmup", "1", "--set", f"gemm_tuning_file={out}")
    assert launch(*use).stdout.startswith("BENCH")
    assert out.read_bytes() == before
    shutil.copy(out, tmp_path / "old.csv")
    out.write_text(out.read_text().replace("Validator,PT_VERSION,", "Validator,PT_VERSION,1."))
    refused = launch(*use, good=False)
    assert refused.returncode == 2 and "PT_VERSION was 1." in refused.stderr
    assert launch("gemms", "check", str(out), good=False).returncode == 2
