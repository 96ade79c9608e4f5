"""Compare the kernels with plain torch on a GPU, at the sizes of both benchmarks.

tests/kernels runs them at small sizes.
"""

import pytest
import torch
from kernel_checks import error, sqnr_db

from common.kernels import accumulate, adamw, lora, rms_norm
from common.kernels.cross_entropy import IGNORE_INDEX, cross_entropy_reference, cross_entropy_triton
from common.kernels.fp8 import AMAX, SATURATED, SCALE, QuantizedTensor, product
from common.kernels.lora import Dropout
from common.kernels.quantize import quantize_reference, quantize_triton
from common.kernels.rope import (
    rope_packed_backward_reference,
    rope_packed_backward_triton,
    rope_packed_reference_,
    rope_packed_triton_,
    rope_reference,
    rope_tables,
)
from common.kernels.swiglu import (
    swiglu_quantized_backward_reference,
    swiglu_quantized_backward_triton,
    swiglu_quantized_reference,
    swiglu_quantized_triton,
)
from common.model.linear_layers import DelayedScaling
from common.model.shapes import ModelShape

SLICE = 128  # rows and columns of a product that are compared
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def decibels(quantized: QuantizedTensor, truth: torch.Tensor) -> float:
    """Return the SQNR in dB of the rows that `truth` has."""
    return sqnr_db(quantized.rowwise[: len(truth)].double() * quantized.inverse_scale, truth)


@pytest.mark.parametrize("gradient", [False, True], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(16384, 4096), (8192, 28672), (300, 208)], ids=str)
def test_quantize_stores_what_torch_computes(shape, gradient):
    device = torch.device("cuda")
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    results = []
    for function in (quantize_reference, quantize_triton):
        scaling = DelayedScaling()
        quantizer = scaling.quantizer(gradient=gradient)
        scaling.allocate(device)
        function(x, quantizer)
        scaling.step_done()
        results.append((function(x, quantizer), quantizer.state.clone()))
    (expected, state), (got, kernel_state) = results
    assert torch.equal(state, kernel_state)
    assert torch.equal(expected.rowwise.view(torch.uint8), got.rowwise.view(torch.uint8))
    assert torch.equal(got.columnwise.view(torch.uint8), got.rowwise.view(torch.uint8).t())


@pytest.mark.parametrize("keeps", [False, True], ids=["keeps bf16", "keeps fp8"])
@pytest.mark.parametrize("num_rows, ffn", [(16384, 14336), (8192, 28672), (300, 208)])
def test_swiglu_stores_what_torch_computes(num_rows, ffn, keeps):
    """All bytes are equal except for at most 1e-4 of them.

    A sigmoid that differs in the last bit is now and then on the other side of a rounding boundary.
    """
    device = torch.device("cuda")
    gate_up = torch.randn(num_rows, 2 * ffn, device=device, dtype=torch.bfloat16)
    d_h = torch.randn(num_rows, ffn, device=device, dtype=torch.bfloat16) * 1e-4
    leaf = gate_up[:256].double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    h_truth = torch.nn.functional.silu(gate) * up
    h_truth.backward(d_h[:256].double())
    truths = h_truth.detach(), leaf.grad
    results = []
    for forward, backward in (
        (swiglu_quantized_reference, swiglu_quantized_backward_reference),
        (swiglu_quantized_triton, swiglu_quantized_backward_triton),
    ):
        scaling = DelayedScaling()
        quantizer = scaling.quantizer()
        gradient = scaling.quantizer(gradient=True)
        kept_quantizer = scaling.quantizer(transposed=False)
        scaling.allocate(device)
        for step in range(2):  # two passes, then one
            h, kept = forward(gate_up, quantizer, kept_quantizer if keeps else None)
            d = backward(d_h, kept, gradient)
            if step == 0:
                scaling.step_done()
        assert not scaling.scales[:, SATURATED].any()
        assert (kept is gate_up) != keeps
        results.append(((h, d), kept, scaling.scales.clone()))
    (expected, kept, state), (got, kernel_kept, kernel_state) = results
    assert torch.allclose(state, kernel_state, rtol=1e-5, atol=0)
    for a, b, truth in zip(expected, got, truths, strict=True):
        assert (
            a.rowwise.view(torch.uint8) != b.rowwise.view(torch.uint8)
        ).sum() <= 1e-4 * a.rowwise.numel()
        assert torch.equal(b.columnwise.view(torch.uint8), b.rowwise.view(torch.uint8).t())
        assert decibels(b, truth) > decibels(a, truth) - 1
    if keeps:
        assert torch.equal(kept.rowwise.view(torch.uint8), kernel_kept.rowwise.view(torch.uint8)), (
            "gate and up are only cast"
        )


