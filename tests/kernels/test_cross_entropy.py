"""The fused cross entropy: numbers, edges and autograd in the interpreter, code for the four GPU targets, and real shapes on a GPU."""

import re
from pathlib import Path

import pytest
import torch
from compiling import TARGETS, check_compiles, run_in_interpreter

ROOT = Path(__file__).resolve().parents[2]


COMMON = """
import gc, math, weakref
import torch
from torch.nn import functional as F
from common.kernels.cross_entropy import BLOCK, DEPTH, IGNORE_INDEX, LANES, cross_entropy_reference, cross_entropy_triton

TILE = DEPTH * LANES
generator = torch.Generator().manual_seed(0)
randn = lambda *shape: torch.randn(shape, generator=generator)
random_labels = lambda vocab, *shape: torch.randint(vocab, shape, generator=generator)

def truth_of(logits, labels):
    losses = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view_as(labels).sum(-1), (labels != IGNORE_INDEX).sum(-1)

def results(function, logits, labels, upstream):
    leaf = logits.clone().requires_grad_()
    loss_sum, count = function(leaf, labels)
    (gradient,) = torch.autograd.grad(loss_sum, leaf, upstream.to(loss_sum.dtype))
    return loss_sum.detach(), count, gradient

def compare(what, logits, labels, upstream):
    truth, ours, plain = (results(f, logits, labels, upstream) for f in (lambda z, y: truth_of(z.double(), y), cross_entropy_triton, cross_entropy_reference))
    truth_gradient = results(truth_of, logits.double(), labels, upstream)[2]
    assert ours[0].dtype == ours[1].dtype == torch.float32 and ours[2].dtype == logits.dtype
    assert ours[1].tolist() == truth[1].tolist(), what
    # The loss of a confident token is log(1 + a little), and fp32 knows the sum of 1 and a little to some eps.
    allowed = 1e-5 * truth[0].abs() + 4 * torch.finfo(torch.float32).eps * truth[1]
    wrong = (ours[0] - truth[0]).abs() > allowed
    assert not wrong.any(), f"{what}: loss {ours[0][wrong]}, truth {truth[0][wrong]}, plain torch {plain[0][wrong]}"
    for sequence in range(len(labels)):
        error, allowed = ((g[sequence].double() - truth_gradient[sequence]).norm() for g in (ours[2], plain[2]))
        assert error <= 2 * allowed + 1e-6 * truth_gradient[sequence].norm(), f"{what}: gradient error {error:.3e}, plain torch {allowed:.3e}"
    return ours

def refuses(message, function):
    try:
        function()
    except (RuntimeError, ValueError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"no error: {message}")
"""

NUMBERS = """
for shape in ((2, 3, 1000), (1, 2, TILE + 3000), (3, 1, 129), (2, 2, LANES), (2, 2, BLOCK + 1), (1, 4, 1), (2, 2, 2)):
    for dtype in (torch.float32, torch.float16):  # not bfloat16: the interpreter truncates there instead of rounding
        labels = random_labels(shape[-1], *shape[:-1])
        labels[0, -1] = shape[-1] - 1
        if shape[1] > 1:
            labels[-1, 0] = IGNORE_INDEX
        upstream = torch.linspace(-0.5, 3.0, shape[0] + 1)[1:]
        compare(f"{shape} {dtype}", (3 * randn(*shape)).to(dtype), labels, upstream)
        compare(f"{shape} {dtype} int32", (3 * randn(*shape)).to(dtype), labels, upstream * 1e-2)

# An upstream gradient per sequence, from memory of any stride; labels cut from the batch as the loop cuts them.
logits, batch, weights = randn(3, 4, 500), random_labels(500, 3, 2, 4), torch.tensor([2.0, 9.0, 0.25, 9.0, -1.0, 9.0])
labels = batch.unbind(1)[1]
assert not labels.is_contiguous()
compare("contiguous upstream", logits, labels, weights[:3])
compare("stride 2", logits, labels, weights[::2])
compare("stride 0", logits, labels, weights[2:3].expand(3))
a, b = (results(cross_entropy_triton, logits, kind, weights[:3]) for kind in (labels, labels.int()))
assert all(map(torch.equal, a, b)), "labels in int32"
"""

