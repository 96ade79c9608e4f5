"""Test GEMM tuning: its files, the check of a solution, its commands, and TunableOp on a GPU.

On a CPU, a fake TunableOp keeps the table and torch does the arithmetic.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from child_path import python_path
from probes import make_visible
from tiny import run_config

from common.errors import ConfigError, PreflightError, StorageError
from common.machine.hardware import Probe
from common.paths import ROOT
from throughput.gemm_tuning import cli, tunable_op_files
from throughput.gemm_tuning import tune as tuner
from throughput.gemm_tuning.tunable_op_files import (
    PREFIX,
    configured,
    per_gpu,
    read_recorded,
    read_tuned,
    write_tuned,
)
from throughput.gemm_tuning.tune import fault, product, reproduce, tune

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
VERSIONS = {
    "PT_VERSION": "2.11.0",
    "HIPBLASLT_VERSION": "100000-abc",
    "GCN_ARCH_NAME": "gfx942:sramecc+:xnack-",
}
MM = ("GemmTunableOp_BFloat16_TN", "tn_96_128_64_ld_64_64_96")
WGRAD = ("GemmTunableOp_BFloat16_NT", "nt_64_96_128_ld_64_96_64")
NARROW = ("GemmTunableOp_float_NN", "nn_5_7_3_ld_9_4_5")  # slices of larger matrices
FP8 = (
    "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN",
    "tn_48_32_64_ld_64_64_48_rw_0_bias_None",
)
FP8_GRAD = (
    "ScaledGemmTunableOp_Float8_e5m2_Float8_e4m3fn_BFloat16_TN",
    "tn_48_32_64_ld_64_64_48_rw_0_bias_None",
)
PROVABLE = (MM, WGRAD, NARROW, FP8, FP8_GRAD)
BATCHED = ("GemmStridedBatchedTunableOp_BFloat16_TN", "tn_32_32_16_B_4_ld_16_16_32")
FP8_ROWS = (
    "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN",
    "tn_48_32_64_ld_64_64_48_rw_1_bias_None",
)


# --- files ----------------------------------------------------------------------------------------


def tuned_file(path, *keys, **validators):
    solutions = dict.fromkeys(keys or (MM,), "Gemm_Hipblaslt_17,0.01")
    write_tuned(path, validators or VERSIONS, solutions)
    return path


def recorded_in(folder, *keys):
    """The directory of recorded GEMMs, as two ranks leave it."""
    folder.mkdir()
    for rank in range(2):
        (folder / f"untuned_gpu{rank}.csv").write_text(
            "".join(f"{','.join(key)}\n" for key in keys)
        )
    return folder


def test_a_tuned_file_is_read_as_it_was_written(tmp_path):
    solutions = {MM: "Gemm_Hipblaslt_17,0.0188931", WGRAD: "Default"}
    write_tuned(tmp_path / "a.csv", VERSIONS, solutions)
    assert read_tuned(tmp_path / "a.csv", VERSIONS) == solutions
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert (
        lines[:3] == sorted(lines[:3])
        and lines[3:] == sorted(lines[3:])
        and lines[4] == f"{','.join(MM)},Gemm_Hipblaslt_17,0.0188931"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("", "has no library versions"),
        ("Validator,PT_VERSION,2.11.0\n", "has no solutions"),
        (f"{','.join(MM)},Default\n", "has no library versions"),
        (f"Validator,PT_VERSION,2.11.0\n{','.join(MM)}\n", "line 2 is invalid"),
        ("Validator,PT_VERSION,2.11.0\n# comment\n", "line 2 is invalid"),
        ("\x00\xff", "has no|cannot read|is invalid"),
    ],
)
def test_what_is_no_tuned_file_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words):
        read_tuned(tmp_path / "a.csv", {"PT_VERSION": "2.11.0"})


def test_recorded_files_of_all_ranks_are_one_list(tmp_path):
    (tmp_path / "untuned_0_gpu0.csv").write_text(
        f"{','.join(MM)}\n{','.join(FP8)},BLAS_PARAMS: x\n"
    )
    (tmp_path / "untuned_1_gpu3.csv").write_text(f"{','.join(MM)}\n\n{','.join(WGRAD)}\nnoise\n")
    assert read_recorded(tmp_path) == sorted([MM, WGRAD, FP8])
    with pytest.raises(ConfigError, match="no recorded GEMMs"):
        read_recorded(tmp_path / "absent")


def test_every_version_that_differs_is_named(tmp_path):
    path = tuned_file(tmp_path / "a.csv")
    here = VERSIONS | {"HIPBLASLT_VERSION": "100100-def", "ROCBLAS_VERSION": "5"}
    with pytest.raises(ConfigError) as caught:
        read_tuned(path, here)
    assert (
        "HIPBLASLT_VERSION" in caught.value.what
        and "ROCBLAS_VERSION was absent" in caught.value.what
    )
    assert (
        "PT_VERSION" not in caught.value.what
        and caught.value.exit_code == 2
        and "tune again" in caught.value.do
    )
    with pytest.raises(ConfigError, match="GCN_ARCH_NAME"):
        read_tuned(path, {"PT_VERSION": "2.11.0", "HIPBLASLT_VERSION": "100000-abc"})


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tuned_file(tmp_path / "a.csv")
    old = path.read_text()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tunable_op_files.Path, "rename", full)
    with pytest.raises(StorageError) as caught:
        write_tuned(path, VERSIONS, {WGRAD: "Default"})
    assert "No space left" in caught.value.why
    assert path.read_text() == old and list(tmp_path.iterdir()) == [path]


def test_the_file_names_are_those_that_torch_reads():
    assert [str(path) for path in per_gpu("configs/gemm/MI300X.csv", 2)] == [
        "configs/gemm/MI300X0.csv",
        "configs/gemm/MI300X1.csv",
    ]
    assert [str(path) for path in per_gpu("a_%d.x/b.csv", 2)] == ["a_0.x/b.csv", "a_1.x/b.csv"]


def test_a_config_names_tuned_files_in_its_env():
    env = {PREFIX + "ENABLED": "1", PREFIX + "TUNING": "0", PREFIX + "FILENAME": "a.csv"}
    assert configured({}, 2) == [] and configured(env, 2) == [Path("a0.csv"), Path("a1.csv")]
    for name, value in (("TUNING", "1"), ("TUNING", ""), ("FILENAME", "")):
        with pytest.raises(ConfigError, match="TunableOp"):
            configured(env | {PREFIX + name: value}, 2)


# --- the proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", PROVABLE, ids=lambda key: key[0])
def test_a_recorded_gemm_is_reproduced(key):
    """Sizes and strides are those of the BLAS call, whose operands a and b are swapped."""
    a, b, out = reproduce(key, CPU)
    n, m, k = (int(word) for word in key[1].split("_")[1:4])
    ldb, lda = (int(word) for word in key[1].split("_ld_")[1].split("_")[:2])
    assert [*a.shape] == [m, k] and [*b.shape] == [k, n]
    layout = key[0][-2:]
    assert (
        b.stride(-1 if layout[0] == "N" else -2) == 1
        and b.stride(-2 if layout[0] == "N" else -1) == ldb
    )
    assert (
        a.stride(-1 if layout[1] == "N" else -2) == 1
        and a.stride(-2 if layout[1] == "N" else -1) == lda
    )
    found = product(a, b, out, torch.tensor(2.0), torch.tensor(0.5))
    assert [*found.shape] == [m, n] and found.dtype == out and torch.isfinite(found.float()).all()


def test_types_are_not_mistaken_for_others():
    a, b, out = reproduce(
        ("ScaledGemmTunableOp_Float8_e5m2fnuz_Float8_e4m3fnuz_Float8_e4m3fnuz_TN", FP8[1]), CPU
    )
    assert (a.dtype, b.dtype, out) == (
        torch.float8_e5m2fnuz,
        torch.float8_e4m3fnuz,
        torch.float8_e4m3fnuz,
    )
    unknown = [
        ("GemmTunableOp_double_TN", MM[1]),
        ("GemmOtherTunableOp_BFloat16_TN", MM[1]),
        (MM[0], "tn_1_2"),
        ("GemmTunableOp", ""),
    ]
    for key in (*unknown, BATCHED, FP8_ROWS):
        assert reproduce(key, CPU) is None


class FakeTunableOp:
    """torch.cuda.tunable with a table.

    Tunes all keys but `never`, and looks `elsewhere` up under another key.
    """

    def __init__(self, never=(), elsewhere=False):
        self.table, self.on, self.tuning, self.recording = {}, False, False, True
        self.never, self.elsewhere, self.settings = never, elsewhere, {}

    def enable(self, value=True):
        self.on = value

    def tuning_enable(self, value=True):
        self.tuning = value

    def record_untuned_enable(self, value=True):
        self.recording = value

    def get_validators(self):
        return tuple(VERSIONS.items())

    def get_results(self):
        return tuple((*key, *value) for key, value in self.table.items())

    def set_filename(self, name):
        self.settings["filename"] = name

    def set_rotating_buffer_size(self, mb):
        self.settings["rotating"] = mb

    def set_max_tuning_duration(self, ms):
        self.settings["duration"] = ms

    def tune_gemm_in_file(self, path):
        assert self.on and self.tuning and not self.recording and self.settings["filename"]
        for line in Path(path).read_text().splitlines():
            key = tuple(line.split(","))
            if key not in self.never:
                self.table[key] = ("Gemm_Hipblaslt_17", 0.0123456789)


@pytest.fixture
def fake(monkeypatch):
    """Install a fake TunableOp that applies `spoil` to products of `bad` shapes and dtypes."""

    def install(bad=None, spoil=None, **options):
        made = FakeTunableOp(**options)
        monkeypatch.setattr(tuner, "tunable", made)
        bad_operands = reproduce(bad, CPU)[:2] if bad else ()

        def spoiled(a, b, out, scale_a, scale_b):
            found = product(a, b, out, scale_a, scale_b)
            if made.on and made.elsewhere:
                made.table["another", f"key_{len(made.table)}"] = ("Default", 0.1)
            if (
                made.on
                and bad
                and [(x.dtype, x.shape) for x in (a, b)]
                == [(x.dtype, x.shape) for x in bad_operands]
            ):
                return spoil(found, scale_a, scale_b)
            return found

        monkeypatch.setattr(tuner, "product", spoiled)
        return made

    return install


def nan_at_tiny_scales(found, scale_a, scale_b):
    """Fail as hipBLASLt's solution 320617, which is correct at common scales."""
    return torch.full_like(found, float("nan")) if float(scale_a) < 1e-10 else found


