"""Test `plan` without a benchmark: memory, published peaks, MFU and the command line."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from probes import make_visible

from common import benchmarks
from common import config as configs
from common.benchmarks import config_class
from common.errors import ConfigError
from common.estimate.memory import fits, memory_peak
from common.estimate.mfu import by_parameters, remark, utilization, with_attention
from common.estimate.workload import Workload, model_workload
from common.gpu_kinds import GIB, KINDS
from common.machine.hardware import Device, Probe
from common.model.families import shape_of
from common.model.shapes import LLAMA2_70B, LLAMA31_8B, ModelShape
from common.paths import ROOT
from common.training.metrics import Events, StepRate, make_meter
from launch.plan.command import main
from launch.plan.model import layouts, model_plan
from launch.plan.plans import config_plan, describe
from llama2_70b_lora.rules import Config as LoraConfig
from llama31_8b.rules import Config

pytestmark = pytest.mark.quick

GB = 1e9


def planned(capsys, line):
    code = main("", line.split())
    return code, capsys.readouterr().out


def found(shape, gpus, gpu="MI300X", batch=1, length=8192, fp8=False, rank=0):
    work = model_workload(shape, length, rank)
    plan = model_plan("a model", work, KINDS[gpu], gpus, batch, "fp8" if fp8 else "bf16")
    return {each.source: each for each in layouts(plan)}


def ours(ways):
    return [each for each in ways.values() if each.is_trained]


# --- known questions ------------------------------------------------------------------------------


def test_405b_lora_on_8_gpus_of_192_gb(capsys):
    """bf16 base: 2 bytes x 405.9e9 = 812 GB of 8 x 192; sharded 101 GB per GPU.

    The activations of 8,192 tokens are what does not fit.
    """
    shape = shape_of("llama3.1-405b")
    sharded = found(shape, 8, rank=16)["base sharded over a node"].memory.parts
    whole = 2 * (2 * 128256 * 16384 + (2 * 126 + 1) * 16384)  # embedding, head and norms
    adapters = 4 * shape.lora_parameters(16)
    assert sharded["weights"] == pytest.approx(
        (2 * shape.num_parameters - whole) / 8 + whole + adapters
    )
    assert 2 * shape.num_parameters == pytest.approx(812e9, rel=0.001) and sharded[
        "weights"
    ] == pytest.approx(109e9, rel=0.01)
    assert sharded["SwiGLU input"] == 126 * 8192 * 2 * 53248 * 2 > 192 * GIB
    code, text = planned(capsys, "--model llama3.1-405b --gpus 8 --gpu MI300X --lora")
    assert code == 12 and "812 GB" in text and "| SwiGLU input                    | 204.8 |" in text
    assert "--seq 1536" in text
    row = next(line for line in text.splitlines() if line.startswith("| base sharded, all layers"))
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["no", "160.9"]
    code, text = planned(capsys, "--model llama3.1-405b --gpus 8 --gpu MI300X --lora --seq 1536")
    assert code == 0 and "It fits" in text
    assert planned(capsys, "--model llama3.1-405b --gpus 8 --gpu MI300X --lora --seq 1600")[0] == 12


def opt_66b(folder):
    """Return a shape as large as OPT-66B (64 layers, hidden size 9216).

    The three SwiGLU matrices of 24,576 are as large as its two of 36,864.
    """
    sizes = dict(
        num_hidden_layers=64,
        hidden_size=9216,
        intermediate_size=24576,
        num_attention_heads=72,
        vocab_size=50272,
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return str(folder)


def test_a_66b_model_on_one_gpu(capsys, tmp_path):
    """Weights take 2 x 66.2e9 = 132 GB of 206.

    Adapters fit beside them. Full training, 18 bytes a weight = 1,191 GB, does not.
    """
    model = opt_66b(tmp_path)
    shape = shape_of(model)
    assert shape.num_parameters == pytest.approx(66.2e9, rel=0.002)
    code, text = planned(capsys, f"--model {model} --gpu MI300X --lora --seq 1024")
    assert code == 0 and "132 GB in bf16" in text
    (lora,) = ours(found(shape, 1, length=1024, rank=16))
    assert lora.memory.parts["weights"] == 2 * shape.num_parameters + 4 * shape.lora_parameters(16)
    code, text = planned(capsys, f"--model {model} --gpu MI300X --seq 64")
    assert code == 12 and " --lora." in text
    full = ours(found(shape, 1, length=64))[-1].memory.parts
    state = sum(
        full[name] for name in ("weights", "gradients", "AdamW moments", "gathered weights")
    )
    assert state == 18 * shape.num_parameters == pytest.approx(1191e9, rel=0.002)


# Batch 8, sequence 1,024, 8 x MI350X, DistributedDataParallel; GB per GPU. Published (not ours):
# GPT models of 40 layers, 5120 wide, feed-forward 13,824, and of 32 layers, 4096 wide, feed-forward
# 11,008; vocabulary 50,257, tied. SwiGLU's three matrices of 2/3 the width are as many weights.
PUBLISHED_DDP = [(ModelShape(40, 5120, 9216, 40, 40, 50257, 1e4, tied_embedding=True), 157)]
PUBLISHED_DDP += [(ModelShape(32, 4096, 7328, 32, 32, 50257, 1e4, tied_embedding=True), 92)]


@pytest.mark.parametrize(("shape", "gigabytes"), PUBLISHED_DDP)
def test_plain_data_parallel_is_near_published_peaks(shape, gigabytes):
    """Weights, gradients, two moments and buckets in bf16 take 10 bytes a weight: 101 of 157 GB.

    With 16 bytes in fp32 it would be 162 GB without activations. Our number is a lower bound,
    because plain torch keeps more activations than fused blocks.
    """
    memory = found(shape, 8, "MI350X", batch=8, length=1024)[
        "plain data parallel, Adam in bf16 without fp32 masters"
    ].memory
    state = sum(memory.parts[name] for name in ("weights", "gradients", "AdamW moments", "buckets"))
    assert state == 10 * shape.num_parameters and 0.9 * gigabytes < memory.needed / GB < gigabytes


def test_13b_plain_data_parallel_with_fp32_masters_fits_288_gb_and_not_192(capsys):
    """Llama 2 13B takes 18 bytes x 13.0e9 = 234 GB on each GPU, for any number of GPUs.

    Sharded over 8 GPUs, it takes 2 x 13.0 + 16 x 13.0 / 8 = 52 GB.
    """
    shape, name = shape_of("llama2-13b"), "plain data parallel, fp32 masters and Adam"
    whole = {gpus: found(shape, gpus, length=1024)[name].memory for gpus in (2, 8)}
    assert (
        whole[2].parts["AdamW moments"]
        == whole[8].parts["AdamW moments"]
        == 8 * shape.num_parameters
    )
    assert [fits(whole[8], KINDS[gpu]) for gpu in ("MI300X", "MI350X")] == [False, True]
    code, text = planned(capsys, "--model llama2-13b --gpus 8 --gpu MI300X --seq 1024")
    assert code == 0 and "ZeRO-2" in text.split("It fits")[0]


def test_70b_full_training_on_8_gpus(capsys):
    """State takes 16 bytes x 70.6e9 / 8 = 141 GB, and whole bf16 weights another 141 GB.

    The sum of 282 GB compares with 206 or 309 GB. With sharded weights it is 141 GB and a few
    gathered layers.
    """
    shape = shape_of("llama3.1-70b")
    ways = found(shape, 8)
    recomputed, sharded = (
        ours(ways)[-1].memory.parts,
        ways["parameters sharded too, all layers recomputed"].memory.parts,
    )
    state = sum(recomputed[name] for name in ("weights", "gradients", "AdamW moments"))
    assert (
        state == 16 * shape.num_parameters / 8
        and recomputed["gathered weights"] == 2 * shape.num_parameters
    )
    assert sharded["gathered weights"] == 2 * (3 * shape.layer_parameters + 128256 * 8192) < 8e9
    code, text = planned(capsys, "--model llama3.1-70b --gpus 8 --gpu MI300X")
    assert code == 12 and "| gathered weights               | 131.4 |" in text
    assert "--gpu MI350X" in text and "recomputed" in text
    code, text = planned(capsys, "--model llama3.1-70b --gpus 8 --gpu MI350X")
    assert code == 0 and "all layers recomputed: " in text and " 2.3 left." in text


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
def test_our_rows_are_what_plan_counts_for_a_config_of_the_benchmark(fp8):
    both = dict(
        gpu="MI300X",
        nodes=1,
        gpus_per_node=8,
        global_batch_size=16,
        micro_batch_size=2,
        eval_micro_batch_size=1,
        max_samples=1,
    )
    both |= dict(linear="fp8" if fp8 else "bf16", opt_base_learning_rate=1.0)
    full, lora = (
        Config(**both, opt_learning_rate_warmup_steps=1),
        LoraConfig(**both, opt_learning_rate_training_steps=1),
    )
    for shape, rank, config, name in (
        (LLAMA31_8B, 0, full, "optimizer sharded over a node, bf16 weights on each GPU (ZeRO-2)"),
        (LLAMA2_70B, 16, lora, "base sharded over a node"),
    ):
        counted = memory_peak(config, Workload(shape, 8192, 0, 1, 1, rank))
        assert found(shape, 8, batch=2, fp8=fp8, rank=rank)[name].memory == counted


@pytest.mark.parametrize(
    ("example", "model", "rank"),
    [
        ("pretrain_1b", str(ROOT / "open_llama/models/llama-1b.json"), 0),
        ("lora_8b", "llama3.1-8b", 16),
    ],
)
@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("linear", ["bf16", "fp8"])
def test_a_model_is_planned_as_its_config_would_be(example, model, rank, gpus, linear):
    """Only the tokens of the evaluation set differ, which a model has not."""
    h200 = KINDS["H200"]
    file = configs.read(ROOT / f"open_llama/examples/{example}.toml", config_class("open_llama"))
    batch = {"gpus_per_node": gpus, "micro_batch_size": 2, "global_batch_size": 2 * gpus}
    keys = {"gpu": "H200", "linear": linear, "max_samples": 64_000, "frozen_base": "replicated"}
    own = config_plan("open_llama", example, file.changed(batch | keys), h200)
    work = model_workload(shape_of(model), 2048, rank)
    plans = ours({p.source: p for p in layouts(model_plan(model, work, h200, gpus, 2, linear))})
    plain = [each for each in plans if not each.config.recompute_layers]
    if rank:
        plain = [each for each in plain if each.config.frozen_base == "replicated"]
    plan = plain[0]
    sizes = plan.memory.parts
    assert {part for part, size in own.memory.parts.items() if sizes.get(part) != size} == {
        "buffers"
    }
    assert own.memory.moment == plan.memory.moment
    assert own.estimate.step_s == plan.estimate.step_s
    lines = describe(plan, [])
    spoken = [line for line in describe(own, []) if line.startswith("Speed: ") or "GFLOP" in line]
    assert len(spoken) == 2 and {*spoken} <= {*lines}


def test_the_largest_batch_is_the_last_that_fits(capsys):
    text = planned(capsys, "--model llama3.1-8b --gpus 8 --gpu H200")[1]
    row = next(
        line
        for line in text.splitlines()
        if line.startswith("| optimizer sharded over a node, bf16 weights on each GPU (ZeRO-2)  ")
    )
    size = int(row.split("|")[-2])
    assert [
        planned(capsys, f"--model llama3.1-8b --gpus 8 --gpu H200 --batch {n}")[1].count(
            "(ZeRO-2): "
        )
        for n in (size, size + 1)
    ] == [
        1,
        0,
    ]


def test_parameters_are_sharded_over_all_nodes_and_optimizers_over_one():
    one, two = (found(LLAMA31_8B, gpus) for gpus in (8, 16))
    name = "parameters sharded too (FSDP, ZeRO-3)"
    assert one[name].memory.parts["AdamW moments"] == 2 * two[name].memory.parts["AdamW moments"]
    assert ours(one)[0].memory.parts["AdamW moments"] == ours(two)[0].memory.parts["AdamW moments"]


def test_queries_and_keys_before_their_norm_and_a_wide_head_are_counted():
    """Qwen3-4B: 32 and 8 heads of 128 in a model 2560 wide."""
    parts = found(shape_of("qwen3-4b"), 8)[
        "optimizer sharded over a node, bf16 weights on each GPU (ZeRO-2)"
    ].memory.parts
    assert parts["queries and keys before their norm"] == 36 * 8192 * 40 * 128 * 2
    assert parts["attention output"] == 36 * 8192 * (32 * 128 * 2 + 32 * 4)


@pytest.mark.parametrize(
    "line",
    [
        "--model llama3.1-70b --gpus 4 --gpu MI355X --lora --batch 8",
        "--model llama3.1-8b --gpus 1 --gpu H100",
        "--model llama3.1-70b --gpus 2 --gpu H200 --lora",
    ],
)
def test_every_advice_leads_to_what_fits(capsys, line):
    code, text = planned(capsys, line)
    ways = text.split("; try ")[1].split(".\n")[0].split(" or ")
    assert code == 12 and ways
    for way in ways:
        option = way.split()[0]
        others = re.sub(rf" {option} \S+", "", line)
        assert planned(capsys, f"{others} {way}")[0] == 0, way


def test_numbers_of_a_model_for_programs(capsys):
    line = "--model llama3.1-70b --gpus 8 --gpu MI350X --json"
    code, text = planned(capsys, line)
    plans = json.loads(text)
    assert code == 0 and {plan["model"] for plan in plans.values()} == {"llama3.1-70b"}
    fit = [name for name, plan in plans.items() if plan["trained"] and plan["memory"]["fits"]]
    assert [name.split(", ")[-1] for name in fit] == ["all layers recomputed"]
    assert plans[fit[0]]["estimate"]["tokens_per_s_per_gpu"] > 1_000
    sharded = plans["parameters sharded too (FSDP, ZeRO-3)"]
    assert not sharded["trained"] and sharded["estimate"] is None
    assert planned(capsys, line.replace("MI350X", "MI300X"))[0] == 12


# --- MFU ------------------------------------------------------------------------------------------


def test_mfu_of_the_worked_example(capsys):
    """6 x 405e9 weights x 1,024 tokens / 30 s / (8 x 1.3 PFLOP/s) = 0.798 %.

    With a factor of 4 instead of 6 it is 0.532 %.
    """
    full, lora = utilization(by_parameters(405e9), 1024 / 30 / 8, 1300, 1300)
    assert full.mfu == pytest.approx(0.00798, abs=5e-6) and lora.mfu == pytest.approx(
        0.00532, abs=5e-6
    )
    assert full.tflops == pytest.approx(10.4, abs=0.05) and lora.tflops == pytest.approx(
        6.9, abs=0.05
    )
    code, text = planned(
        capsys, "--mfu --params 405e9 --tokens 1024 --seconds 30 --peak 1.3e15 --gpus 8"
    )
    assert (
        code == 0
        and "0.798" in text
        and "0.532" in text
        and "34.1 tokens/s" in text
        and "something is wrong" in text
    )


def test_mfu_with_a_shape_adds_attention(capsys):
    shape = LLAMA31_8B
    rows = {
        each.formula: each.tflops
        for each in utilization(
            by_parameters(shape.num_parameters) | with_attention(shape, 8192, 16), 8192, 1000, 1000
        )
    }
    masked = 6 * 32 * 8192 * 4096
    per_token = {formula: tflops * 1e12 / 8192 for formula, tflops in rows.items()}
    assert per_token["full, 6 P"] == pytest.approx(6 * shape.num_parameters)
    assert per_token["full, 6 N + 6 L S H (causal)"] == pytest.approx(
        6 * shape.matmul_parameters + masked
    )
    assert per_token["full, 6 N + 12 L S H"] == pytest.approx(
        6 * shape.matmul_parameters + 2 * masked
    )
    lora = 4 * shape.matmul_parameters + 6 * shape.lora_parameters(16)
    assert per_token["LoRA, 4 N + 6 N_lora + 12 L S H (rank 16)"] == pytest.approx(
        lora + 2 * masked
    )
    code, text = planned(
        capsys, "--mfu --model llama3.1-8b --batch 2 --seq 4096 --seconds 0.5 --gpu H200 --gpus 4"
    )
    assert code == 0 and "32,768 tokens in 0.5 s" in text and "989.4 TFLOP/s" in text


@pytest.mark.parametrize(
    ("benchmark", "options", "formula"),
    [
        ("llama31_8b", "--model llama3.1-8b --batch 4 --seconds 1.8633", "full, 6 N + 6 L"),
        ("llama2_70b_lora", "--model llama2-70b --batch 2 --seconds 4.9381", "LoRA, 4 N + 6 N"),
    ],
)
def test_mfu_of_a_step_in_fp8_is_the_one_that_bench_and_a_run_print(
    capsys, benchmark, options, formula
):
    config = configs.load(
        ROOT / "configs" / benchmark / "H200_1x4.toml", benchmarks.config_class(benchmark), {}
    )
    rules = benchmarks.rules_of(benchmark, config)
    meter = make_meter(config, rules, SimpleNamespace(device=torch.device("cuda")), Events(None))
    milliseconds = 1e3 * float(options.split()[-1])
    rate = StepRate.of(
        milliseconds, meter.tokens_per_step, 4, meter.flops_per_token, meter.peak_tflops
    )
    line = f"--mfu {options} --seq 8192 --gpu H200 --gpus 4 --precision fp8"
    code, text = planned(capsys, line)
    assert code == 0 and "Above 100 %" not in text and "1,978.9 TFLOP/s in FP8" in text
    code, text = planned(capsys, f"{line} --json")
    [mfu] = [
        each["mfu"]
        for each in json.loads(text)
        if each["formula"].startswith(formula) and "causal" in each["formula"]
    ]
    assert mfu == pytest.approx(rate.mfu, rel=1e-9) and 0.5 < mfu < 0.6


def test_mfu_for_programs(capsys):
    line = "--mfu --params 405e9 --tokens 1024 --seconds 30 --peak 1.3e15 --gpus 8 --json"
    code, text = planned(capsys, line)
    assert code == 0
    assert [each["mfu"] for each in json.loads(text)] == pytest.approx([0.00798, 0.00532], abs=5e-6)


def test_remarks_on_implausible_utilization():
    assert (
        "wrong" in remark(utilization(by_parameters(1e9), 1, 0.13, 0.13))
        and remark(utilization(by_parameters(1e9), 10, 0.13, 0.13)) == ""
    )
    assert "must be wrong" in remark(utilization(by_parameters(1e9), 100, 0.1, 0.1))
    # A step of LoRA at 80 % of the peak would be 120 % if it were a full one.
    text = remark(utilization(by_parameters(1e9), 20, 0.1, 0.1))
    assert "convention" in text and "must be wrong" not in text


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--gpus 8 --gpu MI300X", "--model is required"),
        ("--model llama3.1-8b", "--gpu GPU is required"),
        ("--model llama3.1-8b --gpu TPU", "TPU"),
        ("--model llama3.1-8b --gpu H200 --gpus 12", "--gpus 12"),
        ("--model lama3.1-8b --gpu H200", "unknown model"),
        ("--mfu --seconds 1 --peak 1e15", "number of weights"),
        ("--mfu --params 1e9 --model llama3.1-8b --seconds 1 --peak 1e15", "number of weights"),
        ("--mfu --params 1e9 --peak 1e15", "needs --seconds"),
        ("--model llama3.1-8b --gpu H200 --scaling H100", "--gpu H200 with --scaling H100"),
        ("--model llama3.1-8b --gpu H200 --network 50", "--network without --scaling"),
        ("--mfu --params 1e9 --page x.html", "--page without --scaling"),
        ("--model llama3.1-8b --gpu H200 --tokens 1e12", "--tokens without --mfu"),
        ("--model llama3.1-8b --gpu H200 --scaling --peak 1e15", "--peak without --mfu"),
        ("--mfu --params 1e9 --seconds 1 --gpu H200 --scaling", "--scaling cannot be combined"),
        ("--mfu --params 1e9 --seconds 1 --gpu H200 --train-tokens 1e9", "--mfu with --train"),
        ("--mfu --params 8x --seconds 1 --gpu H200", "'8x' is not a positive number"),
    ],
)
def test_what_is_missing_is_said(line, words, monkeypatch):
    make_visible(monkeypatch, Probe("none"))
    with pytest.raises(ConfigError) as caught:
        main("", line.split())
    assert words in caught.value.what


def test_without_options_it_plans_all_gpus_of_this_machine(capsys, monkeypatch):
    mi300x = Device("AMD Instinct MI300X", "gfx942", 192 * GIB, 304)
    make_visible(monkeypatch, Probe("amd", (mi300x,) * 8))
    assert main("", ["--model", "llama3.1-8b"]) == 0
    assert "8 x MI300X" in capsys.readouterr().out


def test_tokens_per_second_days_and_gpu_hours(capsys):
    line = "--model llama3.1-8b --gpu MI300X --gpus 8 --train-tokens 1e12"
    assert main("", line.split()) == 0
    out = capsys.readouterr().out
    speed = re.search(r"([\d,]+) tokens/s per GPU, ([\d,]+) on 8 GPUs", out)
    one, all_gpus = (int(text.replace(",", "")) for text in speed.groups())
    days = float(re.search(r"take ([\d.,]+) days", out)[1].replace(",", ""))
    hours = int(re.search(r"([\d,]+) GPU-hours", out)[1].replace(",", ""))
    assert all_gpus == pytest.approx(8 * one, rel=1e-3)
    assert days == pytest.approx(1e12 / all_gpus / 86_400, rel=1e-3)
    assert hours == pytest.approx(days * 24 * 8, rel=1e-3)
    assert main("", [*line.split()[:-1], "1e10"]) == 0
    short = re.search(r"take ([\d.,]+) hours", capsys.readouterr().out)
    assert float(short[1]) == pytest.approx(1e10 / all_gpus / 3600, rel=0.02)


def test_without_gpu_it_is_that_of_this_machine_known_or_not(capsys, monkeypatch):
    monkeypatch.delenv("GPU_KIND", raising=False)
    make_visible(monkeypatch, Probe("nvidia", (Device("NVIDIA Z300", "sm_107", 180 * GIB),)))
    code, text = planned(capsys, "--model llama3.1-8b --gpus 8")
    assert code == 0 and "8 x NVIDIA_Z300 of 180 GiB" in text


def test_scaling_is_refused_for_a_gpu_whose_links_are_unknown(monkeypatch):
    monkeypatch.delenv("GPU_KIND", raising=False)
    gh200 = Device("NVIDIA GH200 480GB", "sm_90", 96 * GIB)
    make_visible(monkeypatch, Probe("nvidia", (gh200,)))
    with pytest.raises(ConfigError, match="links") as caught:
        main("", ["--model", "llama3.1-8b", "--scaling", "--train-tokens", "1e9"])
    assert "GH200" in caught.value.what and "H200" in caught.value.do


@pytest.mark.parametrize(
    "line", ["--batch 0", "--gpus -1", "--seq x", "--mfu --seconds nan", "--peak -1"]
)
def test_a_number_that_is_none_is_refused(line, capsys):
    with pytest.raises(ConfigError, match=r"^--"):
        main("", line.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["plan", "--model", "qwen3-8b", "--gpus", "8", "--gpu", "MI350X"], 0, "It fits"),
        (
            ["plan", "--model", "llama3.1-405b", "--gpus", "8", "--gpu", "MI300X"],
            12,
            "does NOT fit",
        ),
        (["plan"], 2, "--model is required"),
        (["plan", "--help"], 0, "--mfu"),
        (["plan", "--model", "qwen3-8b"], 2, "--gpu GPU is required"),
    ],
)
def test_without_a_benchmark_and_without_torch(arguments, code, said, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('the plan needs no torch')")
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    command_line = [sys.executable, "-m", "launch", *arguments]
    done = subprocess.run(
        command_line, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60
    )
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
