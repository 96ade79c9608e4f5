"""Self-test: check that this machine computes every op of a config correctly.

Ops of a block and the head's products run at the config's shapes. Cross entropy runs on one
sequence, and the optimizer on one matrix. All run before any weight exists:

    attention      forward and backward: all values finite, and one key head of the last sequence
                   compared with SDPA's math backend in fp32
    FP8 product    fprop, dgrad and wgrad of each linear layer: all values finite, and some rows and
                   columns compared with fp64
    bf16 product   the same for the head, or without FP8 for all linear layers (on a CPU in fp32)
    SwiGLU         in the epilogues of FP8 products, if an engine computes it there: compared with
                   the products and kernels that it replaces, including the amax
    triton         each Triton kernel compared with its reference; in FP8 in a second step, when
                   scales are delayed as in a run

A wrong kernel rarely fails visibly. Wrong FP8 formats, splits of long sums and miscompiled loops
give plausible numbers, or NaN hours later. Errors are measured in dB, 10 log10(signal / noise): if
every value is half of the true one, 6 dB. Random numbers come from a separate generator.
`preflight` runs the test on all GPUs, and so does every rank of a run before it builds the model.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
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
from common.kernels.architecture import architecture, dtype_name
from common.kernels.attention import attention_backends, attention_engine, causal_attention
from common.kernels.background_compilation import compiled_in_background
from common.kernels.fp8 import (
    AMAX,
    QuantizedTensor,
    Quantizer,
    dgrad,
    fprop,
    product_engine,
    takes_every_layout,
    wgrad,
)
from common.kernels.swiglu import swiglu_engine
from common.model.block_ops import KERNEL_ENGINES
from common.model.linear_layers import DelayedScaling, LinearLayers
from common.sharding.processes import Processes
from common.training.kernel_cases import Case, Draw, Output, Quantizers, Sizes, kernel_cases
from common.training.reports import Reports

# Minimum dB of a correct result. Rounding the result to bf16 alone gives 56 dB. Attention also
# rounds its probabilities to bf16. FP8 products sum in some 14 bits on Hopper. Kernels round as
# their references do, except for ties.
ATTENTION_DB = 30.0
PRODUCT_DB = 40.0
FP8_PRODUCT_DB = 25.0
KERNEL_DB = 40.0
SWIGLU_AMAX = 1e-3  # largest relative difference of the amax
SLICE = 256  # number of rows and columns of a product that are compared
# Rows, outputs, inputs of the bf16 product that gave NaN with ROCm 7.12 (rocm-libraries#9055).
SPLIT_K = (546, 9728, 2560)
CHUNK = 1 << 24  # elements compared at a time


@dataclass
class OpResult:
    """Result of one op at one shape."""

    op: str
    shape: str
    db: float = math.nan  # the smallest of its results; NaN if one is not finite
    least: float = 0.0  # minimum dB
    error: str = ""  # message of an exception

    @property
    def good(self) -> bool:
        """Whether the op computed correctly."""
        return not self.error and self.db >= self.least

    def __str__(self) -> str:
        value = "not finite" if math.isnan(self.db) else f"{self.db:.1f} dB"
        return f"{self.op} {self.shape}: {self.error or value} (minimum {self.least:g} dB)"


@dataclass
class SelfTestResult:
    """The engines that a self-test chose, and its findings."""

    attention: str = ""  # attention backend
    products: str = ""  # engine of matrix products
    swiglu: str = ""  # engine of SwiGLU; "" for a config that has no choice
    missing: list[str] = field(default_factory=list)  # why faster engines are not used
    seconds: float = 0.0
    findings: list[OpResult] = field(default_factory=list)

    @property
    def bad(self) -> list[OpResult]:
        """The findings of ops that computed wrongly."""
        return [finding for finding in self.findings if not finding.good]

    @property
    def worst(self) -> OpResult:
        """The finding with the smallest margin above its minimum."""

        def margin(finding: OpResult) -> float:
            return finding.db - finding.least if finding.good else -math.inf

        return min(self.findings, key=margin)


# op, shape, minimum dB, function that measures the dB
Check = tuple[str, str, float, Callable[[], float]]
Checks = Callable[[Sizes, Draw, SelfTestResult], Iterator[Check]]


def self_test(
    sizes: Sizes, device: torch.device, on_op: Callable[[str], object] = lambda op: None
) -> SelfTestResult:
    """Run every check. An op that raises becomes a finding. Frees all memory at the end.

    `on_op`: called with a description before each op.
    """
    began = time.monotonic()
    with _kernels_compiled_in_background(sizes, device):
        result = check_engines(sizes, device, on_op)
        result.findings += run_checks(kernel_checks(sizes, Draw(device), result), device, on_op)
    result.seconds = time.monotonic() - began
    return result


def check_engines(
    sizes: Sizes, device: torch.device, on_op: Callable[[str], object] = lambda op: None
) -> SelfTestResult:
    """Run the checks of attention, of products and of SwiGLU in their epilogues.

    An engine whose checks fail is excluded in this process, and the next one is tested. A pinned
    engine and the last engine of an operation are not excluded. Their bad findings remain.
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
        while True:
            findings = run_checks(checks(sizes, draw, result), device, on_op)
            bad = [finding for finding in findings if not finding.good]
            if not bad:
                break
            is_rejected = engines.reject(operation, choice(), f"its self-test failed: {bad[0]}")
            if not is_rejected:
                break
        result.findings += findings
        result.missing += map(str, choice().faster)
    result.products = str(product_engine(device, sizes.dtype).engine)
    if may_fuse_swiglu(sizes):
        result.swiglu = str(swiglu_engine(device).engine)
    return result


