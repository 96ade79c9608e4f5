"""Which config is chosen for which request on which machine, and what is refused."""

import argparse
import itertools
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from probes import H200X4, MI300X, NOTHING, make_visible

from common import config as configs
from common.benchmarks import config_class
from common.errors import ConfigError, OutOfMemory, PreflightError, RunError
from common.gpu_kinds import GIB, KINDS
from common.machine.hardware import Device, Probe
from common.paths import ROOT
from launch import bench, job_command, profile, run_command
from launch.plan import command as plan
from launch.preflight import __main__ as preflight
from launch.selection.check import DERIVED, FILE, FITTED, MEASURED_ANYWAY, MINIATURE, Named
from launch.selection.choose import choose, fit, nearest_config, override, read
from launch.selection.machine import NO_GPUS, Machine
from launch.selection.request import Request
from launch.tune import command as tune
from submission.own_log import CONFIG_NAME
from throughput.gemm_tuning import cli as gemms

pytestmark = pytest.mark.quick

PRETRAINING, LORA, OPEN = "llama31_8b", "llama2_70b_lora", "open_llama"

# --- the table: every request on every machine ----------------------------------------------------

MACHINES = ("MI300X", "MI355X", "H100", "H200", "B200", "CPU")
COUNTS = (1, 2, 4, 6, 8)
WITH_FILES = {"H200": (1, 2, 4, 8)}  # numbers of GPUs that have a file in configs/; elsewhere 8
BATCH = {PRETRAINING: 16, LORA: 8, OPEN: 64}  # global batches of the configs
# Numbers of GPUs that the benchmark does not fit into, and that its config of 8 MI300X does not.
TOO_SMALL = {(PRETRAINING, "H100"): (1, 2), (LORA, "H100"): (1, 2)}
TOO_SMALL_FOR_ANY = {**TOO_SMALL, (PRETRAINING, "H200"): (1,)}
EXAMPLE = "open_llama/examples/pretrain_1b.toml"


@dataclass(frozen=True)
class Expected:
    """The source and log name of a choice, its GPUs, and the error that ends `run`."""

    source: str = ""
    log_name: str = ""
    gpu: str = ""
    count: int = 1
    error: type[RunError] | None = None
    is_objection: bool = False  # the error is an objection, so there is a choice


def shipped(benchmark, kind, count, modified="") -> Expected:
    """Return what configs/ has for `count` GPUs of `kind`: a file, or one to derive from."""
    name = f"{kind}_1x{count}"
    if kind == "CPU":
        return Expected(FILE, f"CPU_1x1{modified}.toml", "CPU")
    if BATCH[benchmark] % count:
        return Expected(error=ConfigError)
    if count in WITH_FILES.get(kind, (8,)):
        return Expected(FILE, f"{name}{modified}.toml", kind, count)
    if count in TOO_SMALL.get((benchmark, kind), ()):
        return Expected(error=OutOfMemory)
    return Expected(DERIVED, f"{name}+derived{modified}.toml", kind, count)


def as_is(benchmark, kind, count):
    return shipped(benchmark, kind, count)


def two_gpus(benchmark, kind, count):
    if kind == "CPU":
        return Expected(error=PreflightError)
    expected = shipped(benchmark, kind, 2)
    if count == 1 and expected.error is None:
        return Expected(**asdict(expected) | {"error": ConfigError, "is_objection": True})
    return expected


def eight_h200(benchmark, kind, count):
    error = None
    if kind == "CPU":
        error = PreflightError
    elif count < 8:
        error = ConfigError
    name = "H200_1x8.toml" if kind == "H200" else "H200_1x8+forced.toml"
    return Expected(FILE, name, "H200", 8, error, is_objection=error is not None)


def fitted(benchmark, kind, count):
    name = "pretrain_1b" if benchmark == OPEN else "any"
    if kind == "CPU":
        return Expected(FITTED, f"{name}+derived.toml", "CPU", 1 if benchmark == OPEN else 8)
    if BATCH[benchmark] % count:
        return Expected(error=ConfigError)
    if count in TOO_SMALL_FOR_ANY.get((benchmark, kind), ()):
        return Expected(error=OutOfMemory)
    return Expected(FITTED, f"{name}+derived.toml", kind, count)


def toy(benchmark, kind, count):
    if kind == "CPU":
        return Expected(FILE, "CPU_1x1.toml", "CPU")
    return Expected(MINIATURE, "CPU_1x1+derived.toml", kind)


def smallest_batch(benchmark, kind, count):
    return shipped(benchmark, kind, count, "+modified")


