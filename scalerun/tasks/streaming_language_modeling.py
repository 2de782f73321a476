"""Language modelling on folders of text, read shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from scalerun.data.base_dataset import BaseDataset
from scalerun.data.collate import Collater
from scalerun.data.mixture_dataset import Mixture
from scalerun.data.streaming_dataset import Recipe, StreamingTextDataset
from scalerun.data.text.document_kind import PLAIN_TEXT, DocumentKind
from scalerun.data.text.layout import TRAIN, VALID, Split, data_folder, find_sets, find_split
from scalerun.data.text.part import Part, check_valid_fraction
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.token_block_dataset import BREAK_MODES, Packing
from scalerun.data.tokenizers.tokenizer import BYTES, BaseTokenizer, load_tokenizer
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import BaseModel
from scalerun.tasks.base_task import BaseTask, register_task
from scalerun.tasks.text_files import TextFilesConfig, usable_cpus

CORPORA_REPORTED = 20


@dataclass
class StreamingLanguageModelingConfig(TextFilesConfig):
    """Where the text is and how it becomes sequences."""

    data: str = option("", "folder with train/<shard>/*.jsonl, or with text files", positional=True)
    tokenizer: str | None = option(
        None, "bytes, a sentencepiece .model file, or a tokenizers .json file"
    )
    vocab_filename: str | None = option(None, "GPT-2 vocab.json, with --merges-filename")
    merges_filename: str | None = option(None, "GPT-2 merges.txt, with --vocab-filename")
    end_of_document_symbol: str | None = option(
        None, "symbol that ends a document (default: the tokenizer's own)"
    )
    final_vocab_size: int | None = option(
        None,
        "rows of embedding and output (default: the tokenizer's symbols, up to a multiple of 8)",
    )
    sample_break_mode: str = option(
        "none",
        "none: cut the stream of documents anywhere; complete: whole documents; eos: one document; "
        "eos_pad_8: one document, padded to a multiple of 8 only",
        choices=BREAK_MODES,
    )
    tokens_per_sample: int = option(1024, "tokens in a sequence")
    document_masking: bool = option(False, "attention stays inside a document")
    reset_positions: bool = option(
        False, "absolute positions count from the start of each document"
    )
    corpus_weights: dict[str, float] = option(
        {}, "shares of the training tokens by corpus (file name), such as web=0.7,books=0.3"
    )
    multicorpus_sampling_alpha: float = option(
        1.0, "share of corpus i in documents is (n_i / sum n)^alpha; 1 reads each document once"
    )
    valid_fraction: float = option(
        0.0, "share of the training documents to hold out as the set valid; 0 for none"
    )

    def validate(self) -> None:
        if not self.data:
            raise ConfigError("the data folder is missing: give it as the first argument")
        if self.tokens_per_sample < 1:
            raise ConfigError(f"--tokens-per-sample is {self.tokens_per_sample}; give 1 or more")
        check_valid_fraction(self.valid_fraction)
        self.mixture()

    def mixture(self) -> Mixture:
        """Shares of the corpora."""
        return Mixture(self.corpus_weights, self.multicorpus_sampling_alpha)


@register_task("streaming_language_modeling", StreamingLanguageModelingConfig)
class StreamingLanguageModelingTask(BaseTask):
    """Predict each token of a text from those before it."""

    kind: ClassVar[DocumentKind] = PLAIN_TEXT
    """What a line of the text files holds."""
    cfg: StreamingLanguageModelingConfig
    tokenizer: BaseTokenizer
    slides_windows = True

    def __init__(
        self,
        cfg: StreamingLanguageModelingConfig,
        tokenizer: BaseTokenizer,
        *,
        seed: int,
        cache_dir: Path,
        quarantine: Path,
    ) -> None:
        super().__init__(cfg)
        self.tokenizer = tokenizer
        self.dictionary = tokenizer.dictionary
        self.sequence_length = cfg.tokens_per_sample
        self.seed = seed
        self.cache_dir = cache_dir
        self.quarantine = QuarantineFile(quarantine)
        self._described: dict[Any, int] = {}
        """Shards of each dataset that the last report covered."""

    def check_model(self, model: BaseModel, model_cfg: ScalerunDataclass) -> None:
        super().check_model(model, model_cfg)
        require_decoder(model, model_cfg, self.cfg)
        if self.cfg.document_masking and not model.masks_documents:
            raise ConfigError(
                f"--document-masking needs attention, and the mixers of --arch {model_cfg._name} "
                "have a rule of their own; remove it"
            )
        if self.cfg.reset_positions and not model.reads_positions:
            raise ConfigError(
                "--reset-positions has no effect without absolute positions, and --arch "
                f"{model_cfg._name} has none with these settings; remove it"
            )

    @classmethod
    def setup_task(
        cls,
        cfg: StreamingLanguageModelingConfig,
        *,
        seed: int,
        cache_dir: Path,
        quarantine: Path,
    ) -> Self:
        tokenizer = load_tokenizer(
            cfg.tokenizer,
            cfg.vocab_filename,
            cfg.merges_filename,
            cfg.end_of_document_symbol,
            final_vocab_size=cfg.final_vocab_size,
        )
        folder = cfg.cache_folder(cache_dir)
        return cls(cfg, tokenizer, seed=seed, cache_dir=folder, quarantine=quarantine)

    def read_dataset(self, split: str, *, training: bool) -> StreamingTextDataset:
        cfg = self.cfg
        if training:
            self._check_division(split)
        files, part = self._text_of(split)
        dataset = StreamingTextDataset(
            files,
            TokenCache(
                self.cache_dir,
                self.tokenizer,
                skip_bad_records=cfg.bad_records == "skip",
                num_threads=usable_cpus(),
                part=part,
                kind=self.kind,
            ),
            recipe=Recipe(
                packing=Packing(
                    cfg.sample_break_mode,
                    cfg.tokens_per_sample,
                    split_long=not training,
                    context_window=0 if training else self.context_window,
                ),
                seed=self.seed if training else None,
                mixture=cfg.mixture() if training else Mixture(),
            ),
            collater=Collater(
                pad_id=self.dictionary.pad,
                document_masking=cfg.document_masking,
                reset_positions=cfg.reset_positions,
                empty_length=cfg.tokens_per_sample,
            ),
            quarantine=self.quarantine,
        )
        dataset.open_first()
        return dataset

    def valid_subsets(self, names: Sequence[str]) -> list[str]:
        return find_sets(self.cfg.data, names, held_out=self._is_divided())

    def _is_divided(self) -> bool:
        """Whether the set ``valid`` is a part of the training text."""
        return self.cfg.valid_fraction > 0 and not (data_folder(self.cfg.data) / VALID).exists()

    def _check_division(self, train_subset: str) -> None:
        """Refuse to train where ``--valid-fraction`` would hold out something else, or nothing."""
        flag = f"--valid-fraction {self.cfg.valid_fraction:g} divides the training text"
        if self.cfg.valid_fraction > 0 and not self._is_divided():
            raise ConfigError(f"{flag}, but {self.cfg.data} has a folder valid; leave the flag out")
        if self._is_divided() and train_subset != TRAIN:
            raise ConfigError(f"{flag} of --train-subset train, not {train_subset}; leave one out")

    def _text_of(self, split: str) -> tuple[Split, Part | None]:
        """The files of a split, and which of their documents belong to it."""
        if split not in (TRAIN, VALID) or not self._is_divided():
            return find_split(self.cfg.data, split), None
        files = replace(find_split(self.cfg.data, TRAIN), name=split)
        return files, Part(self.cfg.valid_fraction, held_out=split == VALID)

    @classmethod
    def with_assets(
        cls, cfg: StreamingLanguageModelingConfig, folder: Path
    ) -> StreamingLanguageModelingConfig:
        if cfg.tokenizer == BYTES:
            return cfg
        if cfg.tokenizer is not None:
            return cfg.replace(tokenizer=str(folder / Path(cfg.tokenizer).name))
        return cfg.replace(
            vocab_filename=str(folder / "vocab.json"), merges_filename=str(folder / "merges.txt")
        )

    def data_report(self) -> list[dict[str, Any]]:
        return new_reports(self._datasets, self._described)


def require_decoder(
    model: BaseModel, model_cfg: ScalerunDataclass, task_cfg: ScalerunDataclass
) -> None:
    """Refuse a model that does not predict the next token.

    Raises:
        ConfigError: it is no decoder.
    """
    if not isinstance(model, BaseDecoder):
        raise ConfigError(
            f"--arch {model_cfg._name} does not predict the next token, which is what --task "
            f"{task_cfg._name} trains; give a decoder, such as --arch lm_base"
        )


def new_reports(
    datasets: Mapping[Any, BaseDataset[Any]], described: dict[Any, int]
) -> list[dict[str, Any]]:
    """What was found while texts were read since the last call.

    Args:
        described: shards of each dataset that the last call covered; brought up to date.
    """
    reports = []
    for key, dataset in datasets.items():
        assert isinstance(dataset, StreamingTextDataset)
        reports += dataset.reports
        dataset.reports = []
        if described.get(key) != len(dataset.summaries):
            described[key] = len(dataset.summaries)
            reports.append(_describe(dataset))
    return reports


def _describe(dataset: StreamingTextDataset) -> dict[str, Any]:
    """Totals of the shards of a split that have been read so far."""
    return {
        "event": "data",
        "subset": dataset.name,
        "shards": dataset.num_shards(),
        "shards_read": len(dataset.summaries),
        "corpora": dataset.split.corpora[:CORPORA_REPORTED],
        "num_corpora": len(dataset.split.corpora),
        "documents": sum(summary.documents for summary in dataset.summaries.values()),
        "tokens": sum(summary.tokens for summary in dataset.summaries.values()),
        **{
            name if name == "lines" else f"lines_{name}": count
            for name, count in asdict(dataset.lines()).items()
        },
        "fingerprint": dataset.fingerprint,
    }