@pytest.mark.parametrize("key", PROVABLE, ids=lambda key: key[0])
def test_a_correct_solution_passes_at_every_scale(fake, key):
    fake().enable()
    assert fault(key, CPU) == ""


@pytest.mark.parametrize("key", [FP8, FP8_GRAD], ids=lambda key: key[0])
def test_a_solution_that_breaks_at_extreme_scales_is_found(fake, key):
    fake(bad=key, spoil=nan_at_tiny_scales)
    assert "relative error nan" in fault(key, CPU) and "1e-15 and 1" in fault(key, CPU)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y, *_: y * 1.05,
        lambda y, *_: y.roll(1, 0),
        lambda y, *_: y * 0,
        lambda y, *_: y * float("inf"),
    ],
)
def test_a_wrong_solution_is_found(fake, spoil):
    fake(bad=MM, spoil=spoil)
    assert "relative error" in fault(MM, CPU)


def test_what_cannot_be_proven_is_a_fault(fake):
    fake(elsewhere=True)
    assert "could not reproduce" in fault(MM, CPU)
    assert "does not cover" in fault(BATCHED, CPU)


# --- tuning ---------------------------------------------------------------------------------------


def test_tune_writes_only_what_was_proven_once_per_gpu(fake, tmp_path):
    made = fake(bad=FP8_GRAD, spoil=nan_at_tiny_scales, never=(WGRAD,))
    folder = recorded_in(tmp_path / "new", MM, FP8_GRAD, WGRAD, FP8)
    lines = list(tune(folder, tmp_path / "MI355X.csv", 2, CPU))
    for path in (tmp_path / "MI355X0.csv", tmp_path / "MI355X1.csv"):
        tuned = read_tuned(path, VERSIONS)
        assert tuned == dict.fromkeys((MM, FP8), "Gemm_Hipblaslt_17,0.0123457")
    outcomes = dict(line.split(": ", 1) for line in lines[1:-1])
    assert "default" in outcomes[",".join(FP8_GRAD)] and "offline" in outcomes[",".join(WGRAD)]
    assert len(outcomes) == 4 and lines[-1].startswith("2 of 4 GEMMs")
    assert made.settings["rotating"] == 512 and not made.on


