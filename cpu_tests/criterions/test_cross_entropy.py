import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalerun.criterions.base_criterion import build_criterion
from scalerun.criterions.cross_entropy import CrossEntropyConfig, cross_entropy_sum
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import UserError
from scalerun.models.base_decoder import DecoderOutput
from scalerun.modules import row_blocks as module
from scalerun.modules.auxiliary import Auxiliary


@pytest.fixture
def logits_and_targets():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 7, 11, generator=generator) * 4
    targets = torch.randint(0, 11, (5, 7), generator=generator)
    targets[::2, ::3] = IGNORE_INDEX
    return logits, targets


def loss_and_grad(function, logits, targets):
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, targets)
    (loss * 0.3).backward()
    return loss.detach(), logits.grad


def by_torch(logits, targets):
    return F.cross_entropy(logits.float().reshape(-1, 11), targets.reshape(-1), reduction="sum")


def in_float64(logits, targets):
    kept = targets != IGNORE_INDEX
    log_probs = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    return -log_probs[kept].gather(-1, targets[kept].unsqueeze(-1)).sum()


@pytest.fixture(params=[1, 40, 2**18], ids=["row", "few_rows", "whole"])
def chunk(request, monkeypatch):
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", request.param)


def test_it_is_the_formula_in_float64(logits_and_targets, chunk):
    loss, grad = loss_and_grad(cross_entropy_sum, *logits_and_targets)
    expected_loss, expected_grad = loss_and_grad(in_float64, *logits_and_targets)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_it_is_torchs_cross_entropy(logits_and_targets, chunk):
    loss, grad = loss_and_grad(cross_entropy_sum, *logits_and_targets)
    expected_loss, expected_grad = loss_and_grad(by_torch, *logits_and_targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(logits_and_targets, dtype, chunk):
    logits, targets = logits_and_targets
    loss, grad = loss_and_grad(cross_entropy_sum, logits.to(dtype), targets)
    expected_loss, expected_grad = loss_and_grad(by_torch, logits.to(dtype), targets)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad)


def test_an_ignored_target_has_neither_loss_nor_gradient(logits_and_targets):
    logits, targets = logits_and_targets
    _, grad = loss_and_grad(cross_entropy_sum, logits, targets)
    assert (grad[targets == IGNORE_INDEX] == 0).all()
    changed = logits.clone()
    changed[targets == IGNORE_INDEX] = 1e4
    assert torch.equal(cross_entropy_sum(changed, targets), cross_entropy_sum(logits, targets))


def test_without_targets_the_loss_is_zero_and_so_is_the_gradient(logits_and_targets):
    logits, targets = logits_and_targets
    loss, grad = loss_and_grad(cross_entropy_sum, logits, torch.full_like(targets, IGNORE_INDEX))
    assert loss == 0
    assert (grad == 0).all()
    assert cross_entropy_sum(torch.zeros(0, 3, 11), torch.zeros(0, 3, dtype=torch.long)) == 0


@given(st.integers(1, 4))
def test_cutting_a_batch_leaves_the_sum(parts):
    generator = torch.Generator().manual_seed(parts)
    logits = torch.randn(12, 9, generator=generator)
    targets = torch.randint(0, 9, (12,), generator=generator)
    pieces = zip(logits.chunk(parts), targets.chunk(parts), strict=True)
    total = sum(cross_entropy_sum(x, y) for x, y in pieces)
    torch.testing.assert_close(total, cross_entropy_sum(logits, targets), rtol=1e-6, atol=0)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1]))
    loss.backward()
    assert loss == 2e4
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_a_value_that_is_not_a_number_shows_in_the_loss():
    assert cross_entropy_sum(torch.full((1, 3), torch.nan), torch.tensor([0])).isnan()


def test_backward_may_run_twice(logits_and_targets):
    logits, targets = logits_and_targets
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, targets)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwriting_the_logits_changes_no_bit_of_the_gradient(logits_and_targets, dtype, chunk):
    logits, targets = logits_and_targets

    def overwriting(leaf, targets):
        computed = leaf * 1.0
        return cross_entropy_sum(computed, targets, overwrite_logits=True)

    loss, grad = loss_and_grad(overwriting, logits.to(dtype), targets)
    expected_loss, expected_grad = loss_and_grad(cross_entropy_sum, logits.to(dtype), targets)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(grad, expected_grad)


def test_overwritten_logits_are_never_taken_for_logits(logits_and_targets):
    logits, targets = logits_and_targets
    logits.requires_grad_()
    computed = logits * 1.0
    loss = cross_entropy_sum(computed, targets, overwrite_logits=True)
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)


class Bigram(nn.Module):
    def __init__(self, *reports):
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 11, generator=torch.Generator().manual_seed(0)))
        self.reports = reports

    def forward(self, tokens_BT, positions_BT=None, document_ids_BT=None):
        return DecoderOutput(self.table[tokens_BT], self.reports)


def batch_of(targets):
    tokens = torch.arange(targets.numel()).view_as(targets) % 11
    count = int((targets != IGNORE_INDEX).sum())
    return Batch(tokens=tokens, targets=targets, num_targets=count, sample_ids=[0] * len(targets))


def test_the_criterion_sums_over_the_batchs_targets(logits_and_targets):
    _, targets = logits_and_targets
    model, batch = Bigram(), batch_of(targets)
    output = build_criterion(CrossEntropyConfig())(model, batch)
    assert output.num_targets == batch.num_targets
    assert output.aux_loss is None
    assert output.loss_sum == cross_entropy_sum(model.table[batch.tokens], targets)
    output.loss_sum.backward()
    assert model.table.grad.abs().sum() > 0


def test_it_does_not_train_a_model_with_experts_but_scores_it(logits_and_targets):
    _, targets = logits_and_targets
    model = Bigram(Auxiliary(torch.tensor(0.5)))
    criterion = build_criterion(CrossEntropyConfig())
    with pytest.raises(UserError, match="give --criterion moe_cross_entropy"):
        criterion(model, batch_of(targets))
    output = criterion.eval()(model, batch_of(targets))
    assert output.aux_loss is None
    assert output.loss_sum > 0
