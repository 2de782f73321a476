"""Translation: from each line of one file to the same line of another, as text or binarised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from scalerun.data.length_batches import BatchLimits
from scalerun.data.parallel.binarised_pairs import PairFolder
from scalerun.data.parallel.binarised_side import binarised_side
from scalerun.data.parallel.parallel_dataset import ParallelDataset, ParallelRecipe
from scalerun.data.parallel.parallel_layout import find_pair, find_pair_sets
from scalerun.data.parallel.side import Longest, Side, text_side
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.segment_dataset import SEGMENTS
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.tokenizers.tokenizer import BaseTokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.distributed.ranks import Ranks
from scalerun.models.base_model import MODEL_REGISTRY, BaseModel
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.tasks.base_task import BaseTask, register_task
from scalerun.tasks.eval_bleu import BleuScorer
from scalerun.tasks.text_files import usable_cpus
from scalerun.tasks.translation_config import TranslationConfig, with_languages
from scalerun.tasks.translation_vocabulary import (
    check_vocabularies,
    load_vocabularies,
    vocabulary_files,
    with_vocabulary_files,
)

EXPECTED_LENGTH = 32
"""Tokens of a sentence, more or less, for an estimate until the text has been read."""


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
        cfg = with_languages(cfg)
        source, target = load_vocabularies(cfg)
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
        source, target = self._sides(split, training=training)
        dataset = ParallelDataset(
            split,
            source,
            target,
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

    def _sides(self, split: str, *, training: bool) -> list[Side]:
        cfg, pairs = self.cfg, self.cfg.pairs()
        if pairs is not None:
            return self.binarised_sides(pairs, split, whole=training)
        source_lang, target_lang = cfg.languages
        files = find_pair(cfg.data, split, source_lang=source_lang, target_lang=target_lang)
        return [
            text_side(file, self._cache(tokenizer), longest)
            for file, tokenizer, longest in zip(
                files, self._tokenizers(), self._longest(), strict=True
            )
        ]

    def binarised_sides(
        self, pairs: PairFolder, split: str, *, whole: bool, with_target: bool = True
    ) -> list[Side]:
        """The sources, and the targets if they are wanted, of a set of binarised pairs.

        Args:
            whole: with the numbered files that continue the set.

        Raises:
            UserError: a file is missing or damaged, or has another vocabulary.
        """
        check_vocabularies(self.cfg, pairs.folder)
        prefixes = pairs.prefixes(split, whole=whole, with_target=with_target)
        sides = zip(self._tokenizers(), self._longest(), self.cfg.languages, strict=True)
        return [
            binarised_side(each, tokenizer, longest, language=language)
            for each, (tokenizer, longest, language) in zip(prefixes, sides, strict=False)
        ]

    def _tokenizers(self) -> tuple[BaseTokenizer, BaseTokenizer]:
        return self.source_tokenizer, self.tokenizer

    def _longest(self) -> tuple[Longest, Longest]:
        source, target = self.max_positions
        return Longest(source, "--max-source-positions"), Longest(target, "--max-target-positions")

    def _cache(self, tokenizer: BaseTokenizer) -> TokenCache:
        return TokenCache(
            self.cache_dir,
            tokenizer,
            skip_bad_records=self.cfg.bad_records == "skip",
            num_threads=usable_cpus(),
            kind=SEGMENTS,
        )

    def valid_subsets(self, names: Sequence[str]) -> list[str]:
        pairs = self.cfg.pairs()
        if pairs is not None:
            return pairs.sets(names)
        source_lang, target_lang = self.cfg.languages
        return find_pair_sets(
            self.cfg.data, names, source_lang=source_lang, target_lang=target_lang
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
        return vocabulary_files(self.cfg, self.source_tokenizer, self.tokenizer)

    @classmethod
    def with_assets(cls, cfg: TranslationConfig, folder: Path) -> TranslationConfig:
        return with_vocabulary_files(cfg, folder)

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