def run_checks(
    checks: Iterator[Check], device: torch.device, on_op: Callable[[str], object]
) -> list[OpResult]:
    """Run the checks and free their memory. Raises the errors of pinned engines."""
    findings: list[OpResult] = []
    try:
        for op, shape, least, measure in checks:
            on_op(f"self-test: {op} {shape}")
            finding = OpResult(op, shape, least=least)
            findings.append(finding)
            try:
                finding.db = measure()
            except RunError:
                raise  # a pinned engine cannot be used
            except Exception as error:  # of any class, because compilers have their own
                finding.error = next(iter(str(error).splitlines()), "") or type(error).__name__
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return findings


def run_self_test(config: RunConfig, rules: Rules, processes: Processes, reports: Reports) -> None:
    """Run the self-test of a run, before any weight exists, and write the event `self_test`.

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
        choices=cublaslt_choices(result),
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
    for rank in range(processes.world_size):
        if names[rank] != names[0]:
            reasons = "; ".join(result.missing) or "see the event self_test of each rank"
            variables = ", ".join(engines.VARIABLES.values())
            raise PreflightError(
                f"ranks chose different engines: rank 0 {', '.join(filter(None, names[0]))}; "
                f"rank {rank} {', '.join(filter(None, names[rank]))}",
                f"the packages or GPUs of the nodes differ: {reasons}",
                f"install the same packages on all nodes, or pin engines by {variables} in [env]",
            )


def require_sound(result: SelfTestResult, device: torch.device) -> None:
    """Raise PreflightError for the first bad finding, with the versions and their known issues."""
    if not result.bad:
        return
    arch = architecture(device)
    versions = known_issues.installed()
    kind = next((kind for kind in KINDS.values() if kind.arch == arch), None)
    failures = [(finding.op, str(finding)) for finding in result.bad]
    issues = known_issues.suspects(failures, kind, versions) if kind else []
    what = f"the self-test failed: {result.bad[0]}"
    if len(result.bad) > 1:
        what += f" (and {len(result.bad) - 1} more)"
    software = ", ".join(f"{name} {text}" for name, text in versions.items())
    why = f"{arch} with {software}"
    for issue in issues:
        why += f"; perhaps {issue}"
    do = "; or ".join(issue.cure for issue in issues)
    if not issues:
        do = "try another version of torch or ROCm, and report it with these lines"
    raise PreflightError(what, why, do)


def decibels(truth: Tensor, value: Tensor) -> float:
    """Return the signal-to-noise ratio in dB: inf if equal, NaN if a value is not finite."""
    signal = 0.0
    noise = 0.0
    truth_parts = truth.detach().flatten().split(CHUNK)
    value_parts = value.detach().flatten().split(CHUNK)
    for a, b in zip(truth_parts, value_parts, strict=True):
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
    """Yield the checks of attention. The first one also computes the results of the others."""
    shape = sizes.shape
    heads = f"{shape.num_heads}/{shape.num_kv_heads}"
    text = f"[{sizes.micro_batch_size}, {sizes.sequence_length}, {heads}, {shape.head_dim}]"
    ratios: list[float] = []  # dB of the output, dQ, dK, dV

    def random(num_heads: int) -> Tensor:
        size = (sizes.micro_batch_size, sizes.sequence_length, num_heads, shape.head_dim)
        return draw(*size, dtype=sizes.dtype)

    def forward() -> float:
        q = random(shape.num_heads).requires_grad_()
        k = random(shape.num_kv_heads).requires_grad_()
        v = random(shape.num_kv_heads).requires_grad_()
        with attention_backends(draw.device.type, sizes.dtype):
            result.attention = backend_in_use(q, k, v)
            out = causal_attention(q, k, v)
            d_out = draw(*out.shape, dtype=sizes.dtype)
            gradients = torch.autograd.grad(out, (q, k, v), d_out)
        # The last key head of the last sequence, and the query heads that share it.
        group = shape.num_heads // shape.num_kv_heads
        truth = _attention_truth(
            q[-1, :, -group:], k[-1, :, -1], v[-1, :, -1], d_out[-1, :, -group:]
        )
        for true_values, values in zip(truth, (out, *gradients), strict=True):
            if _finite(values):
                num_heads = true_values.shape[1]
                ratios.append(decibels(true_values, values[-1, :, -num_heads:]))
            else:
                ratios.append(math.nan)
        return ratios[0]

    yield "attention", text, ATTENTION_DB, forward
    for index, name in enumerate(("dQ", "dK", "dV"), start=1):
        if ratios:  # unless `forward` raised
            yield (
                f"attention backward {name}",
                text,
                ATTENTION_DB,
                partial(ratios.__getitem__, index),
            )


def backend_in_use(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the name of the attention backend that `causal_attention` would use for these tensors.

    It is "cudnn", "flash" or "math", on ROCm followed by the preferred library, or the name of an
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
    # aminmax returns NaN if any value is NaN, and unlike isfinite needs no memory.
    return all(math.isfinite(float(end)) for end in torch.aminmax(x.detach()))


def _attention_truth(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
    """Return (out, dQ, dK, dV) of attention in fp32, each [S, heads, D].

    `q`, `d_out`: [S, group, D], the query heads that share `k` and `v`.
    `k`, `v`: [S, D].

    Computes one head at a time, because the math backend stores the scores of a head, S x S.
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
    """Yield a check for each matrix product, of size (M, N, K): rows, columns, summed dimension."""
    shape = sizes.shape
    tokens = sizes.tokens
    trains = not sizes.lora_rank
    linears = {
        "qkv": (shape.hidden_size, shape.qkv_size),
        "o": (shape.attention_size, shape.hidden_size),
        "gate_up": (shape.hidden_size, 2 * shape.ffn_hidden_size),
        "down": (shape.ffn_hidden_size, shape.hidden_size),
        "head": (shape.hidden_size, shape.vocab_size),
    }
    for name, (inputs, outputs) in linears.items():
        fp8 = sizes.fp8 and name != "head"
        op = "FP8 product" if fp8 else f"{dtype_name(sizes.dtype)} product"
        products = {
            "fprop": (tokens, outputs, inputs),
            "dgrad": (tokens, inputs, outputs),
            "wgrad": (outputs, inputs, tokens),
        }
        least = FP8_PRODUCT_DB if fp8 else PRODUCT_DB
        for product, size in products.items():
            if trains or product != "wgrad":
                measure = partial(_product, product, size, fp8, sizes, draw)
                yield f"{op} {name} {product}", str(size), least, measure
    if draw.device.type == "cuda":
        measure = partial(_product, "fprop", SPLIT_K, False, sizes, draw)
        yield "bf16 product", str(SPLIT_K), PRODUCT_DB, measure


