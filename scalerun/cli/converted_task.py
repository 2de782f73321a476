"""The task of a converted encoder or encoder-decoder: what its rows of the embedding mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scalerun.data.parallel.binarised_pairs import find_languages
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.fairseq_tokenizer import load_vocabulary
from scalerun.data.tokenizers.piece_tokenizer import PieceTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.tasks.pretraining import PretrainingConfig
from scalerun.tasks.translation_config import TranslationConfig

LONGEST_SAMPLE = 1024


@dataclass(frozen=True)
class VocabularyFlags:
    """What the converter was told of the vocabulary."""

    tokenizer: str | None = None
    dict_: str | None = None
    vocabulary: str | None = None
    """Folder with the dictionaries of two languages."""
    source_lang: str | None = None
    target_lang: str | None = None


def task_settings(
    kind: str, flags: VocabularyFlags, *, rows: Mapping[str, int], positions: int | None
) -> ScalerunDataclass | None:
    """The settings of the task that trains such a model; None where no vocabulary is given.

    Args:
        kind: of the model: ``mlm`` or ``encoder_decoder``.
        rows: of the embedding of each stack: ``encoder``, ``decoder``.
        positions: tokens that the model takes at most; None for no limit.

    Raises:
        UserError: the vocabulary is given in another way than such a model needs, or has another
            size than the embedding.
    """
    if kind == "mlm":
        return _pretraining(flags, rows["encoder"], positions)
    return _translation(flags, rows)


def _pretraining(
    flags: VocabularyFlags, num_rows: int, positions: int | None
) -> ScalerunDataclass | None:
    if flags.vocabulary is not None:
        raise UserError(
            "--vocabulary is for an encoder-decoder; a masked language model needs its "
            "sentencepiece model and dict.txt: --tokenizer and --dict"
        )
    if flags.tokenizer is None:
        return None
    if flags.dict_ is None:
        raise UserError(
            "--tokenizer of a masked language model is not enough: dict.txt has the order of its "
            "rows; give it with --dict, or leave --tokenizer out"
        )
    tokenizer = PieceTokenizer(Path(flags.tokenizer), Path(flags.dict_))
    _check_rows("encoder", tokenizer, num_rows, f"--dict {flags.dict_}")
    return PretrainingConfig(
        spm_model=flags.tokenizer,
        dict_file=flags.dict_,
        tokens_per_sample=min(positions or LONGEST_SAMPLE, LONGEST_SAMPLE),
    ).named("pretraining")


def _translation(flags: VocabularyFlags, rows: Mapping[str, int]) -> ScalerunDataclass | None:
    if flags.tokenizer is not None:
        raise UserError(
            "--tokenizer does not tell the rows of an encoder-decoder; give --vocabulary FOLDER, "
            "the binarised pairs that it was trained on, with a dict.txt of each language"
        )
    if flags.vocabulary is None:
        return None
    folder = Path(flags.vocabulary)
    if not folder.is_dir():
        raise UserError(
            f"--vocabulary {folder} is no folder; give one of binarised pairs, or one with the "
            "dict.txt of each language"
        )
    languages = flags.source_lang, flags.target_lang
    source, target = languages if all(languages) else find_languages(folder)
    assert source is not None
    assert target is not None
    for stack, language in (("encoder", source), ("decoder", target)):
        tokenizer = load_vocabulary(folder, language)
        named = str(next(iter(tokenizer.files.values())))
        _check_rows(stack, tokenizer, rows[stack], named)
    return TranslationConfig(
        data=flags.vocabulary,
        source_lang=source,
        target_lang=target,
        vocabulary=flags.vocabulary,
    ).named("translation")


def _check_rows(stack: str, tokenizer: BaseTokenizer, num_rows: int, named: str) -> None:
    dictionary = tokenizer.dictionary
    if len(dictionary) != num_rows:
        raise UserError(
            f"the {stack}'s embedding has {num_rows} rows, but {named} has "
            f"{dictionary.num_real_symbols} symbols and asks for {len(dictionary)} rows; give the "
            "vocabulary that the model was trained with, or none"
        )


def criterion_for(task: ScalerunDataclass | None, *, has_experts: bool) -> str:
    """The name of the loss that trains a task's model."""
    masked = isinstance(task, PretrainingConfig)
    if has_experts and task is not None:
        return "masked_lm_moe_cross_entropy" if masked else "moe_cross_entropy"
    return "masked_lm" if masked else "cross_entropy"
