"""Test that this machine computes correctly: run each op of a config once at the config's shapes,
before any weight exists.

    attention      forward and backward; all finite, and one key head of the last sequence against
                   SDPA's math backend in fp32
    FP8 product    fprop, dgrad and wgrad of each linear; all finite, and rows and columns of it
                   against fp64
    bf16 product   the same for the head, or for all linears without FP8
    SwiGLU         in FP8 products' epilogues, where an engine computes it there; against the
                   products and kernels that it replaces, amax included
    triton         each Triton kernel against its reference; in FP8 after a step, so that it is
                   launched as in the middle of a run

A wrong kernel rarely fails visibly. Wrong FP8 formats, splits of long sums and miscompiled loops
give plausible numbers, or NaN hours later. dB are 10 log10(signal / noise): half of each value is 6
dB. Random numbers come from a separate generator. `preflight` runs the test on all GPUs, and every
rank of a run before it builds the model.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import engines, known_issues
from common.benchmarks import Rules
from common.config import RunConfig
from common.errors import PreflightError, RunError
from common.gpu_kinds import KINDS
from common.kernels.architecture import architecture
from common.kernels.attention import attention_backends, attention_engine, causal_attention
from common.kernels.fp8 import (
    AMAX,
    QuantizedTensor,
    Quantizer,
    dgrad,
    matmul,
    product_engine,
    takes_every_layout,
    wgrad,
)
from common.kernels.swiglu import swiglu_engine
from common.model.block_ops import ENGINES
from common.model.linear_layers import DelayedScaling, LinearLayers
from common.sharding.processes import Processes
from common.training.kernel_cases import Case, Draw, Output, Quantizers, Sizes, kernel_cases
from common.training.reports import Reports

# Minimum dB: correct results have more, wrong ones less. A bf16 result alone rounds at 56 dB.
# Attention rounds its probabilities to bf16 as well. FP8 products sum in some 14 bits on Hopper.
# Kernels round like their references except for ties.
ATTENTION_DB = 30.0
PRODUCT_DB = 40.0
FP8_PRODUCT_DB = 25.0
KERNEL_DB = 40.0
# Kernels round gate and up to bf16 before SwiGLU, and epilogues do not. So some results round to
# the next FP8 number.
SWIGLU_DB = 30.0
SWIGLU_AMAX = 0.02  # relative difference
SLICE = 256  # number of rows and columns of a product that are compared
# Rows, outputs, inputs of the bf16 product that gave NaN with ROCm 7.12 (rocm-libraries#9055).
SPLIT_K = (546, 9728, 2560)
CHUNK = 1 << 24  # elements compared at a time


@dataclass
class OpResult:
    """Result of one op at one shape."""

    op: str
    shape: str
    db: float = math.nan  # the worst of its results; NaN if one is not finite
    least: float = 0.0
    error: str = ""

    @property
    def good(self) -> bool:
        return not self.error and self.db >= self.least

    def __str__(self) -> str:
        value = "not finite" if math.isnan(self.db) else f"{self.db:.1f} dB"
        return f"{self.op} {self.shape}: {self.error or value}, {self.least:g} dB at least"


@dataclass
class SelfTestResult:
    attention: str = ""  # attention backend
    products: str = ""  # engine of matrix products
    swiglu: str = ""  # engine of SwiGLU, "" for a config without the choice
    missing: list[str] = field(default_factory=list)  # why faster engines are not used
    seconds: float = 0.0
    findings: list[OpResult] = field(default_factory=list)

    @property
    def bad(self) -> list[OpResult]:
        return [finding for finding in self.findings if not finding.good]

    @property
    def worst(self) -> OpResult:
        return min(
            self.findings,
            key=lambda finding: finding.db - finding.least if finding.good else -math.inf,
        )


# op, shape, minimum dB, function that measures the dB
Check = tuple[str, str, float, Callable[[], float]]
Checks = Callable[[Sizes, Draw, SelfTestResult], Iterator[Check]]


def self_test(
    sizes: Sizes, device: torch.device, on_op: Callable[[str], object] = lambda op: None
) -> SelfTestResult:
    """Run every check. An op that raises becomes a finding. Leaves no memory allocated.

    `on_op`: called before each op.
    """
    began = time.monotonic()
    result = check_engines(sizes, device, on_op)
    result.findings += run_checks(kernel_checks(sizes, Draw(device), result), device, on_op)
    result.seconds = time.monotonic() - began
    return result


def check_engines(
    sizes: Sizes, device: torch.device, on_op: Callable[[str], object] = lambda op: None
) -> SelfTestResult:
    """Run the checks of attention, of products and of SwiGLU in their epilogues.

    An engine whose checks fail is excluded in this process, and the next one is tested. A pinned
    engine, or the last one of its operation, stays, and its findings are bad.
    """
    result = SelfTestResult()
    draw = Draw(device)
    engine_checks: list[tuple[str, Checks, Callable[[], engines.Choice]]] = [
        (engines.ATTENTION, attention_checks, partial(attention_engine, device, sizes.dtype)),
        (engines.PRODUCTS, product_checks, partial(product_engine, device, sizes.dtype)),
    ]
    if may_fuse_swiglu(sizes):
        engine_checks.append((engines.SWIGLU, swiglu_checks, partial(swiglu_engine, device)))
    for operation, checks, choice in engine_checks:
        findings = run_checks(checks(sizes, draw, result), device, on_op)
        while bad := [finding for finding in findings if not finding.good]:
            if not engines.reject(operation, choice(), f"its self-test failed: {bad[0]}"):
                break
            findings = run_checks(checks(sizes, draw, result), device, on_op)
        result.findings += findings
        result.missing += choice().missing
    result.products = str(product_engine(device, sizes.dtype).engine)
    if may_fuse_swiglu(sizes):
        result.swiglu = str(swiglu_engine(device).engine)
    return result


def run_checks(
    checks: Iterator[Check], device: torch.device, on_op: Callable[[str], object]
) -> list[OpResult]:
    findings: list[OpResult] = []
    try:
        for op, shape, least, measure in checks:
            on_op(f"self-test: {op} {shape}")
            finding = OpResult(op, shape, least=least)
            findings.append(finding)
            try:
                finding.db = measure()
            except RunError:
                raise  # a pinned engine that cannot be used
            except Exception as error:  # the compilers of engines have classes of their own
                finding.error = next(iter(str(error).splitlines()), "") or type(error).__name__
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return findings


def before_a_run(config: RunConfig, rules: Rules, processes: Processes, reports: Reports) -> None:
    """Run the self-test before any weight exists, and write the event `self_test`.

    Raises PreflightError if an op computes wrongly, or if the ranks chose different engines.
    """
    sizes = Sizes.of(config, rules.shape, rules.sequence_length, rules.lora_rank)
    result = self_test(sizes, processes.device, partial(reports.heartbeat.write, 0))
    require_sound(result, processes.device)
    require_equal_engines(result, processes)
    reports.events.write(
        "self_test",
        attention=result.attention,
        products=result.products,
        swiglu=result.swiglu,
        missing=result.missing,
        choices=products_in_use(result),
        seconds=result.seconds,
        ops=len(result.findings),
        worst=str(result.worst),
    )


def require_equal_engines(result: SelfTestResult, processes: Processes) -> None:
    """Raise PreflightError if a rank uses other engines than rank 0."""
    if processes.world_size == 1:
        return
    own = (result.attention, result.products, result.swiglu)
    names = [own] * processes.world_size
    torch.distributed.all_gather_object(names, own)
    other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if other is None:
        return
    reasons = "; ".join(result.missing) or "see the event self_test of each rank"
    variables = ", ".join(engines.VARIABLES.values())
    raise PreflightError(
        f"ranks chose different engines: rank 0 {', '.join(filter(None, names[0]))}; "
        f"rank {other} {', '.join(filter(None, names[other]))}",
        f"the packages or GPUs of the nodes differ: {reasons}",
        f"install the same packages on all nodes, or pin engines by {variables} in [env]",
    )


def require_sound(result: SelfTestResult, device: torch.device) -> None:
    """Raise PreflightError for the first bad finding, with the versions and their known issues."""
    if not result.bad:
        return
    arch = architecture(device)
    versions = known_issues.installed()
    have = ", ".join(f"{name} {text}" for name, text in versions.items())
    more = f" (and {len(result.bad) - 1} more)" if len(result.bad) > 1 else ""
    kind = next((kind for kind in KINDS.values() if kind.arch == arch), None)
    failures = [(finding.op, str(finding)) for finding in result.bad]
    issues = known_issues.suspects(failures, kind, versions) if kind else []
    why = f"{arch} with {have}" + "".join(f"; perhaps {issue}" for issue in issues)
    do = (
        "; or ".join(issue.cure for issue in issues)
        or "try another version of torch or ROCm, and report it with these lines"
    )
    raise PreflightError(f"the self-test failed: {result.bad[0]}{more}", why, do)


def decibels(truth: Tensor, value: Tensor) -> float:
    """Return the signal-to-noise ratio in dB: inf if equal, NaN if a value is not finite."""
    signal = noise = 0.0
    for a, b in zip(*(x.detach().flatten().split(CHUNK) for x in (truth, value)), strict=True):
        signal += float(a.double().square().sum())
        noise += float((a.double() - b.double()).square().sum())
    if not math.isfinite(noise) or not math.isfinite(signal):
        return math.nan
    if not noise:
        return math.inf
    if not signal:
        return -math.inf
    return 10 * math.log10(signal / noise)


# --- attention


def attention_checks(sizes: Sizes, draw: Draw, result: SelfTestResult) -> Iterator[Check]:
    shape = sizes.shape
    heads = f"{shape.num_heads}/{shape.num_kv_heads}"
    text = f"[{sizes.micro_batch_size}, {sizes.sequence_length}, {heads}, {shape.head_dim}]"
    kept: dict[str, tuple[Tensor, ...]] = {}

    def forward() -> float:
        counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        leaves = [
            draw(
                sizes.micro_batch_size, sizes.sequence_length, n, shape.head_dim, dtype=sizes.dtype
            )
            for n in counts
        ]
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
        with attention_backends(draw.device.type, sizes.dtype):
            result.attention = backend_in_use(q, k, v)
            out = causal_attention(q, k, v)
            d_out = draw(*out.shape, dtype=sizes.dtype)
            gradients = torch.autograd.grad(out, (q, k, v), d_out)
        group = shape.num_heads // shape.num_kv_heads
        kept["found"] = tuple(
            x[-1, :, -n:] if _finite(x) else x.new_full((1,), math.nan)
            for x, n in zip((out, *gradients), (group, group, 1, 1), strict=True)
        )
        kept["truth"] = _attention_truth(
            q[-1, :, -group:], k[-1, :, -1], v[-1, :, -1], d_out[-1, :, -group:]
        )
        return compared(0)

    def compared(index: int) -> float:
        found = kept["found"][index]
        truth = kept["truth"][index]
        return decibels(truth, found) if found.shape == truth.shape else math.nan

    yield "attention", text, ATTENTION_DB, forward
    for index, name in enumerate(("dQ", "dK", "dV"), start=1):
        if kept:
            yield f"attention backward {name}", text, ATTENTION_DB, partial(compared, index)


def backend_in_use(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the name of the attention backend that `causal_attention` would use for these tensors.

    The name is "cudnn", "flash" or "math", on ROCm with the preferred library, or that of an
    engine. Raises RuntimeError if no allowed backend supports the tensors.
    """
    engine = attention_engine(q.device, q.dtype).engine
    if engine.module and engine.name != engines.REPEATED_HEADS:
        return str(engine)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True))
    if chosen == SDPBackend.ERROR:
        raise RuntimeError(
            f"no allowed backend takes {q.dtype} {tuple(q.shape)} with {k.shape[1]} key heads"
        )
    names = [chosen.name.lower().removesuffix("_attention")]
    if torch.version.hip:
        names.append(str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2])
    if engine.name == engines.REPEATED_HEADS:
        names = [engine.name, *names]
    return ", ".join(names)


