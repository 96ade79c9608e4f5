"""The fused cross entropy: numbers, edges and autograd."""

import gc
import weakref

import pytest
import torch
from kernel_checks import DEVICE
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.kernels.architecture import DEFAULT
from common.kernels.cross_entropy import (
    IGNORE_INDEX,
    IMPLEMENTATIONS,
    cross_entropy_backward_settings,
    cross_entropy_forward_settings,
    cross_entropy_reference,
    cross_entropy_triton,
)

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings(
        "ignore:.*(invalid value|overflow|divide by zero).*:RuntimeWarning"
    ),  # numpy's, of inf - inf
]

LANES = cross_entropy_forward_settings(DEFAULT).columns
TILE = cross_entropy_forward_settings(DEFAULT).rows * LANES
BLOCK = cross_entropy_backward_settings(DEFAULT).columns
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)


@pytest.fixture
def random_labels():
    generator = torch.Generator().manual_seed(1)
    return lambda vocab, *shape: torch.randint(vocab, shape, generator=generator).to(DEVICE)


def tensor(*values):
    return torch.tensor(values, device=DEVICE)


def truth_of(logits, labels):
    losses = F.cross_entropy(
        logits.double().flatten(0, 1),
        labels.flatten().long(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return losses.view_as(labels).sum(-1), (labels != IGNORE_INDEX).sum(-1)


def results(function, logits, labels, upstream):
    leaf = logits.clone().requires_grad_()
    loss_sum, count = function(leaf, labels)
    (gradient,) = torch.autograd.grad(loss_sum, leaf, upstream.to(loss_sum.dtype))
    return loss_sum.detach(), count, gradient


def compare(logits, labels, upstream, what=""):
    truth, ours, plain = (
        results(f, logits, labels, upstream)
        for f in (truth_of, cross_entropy_triton, cross_entropy_reference)
    )
    truth_gradient = results(truth_of, logits.double(), labels, upstream)[2]
    assert ours[0].dtype == ours[1].dtype == torch.float32 and ours[2].dtype == logits.dtype
    assert ours[1].tolist() == truth[1].tolist(), what
    # The loss of a confident token is log(1 + a little), and fp32 knows the sum of 1 and a little
    # to some eps.
    wrong = (ours[0] - truth[0]).abs() > 1e-5 * truth[0].abs() + 4 * torch.finfo(
        torch.float32
    ).eps * truth[1]
    assert not wrong.any(), (
        f"{what}: loss {ours[0][wrong]}, truth {truth[0][wrong]}, plain torch {plain[0][wrong]}"
    )
    for sequence in range(len(labels)):
        error, allowed = (
            (g[sequence].double() - truth_gradient[sequence]).norm() for g in (ours[2], plain[2])
        )
        assert error <= 2 * allowed + 1e-6 * truth_gradient[sequence].norm(), (
            f"{what}: gradient error {error:.3e}, plain {allowed:.3e}"
        )
    return ours


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16], ids=str
)  # not bfloat16: the interpreter truncates instead of rounding
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 1000),
        (1, 2, TILE + 3000),
        (3, 1, 129),
        (2, 2, LANES),
        (2, 2, BLOCK + 1),
        (1, 4, 1),
        (2, 2, 2),
    ],
    ids=str,
)
def test_the_kernel_is_as_exact_as_plain_torch(shape, dtype, randn, random_labels):
    labels = random_labels(shape[-1], *shape[:-1])
    labels[0, -1] = shape[-1] - 1
    if shape[1] > 1:
        labels[-1, 0] = IGNORE_INDEX
    upstream = torch.linspace(-0.5, 3.0, shape[0] + 1, device=DEVICE)[1:]
    compare((3 * randn(*shape)).to(dtype), labels, upstream)
    compare((3 * randn(*shape)).to(dtype), labels.int(), upstream * 1e-2)