@dataclass(frozen=True)
class Row:
    """A request of the table, and what is expected of it on each machine."""

    words: tuple[str, ...]
    expected: object
    environment: tuple[str, ...] = ()  # variables: NAME=value


ROWS = {
    "as is": Row((), as_is),
    "DGXNGPU": Row((), two_gpus, ("DGXNGPU=2",)),
    "DGXSYSTEM": Row((), as_is, ("DGXSYSTEM={kind}_1x{count}",)),
    "--config": Row(("--config", "{root}/configs/{benchmark}/H200_1x8.toml"), eight_h200),
    "any": Row(("--config", "{any}"), fitted),
    "--miniature": Row(("--miniature",), toy),
    "--set": Row(("--set", "micro_batch_size=1"), smallest_batch),
}
# Requests in which nothing but the machine selects the config.
AS_MACHINE = (ROWS["as is"], ROWS["DGXNGPU"], ROWS["--set"])
WITHOUT = {  # options that a command does not have
    "plan": ("--miniature",),
    "preflight": ("--set",),
    "gemms": ("--miniature",),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Return benchmark -> a config of gpu = "any", for 8 GPUs of 192 GiB."""
    paths = {OPEN: str(ROOT / EXAMPLE)}
    for benchmark in (PRETRAINING, LORA):
        text = (ROOT / f"configs/{benchmark}/MI300X_1x8.toml").read_text()
        path = tmp_path_factory.mktemp(benchmark) / "any.toml"
        path.write_text(re.sub(r'^gpu = "MI300X"', 'gpu = "any"', text, flags=re.MULTILINE))
        paths[benchmark] = str(path)
    return paths


def machine_of(kind: str, count: int) -> Machine:
    return NO_GPUS if kind == "CPU" else Machine.imagined(KINDS[kind], count)


def asked(row: Row, benchmark: str, kind: str, count: int, files: dict) -> tuple[list[str], dict]:
    """Return the words and the variables of a request."""
    count = 1 if kind == "CPU" else count
    values = dict(benchmark=benchmark, kind=kind, count=count, root=ROOT, any=files[benchmark])
    words = [word.format(**values) for word in row.words]
    return words, dict(text.format(**values).split("=") for text in row.environment)


def expected_of(name: str, benchmark: str, kind: str, count: int) -> Expected:
    if benchmark == OPEN and name == "--config":
        return Expected(error=ConfigError)  # a file of llama31_8b, which does not exist
    if benchmark == OPEN and name != "any":
        return Expected(error=ConfigError)  # open_llama needs a config
    return ROWS[name].expected(benchmark, kind, count)


def require_expected(choice, expected: Expected) -> None:
    config = choice.config
    found = (choice.source, choice.log_name, config.gpu, config.gpus_per_node)
    assert found == (expected.source, expected.log_name, expected.gpu, expected.count)
    assert bool(choice.derived) == (choice.source != FILE)


@pytest.mark.parametrize("benchmark", [PRETRAINING, LORA, OPEN])
@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("name", ROWS)
def test_every_request_on_every_machine(name, kind, benchmark, files):
    for count in COUNTS:
        words, environment = asked(ROWS[name], benchmark, kind, count, files)
        options = run_command.parser(benchmark).parse_args(words)
        request = Request.of(benchmark, options, environment)
        expected = expected_of(name, benchmark, kind, count)
        if expected.error and not expected.is_objection:
            with pytest.raises(expected.error):
                choose(request, machine_of(kind, count))
            continue
        choice = choose(request, machine_of(kind, count))
        require_expected(choice, expected)
        errors = [type(objection.error) for objection in choice.objections]
        assert errors == ([expected.error] if expected.error else [])
        assert choice.config.micro_batch_size == 1 or name != "--set"


# Machines on which each command is asked itself.
STARTS_A_JOB = {"run": run_command, "bench": bench, "profile": profile, "tune": tune}
COMMANDS = (*STARTS_A_JOB, "plan", "preflight", "gemms")
SOME = (("MI300X", 2), ("H100", 1), ("H200", 6), ("B200", 8), ("CPU", 1))
VARIABLES = ("DGXSYSTEM", "DGXNGPU", "GPU_KIND", "DATADIR", "MODEL", "NEXP", "SEED")


@pytest.fixture
def found(monkeypatch, tmp_path) -> list:
    """The configs that commands got, in order, None for none. Nothing is measured or started."""
    configs_found: list = []
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    monkeypatch.setattr("common.known_issues.installed", lambda driver: {})
    monkeypatch.setattr(run_command, "refusal_reasons", lambda root, environment: [])
    for module in (run_command, bench, tune):  # `profile` prints by `bench`
        monkeypatch.setattr(
            module, "print_header", lambda job, places: configs_found.append(job.config)
        )
    monkeypatch.setattr(
        gemms, "check", lambda benchmark, config, options: configs_found.append(config) or 0
    )
    monkeypatch.setattr(
        preflight, "host_rows", lambda name, run, variables: configs_found.append(run.config) or []
    )
    monkeypatch.setattr(preflight, "run_ranks", lambda *arguments: [])
    monkeypatch.setattr(tune, "print_candidates", lambda job: None)
    return configs_found


def ask(command: str, benchmark: str, words: list[str], capsys) -> list[dict]:
    """Ask a command for its config. Return the configs that `plan` prints."""
    if command == "plan":
        plan.main(benchmark, [*words, "--json"])
        return [each["config"] for each in json.loads(capsys.readouterr().out).values()]
    if command == "preflight":
        options = preflight.parser(benchmark).parse_args(words)
        options.benchmark = benchmark
        preflight.check(options, os.environ)
    elif command == "gemms":
        gemms.work(benchmark, "check", *words)
    else:
        module = STARTS_A_JOB[command]
        module.start(benchmark, module.parser(benchmark).parse_args([*words, "--print"]))
    return []


@pytest.mark.parametrize("benchmark", [PRETRAINING, LORA, OPEN])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_gets_the_same_config(command, benchmark, files, found, monkeypatch, capsys):
    for (kind, count), (name, row) in itertools.product(SOME, ROWS.items()):
        words, environment = asked(row, benchmark, kind, count, files)
        if {*words} & {*WITHOUT.get(command, ())}:
            continue
        expected = expected_of(name, benchmark, kind, count)
        machine = machine_of(kind, count)
        make_visible(monkeypatch, machine.probe)
        with monkeypatch.context() as variables:
            for variable, text in environment.items():
                variables.setenv(variable, text)
            error = None
            planned = []
            found.clear()
            try:
                planned = ask(command, benchmark, words, capsys)
            except RunError as raised:
                error = type(raised)
        if command == "plan" and kind == "CPU" and benchmark != OPEN and row in AS_MACHINE:
            if name == "DGXNGPU":
                assert error == ConfigError, "of an unknown kind"
            else:
                assert error is None and len(planned) > 10, "without a GPU, all configs"
            continue
        is_ignored = expected.is_objection and command in ("plan", "preflight")
        if command == "preflight" and expected.error and not expected.is_objection:
            # It checks the machine only, unless the user named a config.
            assert error == expected.error or found in ([], [None])
        else:
            assert error == (None if is_ignored else expected.error), (kind, count, name)
        if expected.error is None or is_ignored:
            options = run_command.parser(benchmark).parse_args(words)
            config = choose(Request.of(benchmark, options, environment), machine).config
            assert (planned or [asdict(each) for each in found]) == [asdict(config)]


@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("lora", [False, True])
def test_throughput_llama_starts_from_the_same_file(kind, lora):
    benchmark = LORA if lora else PRETRAINING
    for count in COUNTS:
        gpu = None if kind == "CPU" else KINDS[kind]
        config, source = nearest_config(benchmark, gpu, count, "fp8")
        expected = shipped(benchmark, kind, count)
        has_file = count == 1 if gpu is None else count in WITH_FILES.get(kind, (8,))
        assert (config.gpu, config.gpus_per_node) == (kind, count)
        assert (source == "") == has_file
        if has_file:
            request = Request(benchmark, overrides={"linear": "fp8"})
            assert config == choose(request, machine_of(kind, count)).config
            assert expected.source == FILE
        else:
            assert config.gradient_accumulation_steps == 1 and ".toml" in source


# --- what is refused ------------------------------------------------------------------------------

H200_FILE = str(ROOT / "configs/llama31_8b/H200_1x4.toml")
MI300X_FILE = str(ROOT / "configs/llama31_8b/MI300X_1x8.toml")
MINIATURE_FILE = str(ROOT / "configs/llama31_8b/CPU_1x1.toml")
LORA_FILE = str(ROOT / "configs/llama2_70b_lora/H200_1x4.toml")


def chosen(gpus, environment=None, benchmark=PRETRAINING, ignored=(), **options):
    """Return the choice of a command that raises the first objection not about `ignored`."""
    given = argparse.Namespace(**{"config": None, "set": [], "device": None} | options)
    environment = environment or {}
    machine = Machine(gpus, environment.get("GPU_KIND", ""))
    choice = choose(Request.of(benchmark, given, environment), machine)
    choice.require(*ignored)
    return choice


# GPUs, variables, options, error, words in its first line, words in its advice.
REFUSED = [
    (H200X4, {"DGXSYSTEM": "MI300X_1x8"}, {}, ConfigError, "MI300X.* H200", "unset DGXSYSTEM"),
    (H200X4, {}, {"set": ["gpu=H100"]}, ConfigError, "H100.* H200", "leave out --set gpu"),
    (H200X4, {"DGXSYSTEM": "H200_1x8"}, {}, ConfigError, "8 GPUs", "fewer GPUs"),
    (
        H200X4,
        {"DGXSYSTEM": "H200"},
        {},
        ConfigError,
        "no config 'H200'",
        "mean H200_1x8",
    ),
    (H200X4, {"DGXNGPU": "3"}, {}, ConfigError, "3 GPUs .*16", "DGXNGPU"),
    (H200X4, {"DGXNGPU": "two"}, {}, ConfigError, "DGXNGPU=two", "unset"),
    (H200X4, {"DGXNGPU": "²"}, {}, ConfigError, "DGXNGPU=.²", "unset"),
    (H200X4, {"DGXNGPU": "2", "DGXSYSTEM": "H200_1x4"}, {}, ConfigError, "DGXNGPU=2", "unset"),
    (H200X4, {}, {"config": "H200_1x4"}, ConfigError, "no such config", "under configs/"),
    (H200X4, {}, {"config": LORA_FILE}, ConfigError, "of llama2_70b_lora", "llama2_70b_lora ..."),
    (H200X4, {}, {"set": ["precision"]}, ConfigError, "KEY=VALUE", "--set"),
    (H200X4, {}, {"set": ["precison=fp32"]}, ConfigError, "unknown key", ""),
    (H200X4, {}, {"set": ["max_samples=16"]}, ConfigError, "max_samples", "12,288"),
    (H200X4, {}, {"set": ["eval_micro_batch_size=1025"]}, ConfigError, "eval_micro", "1,024"),
    (NOTHING, {}, {"device": "cuda"}, PreflightError, "no GPU", "nvidia-smi"),
    (NOTHING, {}, {"config": MI300X_FILE}, PreflightError, "8 x MI300X", "plan --config"),
    (NOTHING, {"GPU_KIND": "MI999X"}, {}, ConfigError, "GPU_KIND=MI999X is unknown", "unset"),
    (NOTHING, {}, {"set": ["env.FOO=1"]}, ConfigError, "unknown key env.FOO", "FOO=1"),
    (
        *(NOTHING, {}, {"miniature": True, "set": ["miniature=false"]}),
        *(ConfigError, "--set miniature=false", "leave out"),
    ),
    (
        *(NOTHING, {}, {"config": MI300X_FILE, "set": ["gpu=MI399X"]}),
        *(ConfigError, "gpu = 'MI399X' is unknown", "choose one"),
    ),
]


def test_a_forced_kind_is_named_in_the_log_and_on_the_first_screen(monkeypatch):
    make_visible(monkeypatch, MI300X)
    choices = {}
    for forced in ("MI325X", ""):
        request = Request(PRETRAINING)
        choices[forced] = choose(request, Machine.of({}, gpu_kind=forced))
    choice = choices["MI325X"]
    assert choice.log_name == "MI325X_1x8+forced.toml" and choice.config.gpu == "MI325X"
    (note,) = [note for note in choice.notes if "--gpu-kind MI325X" in note]
    assert "AMD Instinct MI300X" in note and "not for submission" in note
    assert choices[""].log_name == "MI300X_1x8.toml"


@pytest.mark.parametrize(("gpus", "environment", "options", "error", "what", "do"), REFUSED)
def test_what_is_refused(gpus, environment, options, error, what, do):
    with pytest.raises(error, match=what) as caught:
        chosen(gpus, environment, **options)
    assert do in caught.value.do


def test_a_variable_that_hides_all_gpus_is_no_request_for_the_miniature():
    hidden = Probe("none", hidden="HIP_VISIBLE_DEVICES= hides all 8 GPUs")
    variables = {"HIP_VISIBLE_DEVICES": ""}
    for options in ({}, {"device": "cuda"}):
        with pytest.raises(PreflightError, match="HIP_VISIBLE_DEVICES= hides all 8") as refused:
            chosen(hidden, variables, **options)
        assert "--device cpu" in refused.value.do
    for options in ({"device": "cpu"}, {"miniature": True}, {"config": MINIATURE_FILE}):
        assert chosen(hidden, variables, **options).device == "cpu"
    assert chosen(hidden).device == "cpu", "plan has no environment"


def test_only_a_miniature_for_gpus_is_advised_to_run_on_a_cpu():
    for file, is_advised in ((MI300X_FILE, False), (MINIATURE_FILE, True)):
        with pytest.raises(PreflightError, match="no GPU is visible") as refused:
            chosen(NOTHING, config=file, set=["gpu=H200"])
        assert ("--device cpu" in refused.value.do) == is_advised


def test_a_file_outside_configs_is_read_as_a_config_of_the_benchmark_that_is_asked_for(tmp_path):
    """A TOML does not say its benchmark, so the error names only the key."""
    (tmp_path / "mine.toml").write_text(Path(LORA_FILE).read_text())
    with pytest.raises(ConfigError, match="unknown key") as caught:
        chosen(H200X4, config=str(tmp_path / "mine.toml"))
    assert LORA not in caught.value.what + caught.value.why + caught.value.do
    assert chosen(H200X4, benchmark=LORA, config=str(tmp_path / "mine.toml")).config.gpu == "H200"


def test_a_file_in_configs_belongs_to_the_benchmark_of_its_folder(monkeypatch, tmp_path):
    """Also if its keys are those of the benchmark that is asked for."""
    monkeypatch.setattr("launch.selection.choose.ROOT", tmp_path)
    file = tmp_path / "configs" / "llama32_1b" / "H200_1x4.toml"
    file.parent.mkdir(parents=True)
    file.write_text(Path(H200_FILE).read_text())
    with pytest.raises(ConfigError, match="is a config of llama32_1b") as caught:
        chosen(H200X4, config=str(file))
    assert "llama32_1b ..." in caught.value.do


def test_a_measurement_ignores_what_concerns_a_whole_run():
    short = {"set": ["max_samples=16"]}
    assert chosen(H200X4, ignored=MEASURED_ANYWAY, **short).config.max_samples == 16
    with pytest.raises(ConfigError, match="8 GPUs"):
        chosen(H200X4, {"DGXSYSTEM": "H200_1x8"}, ignored=MEASURED_ANYWAY)


REAL_RUNS = [
    {"DATADIR": "/data/c4"},
    {"MODEL": "/data/llama2-70b"},
    {"NEXP": "10"},
    {"DGXSYSTEM": "H200_1x4"},
    {"DGXNGPU": "8"},
    {"MLPERF_SUBMISSION_ORG": "Us"},
    {"DATADIR": "/data/c4", "NEXP": "10", "MLPERF_SUBMISSION_PLATFORM": "MI300X"},
]


@pytest.mark.parametrize("environment", REAL_RUNS, ids=lambda each: "+".join(each))
def test_hidden_gpus_make_a_real_run_a_miniature_on_request_only(environment):
    with pytest.raises(PreflightError, match="no GPU is visible") as caught:
        chosen(NOTHING, environment)
    assert all(name in caught.value.what for name in environment)
    assert "--miniature" in caught.value.do
    if "DGXNGPU" in environment:
        with pytest.raises(ConfigError, match="DGXNGPU"):
            chosen(NOTHING, environment, miniature=True)
        return
    choice = chosen(NOTHING, environment, miniature=True)
    assert choice.config.miniature and choice.device == "cpu"


# --- what is chosen, and what its log and the first screen say ------------------------------------

STEP = {"MASTER_ADDR": "a", "SLURM_STEP_NUM_NODES": "2"}  # as run.sub starts two nodes


@pytest.mark.parametrize(
    ("gpus", "environment", "options", "log_name", "device"),
    [
        (H200X4, {}, {}, "H200_1x4.toml", "cuda"),
        (H200X4, {}, {"device": "cpu"}, "CPU_1x1.toml", "cpu"),
        (H200X4, {"DGXSYSTEM": "CPU_1x1"}, {}, "CPU_1x1.toml", "cpu"),
        (H200X4, {}, {"miniature": True, "device": "cpu"}, "CPU_1x1.toml", "cpu"),
        (H200X4, {}, {"config": MINIATURE_FILE, "device": "cuda"}, "CPU_1x1+forced.toml", "cuda"),
        (NOTHING, {"NEXP": "1"}, {}, "CPU_1x1.toml", "cpu"),
        (NOTHING, {"NEXP": ""}, {}, "CPU_1x1.toml", "cpu"),
        (NOTHING, {"DATADIR": ""}, {}, "CPU_1x1.toml", "cpu"),
        (NOTHING, {}, {"config": MI300X_FILE, "device": "cpu"}, "MI300X_1x8+forced.toml", "cpu"),
        (MI300X, {"DGXSYSTEM": "MI300X_1x2.toml"}, {}, "MI300X_1x2+derived.toml", "cuda"),
        (MI300X, {"DGXNGPU": "2"}, {}, "MI300X_1x2+derived.toml", "cuda"),
        (MI300X, {"DGXSYSTEM": "MI300X_4x8"}, {}, "MI300X_4x8+derived.toml", "cuda"),
        (MI300X, {"DGXSYSTEM": "CPU_2x1"}, {}, "CPU_2x1+derived.toml", "cpu"),
        (MI300X, STEP, {}, "MI300X_2x8+derived.toml", "cuda"),
        (MI300X, STEP | {"DGXSYSTEM": "MI300X_1x8"}, {}, "MI300X_1x8.toml", "cuda"),
        (MI300X, STEP | {"MASTER_ADDR": ""}, {}, "MI300X_1x8.toml", "cuda"),
        (NOTHING, STEP, {}, "CPU_2x1+derived.toml", "cpu"),
        # The RCP checker would take the words of a key in config_filename for events.
        (H200X4, {}, {"set": ["global_batch_size=32"]}, "H200_1x4+modified.toml", "cuda"),
        (
            *(H200X4, {}, {"config": MI300X_FILE, "set": ["gpus_per_node=4"]}),
            *("MI300X_1x8+forced+modified.toml", "cuda"),
        ),
    ],
)
def test_what_the_log_names(gpus, environment, options, log_name, device):
    choice = chosen(gpus, environment, **options)
    assert (choice.log_name, choice.device) == (log_name, device)
    assert CONFIG_NAME.fullmatch(choice.log_name)
    assert choice.config.kernels == "reference" or choice.config.gpu != "CPU"
    changes = sum(part in log_name for part in ("+derived", "+forced", "+modified"))
    assert len([note for note in choice.notes if "not for submission" in note]) == changes


def test_a_shipped_file_has_no_note_and_says_why_it_was_chosen():
    choice = chosen(H200X4)
    assert choice.notes == () and "4 x H200" in choice.reason and "NVIDIA H200" in choice.gpus
    assert choice.config == configs.load(choice.path, config_class(PRETRAINING))


def test_a_key_given_twice_is_refused_with_both_values():
    with pytest.raises(ConfigError, match="nodes is given twice: '2' and '1'"):
        chosen(H200X4, set=["nodes=2", "micro_batch_size=1", "nodes=1"])


def test_a_batch_of_the_command_line_lets_other_counts_share_it():
    batch = ["global_batch_size=18", "opt_base_learning_rate=5e-4"]
    choice = chosen(MI300X, {"DGXNGPU": "3"}, set=batch)
    config = choice.config
    assert (config.gpus_per_node, config.micro_batch_size) == (3, 2)
    assert (config.gradient_accumulation_steps, config.opt_base_learning_rate) == (3, 5e-4)
    assert "global_batch_size" not in choice.derived, "that is not what was derived"


def test_a_number_of_gpus_on_the_command_line_is_kept():
    options = {"config": str(ROOT / EXAMPLE), "set": ["gpus_per_node=4"]}
    choice = chosen(MI300X, benchmark=OPEN, **options)
    assert choice.config.gpus_per_node == 4 and "4 x MI300X" in choice.derived


@pytest.mark.parametrize(("benchmark", "path"), [(PRETRAINING, H200_FILE), (OPEN, EXAMPLE)])
def test_a_continued_run_keeps_the_number_of_gpus_on_the_command_line(benchmark, path):
    file = configs.read(ROOT / path, config_class(benchmark))
    request = Request(benchmark, overrides={"gpus_per_node": "4"}, continues=SimpleNamespace())
    # A checkpoint has the GPU of its run.
    file = replace(file, table=file.table | {"gpu": "H200"}, overrides=request.overrides)
    fitted = fit(request, machine_of("MI300X", 8), Named(file.path, ""), file)
    assert fitted.config.gpus_per_node == 4 and "4 x MI300X" in fitted.derived


@pytest.mark.parametrize(
    ("machine", "overrides", "words"),
    [
        ("MI300X_1x6", {"gpus_per_node": "2"}, "derived for 2 x MI300X"),
        ("MI300X_1x6", {"nodes": "3", "gpus_per_node": "2"}, "derived for 3 nodes of 2 x MI300X"),
        (
            "CPU_1x1",
            {"gpus_per_node": "2", "micro_batch_size": "2"},
            "the miniature for 2 x MI300X",
        ),
    ],
)
def test_a_config_is_derived_for_the_gpus_on_the_command_line(machine, overrides, words):
    """Six GPUs cannot share the global batch of 16. On three nodes, it is one for six GPUs."""
    path = ROOT / f"configs/{PRETRAINING}/{machine}.toml"
    request = Request(PRETRAINING, overrides=overrides, miniature=machine == "CPU_1x1")
    six = machine_of("MI300X", 6)
    file = override(request, read(request, six, Named(path, "")))
    fitted = fit(request, six, Named(path, ""), file)
    ranks = 6 if "nodes" in overrides else 2
    assert fitted.derived.startswith(words) and fitted.config.world_size == ranks
    assert fitted.config.global_batch_size % ranks == 0


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_what_cannot_share_the_batch_is_told_what_can(count):
    with pytest.raises(ConfigError) as caught:
        chosen(Probe(MI300X.vendor, MI300X.devices[:count]))
    assert "DGXNGPU to 1 or 2 or 4 or 8" in caught.value.do
    assert "global_batch_size=" in caught.value.do
    # RCPs: 4e-4 at 16 and 8e-4 at 32
    batch = -(-16 // count) * count
    assert f"opt_base_learning_rate={4e-4 + (batch - 16) / 16 * 4e-4:.3g}" in caught.value.do
    assert "interpolated" in caught.value.do
    assert "whole node has 8" in caught.value.why and "bus" in caught.value.why


def test_a_config_that_only_bears_our_name_is_modified(tmp_path):
    copy = tmp_path / "H200_1x4.toml"
    copy.write_text(Path(H200_FILE).read_text())
    assert chosen(H200X4, config=str(copy)).log_name == "H200_1x4.toml"
    copy.write_text(Path(H200_FILE).read_text() + "# changed\n")
    changed = chosen(H200X4, config=str(copy))
    assert changed.log_name == "H200_1x4+modified.toml" and "differs" in changed.notes[0]


# --- GPUs that common/gpu_kinds.py lacks ----------------------------------------------------------

A100 = Probe("nvidia", (Device("NVIDIA A100-SXM4-80GB", "sm_80", 81920 * 2**20),) * 8)
Z300 = Probe("nvidia", (Device("NVIDIA Z300", "sm_107", 200 * GIB),) * 2)
L40S = Probe("nvidia", (Device("NVIDIA L40S", "sm_89", 46068 * 2**20),))
MI300A = Probe("amd", (Device("AMD Instinct MI300A", "gfx942", 128 * GIB, 228),) * 8)


@pytest.mark.parametrize("ignored", [(), MEASURED_ANYWAY])
@pytest.mark.parametrize(
    ("gpus", "nearest", "linear", "reduce_scatter"),
    [
        (A100, "H100_1x8.toml", "bf16", "nccl"),
        (Z300, "GB200_1x4.toml", "fp8", "copy_engine"),
        (MI300A, "MI300X_1x8.toml", "fp8", "nccl"),
    ],
)
def test_an_unknown_gpu_gets_a_derived_kind_and_config(
    gpus, nearest, linear, reduce_scatter, ignored
):
    """The file is that of the nearest memory, of the same maker."""
    choice = chosen(gpus, ignored=ignored)
    config = choice.config
    assert choice.source == DERIVED and f"from {nearest}" in choice.derived
    assert (config.linear, config.reduce_scatter) == (linear, reduce_scatter)
    assert config.gpu not in KINDS and config.gpu in choice.derived
    assert any("derived GPU kind" in note for note in choice.notes)
    assert any("not for submission" in note for note in choice.notes)
    assert CONFIG_NAME.fullmatch(choice.log_name)
    assert choice.gpus.startswith(f"{len(gpus.devices)} x ")


@pytest.mark.parametrize("benchmark", [PRETRAINING, LORA])
@pytest.mark.parametrize(
    ("gpus", "linear"),
    [
        *((A100, "bf16"), (L40S, "fp8"), (Z300, "fp8"), (MI300A, "fp8"), (H200X4, "fp8")),
        (MI300X, "fp8"),
    ],
)
def test_the_miniature_runs_on_one_gpu_of_any_kind(benchmark, gpus, linear):
    choice = chosen(gpus, benchmark=benchmark, miniature=True)
    config = choice.config
    assert choice.device == "cuda" and config.miniature
    assert (config.gpus_per_node, config.linear) == (1, linear)
    assert (config.kernels, config.precision) == ("triton", "bf16")
    assert choice.log_name == "CPU_1x1+derived.toml"
    plain = chosen(gpus, benchmark=benchmark, miniature=True, set=["linear=bf16"])
    assert plain.config.linear == "bf16"


def test_a_gpu_without_fp8_computes_in_bf16():
    assert "linear bf16" in chosen(A100).derived
    with pytest.raises(ConfigError, match="linear"):
        chosen(A100, miniature=True, set=["linear=fp8"])
    # 80 layers keep 115 GiB for the backward, and only FP8 can offload them: GPUs share sequences.
    adapted = chosen(A100, benchmark=LORA)
    assert adapted.config.offload_layers == 0 and adapted.config.context_parallel > 1


def test_a_gpu_that_is_too_small_measures_fewer_layers():
    with pytest.raises(OutOfMemory) as caught:
        chosen(L40S)
    layers = int(re.search(r"--layers (\d+)", caught.value.do)[1])
    assert chosen(L40S, layers=layers).config.gpus_per_node == 1
    with pytest.raises(OutOfMemory, match="not fit"):
        chosen(L40S, layers=layers + 1)


def test_versions_known_to_compute_wrongly_are_refused_for_a_run_and_named_for_a_measurement(
    monkeypatch,
):
    monkeypatch.setattr(
        "common.known_issues.installed", lambda driver: {"rocm": "7.13.26183", "driver": driver}
    )
    mi355x = Probe("amd", (Device("AMD Instinct MI355X", "gfx950", 288 * GIB, 256),) * 8)
    with pytest.raises(PreflightError, match=r"rocm 7\.13\.26183 .*MI355X"):
        chosen(mi355x)
    for choice in (
        chosen(mi355x, ignored=MEASURED_ANYWAY),
        chosen(mi355x, {"ALLOW_KNOWN_ISSUES": "rocm-7.12-bf16-nan"}),
    ):
        assert "rocm-7.12-bf16-nan" in choice.notes[0]
    assert chosen(MI300X).notes == () and chosen(mi355x, device="cpu").notes == ()


@pytest.mark.parametrize(("benchmark", "notes"), [(OPEN, 0), (LORA, 1)])
def test_only_a_log_that_names_a_benchmark_of_mlperf_has_notes_on_submission(
    benchmark, notes, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(run_command, "refusal_reasons", lambda root, environment: ["a reason"])
    monkeypatch.setattr(run_command.system_settings, "advice", lambda: "advice")
    example = str(ROOT / "open_llama/examples/stdlib_10m.toml")
    change = f"submission_benchmark={benchmark}"
    choice = chosen(NOTHING, benchmark=OPEN, config=example, set=[change])
    assert len(choice.notes) == notes and choice.log_name == "stdlib_10m+derived+modified.toml"
    words = ["--config", example, "--set", change, "--print"]
    for name in ("DATADIR", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    parsed = run_command.parser(OPEN).parse_args(words)
    assert run_command.start(OPEN, parsed) == 0
    text = capsys.readouterr().err
    assert text.count("NOTE") == 3 * notes + 1 and "missing data file" in text


@pytest.mark.parametrize(
    ("runs", "reasons", "options", "code"),
    [
        ("10", ["a reason"], [], 2),
        ("10", ["a reason"], ["--no-submission"], 0),
        ("10", [], [], 0),
        ("9", ["a reason"], [], 0),
    ],
)
def test_ten_runs_that_package_would_refuse_are_not_started(
    runs, reasons, options, code, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(run_command, "refusal_reasons", lambda root, environment: reasons)
    monkeypatch.setattr(run_command.system_settings, "advice", lambda: "")
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    monkeypatch.setattr(Machine, "of", lambda *_: Machine(MI300X))
    for name, text in (("DATADIR", tmp_path), ("LOGDIR", tmp_path), ("NEXP", runs)):
        monkeypatch.setenv(name, str(text))
    monkeypatch.setenv("MLPERF_SUBMISSION_ORG", "Us")
    monkeypatch.setenv("MLPERF_SUBMISSION_PLATFORM", "My platform")
    assert run_command.main([LORA, "--print", *options]) == code
    text = capsys.readouterr().err
    assert ("a reason" in text) == bool(reasons) and ("--no-submission" in text) == (code == 2)
    assert all(word in text for word in ('"Us"', '"My platform"', f"{runs} runs"))


@pytest.mark.parametrize(
    "org", ["My Company", "test", "REHEARSAL-Us", "", ".us", "a placeholder", "Us:::MLL"]
)
def test_a_name_that_package_would_refuse_starts_no_run(org, monkeypatch, capsys):
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    monkeypatch.setenv("MLPERF_SUBMISSION_ORG", org)
    assert run_command.main([LORA, "--miniature", "--print"]) == 2
    assert "MLPERF_SUBMISSION_ORG" in capsys.readouterr().err


@pytest.mark.parametrize("command", [run_command, bench, profile, tune])
@pytest.mark.parametrize("version", ["", "2.13"])
def test_what_is_printed_without_torch_says_that_it_is_not_installed(
    command, version, monkeypatch, capsys
):
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    monkeypatch.setattr(job_command, "version_of", lambda package: version)
    assert command.main([LORA, "--miniature", "--print"]) == 0
    assert ("torch is not installed" in capsys.readouterr().err) == (not version)
