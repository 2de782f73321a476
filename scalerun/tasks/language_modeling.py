"""Language modelling on text that was binarised before, by us or by fairseq."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scalerun.data.binarised.binarised_dataset import BinarisedDataset
from scalerun.data.binarised.binarised_layout import find_binarised_sets, find_prefixes
from scalerun.data.binarised.indexed_dataset import IndexedFile
from scalerun.data.collate import Collater
from scalerun.data.text.layout import data_folder
from scalerun.data.token_block_dataset import BREAK_MODES, COMPLETE_DOC, Packing
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.fairseq_tokenizer import DICTIONARY_FILE, load_vocabulary, read_record
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.ranges import at_least
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.models.base_model import BaseModel
from scalerun.tasks.base_task import BaseTask, register_task
from scalerun.tasks.streaming_language_modeling import require_decoder


@dataclass
class LanguageModelingConfig(ScalerunDataclass):
    """Where the binarised text is and how it is cut into sequences."""

    data: str = option("", "folder with dict.txt, train.bin, train.idx, …", positional=True)
    vocabulary: str | None = option(
        None, "folder with dict.txt and the tokenizer, if there is one (default: DATA)"
    )
    sample_break_mode: str = option(
        "none",
        "none: cut the row of items anywhere; complete: whole items; complete_doc: whole items of "
        "one text, where empty lines part the texts; eos: one item; eos_pad_8: one item, padded to "
        "a multiple of 8 only",
        choices=(*BREAK_MODES, COMPLETE_DOC),
    )
    tokens_per_sample: int = option(1024, "tokens in a sequence")

    def validate(self) -> None:
        if not self.data:
            raise ConfigError("the data folder is missing: give it as the first argument")
        at_least("--tokens-per-sample", self.tokens_per_sample, 1)


@register_task("language_modeling", LanguageModelingConfig)
class LanguageModelingTask(BaseTask):
    """Predict each token of a binarised text from those before it."""

    cfg: LanguageModelingConfig
    tokenizer: BaseTokenizer
    vocabulary_source = DICTIONARY_FILE
    slides_windows = True

    def __init__(self, cfg: LanguageModelingConfig, tokenizer: BaseTokenizer, *, seed: int) -> None:
        super().__init__(cfg)
        self.tokenizer = tokenizer
        self.dictionary = tokenizer.dictionary
        self.sequence_length = cfg.tokens_per_sample
        self.seed = seed
        self._reported: set[Any] = set()

    @classmethod
    def setup_task(
        cls, cfg: LanguageModelingConfig, *, seed: int, cache_dir: Path, quarantine: Path
    ) -> Self:
        folder = data_folder(cfg.data) if cfg.vocabulary is None else Path(cfg.vocabulary)
        return cls(cfg, load_vocabulary(folder), seed=seed)

    def check_model(self, model: BaseModel, model_cfg: ScalerunDataclass) -> None:
        super().check_model(model, model_cfg)
        require_decoder(model, model_cfg, self.cfg)

    def read_dataset(self, split: str, *, training: bool) -> BinarisedDataset:
        cfg, size = self.cfg, self.dictionary.num_real_symbols
        prefixes = find_prefixes(cfg.data, split, whole=training)
        folder = Path(cfg.data)
        self._check_dictionary(folder)
        known = read_record(folder).get("sets", {})
        texts = [known.get(prefix.name, {}).get("bytes", 0) for prefix in prefixes]
        return BinarisedDataset(
            split,
            [IndexedFile.open(prefix, num_symbols=size) for prefix in prefixes],
            self.dictionary,
            packing=Packing(
                cfg.sample_break_mode,
                cfg.tokens_per_sample,
                split_long=not training,
                context_window=0 if training else self.context_window,
            ),
            seed=self.seed if training else None,
            collater=Collater(pad_id=self.dictionary.pad, empty_length=cfg.tokens_per_sample),
            num_bytes=sum(texts) if all(texts) else 0,
        )

    def _check_dictionary(self, folder: Path) -> None:
        """Refuse tokens whose meaning is another one.

        Raises:
            UserError: the folder's dictionary is not the vocabulary of this task.
        """
        if self.cfg.vocabulary is None or not (folder / DICTIONARY_FILE).exists():
            return
        if load_vocabulary(folder).digest != self.tokenizer.digest:
            raise UserError(
                f"{folder / DICTIONARY_FILE} is not the dictionary in {self.cfg.vocabulary}, so "
                "the tokens have another meaning; binarise the text with that one: --srcdict, or "
                "the same --tokenizer"
            )

    def valid_subsets(self, names: Sequence[str]) -> list[str]:
        return find_binarised_sets(self.cfg.data, names)

    @classmethod
    def with_assets(cls, cfg: LanguageModelingConfig, folder: Path) -> LanguageModelingConfig:
        return cfg.replace(vocabulary=str(folder))

    def data_report(self) -> list[dict[str, Any]]:
        reports = []
        for key, dataset in self._datasets.items():
            if key not in self._reported:
                self._reported.add(key)
                counts = dataset.counts()
                reports.append(
                    {
                        "event": "data",
                        "subset": dataset.name,
                        "documents": counts.documents,
                        "tokens": counts.tokens,
                        "fingerprint": dataset.fingerprint,
                    }
                )
        return reports
