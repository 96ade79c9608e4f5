"""Parse every command that the advice of an error names: none may fail in its turn."""

import re
import shlex

import pytest

from common.command_line import PROGRAM
from common.errors import ConfigError
from common.training.arguments import runs_in
from launch import cli

pytestmark = pytest.mark.quick

CONFIG = "configs/llama31_8b/CPU_1x1.toml"
# What was typed: words that the advice must have.
TYPED = {
    "": "--help",
    "-v": "--version",
    "train": "llama31_8b",
    "status": "runs",
    "bench": "llama31_8b bench",
    "bench --steps 3": "llama31_8b bench --steps 3",
    "merge": "llama2_70b_lora merge",
    "chat": "open_llama generate",
    "--config x.toml llama31_8b": "llama31_8b --config x.toml",
    "--quiet=1 llama31_8b": "write --quiet",
    "llama31_8b --quiet=1": "--quiet",
    CONFIG: f"llama31_8b --config {CONFIG}",
    "open_llama/examples/x.toml": "open_llama --config open_llama/examples/x.toml",
    f"llama31_8b {CONFIG}": f"llama31_8b --config {CONFIG}",
    f"llama31_8b run {CONFIG}": f"--config {CONFIG}",
    "llama31_8b llama2_70b_lora": "one benchmark",
    "llama31_8b train": "llama31_8b",
    "llama31_8b status": "runs llama31_8b",
    "llama31_8b validate": "check llama31_8b",
    "llama31_8b memory": "llama31_8b plan",
    "llama31_8b merge": "llama2_70b_lora merge",
    "llama31_8b runs --json": "runs --json",
    "NEXP=10 llama31_8b bench": "NEXP=10",
    "llama31_8b bench --print NEXP=10": "NEXP=10",
    "preflight gpu1 gpu2": "preflight --nodes gpu1,gpu2",
    "plan qwen3-8b": "plan --model qwen3-8b",
    "preflight lama31_8b": "llama31_8b preflight",
    "plan --all": "llama31_8b plan --all",
    "llama31_8b plan --model qwen3-8b --gpu H200": "plan --model qwen3-8b --gpu H200",
    "llama31_8b \N{EM DASH}print": "llama31_8b --print",
    "llama31_8b \N{EN DASH}print": "use --print",
    "llama31_8b \N{MINUS SIGN}\N{MINUS SIGN}print": "use --print",
    "llama31_8b --set “micro_batch_size=8”": "llama31_8b --set",
    "llama31_8b --lr 1e-4": "--set opt_base_learning_rate=1e-4",
    "llama31_8b --max-samples 100": "--set max_samples=100",
    "llama31_8b --batch-size=8": "--set global_batch_size=8",
    "llama31_8b --epochs 2": "epochs x training sequences",
    "llama31_8b --wandb": "--track wandb",
    "llama31_8b --dry-run": "--print",
    "llama31_8b -print": "--print",
    "llama31_8b --out x": "LOGDIR=x",
    "llama31_8b --seed=1": "SEED=1",
    "llama31_8b --gpus 4": "DGXNGPU=4",
    "llama31_8b bench --seed 1": "bench --help",
    "llama31_8b --model x": "fixes the model",
    "llama2_70b_lora --model x": "MODEL=x",
    "open_llama --model x": "--set model=x",
    "open_llama --optim muon": "AdamW",
    "open_llama sft": "prepare chat",
    "llama31_8b --weights x": "fine-tunes",
    "llama2_70b_lora --weights x": "MODEL=x",
    "open_llama prepare --input README.md": "before its options",
    "throughput gpt --model tinny": "tiny",
    "throughput scaling --model 71b": "7b",
    "llama31_8b --json": "--help",
    "llama31_8b --set micro_batch_size 8": "--set micro_batch_size=VALUE",
    "llama31_8b --checkpoint -1s": "--checkpoint=",
    "llama31_8b --set micro_batch_size:8": "--set micro_batch_size=8",
    "llama31_8b run micro_batch_size=8": "--set micro_batch_size=8",
    "llama31_8b --print=1": "alone",
    "llama31_8b --device gpu": "cuda",
    "llama31_8b profile --memory --with nsys": "leave out --with or --memory",
    "llama31_8b prepare download": "fetch",
    "setup llama31_8b": "leave it out",
    "throughput gem": "gemm",
    "score": "score --help",
    "describe": "describe --help",
    "package --out x": "package --help",
}


