"""Train a tokenizer: ``python -m scalerun.cli.train_tokenizer DATA --output PREFIX.model``."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalerun.checkpoint.atomic import replace_file
from scalerun.cli.entry import run_cli
from scalerun.cli.output_file import prepare_output_file
from scalerun.data.text.jsonl_dataset import JsonlDataset, QuarantinedRecord
from scalerun.data.text.layout import TRAIN, Split, data_folder, find_split
from scalerun.data.text.part import Part, check_valid_fraction
from scalerun.data.text.segment_dataset import SegmentDataset, SegmentFile
from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.data.tokenizers.tokenizer_training import train_byte_level_bpe, train_sentencepiece
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.ranges import at_least
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.logging.console import setup_logging

logger = logging.getLogger("scalerun.cli.train_tokenizer")  # also when run as __main__

SUFFIXES = {"sentencepiece": ".model", "tokenizers": ".json"}
PROBE_DOCUMENTS = 100


@dataclass
class TrainTokenizerConfig(ScalerunDataclass):
    """What ``scalerun.cli.train_tokenizer`` can be told."""

    data: str = option("", "folder of text, laid out as for training", positional=True)
    files: list[str] = option(
        [],
        "files of DATA with one segment a line to train on, such as train.en,train.es, in place of "
        "its training set",
    )
    output: str = option("", "file to write: .model for sentencepiece, .json for tokenizers")
    vocab_size: int = option(8192, "symbols of the vocabulary")
    model_type: str = option("bpe", "kind of model", choices=("bpe", "unigram"))
    library: str = option("sentencepiece", "library of the model", choices=tuple(SUFFIXES))
    character_coverage: float = option(
        0.9995, "share of characters with a symbol of their own; the rest is spelled in bytes"
    )
    sample_megabytes: int = option(
        0, "train on about this many megabytes, taken evenly from the text; 0 for all"
    )
    valid_fraction: float = option(
        0.0, "leave out the documents that training with this --valid-fraction holds out"
    )
    bad_records: str = option(
        "stop", "stop at a record that cannot be read, or skip it", choices=("stop", "skip")
    )

    def validate(self) -> None:
        if not self.data:
            raise ConfigError("the data folder is missing: give it as the first argument")
        suffix = SUFFIXES[self.library]
        if Path(self.output).suffix != suffix:
            raise ConfigError(
                f"--output is {self.output!r}; --library {self.library} writes a file that ends "
                f"in {suffix}"
            )
        at_least("--vocab-size", self.vocab_size, 1)
        at_least("--sample-megabytes", self.sample_megabytes, 0)
        check_valid_fraction(self.valid_fraction)
        if self.files and self.valid_fraction:
            raise ConfigError("--valid-fraction divides a training set; remove it, or --files")
        if not 0.98 <= self.character_coverage <= 1:
            raise ConfigError(
                f"--character-coverage is {self.character_coverage:g}; give a share from 0.98 to 1"
            )
        if self.library == "tokenizers" and self.model_type != "bpe":
            raise ConfigError("--library tokenizers makes --model-type bpe only")


def train_tokenizer(cfg: TrainTokenizerConfig) -> Path:
    """Train on the training split of ``cfg.data`` and write ``cfg.output``; return its path.

    The same text and settings give the same file. An existing file is replaced at the very end.

    Raises:
        UserError: the text cannot be read, or the vocabulary does not fit it.
    """
    output = Path(cfg.output)
    prepare_output_file("--output", output)
    split = _named_files(cfg) if cfg.files else find_split(cfg.data, TRAIN)
    texts = read_texts(split, cfg)
    if cfg.library == "tokenizers":
        content = train_byte_level_bpe(texts, vocab_size=cfg.vocab_size)
    else:
        content = train_sentencepiece(
            texts,
            vocab_size=cfg.vocab_size,
            model_type=cfg.model_type,
            character_coverage=cfg.character_coverage,
        )
    replace_file(output, content)
    report(output, itertools.islice(read_texts(split, cfg), PROBE_DOCUMENTS))
    return output


def _named_files(cfg: TrainTokenizerConfig) -> Split:
    root = data_folder(cfg.data)
    for name in cfg.files:
        if not (root / name).is_file():
            raise UserError(f"--files names {name}, and {root / name} is not a file")
    return Split(TRAIN, [[SegmentFile(root / name, name) for name in cfg.files]])


def read_texts(split: Split, cfg: TrainTokenizerConfig) -> Iterator[str]:
    """The documents of a split, or an even sample of them."""
    files = [file for shard in split.shards for file in shard]
    total = sum(file.path.stat().st_size for file in files)
    share = min(cfg.sample_megabytes * 1e6 / max(total, 1), 1.0) if cfg.sample_megabytes else 1.0
    part = Part(cfg.valid_fraction, held_out=False) if cfg.valid_fraction else None
    bad: list[QuarantinedRecord] = []
    on_bad_record = bad.append if cfg.bad_records == "skip" else None
    seen = taken = 0
    reader = SegmentDataset if cfg.files else JsonlDataset
    for file in files:
        for text in reader(file, on_bad_record, part=part):
            seen += len(text)
            if taken < seen * share:
                taken += len(text)
                yield text
    if not seen:
        raise UserError(f"{cfg.data} has no text to train a tokenizer on")
    if bad:
        logger.warning("%d bad records were left out, the first in %s", len(bad), bad[0].file)


def report(output: Path, texts: Iterator[str]) -> None:
    """Say how well the tokenizer compresses some documents."""
    tokenizer = load_tokenizer(str(output))
    num_bytes = num_tokens = 0
    for text in texts:
        num_bytes += len(text.encode())
        num_tokens += len(tokenizer.encode(text))
    logger.info(
        "%s: %d symbols, %.2f bytes per token",
        output,
        tokenizer.dictionary.num_real_symbols,
        num_bytes / max(num_tokens, 1),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write a tokenizer; return the exit code."""
    cfg = parse_config(TrainTokenizerConfig, argv, prog="scalerun-train-tokenizer")
    setup_logging()
    # The libraries do not return to Python while they train, and there is nothing to save.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    train_tokenizer(cfg)
    return 0


def cli_main() -> None:
    """Entry point of ``scalerun-train-tokenizer``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