def cublaslt_choices(result: SelfTestResult) -> list[str]:
    """Return the algorithms that the cublaslt engine has chosen so far, with their times."""
    if result.products != "cublaslt":
        return []
    # The module of an engine is imported only if the engine is chosen.
    from common.kernels.cublaslt import CHOICES

    return CHOICES


def _product(
    product: str, size: tuple[int, int, int], fp8: bool, sizes: Sizes, draw: Draw
) -> float:
    """Return the dB of a product a b^T, of `a` [M, K] and `b` [N, K], quantized as in a step.

    `product`: "fprop", "dgrad" or "wgrad".
    `size`: (M, N, K).

    Gradients are e5m2, and operands have the layouts that the step multiplies.
    """
    m, n, k = size
    a_quantizer: Quantizer | None = None
    b_quantizer: Quantizer | None = None
    if fp8:
        scaling = DelayedScaling()
        a_quantizer = scaling.quantizer(gradient=product != "fprop", transposed=False)
        b_quantizer = scaling.quantizer(transposed=False)
        scaling.allocate(draw.device)
    quantize = KERNEL_ENGINES[sizes.kernels].quantize
    a = quantize(draw(m, k, dtype=sizes.dtype), a_quantizer)
    b = quantize(draw(n, k, dtype=sizes.dtype), b_quantizer)
    value = _multiply(product, a, b, fp8)
    if not _finite(value):
        return math.nan
    rows = torch.linspace(0, m - 1, min(SLICE, m), device=draw.device).long()
    columns = torch.linspace(0, n - 1, min(SLICE, n), device=draw.device).long()
    truth = _double(a, rows) @ _double(b, columns).t()
    return decibels(truth, value[rows][:, columns])