def test_tuning_extends_a_file_of_the_same_versions_and_drops_what_became_wrong(fake, tmp_path):
    out = tuned_file(tmp_path / "a0.csv", MM, FP8, WGRAD)
    fake(bad=FP8, spoil=nan_at_tiny_scales)
    list(tune(recorded_in(tmp_path / "new", MM, FP8), tmp_path / "a.csv", 1, CPU))
    assert read_tuned(out, VERSIONS) == {
        MM: "Gemm_Hipblaslt_17,0.0123457",
        WGRAD: "Gemm_Hipblaslt_17,0.01",
    }


def test_a_file_of_other_versions_is_not_extended(fake, tmp_path):
    fake()
    out = tuned_file(tmp_path / "a0.csv", PT_VERSION="1.0")
    old = out.read_text()
    with pytest.raises(ConfigError, match="PT_VERSION"):
        list(tune(recorded_in(tmp_path / "new", MM), tmp_path / "a.csv", 1, CPU))
    assert out.read_text() == old


def test_nothing_proven_writes_nothing(fake, tmp_path):
    fake(never=(MM,))
    with pytest.raises(PreflightError, match="no GEMM"):
        list(tune(recorded_in(tmp_path / "new", MM), tmp_path / "a.csv", 1, CPU))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


# --- the commands ---------------------------------------------------------------------------------


