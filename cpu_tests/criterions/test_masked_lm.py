"""The loss is that of the formula, however sequences are batched and padded."""

import math

import numpy as np
import pytest
import torch

from cpu_tests.world import run_world
from scalerun.criterions.base_criterion import CRITERION_REGISTRY, build_criterion
from scalerun.criterions.masked_lm import count_correct
from scalerun.data.batch import IGNORE_INDEX
from scalerun.data.masked.masked_batch import MaskedCollater
from scalerun.data.masked.masking import Masking
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.base_model import build_model
from scalerun.models.transformer_lm import lm_tiny
from scalerun.models.transformer_mlm import mlm_tiny
from scalerun.modules.moe.router import Router

VOCAB = 40
SIZES = {
    "encoder_layers": 2, "encoder_embed_dim": 16, "encoder_attention_heads": 2,
    "encoder_ffn_embed_dim": 32,
}  # fmt: skip
EXPERTS = {
    "moe_freq": 1, "moe_expert_count": 4, "moe_second_expert_policy": "all",
    "moe_eval_capacity_token_fraction": 1.0,
}  # fmt: skip
MASKING = Masking(0.3, 3.0, 0.1, 0.1, 30, (4, 30))


def make_model(**settings):
    cfg = mlm_tiny().replace(**SIZES, **settings)
    model = build_model(
        cfg, vocab_size=VOCAB, padding_idx=1, seed=1, device=torch.device("cpu")
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    return model.eval()


def make_criterion(name="masked_lm", **settings):
    return build_criterion(CRITERION_REGISTRY.config_for(name).replace(**settings)).eval()


def make_blocks(lengths=(9, 14, 3, 11, 14)):
    draw = np.random.default_rng(0)
    return [MASKING(draw.integers(4, 30, size=n), 1, i) for i, n in enumerate(lengths)]


def collate(blocks, length=None):
    return MaskedCollater(1, length, 8)(blocks, range(len(blocks)))


@torch.no_grad()
def test_the_loss_is_the_formulas_in_float64():
    model, batch = make_model(), collate(make_blocks())
    output = make_criterion()(model, batch)
    logits = model(batch.tokens, padding_mask_BT=batch.padding).logits
    total = correct = count = 0.0
    for b in range(batch.tokens.shape[0]):
        for t in range(batch.tokens.shape[1]):
            target = batch.targets[b, t].item()
            if target == IGNORE_INDEX:
                continue
            row = logits[b, t].tolist()
            total += math.log(math.fsum(map(math.exp, row))) - row[target]
            correct += max(range(VOCAB), key=row.__getitem__) == target
            count += 1
    assert output.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert output.num_targets == count > 0
    assert output.num_correct == correct
    assert output.stats["accuracy"] == (pytest.approx(correct / count), count)


def test_the_head_computes_the_hidden_tokens_alone():
    model, batch = make_model(), collate(make_blocks())
    shapes = []
    model.head.register_forward_hook(lambda head, args, logits: shapes.append(logits.shape))
    make_criterion()(model, batch)
    assert shapes == [(batch.num_targets, VOCAB)]


@pytest.mark.parametrize("experts", [False, True])
def test_batching_and_padding_change_nothing(experts):
    model = make_model(**EXPERTS) if experts else make_model()
    name = "masked_lm_moe_cross_entropy" if experts else "masked_lm"
    criterion, blocks = make_criterion(name), make_blocks()
    reference = criterion(model, collate(blocks))
    reference.loss_sum.backward()
    gradient = model.embedding.tokens.weight.grad.clone()
    for cuts, length in (([0, 5], 20), ([0, 1, 5], None), ([0, 2, 4, 5], 14), ([0, 5], 14)):
        model.zero_grad()
        parts = [collate(blocks[a:b], length) for a, b in zip(cuts, cuts[1:], strict=False)]
        outputs = [criterion(model, part) for part in parts]
        total = sum(output.loss_sum for output in outputs)
        total.backward()
        assert total.item() == pytest.approx(reference.loss_sum.item(), rel=1e-9)
        assert sum(o.num_correct for o in outputs) == reference.num_correct
        torch.testing.assert_close(model.embedding.tokens.weight.grad, gradient)
        if experts and len(parts) == 1:
            torch.testing.assert_close(outputs[0].aux_loss, reference.aux_loss)


@torch.no_grad()
@pytest.mark.parametrize("combine", ["sum", "average"])
@pytest.mark.parametrize("transform", ["none", "neg_log"])
def test_the_gate_loss_is_the_formulas_in_float64_without_padding(combine, transform):
    model, batch = make_model(**EXPERTS), collate(make_blocks(), 17)
    seen = []
    for module in model.modules():
        if isinstance(module, Router):
            module.gate.register_forward_hook(lambda gate, args, logits: seen.append(logits))
    criterion = make_criterion(
        "masked_lm_moe_cross_entropy",
        moe_gate_loss_wt=0.25,
        moe_gate_loss_combine_method=combine,
        moe_gate_loss_transform=transform,
    )
    output = criterion(model, batch)
    real = ~batch.padding.t().reshape(-1)  # tokens are routed in the order of time
    losses = []
    for logits_SE in seen:
        probs_SE = torch.exp(logits_SE) / torch.exp(logits_SE).sum(1, keepdim=True)
        num_experts, count = logits_SE.shape[1], int(real.sum())
        loss = 0.0
        for e in range(num_experts):
            mean = sum(probs_SE[s, e].item() for s in range(len(real)) if real[s]) / count
            share = (
                sum(1 for s in range(len(real)) if real[s] and int(logits_SE[s].argmax()) == e)
                / count
            )
            loss += num_experts * mean * share
        losses.append(loss)
    assert len(losses) == 2
    expected = sum(losses) / (len(losses) if combine == "average" else 1)
    expected = -math.log(expected) if transform == "neg_log" else expected
    assert output.aux_loss.item() == pytest.approx(0.25 * expected, rel=1e-9)
    assert output.stats["moe_gate_loss"][1] == batch.num_targets
    assert {"entropy_gating", "overflow_expert1", "unused_expert1_count"} <= set(output.stats)


@pytest.mark.parametrize("blocks", [[], make_blocks((1, 1))])
@pytest.mark.parametrize("experts", [False, True])
def test_without_hidden_tokens_the_loss_is_zero(blocks, experts):
    model = (make_model(**EXPERTS) if experts else make_model()).train()
    name = "masked_lm_moe_cross_entropy" if experts else "masked_lm"
    output = make_criterion(name)(model, collate(blocks))
    assert output.num_targets == 0
    assert output.loss_sum.item() == 0.0
    assert output.stats["accuracy"][0] == 0.0
    output.loss_sum.backward()
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def counted_on(rank, logits, targets):
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    return count_correct(logits.chunk(2, 1)[rank], targets, mesh).item()


def test_ranks_that_share_the_vocabulary_count_as_one():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 8, generator=generator)
    targets = torch.randint(8, (30,), generator=generator)
    targets[::3] = logits[::3].argmax(1)
    expected = int((logits.argmax(1) == targets).sum())
    assert count_correct(logits, targets, None) == expected
    assert run_world(2, counted_on, logits, targets) == [expected, expected]


def test_models_and_criterions_that_do_not_fit_are_refused():
    decoder = build_model(
        lm_tiny(), vocab_size=VOCAB, padding_idx=1, seed=1, device=torch.device("meta")
    )
    with pytest.raises(ConfigError, match="--criterion masked_lm needs a model that predicts hid"):
        make_criterion().check_model(decoder)
    with pytest.raises(ConfigError, match="predicts hidden ones; give --criterion masked_lm"):
        make_criterion("cross_entropy").check_model(make_model())
    with pytest.raises(ConfigError, match="masked_lm_moe_cross_entropy for hidden tokens"):
        make_criterion().check_model(make_model(**EXPERTS))
    name = "masked_lm_moe_cross_entropy"
    with pytest.raises(ConfigError, match=rf"--criterion {name} needs .* --criterion masked_lm$"):
        make_criterion(name).check_model(make_model())
    with pytest.raises(UserError, match="whose balance loss this --criterion knows no weight"):
        make_criterion().train()(make_model(**EXPERTS), collate(make_blocks()))