def advice(line: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        cli.read(shlex.split(line))
    return caught.value


@pytest.mark.parametrize("line", TYPED)
def test_a_command_of_an_advice_is_valid(line, capsys):
    error = advice(line)
    assert TYPED[line] in error.do and error.why and error.why not in error.do
    command = re.search(rf"{re.escape(PROGRAM)} ([^;()?]*)", error.do)
    if not command or command[1].endswith("..."):
        return
    words = shlex.split(command[1].removesuffix(" lists the commands"))
    assert words != shlex.split(line), "it is what was typed"
    if {"package", "merge", "generate"} & {*words}:
        words = [*words, "--help"]  # it needs more arguments
    try:
        cli.read(words)
    except SystemExit as end:
        assert end.code == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "''",
        "llama31_8b ''",
        "llama31_8b --config ''",
        "llama31_8b --continue ' '",
        "llama31_8b --set ''",
        "package --rehearse --out ''",
        "score ''",
        "plan --model '' --gpu H200",
        "describe --out ''",
        "llama31_8b preflight --nodes ''",
    ],
)
def test_an_empty_value_is_refused_by_its_name(line):
    words = shlex.split(line)
    empty = next(word for word in words if not word.strip())
    name = words[words.index(empty) - 1]
    error = advice(line)
    assert "empty" in error.what and (name in error.what or name == "score")
    assert repr(empty) in error.what


@pytest.mark.parametrize(
    ("line", "both"),
    [
        ("llama31_8b --config a --config b", "'a' and 'b'"),
        ("plan --model qwen3-8b --gpu H200 --gpu MI325X", "'H200' and 'MI325X'"),
        ("llama31_8b --device cpu --device=cuda", "'cpu' and 'cuda'"),
    ],
)
def test_an_option_given_twice_is_refused_with_both_values(line, both):
    assert both in advice(line).what


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("plan --model x --gpu mi325x", "gpu", "MI325X"),
        ("plan --model x --gpu 'AMD Instinct MI325X'", "gpu", "MI325X"),
        ("plan --model x --seq 8k", "seq", 8192),
        ("plan --model x --train-tokens 1T", "train_tokens", 1e12),
        ("plan --model x --precision FP8", "precision", "fp8"),
        ("llama31_8b plan --scaling h200", "scaling", "H200"),
        ("llama31_8b run --device CPU", "device", "cpu"),
        ("llama31_8b run --gpu-kind b200", "gpu_kind", "B200"),
        ("llama31_8b run --grace 2m", "grace", 120.0),
        ("llama31_8b tune --minutes 2h", "minutes", 120.0),
        ("preflight --deadline 5m", "deadline", 300.0),
        ("check x --ruleset 6.1", "ruleset", "6.1.0"),
        ("score --list mi325x", "list", "MI325X"),
        ("score x --gpu 'NVIDIA H200'", "gpu", "H200"),
    ],
)
def test_a_value_is_accepted_as_people_write_it(line, option, value):
    words = shlex.split(line)
    benchmark = words.pop(0) if words[0] == "llama31_8b" else ""
    parser = cli.parser_of(words[0], benchmark)
    assert getattr(parser.parse_args(words[1:]), option) == value


def test_a_path_of_an_option_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    options = cli.parser_of("describe", "").parse_args(["--out", "~/x.json"])
    assert str(options.out) == "/home/jane/x.json"
    options = cli.parser_of("run", "llama31_8b").parse_args(["--continue", "~/run"])
    assert str(options.continues) == "/home/jane/run"
    options = cli.parser_of("run", "llama31_8b").parse_args(["--config", "~/x.toml"])
    assert options.config == "/home/jane/x.toml"


@pytest.mark.parametrize("name", ["CPU_1x1", "CPU_1x1.toml", "cpu_1X1", "configs/CPU_1x1"])
def test_a_config_may_be_named_without_its_folder(name):
    options = cli.parser_of("run", "llama31_8b").parse_args(["--config", name])
    assert options.config.endswith(CONFIG)
    other = f"configs/llama2_70b_lora/{name}_"
    assert cli.parser_of("run", "llama31_8b").parse_args(["--config", other]).config == other


@pytest.mark.parametrize("line", ["runs llama31_8b", "report llama31_8b", "check llama31_8b"])
def test_a_benchmark_stands_for_its_runs(line, monkeypatch, tmp_path):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    name, word = line.split()
    options = vars(cli.parser_of(name, "").parse_args([word]))
    given = options.get("directory") or (options.get("directories") or options.get("paths"))[0]
    assert runs_in(given) == tmp_path / word
    (tmp_path / "own" / word).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "own")  # a LOGDIR
    options = vars(cli.parser_of(name, "").parse_args([word]))
    given = options.get("directory") or (options.get("directories") or options.get("paths"))[0]
    assert str(runs_in(given)) == word