EDGES = """
vocab, one = TILE + 100, torch.ones(1)
# Logits of 1e4: rounding them, or their log-sum-exp, in fp32 would cost 5e-4. Runner-up one behind the label, equal to it, far behind.
for dtype in (torch.float32, torch.float16):
    for behind in (1.0, 0.0, 8.0, 2e4):
        for label, other in ((5, vocab - 1), (vocab - 1, 5), (7, 7 + LANES)):
            for right in (label, other, 9):
                logits = torch.full((1, 1, vocab), -1e4)
                logits[..., label], logits[..., other] = 1e4, 1e4 - behind
                compare(f"1e4 {dtype} {behind} {label} {other} {right}", logits.to(dtype), torch.tensor([[right]]), one)
compare("1e4 noise", 1e4 * randn(1, 3, 1000), random_labels(1000, 1, 3), one)
compare("confident", 30 * randn(4, 1, 1000), torch.tensor([[0]] * 4), torch.ones(4))

# A masked vocabulary: -inf in a whole tile, in whole lanes, in all but one column; and finfo.min in its place.
masks = (slice(0, TILE), slice(100, None), slice(1, None), slice(0, vocab - 1), slice(3, None, 2))
for value in (float("-inf"), torch.finfo(torch.float32).min):
    for number, mask in enumerate(masks):
        logits = randn(1, 1, vocab)
        logits[..., mask] = value
        free = (logits[0, 0] > -1e30).nonzero().flatten()
        gradient = compare(f"{value} {mask}", logits, free[-1:, None], one)[2]
        assert not gradient[..., mask].any(), "a masked column has gradient 0"
logits = randn(1, 1, 300)
logits[..., 7] = float("-inf")
loss, _, gradient = results(cross_entropy_triton, logits, torch.tensor([[7]]), one)
assert loss.item() == float("inf") and gradient.isfinite().all() and gradient[0, 0, 7] == -1, "the label itself is masked"

# Ignored rows: exactly 0, whatever is in them and whatever comes from above; the other sequences are as without them.
logits, labels = randn(3, 4, 3000), random_labels(3000, 3, 4)
labels[0, 1:3], labels[1] = IGNORE_INDEX, IGNORE_INDEX
clean = compare("ignored", logits, labels, torch.tensor([1.0, 2.0, 3.0]))
logits[0, 1], logits[0, 2, 5], logits[1, 0, 2999], logits[1, 1] = float("inf"), float("nan"), float("-inf"), float("-inf")
for above in (float("inf"), float("nan"), 0.0):
    loss_sum, count, gradient = results(cross_entropy_triton, logits, labels, torch.tensor([1.0, above, 3.0]))
    assert loss_sum[1] == 0 and count.tolist() == [2, 0, 4]
    assert torch.equal(gradient[labels == IGNORE_INDEX], torch.zeros(6, 3000)), "an ignored row's gradient"
    assert torch.equal(loss_sum, clean[0]) and torch.equal(gradient, clean[2])

# What must not pass for a loss: inf or NaN in a row that counts, and a label that is no token.
for poison in (float("inf"), float("nan")):
    for where in (slice(0, 1), slice(vocab - 1, None), slice(0, None), slice(4, None, LANES)):
        logits = randn(1, 1, vocab)
        logits[..., where] = poison
        assert cross_entropy_triton(logits, torch.tensor([[3]]))[0].isnan(), f"{poison} at {where}"
for label in (-1, 300, 301, -99, -101, 2**31, 2**32 + 3, -(2**40)):
    loss_sum, _ = cross_entropy_triton(randn(1, 3, 300), torch.tensor([[5, label, 6]]))
    assert loss_sum.isnan(), f"label {label}"
assert [value.shape for value in cross_entropy_triton(randn(0, 4, 300), random_labels(300, 0, 4))] == [(0,), (0,)]
"""

