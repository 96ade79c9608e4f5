"""The fused block with Triton's kernels on a GPU, at the 8B's width."""

from dataclasses import replace

import fused_lora as lora
import pytest
import torch
from fp8_llama import fp8_llama
from plain_block import Block
from signal_to_noise import sqnr_db
from tiny import TINY

from common.kernels.lora import Dropout
from common.kernels.rope import rope_tables
from common.model.fused_block import FusedBlock
from common.model.linear_layers import DelayedScaling


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_on_a_gpu_the_kernels_are_as_near_to_the_truth_as_plain_torch(qk_norm):
    """Compare both kernel engines with fp32, for the whole block at the 8B's width.

    Both engines cast the same numbers to the same formats. Triton may not be 1 dB further from fp32
    than plain torch is. The two may differ by at most the sum of two independent errors of that
    size, which is 3 dB.
    """
    shape = replace(
        TINY.shape,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_heads=32,
        num_kv_heads=8,
        qk_norm=qk_norm,
    )
    torch.manual_seed(0)
    scalings = DelayedScaling(), DelayedScaling()
    truth = Block(shape).to("cuda")
    engines = [
        FusedBlock(shape, name, scaling)
        for name, scaling in zip(("reference", "triton"), scalings, strict=True)
    ]
    for scaling in scalings:
        scaling.allocate(torch.device("cuda"))
    for name, parameter in truth.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.02)
        parameter.data = parameter.data.bfloat16().float()  # so that all have exactly these
    for block in engines:
        block.load_state_dict(truth.state_dict())
        block.to("cuda", torch.bfloat16)
    tables = rope_tables(shape, 1024, "cuda")

    def results(block, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(2, 1024, 4096, generator=generator, device="cuda")
        d_out = torch.randn(2, 1024, 4096, generator=generator, device="cuda")
        dtype = block.down.weight.dtype
        x = x.bfloat16().to(dtype).requires_grad_()
        d_out = d_out.bfloat16().to(dtype)
        block.zero_grad()
        out = block(x, *tables)
        out.backward(1e-4 * d_out)
        return {
            "output": out.detach(),
            "input": x.grad,
            **{name: p.grad for name, p in block.named_parameters()},
        }

    for step in range(3):
        plain, triton = (results(block, step) for block in engines)
        for scaling in scalings:
            scaling.step_done()
    report, too_far = [], []
    for name, value in results(truth, 2).items():
        plain_db = sqnr_db(plain[name].float(), value.float())
        triton_db = sqnr_db(triton[name].float(), value.float())
        apart_db = sqnr_db(triton[name].float(), plain[name].float())
        report.append(
            f"{name:24} triton {triton_db:5.1f} dB, plain torch {plain_db:5.1f}, apart "
            f"{apart_db:5.1f}"
        )
        # The weights of norms have so few numbers that the ratio itself is uncertain by 0.3 dB.
        margin = 1 if value.ndim > 1 else 2
        if triton_db < plain_db - margin or apart_db < plain_db - 3:
            too_far.append(name)
    print("\n".join(report))
    assert not too_far, f"{too_far}\n" + "\n".join(report)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("in_fp8", [False, True], ids=["bf16", "fp8"])
def test_both_engines_of_the_lora_block_compute_the_same(in_fp8):
    """Triton and plain torch on the same GPU, for the whole block at width 1024, with equal masks.

    Only rounding separates them.
    """
    plain = lora.plain_block(lora.WIDE, torch.bfloat16).to("cuda")
    x, d_out, tables = lora.data(lora.WIDE, torch.bfloat16, sequence=256)
    x, d_out, tables = x.cuda(), d_out.cuda(), [table.cuda() for table in tables]
    dropouts = tuple(
        Dropout(torch.tensor([seed], device="cuda"), lora.P) for seed in (31, 2**50 + 3)
    )
    blocks = [
        lora.fused_block(plain, lora.P, in_fp8, kernels=kernels).to("cuda")
        for kernels in ("reference", "triton")
    ]
    for block in blocks:
        block.draw_dropouts = lambda device: dropouts
    for step in range(3):
        reference, triton = (lora.results(block, x, d_out, tables) for block in blocks)
        for name, value in reference.items():
            error = (triton[name].double() - value.double()).norm() / value.double().norm()
            assert error < 10 ** (-25 / 20), f"step {step}: {name} {error:.1e}"
        for block in blocks:
            if block.base.scaling is not None:
                block.base.scaling.step_done()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_evaluation_in_fp8_computes_what_a_forward_of_training_does():
    """With the engines chosen on this GPU. Both store the same numbers, so no bit may differ."""
    shape = replace(
        TINY.shape,
        hidden_size=1024,
        ffn_hidden_size=2816,
        num_heads=16,
        num_kv_heads=4,
        num_layers=2,
        vocab_size=2048,
    )
    model, scaling = fp8_llama(shape, 1024, "triton", "cuda")
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: outputs.append(output.detach()))
    tokens = torch.randint(0, shape.vocab_size, (2, 1024), device="cuda")
    for _ in range(2):  # the first step has no scales yet
        losses, counts = model(tokens, tokens)
        (losses / counts).sum().backward()
        scaling.step_done()
    outputs.clear()
    model.eval()
    with torch.no_grad():
        evaluated, _ = model(tokens, tokens)
    model.train()
    trained, _ = model(tokens, tokens)
    assert torch.equal(evaluated, trained)
    for evaluated, trained in zip(outputs[:2], outputs[2:], strict=True):
        assert torch.equal(evaluated, trained)
