"""BLEU of a validation set: translations are searched for and compared with the references."""

from __future__ import annotations

from dataclasses import dataclass, fields

from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.joined_pieces import POST_PROCESSES, join_pieces, reference_text
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.distributed.ranks import Control, Ranks
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.logging.translation_scores import (
    SCORES,
    TOKENIZERS,
    require_sacrebleu,
    score_translations,
)
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.tasks.base_scorer import BaseScorer
from scalerun.tasks.translator import SearchSettings, Translator


@dataclass
class EvalBleuConfig(ScalerunDataclass):
    """Whether and how validation translates."""

    eval_bleu: bool = option(
        False, "translate the validation sets too, and report sacreBLEU's BLEU and chrF"
    )
    eval_bleu_beam: int = option(
        5, "hypotheses of a sentence in that; 1 takes the likeliest token each time"
    )
    eval_bleu_lenpen: float = option(
        1.0, "score = log-probability / length ** lenpen: larger prefers longer translations"
    )
    eval_bleu_max_len_a: float = option(
        1.2, "longest translation: this many tokens for each token of the source, and"
    )
    eval_bleu_max_len_b: int = option(10, "this many tokens more")
    eval_bleu_post_process: str | None = option(
        None,
        "join the pieces of subword_nmt (ending in @@) or sentencepiece before texts are compared, "
        "where the vocabulary lists them as words",
        choices=POST_PROCESSES,
    )
    eval_bleu_tokenize: str = option(
        "13a", "how sacreBLEU cuts texts into words; zh for Chinese", choices=TOKENIZERS
    )

    def validate(self) -> None:
        for field in fields(EvalBleuConfig):
            if not self.eval_bleu and getattr(self, field.name) != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                raise ConfigError(f"{flag} has no effect without --eval-bleu; add it")
        self.search_settings().check("--eval-bleu-")

    def score_names(self) -> tuple[str, ...]:
        """What validation measures besides the loss.

        Raises:
            ConfigError: sacreBLEU is not installed.
        """
        if not self.eval_bleu:
            return ()
        require_sacrebleu("--eval-bleu")
        return SCORES

    def build_scorer(
        self, model: EncoderDecoder, tokenizer: BaseTokenizer, *, pad: int, ranks: Ranks
    ) -> BleuScorer:
        """What measures it in one pass.

        Args:
            tokenizer: of the target.
            pad: fills short sources.
        """
        control = ranks.control if ranks.size > 1 else None
        generator = SequenceGenerator(model, tokenizer, control=control)
        return BleuScorer(
            Translator(generator, self.search_settings()),
            pad=pad,
            tokenize=self.eval_bleu_tokenize,
            post_process=self.eval_bleu_post_process,
            control=ranks.control,
        )

    def search_settings(self) -> SearchSettings:
        """How validation searches."""
        return SearchSettings(
            beam=self.eval_bleu_beam,
            lenpen=self.eval_bleu_lenpen,
            max_len_a=self.eval_bleu_max_len_a,
            max_len_b=self.eval_bleu_max_len_b,
        )


class BleuScorer(BaseScorer):
    """Translates the sources of each batch; ranks translate together, each its own batches.

    References are the target tokens as text, so what a tokenizer cannot spell is missing in them.

    Args:
        translator: searches.
        pad: fills short sources.
        tokenize: how sacreBLEU cuts texts into words.
        control: gathers the texts of all ranks.
        post_process: how pieces of words are joined.
    """

    def __init__(
        self,
        translator: Translator,
        *,
        pad: int,
        tokenize: str,
        control: Control,
        post_process: str | None = None,
    ) -> None:
        self.translator = translator
        self.pad = pad
        self.tokenizer = translator.generator.tokenizer
        self.tokenize = tokenize
        self.control = control
        self.post_process = post_process
        self._texts: dict[int, tuple[str, str]] = {}
        """Translation and reference by the place of the pair in the set."""

    def add(self, batch: Batch) -> None:
        assert batch.source is not None
        rows = [[i for i in row if i != self.pad] for row in batch.source.tolist()]
        # A rank without a pair of its own has a row of padding, and joins in.
        sources = [row or [self.pad] for row in rows]
        found = self.control.together(lambda: self.translator.translate(sources))
        targets = batch.targets.tolist()
        for place, answers, target in zip(batch.sample_ids, found, targets, strict=False):
            ids = (i for i in target if i != IGNORE_INDEX)
            texts = answers[0].text, reference_text(self.tokenizer, ids)
            hypothesis, reference = (join_pieces(text, self.post_process) for text in texts)
            self._texts[place] = (hypothesis, reference)

    def scores(self) -> dict[str, float]:
        together: dict[int, tuple[str, str]] = {}
        for texts in self.control.gather(self._texts):
            together |= texts  # ranks that share each matrix product have translated the same
        pairs = [together[place] for place in sorted(together)]
        hypotheses, references = [hyp for hyp, _ in pairs], [ref for _, ref in pairs]
        return score_translations(hypotheses, references, tokenize=self.tokenize).record()