def _finite(x: Tensor) -> bool:
    # aminmax returns NaN for both if any value is NaN, and copies nothing
    return all(math.isfinite(float(end)) for end in torch.aminmax(x.detach()))


def _attention_truth(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
    """Compute attention in fp32, one head at a time, because each head writes its scores.

    `q`, `d_out`: [S, group, D], the query heads that share `k` and `v`.
    `k`, `v`: [S, D].

    Returns out, dQ, dK, dV.
    """
    k, v = (x.detach().float()[None, None].requires_grad_() for x in (k, v))
    heads: list[tuple[Tensor, ...]] = []
    for head in range(q.shape[1]):
        query = q[:, head].detach().float()[None, None].requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(query, k, v, is_causal=True)
        gradients = torch.autograd.grad(out, (query, k, v), d_out[:, head].float()[None, None])
        heads.append(tuple(x[0, 0].detach() for x in (out, *gradients)))
    outs, d_q, d_k, d_v = (torch.stack(parts, 1) for parts in zip(*heads, strict=True))
    return outs, d_q, d_k.sum(1, keepdim=True), d_v.sum(1, keepdim=True)


# --- matrix products


def product_checks(sizes: Sizes, draw: Draw, _: SelfTestResult) -> Iterator[Check]:
    """Yield a check per matrix product. Sizes (M, N, K): rows, columns, contracted dimension."""
    shape = sizes.shape
    tokens = sizes.tokens
    trains = not sizes.lora_rank
    linears = {
        "qkv": (shape.hidden_size, shape.qkv_size),
        "o": (shape.attention_size, shape.hidden_size),
        "gate_up": (shape.hidden_size, 2 * shape.ffn_hidden_size),
        "down": (shape.ffn_hidden_size, shape.hidden_size),
    }
    linears["head"] = (shape.hidden_size, shape.vocab_size)
    for name, (inputs, outputs) in linears.items():
        fp8 = sizes.fp8 and name != "head"
        op = "FP8 product" if fp8 else "bf16 product"
        products = {
            "fprop": (tokens, outputs, inputs),
            "dgrad": (tokens, inputs, outputs),
            "wgrad": (outputs, inputs, tokens),
        }
        for product, size in products.items():
            if trains or product != "wgrad":
                least = FP8_PRODUCT_DB if fp8 else PRODUCT_DB
                yield (
                    f"{op} {name} {product}",
                    str(size),
                    least,
                    partial(_product, product, size, fp8, sizes, draw),
                )
    if draw.device.type == "cuda":
        yield (
            "bf16 product",
            str(SPLIT_K),
            PRODUCT_DB,
            partial(_product, "fprop", SPLIT_K, False, sizes, draw),
        )


def products_in_use(result: SelfTestResult) -> list[str]:
    """Return the times of the algorithms that cuBLASLt's engine has chosen so far, for the log."""
    if result.products != "cublaslt":
        return []
    from common.kernels.cublaslt import CHOICES  # imported only if it is chosen

    return CHOICES


def _product(
    product: str, size: tuple[int, int, int], fp8: bool, sizes: Sizes, draw: Draw
) -> float:
    """Return the dB of a [M, K] b [N, K]^T, both quantized as in the step.

    Gradients are in e5m2, and operands in the layouts that the step multiplies.
    """
    m, n, k = size
    quantizers: list[Quantizer | None] = [None, None]
    if fp8:
        scaling = DelayedScaling()
        quantizers = [
            scaling.quantizer(gradient=product != "fprop", transposed=False),
            scaling.quantizer(transposed=False),
        ]
        scaling.allocate(draw.device)
    quantize = ENGINES[sizes.kernels].quantize
    a, b = (
        quantize(draw(rows, k, dtype=sizes.dtype), quantizer)
        for rows, quantizer in zip((m, n), quantizers, strict=True)
    )
    # All three products are then this one, of rowwise operands.
    transposed = fp8 and not takes_every_layout(draw.device)
    is_torch = not product_engine(draw.device, a.rowwise.dtype).engine.module
    if transposed or (product == "fprop" and (fp8 or not is_torch)):
        found = matmul(a, b)
    elif product == "fprop":
        # prefilled with NaN, so that a missing store shows
        found = torch.mm(a.rowwise, b.rowwise.t(), out=a.rowwise.new_full((m, n), math.nan))
    elif product == "dgrad":
        found = dgrad(a, b._replace(rowwise=b.rowwise.t().contiguous()))
    else:
        found = wgrad(*(x._replace(rowwise=x.rowwise.t().contiguous()) for x in (a, b)))
    if not _finite(found):
        return math.nan
    rows, columns = (
        torch.linspace(0, length - 1, min(SLICE, length), device=draw.device).long()
        for length in (m, n)
    )
    exact = _double(a, rows) @ _double(b, columns).t()
    return decibels(exact, found[rows][:, columns])


def _double(x: QuantizedTensor, rows: Tensor) -> Tensor:
    if x.scale is None:
        return x.rowwise[rows].double()
    # uint8, because torch cannot index FP8 tensors
    return x.rowwise.view(torch.uint8)[rows].view(x.rowwise.dtype).double() * x.scale


# --- SwiGLU in the epilogues of products


def may_fuse_swiglu(sizes: Sizes) -> bool:
    """Return True if FP8 products of a config of these sizes may compute SwiGLU."""
    return sizes.fp8 and not sizes.lora_rank and ENGINES[sizes.kernels].fuses


def swiglu_checks(sizes: Sizes, draw: Draw, _: SelfTestResult) -> Iterator[Check]:
    if not swiglu_engine(draw.device).engine.module:
        return  # the kernels have checks of their own
    for backward in (False, True):
        op = "SwiGLU backward in a product" if backward else "SwiGLU in a product"
        size = (sizes.tokens, 2 * sizes.shape.ffn_hidden_size, sizes.shape.hidden_size)
        yield op, str(size), SWIGLU_DB, partial(_fused_swiglu, backward, sizes, draw)


def _fused_swiglu(backward: bool, sizes: Sizes, draw: Draw) -> float:
    """Return the dB of a product with SwiGLU against a product and a kernel, in a second step.

    NaN if their amaxes differ.
    """
    ops = ENGINES[sizes.kernels]
    ffn = sizes.shape.ffn_hidden_size
    hidden = sizes.shape.hidden_size
    inputs = DelayedScaling()
    operand_quantizer = inputs.quantizer(gradient=backward, transposed=False)
    weight_quantizer = inputs.quantizer(weight=True)
    inputs.allocate(draw.device)
    operand = ops.quantize(draw(sizes.tokens, hidden, dtype=sizes.dtype), operand_quantizer)
    shape = (hidden, ffn) if backward else (2 * ffn, hidden)
    weight = ops.quantize(draw(*shape, dtype=sizes.dtype, scale=hidden**-0.5), weight_quantizer)
    gate_up = draw(sizes.tokens, 2 * ffn, dtype=sizes.dtype) if backward else None
    outputs = DelayedScaling()
    quantizers = [outputs.quantizer(gradient=backward) for _ in range(2)]
    outputs.allocate(draw.device)

    def result_of(linear: type[LinearLayers], quantizer: Quantizer) -> tuple[Output, ...]:
        if gate_up is None:
            return linear.gate_up_swiglu(outputs, ops, operand, weight, quantizer)
        return (linear.down_swiglu_backward(outputs, ops, operand, weight, gate_up, quantizer),)

    for quantizer in quantizers:
        result_of(LinearLayers, quantizer)
    outputs.step_done()
    truth = result_of(LinearLayers, quantizers[0])
    found = result_of(DelayedScaling, quantizers[1])
    amaxes = [float(quantizer.state[AMAX]) for quantizer in quantizers]
    if not math.isclose(*amaxes, rel_tol=SWIGLU_AMAX):
        return math.nan
    return min(_output_db(*pair) for pair in zip(truth, found, strict=True))


# --- Triton kernels


def kernel_checks(sizes: Sizes, draw: Draw, _: SelfTestResult) -> Iterator[Check]:
    if sizes.kernels == "triton":
        for op, shape, case in kernel_cases(sizes, draw):
            yield (
                f"triton {op}",
                str(shape),
                KERNEL_DB,
                partial(against_reference, case, sizes, draw.device),
            )


def against_reference(case: Case, sizes: Sizes, device: torch.device) -> float:
    """Return the dB of the kernels against their references, in the second launch of each.

    Scales are delayed, so the second launch stores and records in one pass.
    """
    results = []
    for engine in ("reference", "triton"):
        quantizers = Quantizers(sizes, device)
        case(engine, quantizers)
        if sizes.fp8:
            quantizers.scaling.step_done()
        results.append(case(engine, quantizers))
    ratios = [_output_db(*pair) for pair in zip(*results, strict=True)]
    return math.nan if any(map(math.isnan, ratios)) else min(ratios)


def _output_db(truth: Output, found: Output) -> float:
    if isinstance(truth, QuantizedTensor) and isinstance(found, QuantizedTensor):
        if found.columnwise is not None and not torch.equal(
            found.columnwise.view(torch.uint8), found.rowwise.view(torch.uint8).t()
        ):
            return -math.inf
        return decibels(
            *(x.rowwise if x.scale is None else x.rowwise.float() * x.scale for x in (truth, found))
        )
    return (
        decibels(truth, found)
        if isinstance(truth, Tensor) and isinstance(found, Tensor)
        else math.inf
    )
