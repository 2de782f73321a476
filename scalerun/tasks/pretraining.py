"""Masked language modelling on shards of sentences that a JSON index lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scalerun.data.masked.masked_batch import MaskedCollater
from scalerun.data.masked.masked_text_dataset import MaskedTextDataset
from scalerun.data.masked.masking import Masking
from scalerun.data.masked.sentence_blocks import COMPLETE_DOC
from scalerun.data.mixture_dataset import Mixture
from scalerun.data.streaming_dataset import Recipe
from scalerun.data.text.corpus_index import find_indices, read_index, training_split, whole_split
from scalerun.data.text.layout import data_folder
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.sentence_dataset import SENTENCES
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.token_block_dataset import Packing
from scalerun.data.tokenizers.fairseq_dictionary import NUM_SPECIAL
from scalerun.data.tokenizers.piece_tokenizer import DICT_FILE, MODEL_FILE, PieceTokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.models.base_model import BaseModel
from scalerun.models.transformer_mlm import TransformerMLM
from scalerun.tasks.base_task import BaseTask, register_task
from scalerun.tasks.streaming_language_modeling import new_reports
from scalerun.tasks.text_files import TextFilesConfig, usable_cpus

SHORTEST = 3
"""Tokens of the shortest sequence: its beginning, one piece, the end of the sentence."""


@dataclass
class PretrainingConfig(TextFilesConfig):
    """Where the sentences are, how they become sequences, and which tokens are hidden."""

    data: str = option("", "folder with json/train.json and the files it lists", positional=True)
    spm_model: str | None = option(
        None, f"sentencepiece model (default: {MODEL_FILE} in the data folder)"
    )
    dict_file: str | None = option(
        None, f"symbols of the vocabulary (default: {DICT_FILE} in the data folder)"
    )
    tokens_per_sample: int = option(1024, "tokens in a sequence, at most")
    sample_break_mode: str = option(
        "complete",
        "complete: sentences until the next does not fit, across documents, and so do none and "
        "eos; complete_doc: a document also ends the sequence",
        choices=("none", "complete", COMPLETE_DOC, "eos"),
    )
    mask_prob: float = option(0.15, "share of the tokens to predict")
    span_length: float = option(
        3.0, "mean length of the spans that they form; 1 chooses single tokens"
    )
    leave_unmasked_prob: float = option(0.1, "share of them that the model sees as they are")
    random_token_prob: float = option(0.1, "share of them that random symbols replace")
    pad_to_max_length: bool = option(
        False, "pad each batch to --tokens-per-sample, not to its longest sequence"
    )

    def validate(self) -> None:
        if not self.data:
            raise ConfigError("the data folder is missing: give it as the first argument")
        if self.tokens_per_sample < SHORTEST:
            raise ConfigError(
                f"--tokens-per-sample is {self.tokens_per_sample}; give {SHORTEST} or more"
            )
        if not 0 < self.mask_prob < 1:
            raise ConfigError(f"--mask-prob is {self.mask_prob:g}; give a share between 0 and 1")
        if not self.span_length >= 1:
            raise ConfigError(f"--span-length is {self.span_length:g}; give 1 or more tokens")
        shares = (self.leave_unmasked_prob, self.random_token_prob)
        if not (min(shares) >= 0 and sum(shares) <= 1):
            raise ConfigError(
                f"--leave-unmasked-prob {shares[0]:g} and --random-token-prob {shares[1]:g} are "
                "shares of the tokens to predict; give numbers from 0 whose sum is at most 1"
            )


@register_task("pretraining", PretrainingConfig)
class PretrainingTask(BaseTask):
    """Predict tokens that are hidden from the model, from those around them."""

    cfg: PretrainingConfig
    tokenizer: PieceTokenizer

    def __init__(
        self,
        cfg: PretrainingConfig,
        tokenizer: PieceTokenizer,
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

    @classmethod
    def setup_task(
        cls, cfg: PretrainingConfig, *, seed: int, cache_dir: Path, quarantine: Path
    ) -> Self:
        tokenizer = PieceTokenizer(
            _file(cfg, "--spm-model", cfg.spm_model, MODEL_FILE),
            _file(cfg, "--dict-file", cfg.dict_file, DICT_FILE),
        )
        folder = cfg.cache_folder(cache_dir)
        return cls(cfg, tokenizer, seed=seed, cache_dir=folder, quarantine=quarantine)

    def check_model(self, model: BaseModel, model_cfg: ScalerunDataclass) -> None:
        if not isinstance(model, TransformerMLM):
            raise ConfigError(
                f"--arch {model_cfg._name} does not predict hidden tokens, which is what --task "
                f"{self.cfg._name} trains; give a masked language model, such as --arch mlm_base"
            )
        positions = model.max_positions()
        if positions is not None and self.sequence_length > positions:
            raise ConfigError(
                f"--tokens-per-sample {self.sequence_length} is above the model's {positions} "
                "positions; lower it or raise --max-source-positions"
            )

    def flops_per_target(self, model: BaseModel) -> int:
        # The head works on the targets alone, and the other layers on all tokens around them.
        assert isinstance(model, TransformerMLM)
        layers = model.flops_per_token(self.sequence_length)
        return int(layers / self.cfg.mask_prob) + model.head_flops()

    def read_dataset(self, split: str, *, training: bool) -> MaskedTextDataset:
        cfg = self.cfg
        corpora = read_index(cfg.data, split)
        if training:
            files, mixture = training_split(corpora, split)
        else:
            files, mixture = whole_split(corpora, split), Mixture()
        mode = COMPLETE_DOC if cfg.sample_break_mode == COMPLETE_DOC else "complete"
        dataset = MaskedTextDataset(
            files,
            TokenCache(
                self.cache_dir,
                self.tokenizer,
                skip_bad_records=cfg.bad_records == "skip",
                num_threads=usable_cpus(),
                kind=SENTENCES,
            ),
            recipe=Recipe(
                packing=Packing(mode, cfg.tokens_per_sample, split_long=False),
                seed=self.seed if training else None,
                mixture=mixture,
            ),
            collater=MaskedCollater(
                pad_id=self.dictionary.pad,
                length=cfg.tokens_per_sample if cfg.pad_to_max_length else None,
                empty_length=cfg.tokens_per_sample,
            ),
            quarantine=self.quarantine,
            masking=self._masking(),
        )
        dataset.open_first()
        return dataset

    def _masking(self) -> Masking:
        cfg, first = self.cfg, NUM_SPECIAL
        return Masking(
            mask_prob=cfg.mask_prob,
            span_length=cfg.span_length,
            leave_unmasked_prob=cfg.leave_unmasked_prob,
            random_token_prob=cfg.random_token_prob,
            mask_id=self.tokenizer.mask,
            random_ids=(first, first + self.tokenizer.num_listed),
        )

    def valid_subsets(self, names: Sequence[str]) -> list[str]:
        return find_indices(self.cfg.data, names)

    @classmethod
    def with_assets(cls, cfg: PretrainingConfig, folder: Path) -> PretrainingConfig:
        return cfg.replace(spm_model=str(folder / MODEL_FILE), dict_file=str(folder / DICT_FILE))

    def data_report(self) -> list[dict[str, Any]]:
        return new_reports(self._datasets, self._described)


def _file(cfg: PretrainingConfig, flag: str, name: str | None, default: str) -> Path:
    """A file of the vocabulary: the one named, or that of the data folder."""
    path = data_folder(cfg.data) / default if name is None else Path(name)
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "does not exist"
    hint = "name another with" if name is None else "correct"
    raise UserError(f"{path} {what}; put the vocabulary's file there, or {hint} {flag}")