AUTOGRAD = """
vocab = 500
x, weight, labels = randn(2, 3, 16), randn(vocab, 16), random_labels(vocab, 2, 3)
labels[1, 0] = IGNORE_INDEX
head = lambda leaf_x, leaf_w: F.linear(leaf_x, leaf_w)
leaves = lambda: (x.clone().requires_grad_(), weight.clone().requires_grad_())

# Through the projection, as the model uses it: its gradients, with and without recompute.
def gradients(function, recompute=False):
    ours = leaves()
    loss = lambda *leaf: function(head(*leaf), labels)
    loss_sum, count = torch.utils.checkpoint.checkpoint(loss, *ours, use_reentrant=False) if recompute else loss(*ours)
    assert not count.requires_grad
    (loss_sum / count).sum().backward()
    return [leaf.grad for leaf in ours]
import torch.utils.checkpoint
for ours, recomputed, plain in zip(gradients(cross_entropy_triton), gradients(cross_entropy_triton, True), gradients(cross_entropy_reference)):
    assert torch.equal(ours, recomputed)
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)

# In place: the gradient is the logits' memory, and the logits are gone.
logits = head(*leaves())
before, address = logits.detach().clone(), logits.data_ptr()
loss_sum, _ = cross_entropy_triton(logits, labels)
assert torch.equal(logits, before), "the forward does not write"
(gradient,) = torch.autograd.grad(loss_sum.sum(), logits, retain_graph=True)
assert gradient.data_ptr() == address == logits.data_ptr() and torch.equal(gradient, logits) and not gradient.requires_grad
assert not torch.equal(logits, before)

# Whoever would read them once more is refused.
refuses("second backward through cross_entropy_triton", lambda: loss_sum.sum().backward())
logits = head(*leaves())
loss_sum, _ = cross_entropy_triton(logits, labels)
loss_sum.sum().backward()
refuses("second backward through cross_entropy_triton", lambda: loss_sum.sum().backward())
logits = head(*leaves())
first, second = cross_entropy_triton(logits, labels)[0], cross_entropy_triton(logits, labels)[0]
refuses("modified by an inplace operation", lambda: (first + second).sum().backward())
logits = head(*leaves())
refuses("modified by an inplace operation", (logits.square().sum() + cross_entropy_triton(logits, labels)[0].sum()).backward)
logits = head(*leaves()).tanh()  # keeps its output for backward
refuses("modified by an inplace operation", cross_entropy_triton(logits, labels)[0].sum().backward)
logits = head(*leaves())
loss_sum, _ = cross_entropy_triton(logits, labels)
with torch.no_grad():
    logits.mul_(2)
refuses("modified by an inplace operation", loss_sum.sum().backward)
scale = torch.ones((), requires_grad=True)
logits = head(*leaves())
(gradient,) = torch.autograd.grad((cross_entropy_triton(logits, labels)[0] * scale).sum(), logits, create_graph=True)
refuses("once_differentiable", lambda: gradient.sum().backward())

# A second use of the logits that does not read them in backward, or whose turn comes before ours, adds its gradient.
def with_other(function, other, other_first):
    logits = head(*leaves())
    losses = [lambda: function(logits, labels)[0].sum(), lambda: other(logits).sum()]
    total = sum(loss() for loss in (reversed(losses) if other_first else losses))
    return torch.autograd.grad(total, logits)[0]
for other, first in ((torch.neg, False), (torch.neg, True), (torch.square, False)):
    ours, plain = (with_other(function, other, first) for function in (cross_entropy_triton, cross_entropy_reference))
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6), (other, first)

# Without gradient: untouched, and nothing kept.
gc.disable()
def forward_only(requires_grad):
    logits = (randn(2, 3, vocab)).requires_grad_(requires_grad)
    before, alive = logits.detach().clone(), weakref.ref(logits)
    loss_sum, count = cross_entropy_triton(logits, labels)
    assert torch.equal(logits, before) and not loss_sum.requires_grad and not count.requires_grad
    return alive, loss_sum
with torch.no_grad():
    alive, loss_sum = forward_only(True)
    assert alive() is None, "the logits are kept after the forward"
alive, loss_sum = forward_only(False)
assert alive() is None

refuses("contiguous", lambda: cross_entropy_triton(randn(2, 3, 2 * vocab)[..., :vocab], labels))
refuses("contiguous", lambda: cross_entropy_triton(randn(2, 3, vocab), labels[:, :2]))
"""


@pytest.mark.parametrize("script", [NUMBERS, EDGES, AUTOGRAD], ids=["numbers", "edges", "autograd"])
def test_cross_entropy_in_the_interpreter(script):
    run_in_interpreter(COMMON + script + "\nprint('agreed')", "-W", "ignore::RuntimeWarning")  # numpy warns of inf - inf


