"""Flags of fairseq, metaseq and TorchScale's examples that scalerun does not have.

What they asked for is done by another flag, or by itself, or not at all: one line says which.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError

logger = logging.getLogger(__name__)

_RANKS = "ranks are those of torchrun or Slurm, or as many as --distributed-world-size says"
_PIECES = {"@@ ": "subword_nmt", "subword_nmt": "subword_nmt", "sentencepiece": "sentencepiece"}
_COPIES = "each data-parallel rank has a copy of the weights"

READ_AS = {
    "--bpe-merges=": ("--merges-filename=", "GPT-2's files make a tokenizer by themselves"),
    "--bpe-vocab=": ("--vocab-filename=", "GPT-2's files make a tokenizer by themselves"),
    "--hf-tokenizer=": ("--tokenizer=", "one flag takes every kind of tokenizer"),
    "--local-save-interval-updates=": (
        "--save-interval-updates=",
        "all checkpoints go to --save-dir",
    ),
    "--memory-efficient-bf16": ("--bf16", "weights are float32, products bfloat16"),
    "--memory-efficient-fp16": ("--fp16", "weights are float32, products half precision"),
    "--min-len=": ("--min-new-tokens=", "the prompt is not counted"),
    "--no-progress-bar": ("--log-format simple", "a line for each --log-interval updates"),
    "--remove-bpe": ("--post-process subword_nmt", "one flag joins the pieces of words"),
    "--eval-bleu-remove-bpe": (
        "--eval-bleu-post-process subword_nmt",
        "one flag joins the pieces of words",
    ),
    "--sampling-topp=": ("--top-p=", "it is one of several rules to sample by"),
}
"""Flag: the words that stand for it, and why. One that takes a value ends in ``=``; the value goes
to words that end so too."""

VALUES_READ_AS = {
    ("--ddp-backend", "c10d"): ("pytorch_ddp", _COPIES),
    ("--ddp-backend", "legacy_ddp"): ("pytorch_ddp", _COPIES),
    ("--ddp-backend", "no_c10d"): ("pytorch_ddp", _COPIES),
}
"""Flag that scalerun has, and another trainer's value: the value that is read, and why."""

OPTIONAL_VALUES = {"--remove-bpe": _PIECES, "--eval-bleu-remove-bpe": _PIECES}
"""Flag of :data:`READ_AS` that may have a value, and the values that then replace the last word."""

LEFT_OUT = {
    "--distributed-no-spawn --device-id= --local-rank=": _RANKS,
    "--distributed-backend=": "gloo connects processes on CPUs, NCCL those on GPUs",
    "--all-gather-list-size=": "messages between ranks have any size",
    "--bucket-cap-mb= --min-params-to-wrap=": "gradients are summed block by block",
    "--broadcast-buffers": "models have no buffers that training changes",
    "--find-unused-parameters": "parameters may be without a gradient at any layout",
    "--fast-stat-sync": "statistics of all ranks are summed once an update",
    "--fp32-reduce-scatter --gradient-predivide-factor=": "gradients are summed in float32",
    "--fp16-no-flatten-grads": "gradients are never flattened",
    "--fp16-adam-stats --ema-fp32": "the optimizer's state and averages are float32",
    "--use-old-adam": "--adam-implementation chooses Adam's",
    "--use-sharded-state": "each rank writes its part of a checkpoint",
    "--checkpoint-shard-count= --checkpoint-suffix=": "a checkpoint is one folder at any layout",
    "--cluster-env=": "a run resumes by the same rule on every cluster",
    "--save-last-checkpoint": "the newest checkpoint is always kept",
    "--tensor-parallel-init-model-on-gpu": "weights are drawn where they will be",
    "--distribute-checkpointed-activations": "--sequence-parallel spreads activations over ranks",
    "--recompute-fc1-num-layers=": "--recompute selective chooses what is computed again",
    "--flash-attention --xf-attn-op=": "the fastest kernel for the device is taken",
    "--empty-cache-freq=": "the memory that torch holds back is left to it",
    "--dataset-impl=": "the kind of file is read from the file",
    "--plasma-path= --use-plasma-view": "files are mapped into memory",
    "--data-subshard-count=": "any number of ranks reads the same shards",
    "--batch-read-ahead= --shuffle-docs": "training data is always shuffled as a whole",
    "--fix-batches-to-gpus": "the order of the data follows from --seed alone",
    "--fixed-validation-seed=": "validation draws no random numbers",
    "--seed-per-rank": "ranks always draw different random numbers",
    "--num-workers-valid=": "--num-workers counts for validation too",
    "--ignore-unused-valid-subsets": "only the sets of --valid-subset are looked for",
    "--left-pad-source= --left-pad-target=": "the side of the padding changes nothing",
    "--azureml-logging": "records are written to metrics.jsonl in --save-dir",
    "--log-nvidia-smi": "the records say how much memory is in use",
    "--quiet-logs": "norms of single parameters are not logged",
    "--buffer-size= --softmax-batch=": "batches are as large as --batch-size says",
}
"""Flags (with ``=`` those that take a value), and what happens instead."""

