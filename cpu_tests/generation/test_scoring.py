import pytest
import torch

from scalerun.data.batch import IGNORE_INDEX
from scalerun.distributed.precision import choose_precision
from scalerun.generation.scoring import TokenScorer, target_logprobs
from scalerun.models import ARCH_REGISTRY
from scalerun.models.base_model import build_model

CPU = torch.device("cpu")
VOCAB = 40


@pytest.fixture(scope="module", params=["lm_tiny", "retnet_tiny"])
def model(request):
    cfg = ARCH_REGISTRY.config_for(request.param)
    return build_model(cfg, vocab_size=VOCAB, padding_idx=1, seed=3, device=CPU).eval()


def scorer(model, batch_size):
    precision = choose_precision(fp16=False, bf16=False, device=CPU)
    return TokenScorer(model, pad_id=1, precision=precision, batch_size=batch_size)


PAIRS = [([2], [5, 6, 7]), ([2, 8, 9, 10, 11], [12]), ([2, 30], []), ([2, 5], [6, 7, 8, 9])]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_score_is_that_of_each_token_alone_whatever_it_is_batched_with(model, batch_size):
    scores = scorer(model, batch_size).score(PAIRS)
    for (context, continuation), score in zip(PAIRS, scores, strict=True):
        expected, greedy = [], True
        for place, token in enumerate(continuation):
            with torch.no_grad():
                read = torch.tensor([[*context, *continuation[:place]]])
                logits = model(read).logits[0, -1].double()
            expected.append(logits.log_softmax(-1)[token].item())
            greedy &= int(logits.argmax()) == token
        assert score.logprobs == pytest.approx(expected, abs=1e-5)
        assert score.is_greedy == greedy


def test_what_the_model_would_say_is_greedy(model):
    context = [2, 4]
    for _ in range(3):
        with torch.no_grad():
            context.append(int(model(torch.tensor([context])).logits[0, -1].argmax()))
    same, other = scorer(model, 2).score([([2, 4], context[2:]), ([2, 4], [*context[2:4], 3])])
    assert same.is_greedy
    assert other.is_greedy == (context[4] == 3)


def test_logprobs_are_those_of_the_softmax_and_0_without_a_target():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, 4, IGNORE_INDEX], [2, IGNORE_INDEX, 1]])
    found = target_logprobs(logits, targets)
    for i in range(2):
        for j in range(3):
            target = targets[i, j]
            probabilities = logits[i, j].exp() / logits[i, j].exp().sum()
            expected = 0.0 if target == IGNORE_INDEX else probabilities[target].log().item()
            assert found[i, j].item() == pytest.approx(expected)
    assert target_logprobs(logits.bfloat16(), targets).dtype == torch.float32
