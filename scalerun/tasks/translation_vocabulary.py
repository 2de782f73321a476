"""The vocabularies of a translation run: tokenizers, or the dictionaries of binarised pairs."""

from __future__ import annotations

from pathlib import Path

from scalerun.data.parallel.binarised_pairs import has_pairs
from scalerun.data.text.layout import data_folder
from scalerun.data.tokenizers.fairseq_dictionary import read_fairseq_dictionary
from scalerun.data.tokenizers.fairseq_tokenizer import dictionary_file, load_vocabulary
from scalerun.data.tokenizers.tokenizer import BYTES, BaseTokenizer, load_tokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.tasks.translation_config import NO_VOCABULARY, TranslationConfig


def load_vocabularies(cfg: TranslationConfig) -> tuple[BaseTokenizer, BaseTokenizer]:
    """The tokenizers of source and target; one object where the vocabulary is joint.

    Dictionaries are joint where they list the same symbols in the same order.

    Args:
        cfg: with both languages.

    Raises:
        ConfigError: there is neither a tokenizer nor a dictionary.
        UserError: a file is missing or damaged.
    """
    if cfg.tokenizer is not None:
        joint = load_tokenizer(cfg.tokenizer)
        return joint, joint
    if cfg.has_tokenizers:
        return (
            load_tokenizer(cfg.source_tokenizer, flag="--source-tokenizer"),
            load_tokenizer(cfg.target_tokenizer, flag="--target-tokenizer"),
        )
    folder = data_folder(cfg.data) if cfg.vocabulary is None else Path(cfg.vocabulary)
    if cfg.vocabulary is None and not has_pairs(folder):
        raise ConfigError(NO_VOCABULARY)
    source, target = (load_vocabulary(folder, language) for language in cfg.languages)
    return (target, target) if source.digest == target.digest else (source, target)


def check_vocabularies(cfg: TranslationConfig, folder: Path) -> None:
    """Refuse binarised pairs whose tokens have another meaning than the run's.

    Raises:
        UserError: names the dictionary.
    """
    for language in cfg.languages:
        path = folder / dictionary_file(language)
        if cfg.has_tokenizers:
            raise UserError(
                f"{folder} has binarised pairs, whose vocabulary is {path.name} and no tokenizer's "
                "own; leave --tokenizer, --source-tokenizer and --target-tokenizer out"
            )
        if cfg.vocabulary is None or not path.exists():
            continue
        own = Path(cfg.vocabulary) / path.name
        if read_fairseq_dictionary(path, flag="") != read_fairseq_dictionary(own, flag=""):
            raise UserError(
                f"{path} is not the dictionary in {cfg.vocabulary}, so the tokens have another "
                "meaning; binarise the text with that one: --srcdict and --tgtdict, or the same "
                "--tokenizer"
            )


def vocabulary_files(
    cfg: TranslationConfig, source: BaseTokenizer, target: BaseTokenizer
) -> dict[str, Path]:
    """What a checkpoint must carry, by the names that it has there."""
    if source is target and cfg.has_tokenizers:
        return dict(source.files)
    if cfg.has_tokenizers:
        return {
            _asset(side, name): path
            for side, tokenizer in (("source", source), ("target", target))
            for name, path in tokenizer.files.items()
        }
    # A joint vocabulary has read the dictionary of one language; the other's is its equal.
    folder = next(iter(target.files.values())).parent
    listings = {name: folder / name for name in map(dictionary_file, cfg.languages)}
    return {**source.files, **target.files, **listings}


def with_vocabulary_files(cfg: TranslationConfig, folder: Path) -> TranslationConfig:
    """The settings with what :func:`vocabulary_files` names read from a folder."""
    if not cfg.has_tokenizers:
        return cfg.replace(vocabulary=str(folder))
    changes = {}
    if cfg.tokenizer not in (None, BYTES):
        changes["tokenizer"] = str(folder / Path(cfg.tokenizer).name)
    for side in ("source", "target"):
        spec = getattr(cfg, f"{side}_tokenizer")
        if spec not in (None, BYTES):
            changes[f"{side}_tokenizer"] = str(folder / _asset(side, Path(spec).name))
    return cfg.replace(**changes)


def _asset(side: str, name: str) -> str:
    """What a checkpoint calls the file of one side's tokenizer."""
    return f"{side}-{name}"
