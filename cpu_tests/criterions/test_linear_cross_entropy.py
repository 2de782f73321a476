"""N rows, D features, V vocabulary."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scalerun.criterions.base_criterion import build_criterion
from scalerun.criterions.cross_entropy import (
    CrossEntropy,
    CrossEntropyConfig,
    cross_entropy_sum,
)
from scalerun.criterions.linear_cross_entropy import linear_cross_entropy_sum
from scalerun.criterions.moe import MoECrossEntropyConfig
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.models.base_model import build_model
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_mt import TransformerMTConfig
from scalerun.modules import row_blocks

N, D, V = 35, 6, 11
CPU = torch.device("cpu")
SMALL = {
    "decoder_embed_dim": 16,
    "decoder_attention_heads": 2,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
}
ENCODER = {
    "encoder_embed_dim": 16,
    "encoder_attention_heads": 2,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 1,
}
RETNET = {
    "decoder_embed_dim": 16,
    "decoder_value_embed_dim": 24,
    "decoder_retention_heads": 2,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
}


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(5, 7, D, generator=generator)
    weight = 2 * torch.randn(V, D, generator=generator)
    targets = torch.randint(0, V, (5, 7), generator=generator)
    targets[::2, ::3] = IGNORE_INDEX
    return features, weight, targets


def loss_and_grads(function, features, weight, targets):
    leaves = [x.detach().clone().requires_grad_() for x in (features, weight)]
    loss = function(*leaves, targets)
    (loss * 0.3).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def chunked(chunk_tokens):
    def loss(features, weight, targets):
        return linear_cross_entropy_sum(features, weight, targets, chunk_tokens=chunk_tokens)

    return loss


def projected(features, weight, targets):
    return cross_entropy_sum(nn.functional.linear(features, weight), targets)


def in_float64(features, weight, targets):
    kept = targets != IGNORE_INDEX
    logits = torch.einsum("btd,vd->btv", features.double(), weight.double())
    log_probs = logits - logits.exp().sum(-1, keepdim=True).log()
    return -log_probs[kept].gather(-1, targets[kept].unsqueeze(-1)).sum()


every_chunk = pytest.mark.parametrize("chunk_tokens", [1, 8, N - 1, N, 1000])


@every_chunk
@pytest.mark.parametrize("block", [1, 40, 2**18], ids=["row", "few_rows", "whole"])
def test_it_is_the_formula_in_float64(parts, chunk_tokens, block, monkeypatch):
    monkeypatch.setitem(row_blocks.BLOCK_ELEMENTS, "cpu", block)
    for found, expected in zip(
        loss_and_grads(chunked(chunk_tokens), *parts),
        loss_and_grads(in_float64, *parts),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)
        assert found.dtype == torch.float32


@every_chunk
def test_it_is_the_cross_entropy_of_all_logits(parts, chunk_tokens):
    for found, expected in zip(
        loss_and_grads(chunked(chunk_tokens), *parts),
        loss_and_grads(projected, *parts),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_in_float64_its_gradients_are_the_differences_of_its_values(parts):
    features, weight, targets = parts
    leaves = (features.double().requires_grad_(), weight.double().requires_grad_())

    def loss(features, weight):
        return linear_cross_entropy_sum(features, weight, targets, chunk_tokens=8)

    # Not gradcheck, which goes backward twice.
    grads = torch.autograd.grad(loss(*leaves), leaves)
    with torch.no_grad():
        for leaf, grad in zip(leaves, grads, strict=True):
            for index in ((0,) * leaf.ndim, (1,) * leaf.ndim, (2,) * leaf.ndim):
                values = []
                for step in (1e-5, -1e-5):
                    leaf[index] += step
                    values.append(loss(*leaves))
                    leaf[index] -= step
                torch.testing.assert_close((values[0] - values[1]) / 2e-5, grad[index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_type_and_the_rest_is_float32(parts, dtype):
    features, weight, targets = parts

    def rounded(function):
        def loss(features, weight, targets):
            with torch.autocast("cpu", dtype=dtype):
                return function(features, weight, targets)

        return loss

    found = loss_and_grads(rounded(chunked(8)), features, weight, targets)
    expected = loss_and_grads(rounded(projected), features, weight, targets)
    exact = loss_and_grads(projected, features, weight, targets)
    for one, other, precise in zip(found, expected, exact, strict=True):
        assert one.dtype == torch.float32
        error, usual = (one - precise).norm(), (other - precise).norm()
        assert 0 < error < 2 * usual


def test_gradients_have_the_type_of_what_they_belong_to(parts):
    features, weight, targets = parts
    loss, of_features, of_weight = loss_and_grads(
        chunked(8), features.bfloat16(), weight.bfloat16(), targets
    )
    assert (loss.dtype, of_features.dtype, of_weight.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )


def test_the_weights_gradient_does_not_round_more_with_more_chunks():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2048, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    targets = torch.randint(0, V, (2048,), generator=generator)

    def in_bfloat16(features, weight, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy_sum(features, weight, targets, chunk_tokens=4)

    *_, found = loss_and_grads(in_bfloat16, features, weight, targets)
    *_, exact = loss_and_grads(projected, features, weight, targets)
    assert (found - exact).norm() < 0.005 * exact.norm()


def test_an_ignored_target_has_neither_loss_nor_gradient(parts):
    features, weight, targets = parts
    ignored = targets == IGNORE_INDEX
    changed = features.clone()
    changed[ignored] = 50.0
    one = loss_and_grads(chunked(8), features, weight, targets)
    other = loss_and_grads(chunked(8), changed, weight, targets)
    assert (one[1][ignored] == 0).all()
    assert all(map(torch.equal, one, other))


def test_without_targets_the_loss_is_zero_and_so_are_the_gradients(parts):
    features, weight, targets = parts
    for x, y in ((features, torch.full_like(targets, IGNORE_INDEX)), (features[:0], targets[:0])):
        loss, of_features, of_weight = loss_and_grads(chunked(8), x, weight, y)
        assert loss == 0
        assert (of_features == 0).all()
        assert (of_weight == 0).all()


@pytest.mark.parametrize("trained", [0, 1])
def test_only_what_is_trained_gets_a_gradient(parts, trained):
    *leaves, targets = parts
    leaves[trained].requires_grad_()
    linear_cross_entropy_sum(*leaves, targets, chunk_tokens=8).backward()
    expected = loss_and_grads(projected, *parts)[1 + trained] / 0.3
    torch.testing.assert_close(leaves[trained].grad, expected, rtol=1e-5, atol=1e-5)
    assert leaves[1 - trained].grad is None


class CountsProducts(TorchDispatchMode):
    """Counts matrix products, the elements of the largest result, and places that hold logits."""

    def __init__(self):
        super().__init__()
        self.products = self.largest = 0
        self.places = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.name() in ("aten::mm", "aten::mm.out", "aten::addmm_")
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
            if "mm" in func.name() and out.shape[1] == V:
                self.places.add(out.untyped_storage().data_ptr())
        return out


def test_the_logits_never_exist_all_at_once_and_are_computed_once(parts):
    features, weight, targets = parts
    leaves = features.requires_grad_(), weight.requires_grad_()
    with CountsProducts() as counted:
        linear_cross_entropy_sum(*leaves, targets, chunk_tokens=N // 5).backward()
    assert counted.largest <= N * D < N * V
    assert counted.products == 3 * 5
    assert len(counted.places) == 1


def test_evaluation_multiplies_once_for_each_chunk(parts):
    *leaves, targets = parts
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.no_grad(), CountsProducts() as counted:
        loss = linear_cross_entropy_sum(*leaves, targets, chunk_tokens=N // 5)
    assert counted.products == 5
    assert not loss.requires_grad


def test_a_second_backward_pass_is_an_error(parts):
    *leaves, targets = parts
    leaves[0].requires_grad_()
    loss = linear_cross_entropy_sum(*leaves, targets, chunk_tokens=8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_value_that_is_not_a_number_shows_in_the_loss(parts):
    features, weight, targets = parts
    features[1, 1] = torch.nan
    assert linear_cross_entropy_sum(features, weight, targets, chunk_tokens=8).isnan()


def batch_of(num_rows=3, num_tokens=9):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, 19, (num_rows, num_tokens), generator=generator)
    targets = torch.randint(2, 19, (num_rows, num_tokens), generator=generator)
    targets[0, 4:] = IGNORE_INDEX
    count = int((targets != IGNORE_INDEX).sum())
    return Batch(tokens=tokens, targets=targets, num_targets=count, sample_ids=[0] * num_rows)


def trained(cfg, criterion):
    """Loss, auxiliary loss and gradients of a model."""
    model = build_model(cfg, vocab_size=19, padding_idx=1, seed=1, device=CPU).train()
    criterion = build_criterion(criterion)
    criterion.check_model(model)
    torch.manual_seed(2)
    output = criterion(model, batch_of())
    loss = output.loss_sum / output.num_targets + (output.aux_loss or 0.0)
    loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


MODELS = {
    "untied": TransformerConfig(**SMALL, dropout=0.1),
    "tied": TransformerConfig(**SMALL, share_decoder_input_output_embed=True),
    "no_final_norm": TransformerConfig(**SMALL, decoder_normalize_before=False),
    "retnet": RetNetConfig(**RETNET),
    "recomputed": TransformerConfig(**SMALL, checkpoint_activations=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_alike_with_and_without_chunks(name):
    whole, expected = trained(MODELS[name], CrossEntropyConfig())
    chunks, found = trained(MODELS[name], CrossEntropyConfig(cross_entropy_chunk_tokens=4))
    torch.testing.assert_close(chunks.loss_sum, whole.loss_sum, rtol=1e-6, atol=0)
    assert chunks.num_targets == whole.num_targets
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)


def test_experts_are_trained_alike_with_and_without_chunks():
    cfg = TransformerConfig(**SMALL, moe_freq=2, moe_expert_count=4)
    whole, expected = trained(cfg, MoECrossEntropyConfig())
    chunks, found = trained(cfg, MoECrossEntropyConfig(cross_entropy_chunk_tokens=4))
    assert chunks.aux_loss == whole.aux_loss
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)


def test_an_encoder_decoder_computes_a_loss_in_place_of_logits():
    cfg = TransformerMTConfig(**SMALL, **ENCODER)
    model = build_model(cfg, vocab_size=19, padding_idx=1, seed=1, device=CPU).eval()
    batch = batch_of()
    whole = model(batch.tokens, batch.tokens)
    output = model(
        batch.tokens, batch.tokens, loss=lambda x, w, mesh: chunked(4)(x, w, batch.targets)
    )
    assert output.logits is None
    torch.testing.assert_close(output.loss, cross_entropy_sum(whole.logits, batch.targets))


def test_a_model_that_gives_logits_alone_is_refused():
    cfg = CrossEntropyConfig(cross_entropy_chunk_tokens=4)
    with pytest.raises(ConfigError, match="--cross-entropy-chunk-tokens needs a model that"):
        build_criterion(cfg).check_model(nn.Linear(2, 2))
    build_criterion(CrossEntropyConfig()).check_model(nn.Linear(2, 2))


def test_a_subclass_with_settings_of_its_own_has_no_chunks():
    model = build_model(MODELS["tied"], vocab_size=19, padding_idx=1, seed=1, device=CPU)
    criterion = CrossEntropy(ScalerunDataclass())
    criterion.check_model(model)
    expected = build_criterion(CrossEntropyConfig())(model, batch_of())
    assert criterion(model, batch_of()).loss_sum == expected.loss_sum


@pytest.mark.parametrize("config", [CrossEntropyConfig, MoECrossEntropyConfig])
def test_a_negative_number_of_tokens_is_refused(config):
    with pytest.raises(ConfigError, match="--cross-entropy-chunk-tokens is -1; give a number"):
        config(cross_entropy_chunk_tokens=-1).validate()