def _multiply(product: str, a: QuantizedTensor, b: QuantizedTensor, fp8: bool) -> Tensor:
    """Return a b^T, of `a` [M, K] and `b` [N, K], by the step's function for `product`."""
    device = a.rowwise.device
    if fp8 and not takes_every_layout(device):
        # A dgrad or wgrad of the step then makes the same call, with transposed copies.
        return fprop(a, b)
    is_torch = not product_engine(device, a.rowwise.dtype).engine.module
    if product == "fprop" and (fp8 or not is_torch):
        return fprop(a, b)
    if product == "fprop":
        # NaN in the result shows elements that were not stored.
        out = a.rowwise.new_full((a.rowwise.shape[0], b.rowwise.shape[0]), math.nan)
        return torch.mm(a.rowwise, b.rowwise.t(), out=out)
    b_transposed = b._replace(rowwise=b.rowwise.t().contiguous())
    if product == "dgrad":
        return dgrad(a, b_transposed)
    a_transposed = a._replace(rowwise=a.rowwise.t().contiguous())
    return wgrad(a_transposed, b_transposed)


def _double(x: QuantizedTensor, rows: Tensor) -> Tensor:
    """Return rows of a quantized tensor in fp64."""
    if x.inverse_scale is None:
        return x.rowwise[rows].double()
    # As uint8, because torch cannot index FP8 tensors.
    return x.rowwise.view(torch.uint8)[rows].view(x.rowwise.dtype).double() * x.inverse_scale


# --- SwiGLU in the epilogues of products


def may_fuse_swiglu(sizes: Sizes) -> bool:
    """Return True if FP8 products of a config of these sizes may compute SwiGLU."""
    operations = engines.operations(sizes.fp8)
    return engines.SWIGLU in operations and KERNEL_ENGINES[sizes.kernels].may_fuse_swiglu


def swiglu_checks(sizes: Sizes, draw: Draw, _: SelfTestResult) -> Iterator[Check]:
    """Yield the checks of SwiGLU in epilogues, if an engine computes it there."""
    if not swiglu_engine(draw.device).engine.module:
        return  # `kernel_checks` checks the kernels
    for backward in (False, True):
        op = "SwiGLU backward in a product" if backward else "SwiGLU in a product"
        size = (sizes.tokens, 2 * sizes.shape.ffn_hidden_size, sizes.shape.hidden_size)
        yield op, str(size), KERNEL_DB, partial(_fused_swiglu, backward, sizes, draw)


