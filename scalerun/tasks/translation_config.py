"""What a translation run is told about its pairs of lines."""

from __future__ import annotations

from dataclasses import dataclass

from scalerun.data.parallel.binarised_pairs import PairFolder, find_languages, has_pairs
from scalerun.data.text.layout import data_folder
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.tasks.eval_bleu import EvalBleuConfig
from scalerun.tasks.text_files import TextFilesConfig

NO_VOCABULARY = (
    "--tokenizer is required for a joint vocabulary, or --source-tokenizer and "
    "--target-tokenizer for two: bytes, a sentencepiece .model file or a tokenizers .json file"
)


@dataclass
class TranslationConfig(EvalBleuConfig, TextFilesConfig):
    """Where the parallel text is and how it becomes tokens."""

    data: str = option("", "folder with train.SOURCE, train.TARGET, valid.SOURCE…", positional=True)
    source_lang: str | None = option(
        None, "what the names of the source files end in, such as en", aliases=("-s",)
    )
    target_lang: str | None = option(
        None, "what the names of the target files end in, such as es", aliases=("-t",)
    )
    tokenizer: str | None = option(
        None,
        "joint vocabulary of both sides: bytes, a sentencepiece .model file, or a tokenizers "
        ".json file",
    )
    source_tokenizer: str | None = option(
        None, "vocabulary of the source alone, with --target-tokenizer"
    )
    target_tokenizer: str | None = option(
        None, "vocabulary of the target alone, with --source-tokenizer"
    )

    vocabulary: str | None = option(
        None, "folder with the dict.LANG.txt of binarised pairs (default: DATA)"
    )

    def validate(self) -> None:
        super().validate()
        if not self.data:
            raise ConfigError("the data folder is missing: give it as the first argument")
        if self.source_lang is not None and self.source_lang == self.target_lang:
            raise ConfigError(
                f"--source-lang and --target-lang are both {self.source_lang}; give two endings"
            )
        separate = (self.source_tokenizer, self.target_tokenizer)
        if self.tokenizer is not None and any(separate):
            raise ConfigError(
                "--tokenizer is for both sides; give it alone, or --source-tokenizer and "
                "--target-tokenizer"
            )
        if any(separate) and not all(separate):
            raise ConfigError(NO_VOCABULARY)
        if self.vocabulary is not None and self.has_tokenizers:
            raise ConfigError(
                "--vocabulary names a folder of dictionaries, which tokenizers have no use for; "
                "leave one of them out"
            )

    @property
    def has_tokenizers(self) -> bool:
        """Whether tokenizers are named; else dictionaries are the vocabularies."""
        return self.tokenizer is not None or self.source_tokenizer is not None

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target, once they are known."""
        assert self.source_lang is not None
        assert self.target_lang is not None
        return self.source_lang, self.target_lang

    def pairs(self) -> PairFolder | None:
        """The binarised pairs in the data folder; None where there is text.

        Raises:
            UserError: the folder is not there.
        """
        folder = data_folder(self.data)
        return PairFolder(folder, *self.languages) if has_pairs(folder) else None


def with_languages(cfg: TranslationConfig) -> TranslationConfig:
    """The settings with both languages, from the names of binarised files where need be.

    Raises:
        ConfigError: they do not follow.
        UserError: the data folder is not there.
    """
    if cfg.source_lang is None or cfg.target_lang is None:
        folder = data_folder(cfg.data)
        if not has_pairs(folder):
            missing = "--source-lang" if cfg.source_lang is None else "--target-lang"
            raise ConfigError(f"{missing} is required: the ending of its files, such as en")
        found = find_languages(folder)
        given = [lang for lang in (cfg.source_lang, cfg.target_lang) if lang is not None]
        if not set(given) <= set(found):
            raise ConfigError(f"{cfg.data} has pairs of {' and '.join(found)}, not of {given[0]}")
        if cfg.source_lang == found[1] or cfg.target_lang == found[0]:
            found = found[::-1]
        cfg = cfg.replace(source_lang=found[0], target_lang=found[1])
    return cfg
