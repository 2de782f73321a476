import pytest
import torch

from cpu_tests.world import run_world
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules import row_blocks as blocks
from scalerun.modules.megatron.cross_entropy import vocab_parallel_cross_entropy_sum
from scalerun.modules.megatron.label_smoothing import smoothed_cross_entropy_sums

SYMBOLS, IGNORED = 12, -100


@pytest.fixture
def logits_and_targets():
    return make()


def make():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 7, SYMBOLS, generator=generator) * 4
    targets = torch.randint(0, SYMBOLS, (5, 7), generator=generator)
    targets[::2, ::3] = IGNORED
    return logits, targets


def by_the_formula(logits, targets, smoothing):
    """Target by target, in float64."""
    share = smoothing / (SYMBOLS - 1)
    loss = plain = torch.zeros((), dtype=torch.float64)
    for row, target in zip(logits.double().view(-1, SYMBOLS), targets.view(-1), strict=True):
        if target != IGNORED:
            log_probs = row - row.exp().sum().log()
            loss = loss - (1 - smoothing - share) * log_probs[target] - share * log_probs.sum()
            plain = plain - log_probs[target]
    return loss, plain


def sums_and_grad(function, logits, *args, **options):
    logits = logits.detach().clone().requires_grad_()
    loss, plain = function(logits, *args, **options)
    (loss * 0.3).backward()
    return loss.detach(), plain.detach(), logits.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("block", [1, 40, 2**18])
def test_it_is_the_formula_in_float64(logits_and_targets, smoothing, block, monkeypatch):
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", block)
    logits, targets = logits_and_targets
    found = sums_and_grad(
        smoothed_cross_entropy_sums, logits, targets, None, smoothing=smoothing,
        ignore_index=IGNORED,
    )  # fmt: skip
    expected = sums_and_grad(by_the_formula, logits, targets, smoothing)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-6)


def test_without_smoothing_it_is_the_plain_cross_entropy(logits_and_targets):
    logits, targets = logits_and_targets
    options = {"ignore_index": IGNORED}
    loss, plain, _ = sums_and_grad(
        smoothed_cross_entropy_sums, logits, targets, None, smoothing=0.0, **options
    )
    expected = vocab_parallel_cross_entropy_sum(logits, targets, None, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(plain, expected)


def test_overwriting_gives_the_same_gradient(logits_and_targets):
    logits, targets = logits_and_targets
    options = {"smoothing": 0.1, "ignore_index": IGNORED}
    expected = sums_and_grad(smoothed_cross_entropy_sums, logits, targets, None, **options)[2]
    leaf = logits.clone().requires_grad_()
    own = leaf * 1
    loss, _ = smoothed_cross_entropy_sums(own, targets, None, overwrite_logits=True, **options)
    (loss * 0.3).backward()
    assert torch.equal(leaf.grad, expected)
    assert torch.equal(own.detach(), expected)


def test_a_spread_vocabulary_changes_nothing():
    logits, targets = make()
    options = {"smoothing": 0.1, "ignore_index": IGNORED}
    expected = sums_and_grad(smoothed_cross_entropy_sums, logits, targets, None, **options)

    def work(rank):
        mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
        mine = logits.chunk(2, -1)[rank]
        return sums_and_grad(smoothed_cross_entropy_sums, mine, targets, mesh, **options)

    results = run_world(2, work)
    for loss, plain, _ in results:
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(plain, expected[1])
    grad = torch.cat([grad for _, _, grad in results], -1)
    torch.testing.assert_close(grad, expected[2])
