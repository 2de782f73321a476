"""BLEU and chrF of translations, as sacreBLEU computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError

SCORES = ("bleu", "chrf")
"""Names of the numbers; larger is better."""
TOKENIZERS = ("13a", "intl", "zh", "char", "none")
"""How sacreBLEU may cut texts into the words that BLEU counts."""


@dataclass(frozen=True)
class TranslationScores:
    """Scores of a whole set of translations."""

    bleu: float
    """From 0 to 100 (Papineni et al. 2002, ACL)."""
    chrf: float
    """chrF2, from 0 to 100 (Popovic 2015, WMT)."""
    bleu_details: str
    """Precisions, brevity penalty and lengths behind BLEU."""
    bleu_signature: str
    """Settings and version that make the number comparable (Post 2018, arXiv:1804.08771)."""
    chrf_signature: str

    def record(self) -> dict[str, float]:
        """The numbers under their names in ``metrics.jsonl``."""
        return {"bleu": self.bleu, "chrf": self.chrf}


def require_sacrebleu(what: str) -> None:
    """Refuse to begin what could not be scored in the end.

    Raises:
        ConfigError: the package is not there.
    """
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} needs the sacrebleu package: pip install sacrebleu") from error


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a"
) -> TranslationScores:
    """Score translations against one reference each.

    Args:
        hypotheses: at least one; plain text, not cut into tokens.
        references: in the same order.
        tokenize: one of :data:`TOKENIZERS`.

    Raises:
        ConfigError: sacreBLEU is not installed.
    """
    require_sacrebleu("scoring translations")
    from sacrebleu.metrics import BLEU, CHRF

    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses have {len(references)} references")
    bleu, chrf = BLEU(tokenize=tokenize), CHRF()
    found = bleu.corpus_score(hypotheses, [references])
    return TranslationScores(
        bleu=found.score,
        chrf=chrf.corpus_score(hypotheses, [references]).score,
        bleu_details=found.format(width=2),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )
