import math

import pytest
import torch

from scalerun.dataclass.errors import UserError
from scalerun.models.hf.parity import NUM_TOKENS, check_logits, random_tokens


def test_tokens_are_the_same_every_time_and_fit():
    first, second = random_tokens(50, 7), random_tokens(50, 7)
    assert torch.equal(first, second)
    assert first.shape == (2, 7)
    assert int(first.max()) < 50
    assert random_tokens(50, None).shape == (2, NUM_TOKENS)


def test_small_differences_are_told_and_large_ones_refused():
    x = torch.linspace(-0.5, 0.5, 12).view(1, 3, 4)
    assert check_logits(x + 5e-6, x, "it") == pytest.approx(5e-6, rel=0.1)
    with pytest.raises(UserError, match="it computes something else .* differ by up to 2e-05"):
        check_logits(x + 2e-5, x, "it")


def test_the_limit_grows_with_logits_above_1():
    x = 100 * torch.linspace(-1, 1, 12).view(1, 3, 4)
    assert check_logits(x + 9e-4, x, "it") > 1e-5
    with pytest.raises(UserError, match="more than 0.001"):
        check_logits(x + 2e-3, x, "it")


@pytest.mark.parametrize("wrong", [torch.full((1, 3, 4), math.nan), torch.zeros(1, 3, 5)])
def test_what_cannot_be_compared_is_refused(wrong):
    with pytest.raises(UserError, match="nothing is written"):
        check_logits(wrong, torch.zeros(1, 3, 4), "it")