def _fused_swiglu(backward: bool, sizes: Sizes, draw: Draw) -> float:
    """Return the dB of a product with SwiGLU compared with a product and a kernel.

    Both run in a second step, with delayed scales. Returns NaN if their amaxes differ.
    """
    ops = KERNEL_ENGINES[sizes.kernels]
    ffn = sizes.shape.ffn_hidden_size
    hidden = sizes.shape.hidden_size
    inputs = DelayedScaling()
    operand_quantizer = inputs.quantizer(gradient=backward, transposed=False)
    weight_quantizer = inputs.quantizer(weight=True)
    inputs.allocate(draw.device)
    operand = ops.quantize(draw(sizes.tokens, hidden, dtype=sizes.dtype), operand_quantizer)
    shape = (hidden, ffn) if backward else (2 * ffn, hidden)
    weight = ops.quantize(draw(*shape, dtype=sizes.dtype, scale=hidden**-0.5), weight_quantizer)
    gate_up = draw(sizes.tokens, 2 * ffn, dtype=sizes.dtype)

    def step(linear: type[LinearLayers], quantizers: Quantizers) -> tuple[Output, ...]:
        arguments = quantizers.scaling, ops, operand, weight
        if not backward:
            return linear.gate_up_swiglu(*arguments, quantizers.forward, quantizers.kept)
        kept = ops.quantize(gate_up, quantizers.kept) if quantizers.kept else gate_up
        return (linear.down_swiglu_backward(*arguments, kept, quantizers.gradient),)

    def second_step(linear: type[LinearLayers]) -> tuple[tuple[Output, ...], Tensor]:
        """Return the results and the amaxes of all quantizers."""
        quantizers = Quantizers(sizes, draw.device)
        step(LinearLayers, quantizers)
        quantizers.scaling.step_done()
        results = step(linear, quantizers)
        return results, quantizers.scaling.scales[:, AMAX]

    truth, true_amaxes = second_step(LinearLayers)
    values, amaxes = second_step(DelayedScaling)
    if not torch.allclose(amaxes, true_amaxes, rtol=SWIGLU_AMAX, atol=0.0):
        return math.nan
    return min(_output_db(*pair) for pair in zip(truth, values, strict=True))


# --- Triton kernels


def kernel_checks(sizes: Sizes, draw: Draw, _: SelfTestResult) -> Iterator[Check]:
    """Yield a check for each Triton kernel."""
    if sizes.kernels == "triton":
        for op, shape, case in kernel_cases(sizes, draw):
            measure = partial(against_reference, case, sizes, draw.device)
            yield f"triton {op}", str(shape), KERNEL_DB, measure


def _kernels_compiled_in_background(
    sizes: Sizes, device: torch.device
) -> AbstractContextManager[None]:
    """Compile the kernels of `kernel_checks` during the block.

    At a machine's first start, they would take 12 s one after another (docs/log.md).
    """
    if sizes.kernels != "triton" or device.type != "cuda":
        return nullcontext()

    def launch_all() -> None:
        for _, _, case in kernel_cases(sizes, Draw(device)):
            with suppress(Exception):  # the checks meet the same error and report it
                _second_step("triton", case, sizes, device)

    return compiled_in_background(launch_all)


def against_reference(case: Case, sizes: Sizes, device: torch.device) -> float:
    """Return the dB of a kernel compared with its reference, in a second step.

    Scales are then delayed, so one launch stores and records.
    """
    results = [_second_step(engine, case, sizes, device) for engine in ("reference", "triton")]
    ratios = [_output_db(*pair) for pair in zip(*results, strict=True)]
    return math.nan if any(map(math.isnan, ratios)) else min(ratios)


def _second_step(engine: str, case: Case, sizes: Sizes, device: torch.device) -> tuple[Output, ...]:
    """Return the results of a second step in FP8, or of the only one otherwise."""
    quantizers = Quantizers(sizes, device)
    results = case(engine, quantizers)
    if sizes.fp8:
        quantizers.scaling.step_done()
        results = case(engine, quantizers)
    return results


def _output_db(truth: Output, value: Output) -> float:
    """Return the dB of one output of a kernel, inf if it has none."""
    if isinstance(truth, QuantizedTensor) and isinstance(value, QuantizedTensor):
        if value.columnwise is not None and not torch.equal(
            value.columnwise.view(torch.uint8), value.rowwise.view(torch.uint8).t()
        ):
            return -math.inf  # the transpose is wrong
        return decibels(_dequantized(truth), _dequantized(value))
    if isinstance(truth, Tensor) and isinstance(value, Tensor):
        return decibels(truth, value)
    return math.inf


def _dequantized(x: QuantizedTensor) -> Tensor:
    return x.rowwise if x.inverse_scale is None else x.rowwise.float() * x.inverse_scale
