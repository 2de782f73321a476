from __future__ import annotations

import math
import sys
from collections import Counter

import pytest
import sacrebleu

from scalerun.dataclass.errors import ConfigError
from scalerun.logging.translation_scores import TOKENIZERS, require_sacrebleu, score_translations

HYPOTHESES = ["The cat sat on the mat.", "A dog, it barks at night", "Birds sing"]
REFERENCES = ["The cat sat on a mat.", "The dog barks at night.", "The birds sing early today"]


@pytest.mark.parametrize("tokenize", TOKENIZERS)
def test_the_numbers_are_sacrebleus_own(tokenize: str) -> None:
    found = score_translations(HYPOTHESES, REFERENCES, tokenize=tokenize)
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize)
    assert found.bleu == expected.score
    assert found.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert f"tok:{tokenize}" in found.bleu_signature
    assert sacrebleu.__version__ in found.bleu_signature
    assert found.record() == {"bleu": found.bleu, "chrf": found.chrf}


def test_bleu_is_the_formula_of_the_paper() -> None:
    """Geometric mean of clipped 1- to 4-gram precisions, times the brevity penalty."""
    hypotheses = ["a b c d e f", "b c d e a"]
    references = ["a b c d e e f g", "b c d e f"]
    logs = []
    for n in range(1, 5):
        matches = total = 0
        for pair in zip(hypotheses, references, strict=True):
            words = [text.split() for text in pair]
            grams = [Counter(zip(*(w[i:] for i in range(n)), strict=False)) for w in words]
            matches += sum((grams[0] & grams[1]).values())
            total += sum(grams[0].values())
        logs.append(math.log(matches / total))
    brevity = min(0.0, 1 - 13 / 11)
    expected = 100 * math.exp(sum(logs) / 4 + brevity)
    found = score_translations(hypotheses, references, tokenize="none")
    assert found.bleu == pytest.approx(expected)


def test_texts_that_are_equal_score_100() -> None:
    found = score_translations(REFERENCES, REFERENCES)
    assert found.bleu == pytest.approx(100)
    assert found.chrf == pytest.approx(100)


def test_each_translation_needs_its_reference() -> None:
    with pytest.raises(ValueError, match="3 hypotheses have 2 references"):
        score_translations(HYPOTHESES, REFERENCES[:2])


def test_without_sacrebleu_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigError, match="--eval-bleu needs the sacrebleu package: pip install"):
        require_sacrebleu("--eval-bleu")