def test_upstream_gradients_and_labels_may_have_any_strides(randn, random_labels):
    logits = randn(3, 4, 500)
    batch = random_labels(500, 3, 2, 4)
    weights = tensor(2.0, 9.0, 0.25, 9.0, -1.0, 9.0)
    labels = batch.unbind(1)[1]  # cut from the batch as the loop cuts them
    assert not labels.is_contiguous()
    compare(logits, labels, weights[:3], "contiguous")
    compare(logits, labels, weights[::2], "stride 2")
    compare(logits, labels, weights[2:3].expand(3), "stride 0")
    as_int64, as_int32 = (
        results(cross_entropy_triton, logits, kind, weights[:3]) for kind in (labels, labels.int())
    )
    assert all(map(torch.equal, as_int64, as_int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("behind", [1.0, 0.0, 8.0, 2e4])
def test_logits_of_1e4_are_as_exact_as_plain_torch(dtype, behind):
    """Rounding them, or their log-sum-exp, in fp32 would cost 5e-4.

    The runner-up is one behind the label, equal to it, or far behind.
    """
    vocab = TILE + 100
    for label, other in ((5, vocab - 1), (vocab - 1, 5), (7, 7 + LANES)):
        for right in (label, other, 9):
            logits = torch.full((1, 1, vocab), -1e4, device=DEVICE)
            logits[..., label], logits[..., other] = 1e4, 1e4 - behind
            compare(logits.to(dtype), tensor([right]), tensor(1.0), f"{label} {other} {right}")


def test_large_and_confident_logits_are_as_exact_as_plain_torch(randn, random_labels):
    compare(1e4 * randn(1, 3, 1000), random_labels(1000, 1, 3), tensor(1.0))
    compare(30 * randn(4, 1, 1000), tensor([0], [0], [0], [0]), torch.ones(4, device=DEVICE))


MASKS = [slice(0, TILE), slice(100, None), slice(1, None), slice(0, TILE + 99), slice(3, None, 2)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("value", [-INF, torch.finfo(torch.float32).min], ids=["-inf", "finfo.min"])
def test_masked_columns_have_gradient_zero(value, mask, randn):
    """A whole tile, whole lanes, all but one column."""
    logits = randn(1, 1, TILE + 100)
    logits[..., mask] = value
    free = (logits[0, 0] > -1e30).nonzero().flatten()
    gradient = compare(logits, free[-1:, None], tensor(1.0))[2]
    assert not gradient[..., mask].any(), "a masked column has gradient 0"


def test_a_masked_label_has_an_infinite_loss_and_a_finite_gradient(randn):
    logits = randn(1, 1, 300)
    logits[..., 7] = -INF
    loss, _, gradient = results(cross_entropy_triton, logits, tensor([7]), tensor(1.0))
    assert loss.item() == INF and gradient.isfinite().all() and gradient[0, 0, 7] == -1


@pytest.mark.parametrize("above", [INF, NAN, 0.0])
@pytest.mark.parametrize("engine", IMPLEMENTATIONS)
def test_an_ignored_row_has_loss_and_gradient_zero_even_with_nan_or_inf(
    engine, above, randn, random_labels
):
    """NaN and inf among its logits; and a sequence without valid tokens, whose 1 / count is inf.

    The other rows are as without them.
    """
    logits, labels = randn(3, 4, 3000), random_labels(3000, 3, 4)
    labels[0, 1:3], labels[1] = IGNORE_INDEX, IGNORE_INDEX
    compare(logits, labels, tensor(1.0, 2.0, 3.0))
    clean = results(IMPLEMENTATIONS[engine], logits, labels, tensor(1.0, 2.0, 3.0))
    logits[0, 1], logits[0, 2, 5], logits[1, 0, 2999], logits[1, 1] = INF, NAN, -INF, -INF
    loss_sum, count, gradient = results(
        IMPLEMENTATIONS[engine], logits, labels, tensor(1.0, above, 3.0)
    )
    assert loss_sum[1] == 0 and count.tolist() == [2, 0, 4]
    assert torch.equal(gradient[labels == IGNORE_INDEX], torch.zeros(6, 3000, device=DEVICE)), (
        "an ignored row's gradient"
    )
    assert torch.equal(loss_sum, clean[0]) and torch.equal(gradient, clean[2])


@pytest.mark.parametrize("engine", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", [INF, NAN])
def test_inf_or_nan_in_a_row_with_a_label_gives_a_loss_of_nan(engine, poison, randn):
    for where in (slice(0, 1), slice(TILE + 99, None), slice(0, None), slice(4, None, LANES)):
        logits = randn(1, 1, TILE + 100)
        logits[..., where] = poison
        assert IMPLEMENTATIONS[engine](logits, tensor([3]))[0].isnan(), f"at {where}"


@pytest.mark.parametrize("label", [-1, 300, 301, -99, -101, 2**31, 2**32 + 3, -(2**40)])
def test_a_label_outside_the_vocabulary_gives_a_loss_of_nan(label, randn):
    assert cross_entropy_triton(randn(1, 3, 300), tensor([5, label, 6]))[0].isnan()


def test_an_empty_batch_has_empty_results(randn, random_labels):
    assert [
        value.shape for value in cross_entropy_triton(randn(0, 4, 300), random_labels(300, 0, 4))
    ] == [(0,), (0,)]


# ---- autograd

VOCAB = 500


@pytest.fixture
def head(randn, random_labels):
    """Return (a function that computes logits from new leaves, labels), as in the model."""
    x, weight, labels = randn(2, 3, 16), randn(VOCAB, 16), random_labels(VOCAB, 2, 3)
    labels[1, 0] = IGNORE_INDEX

    def leaves():
        return x.clone().requires_grad_(), weight.clone().requires_grad_()

    return leaves, labels


def test_gradients_of_the_projection_agree_with_the_reference_also_with_recompute(head):
    leaves, labels = head

    def gradients(function, recompute=False):
        ours = leaves()

        def loss(*leaf):
            return function(F.linear(*leaf), labels)

        loss_sum, count = checkpoint(loss, *ours, use_reentrant=False) if recompute else loss(*ours)
        assert not count.requires_grad
        (loss_sum / count).sum().backward()
        return [leaf.grad for leaf in ours]

    found = (
        gradients(cross_entropy_triton),
        gradients(cross_entropy_triton, True),
        gradients(cross_entropy_reference),
    )
    for ours, recomputed, plain in zip(*found, strict=True):
        assert torch.equal(ours, recomputed)
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_the_gradient_takes_the_memory_of_the_logits_and_a_second_backward_is_refused(head):
    leaves, labels = head
    logits = F.linear(*leaves())
    before, address = logits.detach().clone(), logits.data_ptr()
    loss_sum, _ = cross_entropy_triton(logits, labels)
    assert torch.equal(logits, before), "the forward does not write"
    (gradient,) = torch.autograd.grad(loss_sum.sum(), logits, retain_graph=True)
    assert (
        gradient.data_ptr() == address == logits.data_ptr()
        and torch.equal(gradient, logits)
        and not gradient.requires_grad
    )
    assert not torch.equal(logits, before)
    with pytest.raises(RuntimeError, match="inplace"):
        loss_sum.sum().backward()
    loss_sum, _ = cross_entropy_triton(F.linear(*leaves()), labels)
    loss_sum.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss_sum.sum().backward()


def two_losses(logits, labels):
    return (cross_entropy_triton(logits, labels)[0] + cross_entropy_triton(logits, labels)[0]).sum()


def square_as_well(logits, labels):
    return logits.square().sum() + cross_entropy_triton(logits, labels)[0].sum()


def after_an_op_that_saved_its_output(logits, labels):
    return cross_entropy_triton(logits.tanh(), labels)[0].sum()


def changed_before_backward(logits, labels):
    loss_sum, _ = cross_entropy_triton(logits, labels)
    with torch.no_grad():
        logits.mul_(2)
    return loss_sum.sum()


@pytest.mark.parametrize(
    "use", [two_losses, square_as_well, after_an_op_that_saved_its_output, changed_before_backward]
)
def test_a_graph_that_needs_the_overwritten_logits_is_refused(head, use):
    leaves, labels = head
    loss = use(F.linear(*leaves()), labels)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_gradient_of_the_gradient_is_refused(head):
    leaves, labels = head
    scale = torch.ones((), requires_grad=True, device=DEVICE)
    logits = F.linear(*leaves())
    (gradient,) = torch.autograd.grad(
        (cross_entropy_triton(logits, labels)[0] * scale).sum(), logits, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "other, other_first", [(torch.neg, False), (torch.neg, True), (torch.square, False)]
)
def test_another_use_of_the_logits_adds_its_gradient(head, other, other_first):
    """One that does not read them in backward, or whose turn comes before."""
    leaves, labels = head

    def gradient_of(function):
        logits = F.linear(*leaves())
        losses = [lambda: function(logits, labels)[0].sum(), lambda: other(logits).sum()]
        total = sum(loss() for loss in (reversed(losses) if other_first else losses))
        return torch.autograd.grad(total, logits)[0]

    assert torch.allclose(
        gradient_of(cross_entropy_triton),
        gradient_of(cross_entropy_reference),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("requires_grad", [True, False])
def test_without_gradient_nothing_is_overwritten_and_nothing_kept(requires_grad, randn, head):
    def forward_only():
        logits = randn(2, 3, VOCAB).requires_grad_(requires_grad)
        before, alive = logits.detach().clone(), weakref.ref(logits)
        loss_sum, count = cross_entropy_triton(logits, head[1])
        assert (
            torch.equal(logits, before) and not loss_sum.requires_grad and not count.requires_grad
        )
        return alive, loss_sum

    gc.disable()
    try:
        with torch.set_grad_enabled(not requires_grad):
            alive, loss_sum = forward_only()
        assert alive() is None and loss_sum.isfinite().all(), (
            "the logits are kept after the forward"
        )
    finally:
        gc.enable()


def test_logits_that_are_not_contiguous_and_labels_of_another_shape_are_refused(randn, head):
    with pytest.raises(ValueError, match="contiguous"):
        cross_entropy_triton(randn(2, 3, 2 * VOCAB)[..., :VOCAB], head[1])
    with pytest.raises(ValueError, match="contiguous"):
        cross_entropy_triton(randn(2, 3, VOCAB), head[1][:, :2])