def options(**changed):
    return argparse.Namespace(
        **({"path": None, "out": None, "config": None, "set": [], "device": None} | changed)
    )


@pytest.fixture
def commands(monkeypatch):
    """Stands in for the benches that `record` starts; each leaves a record."""
    made = []

    def run(command, env, **_):
        made.append((command, env))
        Path(env[PREFIX + "UNTUNED_FILENAME"].replace(".csv", "0.csv")).write_text(
            f"{','.join(MM)}\n"
        )
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(cli.subprocess, "run", run)
    monkeypatch.setenv(PREFIX + "TUNING", "1")
    return made


def settings(command):
    return dict(
        word.removeprefix("--set=").split("=", 1) for word in command if word.startswith("--set=")
    )


def test_record_benches_training_and_evaluation_sizes(commands, tmp_path, capsys):
    config = run_config(gpus_per_node=2, micro_batch_size=2, eval_micro_batch_size=4)
    chosen = options(path=tmp_path / "new", set=["max_samples=64"])
    assert cli.record("llama31_8b", config, chosen) == 0
    ((command, env),) = commands
    assert settings(command) == {"max_samples": "64", "global_batch_size": "8"}
    assert command[2:4] == ["launch.bench", "llama31_8b"]
    assert command[command.index("--eval-sequences") + 1] == "8", (
        "a micro-batch for each of two ranks"
    )
    assert (env[PREFIX + "TUNING"], env[PREFIX + "RECORD_UNTUNED"]) == ("0", "1")
    assert "1 GEMMs recorded" in capsys.readouterr().out
    with pytest.raises(StorageError, match="cannot create"):
        cli.record("llama31_8b", config, chosen)