_NOT_HERE = "scalerun's models do not have it; remove it"
_NO_EFFECT = "it had no effect on TorchScale's models; remove it"
_NO_HOOK = "nothing is uploaded or run after a save; let a job of its own watch --save-dir"
_MOE_FREQ = "give --moe-freq, which holds for both stacks"
REFUSED = {
    "--distributed-init-method --distributed-rank": f"{_RANKS}; remove it",
    "--adaptive-softmax-cutoff --decoder-layerdrop --encoder-layerdrop": _NOT_HERE,
    "--decoder-layers-to-keep --encoder-layers-to-keep --alibi --attn-variant": _NOT_HERE,
    "--quant-noise-pq --quant-noise-pq-block-size --quant-noise-scalar": _NOT_HERE,
    "--disable-bias --disable-affine-ln --decoder-learned-sinusoidal": _NOT_HERE,
    "--language-modeling-type": "text is read from left to right alone; remove it",
    "--full-megatron-init": "give --init megatron",
    "--full-megatron-init-scalar --pos-init-scalar --truncate-init": "--init says how weights "
    "start; remove it",
    "--decoder-moe-freq --encoder-moe-freq": _MOE_FREQ,
    "--use-moe-pad-mask": "give --moe-mask-padding",
    "--moe-batch-prioritized-routing --moe-expert-ffn-dim --no-encoder-final-norm": _NO_EFFECT,
    "--moe-normalize-expert-grad": "give --clip-norm-type sparse for SparseClip's norm",
    "--freeze-moe": "give --freeze-params '*experts*'",
    "--self-attn-doc-sep": "give --document-masking",
    "--fsdp-checkpoint-wrap-layer-frequency": "give --checkpoint-activations-interval",
    "--threshold-loss-scale": "--min-loss-scale ends the run at the smallest scale; remove it",
    "--sentence-avg": "the loss is a mean over target tokens; remove it",
    "--multicorpus-sampling-maximum": "give --corpus-weights",
    "--combine-valid-subsets": "name the sets in --valid-subset",
    "--shorten-method --shorten-data-split-list": "--sample-break-mode says how documents become "
    "sequences; remove it",
    "--model-overrides --optimizer-overrides": "give the flags themselves",
    "--ema-seed-model": "averages begin with the weights of --ema-start-update; remove it",
    "--cloud-upload-path --nfs-eval-script-path --nfs-eval-frequency": _NO_HOOK,
}
"""Flags without which results would be others, and what to do."""


@dataclass(frozen=True)
class ForeignFlag:
    """What becomes of one of them."""

    words: tuple[str, ...] | None
    """What stands for it, the value after the last word; nothing where it is left out; None where
    it is refused."""
    takes_value: bool
    why: str


def _table() -> dict[str, ForeignFlag]:
    table = {}
    for name, (read_as, why) in READ_AS.items():
        words = tuple(read_as.rstrip("=").split())
        table[name.rstrip("=")] = ForeignFlag(words, name.endswith("="), why)
    for group, words_of in ((LEFT_OUT, ()), (REFUSED, None)):
        for names, why in group.items():
            for name in names.split():
                table[name.rstrip("=")] = ForeignFlag(words_of, name.endswith("="), why)
    return table


FOREIGN_FLAGS = _table()
"""By spelling. A flag of the command itself comes before one of these."""


def without_foreign_flags(given: Sequence[str], known: Container[str]) -> list[str]:
    """A command line in which flags and values of other trainers have given way to scalerun's.

    Each that does is logged, by the first rank of a launcher.

    Args:
        known: spellings of the command's own flags.

    Raises:
        ConfigError: a flag has no counterpart, and without it the results would be others.
    """
    result: list[str] = []
    rest = deque(given)
    while rest:
        word = rest.popleft()
        spelling, equals, inline = word.partition("=")
        value = inline if equals else rest[0] if rest else ""
        if spelling in known and (spelling, value) in VALUES_READ_AS:
            if not equals:
                rest.popleft()
            read_as, why = VALUES_READ_AS[spelling, value]
            result += [spelling, read_as]
            _note(f"{spelling} {value} is read as {read_as}: {why}")
        elif spelling in FOREIGN_FLAGS and spelling not in known:
            flag = FOREIGN_FLAGS[spelling]
            if flag.words is None:
                raise ConfigError(f"{spelling} is not a flag of scalerun: {flag.why}")
            words, values = flag.words, OPTIONAL_VALUES.get(spelling, {})
            if value in values:
                words = (words[0], values[value])
                if not equals:
                    rest.popleft()
            elif values and equals:
                choices = " or ".join(sorted({*values.values()}))
                raise ConfigError(f"{spelling} takes {choices}; {value!r} was given")
            if flag.takes_value and not equals:
                if not rest or value.startswith("--"):
                    raise ConfigError(f"{spelling} expects a value")
                rest.popleft()
            result += [*words, *([value] if words and flag.takes_value else [])]
            read_as = f"read as {' '.join(words)}" if words else "left out"
            _note(f"{spelling} is {read_as}: {flag.why}")
        else:
            result.append(word)
    return result


def _note(text: str) -> None:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        logger.warning(text)
