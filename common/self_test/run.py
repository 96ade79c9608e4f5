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

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from common import engines, known_issues
from common.errors import PreflightError, RunError, first_line
from common.gpu_kinds import KINDS
from common.kernels.architecture import gpu_architecture
from common.kernels.attention import attention_engine
from common.kernels.fp8 import product_engine
from common.kernels.swiglu import swiglu_engine
from common.self_test.attention import attention_checks, attention_work
from common.self_test.engine_times import Operation, choose_engine
from common.self_test.kernel_cases import Draw, Sizes
from common.self_test.kernels import compile_kernels_in_background, kernel_checks
from common.self_test.products import product_checks, product_work
from common.self_test.results import Check, OpResult, SelfTestResult, freed_memory
from common.self_test.swiglu import may_fuse_swiglu, swiglu_checks, swiglu_work
from common.sharding.processes import of_all_ranks


def self_test(
    sizes: Sizes, device: torch.device, on_op: Callable[[str], object] = lambda op: None
) -> SelfTestResult:
    """Run every check. An op that raises has a bad result. Frees all memory at the end.

    `on_op`: called with a description before each op.
    """
    began = time.monotonic()
    with compile_kernels_in_background(sizes, device):
        result = check_engines(sizes, device, on_op)
        result.results += run_checks(kernel_checks(sizes, Draw(device)), device, on_op)
    result.seconds = time.monotonic() - began
    return result


def check_engines(
    sizes: Sizes, device: torch.device, on_op: Callable[[str], object] = lambda op: None
) -> SelfTestResult:
    """Run the checks of attention, of products and of SwiGLU in their epilogues.

    All usable engines are tested and timed, unless an earlier start kept their times, and the
    fastest is used (engine_times.py). One whose checks fail is excluded in this process. A pinned
    engine and the last one of an operation are not excluded. Their bad results remain.
    """
    result = SelfTestResult()
    draw = Draw(device)
    for operation in operations(sizes, device, result):
        _check_engines_of(operation, sizes, draw, result, on_op)
    result.products = str(product_engine(device, sizes.dtype).engine)
    if may_fuse_swiglu(sizes):
        result.swiglu = str(swiglu_engine(device).engine)
    return result


def _check_engines_of(
    operation: Operation,
    sizes: Sizes,
    draw: Draw,
    result: SelfTestResult,
    on_op: Callable[[str], object],
) -> None:
    """Choose the engine of one operation, and add the results of its checks to `result`."""
    backends: dict[str, str] = {}  # engine -> attention backend

    def test() -> list[OpResult]:
        found = run_checks(operation.checks(sizes, draw), draw.device, on_op)
        backends[operation.choice().engine.name] = result.attention
        return found

    choice, results = choose_engine(operation, sizes, draw, test, result.notes)
    result.engines[operation.name] = choice
    result.attention = backends[choice.engine]
    result.results += results[choice.engine]
    result.missing += map(str, operation.choice().faster)


def operations(sizes: Sizes, device: torch.device, result: SelfTestResult) -> list[Operation]:
    """Return the operations whose engines are chosen, SwiGLU after the products that it uses.

    `result`: receives the backend of attention.
    """
    chosen = [
        Operation(
            engines.ATTENTION,
            partial(attention_checks, result=result),
            partial(attention_engine, device, sizes.dtype),
            attention_work,
        ),
        Operation(
            engines.PRODUCTS,
            product_checks,
            partial(product_engine, device, sizes.dtype),
            product_work,
        ),
    ]
    if may_fuse_swiglu(sizes):
        swiglu = partial(swiglu_engine, device)
        chosen.append(Operation(engines.SWIGLU, swiglu_checks, swiglu, swiglu_work))
    return chosen


def run_checks(
    checks: Iterator[Check], device: torch.device, on_op: Callable[[str], object]
) -> list[OpResult]:
    """Run the checks and free their memory. Raises the errors of pinned engines."""
    results: list[OpResult] = []
    with freed_memory(device):
        for check in checks:
            on_op(f"self-test: {check.op} {check.shape}")
            result = OpResult(check.op, check.shape, least=check.least)
            results.append(result)
            try:
                result.db = check.measure()
            except RunError:
                raise  # a pinned engine cannot be used
            except Exception as error:  # of any class, because compilers have their own
                result.error = first_line(error)
    return results


def require_equal_engines(result: SelfTestResult) -> None:
    """Raise PreflightError if a rank uses other engines than rank 0."""
    own = (result.attention, result.products, result.swiglu)
    ranks = of_all_ranks((own, result.missing))
    first_names, first_missing = ranks[0]
    for rank, (names, missing) in enumerate(ranks):
        if names != first_names:
            reasons = [f"rank 0: {line}" for line in first_missing if line not in missing]
            reasons += [f"rank {rank}: {line}" for line in missing if line not in first_missing]
            variables = ", ".join(engines.VARIABLES.values())
            raise PreflightError(
                f"ranks chose different engines: rank 0 {', '.join(filter(None, first_names))}; "
                f"rank {rank} {', '.join(filter(None, names))}",
                "; ".join(reasons) or "the GPUs or the versions of packages differ",
                "install the same packages on all nodes, check a GPU that failed its self-test, "
                f"or pin engines by {variables} in [env]",
            )


def require_sound(result: SelfTestResult, device: torch.device) -> None:
    """Raise PreflightError for the first bad result, with the versions and their known issues."""
    if not result.bad:
        return
    arch = gpu_architecture(device)
    versions = known_issues.installed()
    kind = next((kind for kind in KINDS.values() if kind.arch == arch), None)
    failures = [(each.op, str(each)) for each in result.bad]
    issues = known_issues.suspects(failures, kind, versions) if kind else []
    what = f"the self-test failed: {result.bad[0]}"
    if len(result.bad) > 1:
        what += f" (and {len(result.bad) - 1} more)"
    software = ", ".join(f"{name} {text}" for name, text in versions.items())
    why = f"{arch or 'CPU'} with {software}"
    for issue in issues:
        why += f"; perhaps {issue}"
    do = "; or ".join(issue.cure for issue in issues)
    if not issues:
        do = "try another version of torch or ROCm, and report it with these lines"
    raise PreflightError(what, why, do)
