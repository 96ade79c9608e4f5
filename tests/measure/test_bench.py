"""`bench` in a process of its own, on a CPU."""

import pytest
from ranks import start_ranks
from tiny import lora_config, run_config

from common.errors import ConfigError
from launch import bench, profile


@pytest.mark.parametrize("benchmark", ["llama31_8b", "llama2_70b_lora"])
def test_it_times_steps_and_on_request_an_evaluation(tmp_path, benchmark):
    config = run_config() if benchmark == "llama31_8b" else lora_config(micro_batch_size=4)
    (tmp_path / "CPU_1x1.toml").write_text(config.as_toml())
    arguments = [
        "--benchmark",
        benchmark,
        "--config",
        str(tmp_path / "CPU_1x1.toml"),
        "--device",
        "cpu",
        "--steps",
        "2",
        "--warmup",
        "1",
    ]
    watched = (
        "import atexit, sys; atexit.register(print, 'torn down'); from common.measure.bench import "
        "main; main(sys.argv[1:])"
    )
    (process,) = start_ranks(
        1, ["-c", watched, *arguments, "--layers", "2", "--eval-sequences", "5"]
    )
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr[-2000:]
    # No interpreter was torn down, which gloo's threads may end with std::terminate.
    bench, used, evaluation = stdout.splitlines()
    assert used == f"ENGINES {benchmark}: attention sdpa, products torch"
    length = {"llama31_8b": 128, "llama2_70b_lora": 256}[benchmark]
    assert (
        bench.startswith(
            f"BENCH {benchmark} CPU_1x1 fp32, 2 layers, 1 x 4 x 2 sequences of {length}: "
        )
        and "median of 2" in bench
    )
    assert (
        evaluation.startswith(f"EVALUATION {benchmark}: 5 sequences in ")
        and "tok/s/process" in evaluation
    )


@pytest.mark.parametrize("option", ["--layers", "--steps", "--warmup", "--eval-sequences"])
@pytest.mark.parametrize("value", ["0", "-3", "x", "1.5"])
def test_numbers_that_make_no_sense_are_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        bench.parser("llama31_8b").parse_args([option, value])


@pytest.mark.parametrize("command", [bench, profile])
def test_the_launcher_refuses_more_layers_than_the_model_has(command, capsys):
    assert command.main(["llama31_8b", "--miniature", "--device", "cpu", "--layers", "99"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert line.startswith("error: --layers 99")


def test_more_layers_than_the_model_has_are_refused(tmp_path):
    (tmp_path / "CPU_1x1.toml").write_text(run_config().as_toml())
    words = f"--benchmark llama31_8b --config {tmp_path / 'CPU_1x1.toml'} --device cpu --layers 99"
    (process,) = start_ranks(1, ["-m", "common.measure.bench", *words.split()])
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2 and "--layers 99" in stderr