@pytest.mark.parametrize("shape", [(16384, 4096), (8192, 8192), (8195, 4096), (37, 100)], ids=str)
@pytest.mark.parametrize("form", ["plain", "rowwise", "both layouts"])
def test_rms_norm_is_as_exact_as_plain_torch(shape, form):
    torch.manual_seed(0)
    x, branch, d_n, d_residual = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
    weight = (1 + 0.3 * torch.randn(shape[1], device="cuda")).bfloat16()
    scaling = DelayedScaling()
    quantizers = [None] * 4
    if form != "plain":
        quantizers = [
            scaling.quantizer(gradient=gradient, transposed=form != "rowwise")
            for gradient in (False, True, False, True)
        ]
        scaling.allocate(x.device)
    # The first step takes two passes. The second takes one, with values that saturate under the
    # scale of the first.
    for growth in (1, 2):
        weight = weight * growth
        r_x, r_n, r_rstd = rms_norm.add_rms_norm_reference(x, branch, weight, 1e-5, quantizers[0])
        residual, n, rstd = rms_norm.add_rms_norm_triton(x, branch, weight, 1e-5, quantizers[2])
        assert torch.equal(residual, r_x)
        torch.testing.assert_close(rstd, r_rstd, rtol=1e-6, atol=0)
        gradients = (d_n, residual, rstd, weight, d_residual)
        r_d_x, r_g, r_d_weight = rms_norm.rms_norm_backward_reference(*gradients, quantizers[1])
        d_x, g, d_weight = rms_norm.rms_norm_backward_triton(*gradients, quantizers[3])
        again = rms_norm.rms_norm_backward_triton(*gradients, quantizers[3])
        assert torch.equal(again[0], d_x) and torch.equal(again[2], d_weight), (
            "the same in every run"
        )

        leaves = [t.double().requires_grad_() for t in (residual, weight)]
        true_n = leaves[0] * (leaves[0].pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * leaves[1]
        true_n.backward(d_n.double())
        true_d_x, true_d_weight = leaves[0].grad + d_residual.double(), leaves[1].grad
        assert error(d_x, true_d_x) <= 2 * error(r_d_x, true_d_x)
        engines = (rms_norm.rms_norm_backward_triton, rms_norm.rms_norm_backward_reference)
        in_fp32, r_in_fp32 = (
            engine(d_n, residual, rstd, weight.float(), d_residual, None)[2] for engine in engines
        )
        assert error(in_fp32, true_d_weight) <= 2 * error(r_in_fp32, true_d_weight) + 1e-6
        assert error(d_weight, true_d_weight) <= 2 * error(r_d_weight, true_d_weight) + 1e-6
        if form == "plain":
            assert error(n.rowwise, true_n.detach()) <= 2 * error(r_n.rowwise, true_n.detach())
            assert g is None
            continue
        for ours, theirs, truth in ((n, r_n, true_n.detach()), (g, r_g, true_d_x)):
            other = ours.rowwise.view(torch.uint8) != theirs.rowwise.view(torch.uint8)
            assert other.sum() <= max(1, 1e-4 * other.numel())  # ties
            assert abs(decibels(ours, truth) - decibels(theirs, truth)) < 1
            assert (ours.columnwise is None) == (form == "rowwise")
            if ours.columnwise is not None:
                assert torch.equal(
                    ours.columnwise.view(torch.uint8), ours.rowwise.view(torch.uint8).t()
                )
        # Backward ran twice: it counted twice.
        for reference, ours, runs in (
            (quantizers[0], quantizers[2], 1),
            (quantizers[1], quantizers[3], 2),
        ):
            for entry in (SCALE, AMAX):
                torch.testing.assert_close(
                    ours.state[entry], reference.state[entry], rtol=2**-8, atol=0
                )
            torch.testing.assert_close(
                ours.state[SATURATED], runs * reference.state[SATURATED], rtol=1e-3, atol=2
            )
        assert growth == 1 or quantizers[2].state[SATURATED] > 0
        scaling.step_done()


@pytest.mark.parametrize(
    "batch, sequence, heads, kv_heads", [(2, 8192, 32, 8), (1, 8192, 64, 8), (3, 100, 3, 1)]
)
def test_rope_is_as_exact_as_plain_torch(batch, sequence, heads, kv_heads):
    device, head_dim = torch.device("cuda"), 128
    cos, sin = rope_tables(
        ModelShape(1, heads * head_dim, 256, heads, kv_heads, 71, 500000.0), sequence, device
    )
    all_heads, rotated_heads = heads + 2 * kv_heads, heads + kv_heads
    qkv = torch.randn(batch * sequence, all_heads * head_dim, device=device, dtype=torch.bfloat16)
    unpacked = qkv.view(batch, sequence, all_heads, head_dim)
    truth = rope_reference(unpacked[:1, :, :rotated_heads].double(), cos, sin)
    plain = rope_packed_reference_(qkv.clone(), cos, sin, heads, kv_heads)
    ours = rope_packed_triton_(qkv.clone(), cos, sin, heads, kv_heads)
    errors = [
        (x.view_as(unpacked)[:1, :, :rotated_heads].double() - truth).norm() for x in (plain, ours)
    ]
    assert errors[1] <= 2 * errors[0]
    assert torch.equal(ours.view_as(unpacked)[:, :, rotated_heads:], unpacked[:, :, rotated_heads:])
    # A fused multiply-add rounds once where torch rounds twice.
    assert (ours != plain).sum() <= 1e-3 * ours.numel()

    upstream = (
        torch.randn(
            batch, all_heads, sequence, head_dim, device=device, dtype=torch.bfloat16
        ).transpose(1, 2)
        * 1e-4
    )
    parts = upstream.split((heads, kv_heads, kv_heads), dim=2)
    results = []
    for function in (rope_packed_backward_reference, rope_packed_backward_triton):
        scaling = DelayedScaling()
        quantizer = scaling.quantizer(gradient=True)
        scaling.allocate(device)
        function(*parts, cos, sin, quantizer)  # two passes
        scaling.step_done()
        results.append((function(*parts, cos, sin, quantizer), scaling.scales.clone()))
        assert not scaling.scales[:, SATURATED].any()
    (expected, state), (got, kernel_state) = results
    assert torch.allclose(state, kernel_state, rtol=1e-5, atol=0)
    assert (
        expected.rowwise.view(torch.uint8) != got.rowwise.view(torch.uint8)
    ).sum() <= 1e-4 * got.rowwise.numel()
    assert torch.equal(got.columnwise.view(torch.uint8), got.rowwise.view(torch.uint8).t())
    truth = torch.cat(
        (
            rope_reference(upstream[:1, :, :rotated_heads].double(), cos, -sin),
            upstream[:1, :, rotated_heads:].double(),
        ),
        dim=2,
    ).flatten()
    errors = [
        (x.rowwise[:sequence].double() * x.inverse_scale).flatten().sub_(truth).norm()
        for x in (expected, got)
    ]
    assert errors[1] <= 1.12 * errors[0]  # 1 dB


@pytest.mark.parametrize("normed", [False, True], ids=["o", "qkv"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_lora_adapter_kernels_are_as_exact_as_plain_torch(normed, p):
    """At the 70B's sizes, errors against fp64 are at most twice plain torch's in bf16.

    All have the same dropout mask. The quantized gradient is plain torch's bit for bit.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    rows, inputs, outputs, rank = 8192, 8192, 10240 if normed else 8192, 16

    def normal(*shape, std=1.0):
        return (std * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()

    x = normal(rows, inputs)
    a = normal(rank, inputs, std=0.01)
    b = normal(outputs, rank)
    g = normal(rows, outputs)
    d_n = normal(rows, inputs)
    norm = (
        lora.Norm(torch.rand(rows, generator=generator, device="cuda") + 0.5, normal(inputs))
        if normed
        else None
    )
    dropout = Dropout(torch.tensor([2**40 + 7], device="cuda"), p) if p else None
    found = {}
    for name, cast in (
        ("reference", torch.bfloat16),
        ("triton", torch.bfloat16),
        ("truth", torch.float64),
    ):
        engine = lora.IMPLEMENTATIONS["triton" if name == "triton" else "reference"]
        scaling = DelayedScaling()
        quantizer = scaling.quantizer(gradient=True, transposed=False)
        scaling.allocate(torch.device("cuda"))
        normal_form = lora.Norm(norm.rstd, norm.weight.to(cast)) if norm else None
        t = engine.down(x.to(cast), normal_form, a.to(cast), dropout)
        p_out, d_b, quantized = engine.up_backward(
            g.to(cast), t, b.to(cast), 2.0, dropout, None if name == "truth" else quantizer
        )
        d_input = d_n.to(cast, copy=True)
        d_a = engine.down_backward_(d_input, x.to(cast), normal_form, p_out, a.to(cast), dropout)
        found[name] = {"t": t, "p": p_out, "d_b": d_b, "d_n": d_input, "d_a": d_a}
        found[name + " quantized"] = quantized.rowwise
    assert torch.equal(
        found["reference quantized"].view(torch.uint8), found["triton quantized"].view(torch.uint8)
    )
    for name, truth in found["truth"].items():
        errors = [
            float((found[way][name].double() - truth).norm() / truth.norm())
            for way in ("triton", "reference")
        ]
        assert errors[0] <= 2 * errors[1] + 1e-6, (
            f"{name}: {errors[0]:.2e}, plain torch {errors[1]:.2e}"
        )


@pytest.mark.parametrize(
    "size", [(8192, 6144, 4096), (4096, 14336, 8192), (304, 208, 128)], ids=str
)
def test_products_by_cublaslt_are_torchs(monkeypatch, tmp_path, size):
    """In FP8 the results are equal bit for bit, whichever algorithm is the fastest.

    In bf16 they are as exact as a result in bf16 can be, in each layout.
    """
    m, n, k = size
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    scales = torch.tensor([0.5], device="cuda"), torch.tensor([3.0], device="cuda")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MATMUL_ENGINE", "torch")
    plain = product(a, b.t(), *scales)
    a_wide, b_wide = a.double()[:SLICE], b.double()[:SLICE]
    monkeypatch.setenv("MATMUL_ENGINE", "cublaslt")
    for _ in range(2):  # the first call chooses an algorithm
        assert torch.equal(product(a, b.t(), *scales), plain)
    for left in (a.bfloat16(), a.bfloat16().t().contiguous().t()):
        for right in (b.bfloat16().t(), b.bfloat16().t().contiguous()):
            for _ in range(2):
                assert sqnr_db(product(left, right)[:SLICE, :SLICE], a_wide @ b_wide.t()) > 50


def test_adamw_takes_more_elements_than_32_bits_count_and_no_host_sync():
    size = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 22 * size:
        pytest.skip("needs 48 GB of free GPU memory")
    weight, m, v = (torch.zeros(size, device="cuda") for _ in range(3))
    gradient = torch.ones(size, device="cuda")
    rounded = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    one, zero = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        adamw.adamw_triton(
            weight,
            gradient,
            m,
            v,
            rounded,
            0.1,
            adamw.AdamWStep(0.5, (0.9, 0.95), 1e-5, one, one, zero),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tensor, value in ((weight, -0.5 / (1 + 1e-5)), (m, 0.1), (v, 0.05), (rounded, -0.5)):
        assert tensor.min().item() == tensor.max().item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    "shape",
    [(1, 8192, 128256), (2, 8192, 128256), (3, 8192, 128256), (1, 8192, 32000), (2, 100, 50257)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_cross_entropy_is_as_exact_as_plain_torch(shape):
    """Three sequences of 128,256 have more than 2**31 logits, beyond 32-bit offsets.

    50,257 is not a multiple of any tile.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    original = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(
        0, 3, generator=generator
    )
    labels = torch.randint(shape[-1], shape[:-1], device="cuda", generator=generator)
    labels[:, ::100] = IGNORE_INDEX
    upstream = torch.tensor([1.0, -3.0, 1e-4], device="cuda")[: shape[0]]

    logits = original.clone().requires_grad_()
    with torch.no_grad():
        evaluated, _ = cross_entropy_triton(logits, labels)
    assert torch.equal(logits, original)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_sum, count = cross_entropy_triton(logits, labels)
    (gradient,) = torch.autograd.grad(loss_sum, logits, upstream)
    assert torch.cuda.max_memory_allocated() - before < 0.01 * original.nbytes, (
        "memory beside the logits"
    )
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(evaluated, loss_sum)
    assert not gradient[labels == IGNORE_INDEX].any()
    assert count.tolist() == (labels != IGNORE_INDEX).sum(-1).tolist()

    truth_sum = torch.zeros(shape[0], device="cuda", dtype=torch.float64)
    for sequence in range(shape[0]):
        for rows in torch.arange(shape[1], device="cuda").split(512):
            chunk = original[sequence, rows][None].float().requires_grad_()
            # A sequence for each row.
            losses, _ = cross_entropy_reference(
                chunk.transpose(0, 1), labels[sequence, rows][:, None]
            )
            truth_sum[sequence] += losses.detach().double().sum()
            (truth,) = torch.autograd.grad(losses.sum(), chunk, upstream[sequence])
            error = (gradient[sequence, rows].float() - truth[0]).norm()
            plain = (truth[0].bfloat16().float() - truth[0]).norm()
            assert error <= 2 * plain, (
                f"sequence {sequence}, rows from {rows[0]}: error {error:.3e}, plain torch "
                f"{plain:.3e}"
            )
    assert ((loss_sum.double() - truth_sum).abs() <= 1e-5 * truth_sum).all(), (
        loss_sum.tolist(),
        truth_sum.tolist(),
    )


@pytest.mark.parametrize("shape", [(14336, 4096), (4097,)])
def test_accumulate_adds_what_the_reference_adds(shape):
    parts = [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]
    ours = theirs = None
    for part in parts:
        ours = accumulate.accumulate_triton(ours, part)
        theirs = accumulate.accumulate_reference(theirs, part)
    assert torch.equal(ours, theirs)
    for others in (1, 3):
        more = torch.randn(others, *shape, device="cuda").bfloat16()
        ours = accumulate.accumulate_triton(ours, parts[0], more)
        theirs = accumulate.accumulate_reference(theirs, parts[0], more)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_embeddings_rows_are_added_as_the_dense_gradient_is_and_always_in_one_order(ranks):
    rows, tokens = 128256, 8192 * ranks
    ids = torch.randint(rows, (tokens,), device="cuda")
    ids[torch.rand(tokens, device="cuda") < 0.05] = rows // 2  # as a frequent word
    gradient = torch.randn(tokens, 4096, device="cuda").bfloat16()
    first = rows // 4
    count = rows // 2
    dense = (
        torch.zeros(rows, 4096, device="cuda", dtype=torch.float64).index_add_(
            0, ids, gradient.double()
        )[first : first + count]
        / ranks
    )
    totals = [torch.ones(count, 4096, device="cuda") for _ in range(5)]
    for total in totals:
        accumulate.add_rows_triton(total, ids, gradient, first, ranks)
    torch.testing.assert_close(totals[0], (dense + 1).float(), rtol=1e-5, atol=1e-4)
    assert all(torch.equal(total, totals[0]) for total in totals[1:])
