"""Language modelling on examples: a source is given, its target is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from scalerun.data.text.example import EXAMPLES
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.tasks.base_task import register_task
from scalerun.tasks.streaming_language_modeling import (
    StreamingLanguageModelingConfig,
    StreamingLanguageModelingTask,
)

SHORTEST = 2
"""Tokens of the shortest sequence: one of the source, one of the target."""


@dataclass
class StreamingFinetuneLanguageModelingConfig(StreamingLanguageModelingConfig):
    """Where the examples are and how they become sequences."""

    sample_break_mode: str = option(
        "eos_pad_8",
        "eos: one example; eos_pad_8: one example, padded to a multiple of 8 only; complete: as "
        "many whole examples as fit, with --document-masking",
        choices=("complete", "eos", "eos_pad_8"),
    )

    def validate(self) -> None:
        super().validate()
        if self.tokens_per_sample < SHORTEST:
            raise ConfigError(
                f"--tokens-per-sample is {self.tokens_per_sample}, which leaves no room for a "
                f"source before its target; give {SHORTEST} or more"
            )
        if self.sample_break_mode == "complete" and not self.document_masking:
            raise ConfigError(
                "--sample-break-mode complete puts several examples into a sequence, where each "
                "would see those before it; add --document-masking, or give eos_pad_8"
            )


@register_task("streaming_finetune_language_modeling", StreamingFinetuneLanguageModelingConfig)
class StreamingFinetuneLanguageModelingTask(StreamingLanguageModelingTask):
    """Predict each token of a target, and its end, from the source and the target before it.

    The text files have the keys ``src`` and ``tgt``. An example that is longer than a sequence
    loses the beginning of its source; a target that is longer than a sequence by itself loses its
    end in training, and goes on in the next sequence in validation.
    """

    kind = EXAMPLES
