"""Translation: from each line of one text file to the same line of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from scalerun.data.length_batches import BatchLimits
from scalerun.data.parallel.parallel_dataset import ParallelDataset, ParallelRecipe, Side
from scalerun.data.parallel.parallel_layout import find_pair, find_pair_sets
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.segment_dataset import SEGMENTS, SegmentFile
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.tokenizers.tokenizer import BYTES, BaseTokenizer, load_tokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.distributed.ranks import Ranks
from scalerun.models.base_model import MODEL_REGISTRY, BaseModel
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.tasks.base_task import BaseTask, register_task
from scalerun.tasks.eval_bleu import BleuScorer, EvalBleuConfig
from scalerun.tasks.text_files import TextFilesConfig, usable_cpus

EXPECTED_LENGTH = 32
"""Tokens of a sentence, more or less, for an estimate until the text has been read."""


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

    def validate(self) -> None:
        super().validate()
        if not self.data:
            raise ConfigError("the data folder is missing: give it as the first argument")
        for flag, value in (
            ("--source-lang", self.source_lang),
            ("--target-lang", self.target_lang),
        ):
            if not value:
                raise ConfigError(f"{flag} is required: the ending of its files, such as en")
        if self.source_lang == self.target_lang:
            raise ConfigError(
                f"--source-lang and --target-lang are both {self.source_lang}; give two endings"
            )
        separate = (self.source_tokenizer, self.target_tokenizer)
        if self.tokenizer is not None and any(separate):
            raise ConfigError(
                "--tokenizer is for both sides; give it alone, or --source-tokenizer and "
                "--target-tokenizer"
            )
        if self.tokenizer is None and not all(separate):
            raise ConfigError(
                "--tokenizer is required for a joint vocabulary, or --source-tokenizer and "
                "--target-tokenizer for two: bytes, a sentencepiece .model file or a tokenizers "
                ".json file"
            )


@register_task("translation", TranslationConfig)
class TranslationTask(BaseTask):
    """Predict each token of a translation from the source and the tokens before it.

    Attributes:
        tokenizer: of the target.
        source_tokenizer: of the source; the same object where the vocabulary is joint.
    """

    cfg: TranslationConfig
    tokenizer: BaseTokenizer

    def __init__(
        self,
        cfg: TranslationConfig,
        source_tokenizer: BaseTokenizer,
        target_tokenizer: BaseTokenizer,
        *,
        seed: int,
        cache_dir: Path,
        quarantine: Path,
    ) -> None:
        super().__init__(cfg)
        self.source_tokenizer = source_tokenizer
        self.tokenizer = target_tokenizer
        self.dictionary = target_tokenizer.dictionary
        self.sequence_length = EXPECTED_LENGTH
        self.seed = seed
        self.cache_dir = cache_dir
        self.quarantine = QuarantineFile(quarantine)
        self.limits = {training: BatchLimits(max_sentences=1) for training in (True, False)}
        self.max_positions: tuple[int | None, int | None] = (None, None)
        self._described: set[tuple[str, bool]] = set()

    @classmethod
    def setup_task(
        cls, cfg: TranslationConfig, *, seed: int, cache_dir: Path, quarantine: Path
    ) -> Self:
        if cfg.tokenizer is not None:
            source = target = load_tokenizer(cfg.tokenizer)
        else:
            source = load_tokenizer(cfg.source_tokenizer, flag="--source-tokenizer")
            target = load_tokenizer(cfg.target_tokenizer, flag="--target-tokenizer")
        folder = cfg.cache_folder(cache_dir)
        return cls(cfg, source, target, seed=seed, cache_dir=folder, quarantine=quarantine)

    @property
    def has_joint_vocabulary(self) -> bool:
        """Whether both sides have one vocabulary."""
        return self.source_tokenizer is self.tokenizer

    def set_batch_limits(self, *, train: BatchLimits, valid: BatchLimits) -> None:
        self.limits = {True: train, False: valid}

    def build_model(
        self,
        model_cfg: ScalerunDataclass,
        *,
        seed: int,
        device: torch.device,
        meshes: ModelMeshes = ONE_RANK,
        prepare: Callable[[BaseModel], None] = lambda model: None,
    ) -> BaseModel:
        if not issubclass(MODEL_REGISTRY.class_for(model_cfg), EncoderDecoder):
            raise ConfigError(
                f"--arch {model_cfg._name} has no encoder for the source that --task translation "
                "gives it; choose an encoder-decoder, such as --arch mt_base"
            )
        return super().build_model(
            model_cfg, seed=seed, device=device, meshes=meshes, prepare=prepare
        )

    def vocabularies(self) -> dict[str, int]:
        sizes = super().vocabularies()
        if not self.has_joint_vocabulary:
            source = self.source_tokenizer.dictionary
            sizes |= {"source_vocab_size": len(source), "source_padding_idx": source.pad}
        return sizes

    def check_meshes(self, meshes: ModelMeshes) -> None:
        """Nothing is refused: a batch whose length the ranks cannot share stays whole on each."""

    def check_model(self, model: BaseModel, model_cfg: ScalerunDataclass) -> None:
        """Remember the longest sequences; pairs are compared with them when they are read."""
        assert isinstance(model, EncoderDecoder)
        self.max_positions = (model.encoder.max_positions(), model.decoder.max_positions())

    def read_dataset(self, split: str, *, training: bool) -> ParallelDataset:
        cfg = self.cfg
        assert cfg.source_lang is not None
        assert cfg.target_lang is not None
        source, target = find_pair(
            cfg.data, split, source_lang=cfg.source_lang, target_lang=cfg.target_lang
        )
        dataset = ParallelDataset(
            split,
            self._side(source, self.source_tokenizer, self.max_positions[0], "source"),
            self._side(target, self.tokenizer, self.max_positions[1], "target"),
            recipe=ParallelRecipe(
                limits=self.limits[training],
                seed=self.seed if training else None,
                skip_bad_records=cfg.bad_records == "skip",
            ),
            quarantine=self.quarantine,
        )
        if training:
            self.sequence_length = round(float(dataset.lengths_NS[:, 1].mean()))
        return dataset

    def _side(
        self, file: SegmentFile, tokenizer: BaseTokenizer, max_positions: int | None, name: str
    ) -> Side:
        cache = TokenCache(
            self.cache_dir,
            tokenizer,
            skip_bad_records=self.cfg.bad_records == "skip",
            num_threads=usable_cpus(),
            kind=SEGMENTS,
        )
        return Side(file, cache, max_positions, f"--max-{name}-positions")

    def valid_subsets(self, names: Sequence[str]) -> list[str]:
        cfg = self.cfg
        assert cfg.source_lang is not None
        assert cfg.target_lang is not None
        return find_pair_sets(
            cfg.data, names, source_lang=cfg.source_lang, target_lang=cfg.target_lang
        )

    def score_names(self) -> tuple[str, ...]:
        return self.cfg.score_names()

    def build_scorer(self, model: BaseModel, ranks: Ranks) -> BleuScorer | None:
        if not self.cfg.eval_bleu:
            return None
        assert isinstance(model, EncoderDecoder)
        return self.cfg.build_scorer(
            model, self.tokenizer, pad=self.source_tokenizer.dictionary.pad, ranks=ranks
        )

    def assets(self) -> dict[str, Path]:
        if self.has_joint_vocabulary:
            return super().assets()
        sides = {"source": self.source_tokenizer, "target": self.tokenizer}
        return {
            _asset(side, name): path
            for side, tokenizer in sides.items()
            for name, path in tokenizer.files.items()
        }

    @classmethod
    def with_assets(cls, cfg: TranslationConfig, folder: Path) -> TranslationConfig:
        changes = {}
        if cfg.tokenizer not in (None, BYTES):
            changes["tokenizer"] = str(folder / Path(cfg.tokenizer).name)
        for side in ("source", "target"):
            spec = getattr(cfg, f"{side}_tokenizer")
            if spec not in (None, BYTES):
                changes[f"{side}_tokenizer"] = str(folder / _asset(side, Path(spec).name))
        return cfg.replace(**changes)

    def state_dict(self) -> dict[str, Any]:
        source = self.source_tokenizer.dictionary
        return {
            **super().state_dict(),
            "source_vocabulary": source.digest,
            "source_vocabulary_size": len(source),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        own = self.state_dict()
        before = state.get("source_vocabulary", state["vocabulary"])
        if before is not None and before != own["source_vocabulary"]:
            raise UserError(
                f"the checkpoint was trained with another source vocabulary (digest {before[:8]}; "
                f"now {own['source_vocabulary'][:8]}); give the tokenizer that it was trained with"
            )

    def data_report(self) -> list[dict[str, Any]]:
        reports = []
        for key, dataset in self._datasets.items():
            assert isinstance(dataset, ParallelDataset)
            if key not in self._described:
                self._described.add(key)
                reports.append(dataset.describe())
                if dataset.bad:
                    first = dataset.bad[0]
                    reports.append(
                        {
                            "event": "bad_record",
                            "subset": dataset.name,
                            "file": first.file,
                            "records": len(dataset.bad),
                            "line": first.line,
                            "reason": first.reason,
                            "listed_in": str(self.quarantine.path),
                        }
                    )
        return reports


def _asset(side: str, name: str) -> str:
    """What a checkpoint calls the file of one side's tokenizer."""
    return f"{side}-{name}"
