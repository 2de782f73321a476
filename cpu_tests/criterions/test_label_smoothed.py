import math

import pytest
import torch
from torch import nn

from scalerun.criterions.base_criterion import build_criterion
from scalerun.criterions.label_smoothed import LabelSmoothedCrossEntropyConfig
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_decoder import DecoderOutput


class Logits(nn.Module):
    """A model whose logits are what it is given."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def forward(self, **net_input):
        return DecoderOutput(self.logits * 1)


@pytest.fixture
def batch():
    tokens = torch.randint(0, 9, (3, 4), generator=torch.Generator().manual_seed(1))
    targets = tokens.masked_fill(tokens == 2, IGNORE_INDEX)
    return Batch(tokens, targets, int((targets >= 0).sum()), [0, 1, 2])


@pytest.fixture
def model():
    return Logits(torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(2)) * 3)


def criterion(smoothing=0.1):
    cfg = LabelSmoothedCrossEntropyConfig(label_smoothing=smoothing)
    return build_criterion(cfg.named("label_smoothed_cross_entropy"))


def test_the_loss_and_what_is_logged_beside_it(model, batch):
    output = criterion()(model, batch)
    log_probs = model.logits.double().log_softmax(-1)
    kept = batch.targets >= 0
    nll = -log_probs[kept].gather(1, batch.targets[kept][:, None]).sum()
    everything = -log_probs[kept].sum()
    share = 0.1 / 8
    assert output.loss_sum.item() == pytest.approx(
        ((1 - 0.1 - share) * nll + share * everything).item(), rel=1e-6
    )
    assert output.nll_sum.item() == pytest.approx(nll.item(), rel=1e-6)
    assert not output.nll_sum.requires_grad
    bits, weight = output.stats["nll_loss"]
    assert weight == batch.num_targets
    assert bits.item() * weight * math.log(2) == pytest.approx(nll.item(), rel=1e-6)


def test_a_batch_without_targets_costs_nothing(model):
    empty = Batch(torch.zeros(3, 4, dtype=torch.long), torch.full((3, 4), IGNORE_INDEX), 0, [])
    output = criterion()(model, empty)
    output.loss_sum.backward()
    assert output.loss_sum.item() == output.nll_sum.item() == 0
    assert not model.logits.grad.any()


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_a_share_that_is_none_is_refused(smoothing):
    with pytest.raises(ConfigError, match="--label-smoothing is"):
        LabelSmoothedCrossEntropyConfig(label_smoothing=smoothing).validate()