def shipped_kernels(vocab):
    """(name, kernel, signature, constants, 16-byte loads and stores of one thread)"""
    from common.kernels import cross_entropy as module

    rows = {"labels_ptr": "*i64", "max_ptr": "*fp32", "sum_ptr": "*fp32"}
    signature = {"logits_ptr": "*bf16", "losses_ptr": "*fp32", **rows}
    constants = {"VOCAB": vocab, "LANES": module.LANES, "DEPTH": module.DEPTH}
    yield "forward", module._cross_entropy_forward_kernel, signature, constants, (module.DEPTH, 0)
    signature = {"logits_ptr": "*bf16", **rows, "upstream_ptr": "*fp32", "sequence": "i32", "upstream_stride": "i32"}
    vectors = module.BLOCK // 2048
    yield "backward", module._cross_entropy_backward_kernel, signature, {"VOCAB": vocab, "BLOCK": module.BLOCK}, (vectors, vectors)


@pytest.mark.parametrize("vocab", [128256, 32000])
@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_cross_entropy_compiles_for(target, vocab):
    """Within the chip's means, and with every access to the logits 16 bytes wide: bandwidth is all that counts here."""
    backend, _, width, _ = target
    for name, kernel, signature, constants, vectors in shipped_kernels(vocab):
        # 256 threads, as the module's NUM_WARPS is where that GPU is
        signature = {k: signature[k] for k in kernel.arg_names if k in signature}
        compiled = check_compiles(target, kernel, signature, constants, 256 // width, name)
        if backend == "hip":
            found = [len(re.findall(rf"(?:buffer|global)_{what}_dwordx4 ", compiled.asm["amdgcn"])) for what in ("load", "store")]
        else:
            found = [len(re.findall(rf"\b{what}\.global\S*\.v4\.b32", compiled.asm["ptx"])) for what in ("ld", "st")]
        assert tuple(found) == vectors, f"{name}: 16-byte loads and stores of a thread {found}, expected {vectors}"


def test_the_threads_of_a_block_are_256_on_this_machine():
    from common.kernels.cross_entropy import LANES, NUM_WARPS

    assert NUM_WARPS * (64 if torch.version.hip else 32) == 256 and LANES == 256 * 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "shape",
    [(1, 8192, 128256), (2, 8192, 128256), (3, 8192, 128256), (1, 8192, 32000), (2, 100, 50257)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_cross_entropy_on_the_gpu_is_as_exact_as_plain_torch(shape):
    """Three sequences of 128,256 are past 2**31 logits, where 32-bit offsets end; 50,257 is no multiple of anything."""
    from common.kernels.cross_entropy import IGNORE_INDEX, cross_entropy_reference, cross_entropy_triton

    generator = torch.Generator("cuda").manual_seed(0)
    original = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, 3, generator=generator)
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
    assert torch.cuda.max_memory_allocated() - before < 0.01 * original.nbytes, "memory beside the logits"
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(evaluated, loss_sum)
    assert not gradient[labels == IGNORE_INDEX].any()
    assert count.tolist() == (labels != IGNORE_INDEX).sum(-1).tolist()

    truth_sum = torch.zeros(shape[0], device="cuda", dtype=torch.float64)
    for sequence in range(shape[0]):
        for rows in torch.arange(shape[1], device="cuda").split(512):
            chunk = original[sequence, rows][None].float().requires_grad_()
            losses, _ = cross_entropy_reference(chunk.transpose(0, 1), labels[sequence, rows][:, None])  # a sequence for each row
            truth_sum[sequence] += losses.detach().double().sum()
            (truth,) = torch.autograd.grad(losses.sum(), chunk, upstream[sequence])
            error = (gradient[sequence, rows].float() - truth[0]).norm()
            plain = (truth[0].bfloat16().float() - truth[0]).norm()
            assert error <= 2 * plain, f"sequence {sequence}, rows from {rows[0]}: error {error:.3e}, plain torch {plain:.3e}"
    assert ((loss_sum.double() - truth_sum).abs() <= 1e-5 * truth_sum).all(), (loss_sum.tolist(), truth_sum.tolist())