@pytest.fixture
def gpu(fake, monkeypatch):
    """`tune` and `check` on a CPU that passes for a GPU; the environment is put back."""
    before = dict(os.environ)
    monkeypatch.setattr(
        tuner, "torch", argparse.Namespace(**vars(torch) | {"device": lambda name: CPU})
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield fake()
    os.environ.clear()
    os.environ.update(before)


def test_tune_runs_in_the_configs_environment_without_its_tunable_op_variables(
    gpu, tmp_path, capsys
):
    (tmp_path / "untuned0.csv").write_text(f"{','.join(MM)}\n")
    env = {"HIPBLASLT_WORKSPACE_SIZE": "131072", PREFIX + "ENABLED": "1"}
    config = replace(run_config(gpus_per_node=2), gpu="MI300X", env=env)
    assert cli.tune("llama31_8b", config, options(path=tmp_path, out=tmp_path / "out.csv")) == 0
    assert (
        sorted(read_tuned(tmp_path / "out1.csv", VERSIONS)) == [MM]
        and "1 of 1 GEMMs" in capsys.readouterr().out
    )
    assert os.environ["HIPBLASLT_WORKSPACE_SIZE"] == "131072" and not any(
        name.startswith(PREFIX) for name in os.environ
    )
    with pytest.raises(ConfigError, match="no recorded GEMMs"):
        cli.tune("llama31_8b", config, options(path=tmp_path / "absent"))


def test_a_tuned_file_that_cannot_be_written_is_refused_before_tuning(gpu, tmp_path, monkeypatch):
    (tmp_path / "untuned0.csv").write_text(f"{','.join(MM)}\n")
    monkeypatch.setattr(tuner, "tune", None)
    out = tmp_path / "untuned0.csv" / "out.csv"  # in a file instead of a directory
    with pytest.raises(StorageError):
        cli.tune("llama31_8b", run_config(), options(path=tmp_path, out=out))


@pytest.mark.parametrize("step", ["record", "check"])
def test_out_is_refused_where_no_tuned_file_is_written(tmp_path, capsys, step):
    path = tmp_path / "new"
    assert cli.main(["llama31_8b", step, str(path), "--out", str(tmp_path / "x.csv")]) == 2
    assert "--out" in capsys.readouterr().err.splitlines()[0] and not path.exists()


def test_check_takes_the_configs_file_or_another_and_compares_versions(gpu, tmp_path, capsys):
    with pytest.raises(ConfigError, match="no file"):
        cli.check("llama31_8b", run_config(), options())
    tuned_file(tmp_path / "a0.csv")
    name = str(tmp_path / "a.csv")
    config = replace(
        run_config(),
        env={PREFIX + "ENABLED": "1", PREFIX + "TUNING": "0", PREFIX + "FILENAME": name},
    )
    for chosen in (options(), options(path=Path(name))):
        assert (
            cli.check("llama31_8b", config, chosen) == 0
            and "this machine" in capsys.readouterr().out
        )
    with pytest.raises(
        ConfigError, match=r"a1\.csv: cannot read"
    ):  # GPU 1 would run with default solutions
        cli.check("llama31_8b", replace(config, gpus_per_node=2), options())
    tuned_file(tmp_path / "a0.csv", PT_VERSION="1.0")
    with pytest.raises(ConfigError, match="other versions"):
        cli.check("llama31_8b", config, options())


def test_the_command_without_a_gpu_is_refused(tmp_path):
    tuned_file(tmp_path / "a0.csv")
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama31_8b",
        "gemms",
        "check",
        str(tmp_path / "a.csv"),
        "--device",
        "cpu",
    ]
    environment = os.environ | {
        "PYTHONPATH": python_path(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 18 and "no GPU" in done.stderr


# --- on a GPU, with torch's TunableOp -------------------------------------------------------------

SOLUTIONS_THAT_TORCH_READ = """
import torch, torch.cuda.tunable as tunable
a = torch.ones(8, 8, device="cuda")
a @ a
print(sorted(",".join(row[:2]) for row in tunable.get_results()))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_record_tune_check_and_use_on_a_gpu(tmp_path):
    """Record, tune, check, bench with the file, and check after an upgrade, on the miniature."""
    config, out = tmp_path / "tuned.toml", tmp_path / "gemms.csv"
    text = (ROOT / "configs/llama31_8b/CPU_1x1.toml").read_text()
    env = {PREFIX + "ENABLED": "1", PREFIX + "TUNING": "0", PREFIX + "FILENAME": str(out)}
    assert text.count("\n[") == text.count("\n[env]\n") == 1, (
        "what is added below must come into this table, the last"
    )
    config.write_text(
        text.rstrip() + "\n" + "".join(f'{name} = "{value}"\n' for name, value in env.items())
    )

    def launch(*words, good=True):
        environment = os.environ | {"PYTHONPATH": python_path(ROOT), "LOGDIR": str(tmp_path)}
        command = [
            sys.executable,
            "-m",
            "launch",
            "llama31_8b",
            *words,
            "--config",
            str(config),
            "--device",
            "cuda",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
        )
        assert (done.returncode == 0) == good, done.stdout + done.stderr
        return done

    launch("gemms", "record", str(tmp_path / "recorded"))
    keys = read_recorded(tmp_path / "recorded")
    lines = launch(
        "gemms", "tune", str(tmp_path / "recorded"), "--out", str(out)
    ).stdout.splitlines()
    (path,) = per_gpu(out, 1)
    tuned = read_tuned(path, tuner.versions())
    print(json.dumps({"recorded": len(keys), "tuned": len(tuned), "last": lines[-1]}))
    assert set(tuned) <= set(keys) and len(tuned) >= len(keys) // 2, lines
    assert "this machine" in launch("gemms", "check").stdout
    before = path.read_bytes()
    assert launch("bench", "--steps", "1", "--warmup", "1").stdout.startswith("BENCH")
    assert path.read_bytes() == before
    read = subprocess.run(
        [sys.executable, "-c", SOLUTIONS_THAT_TORCH_READ],
        capture_output=True,
        text=True,
        env=os.environ | env,
        check=True,
    )
    assert all(",".join(key) in read.stdout for key in tuned), (
        "torch reads the file under the name that per_gpu gives"
    )
    path.write_text(path.read_text().replace("Validator,PT_VERSION,", "Validator,PT_VERSION,1."))
    refused = launch("gemms", "check", good=False)
    assert refused.returncode == 2 and "PT_VERSION was 1." in refused.stderr


def test_record_and_tune_say_that_they_need_a_directory(capsys):
    for step in ("record", "tune"):
        assert cli.main(["llama31_8b", step]) == 2
        assert f"gemms {step} DIR" in capsys.readouterr().err


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]])
def test_record_starts_no_bench_without_a_gpu(commands, tmp_path, monkeypatch, capsys, device):
    make_visible(monkeypatch, Probe("none"))
    arguments = ["llama31_8b", "record", str(tmp_path / "new"), *device]
    assert cli.main(arguments) == PreflightError.exit_code
    assert "needs a GPU" in capsys.readouterr().err
    assert not commands and not (tmp_path / "new").exists()
