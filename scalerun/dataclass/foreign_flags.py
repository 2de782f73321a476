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


@dataclass(frozen=True)
class ForeignFlag:
    """What becomes of a flag of another trainer."""

    instead: str
    """What happens in its place, or what to give in its place."""
    words: tuple[str, ...] | None = ()
    """Words that stand for it; its value follows them. None: the flag is refused."""
    takes_value: bool = False
    keeps_value: bool = False
    """Whether the value follows the words."""


def _same(words: str, instead: str) -> ForeignFlag:
    return ForeignFlag(instead, tuple(words.split()))


def _left_out(instead: str) -> ForeignFlag:
    return ForeignFlag(instead)


def _left_out_with_value(instead: str) -> ForeignFlag:
    return ForeignFlag(instead, takes_value=True)


def _refused(instead: str) -> ForeignFlag:
    return ForeignFlag(instead, words=None)


_RANKS = "ranks are those of torchrun or Slurm, or as many as --distributed-world-size says"
_NO_EFFECT = "it had no effect on TorchScale's models; remove it"
_NOT_HERE = "scalerun's models do not have it; remove it"

FOREIGN_FLAGS = {
    "--memory-efficient-fp16": _same("--fp16", "weights are float32, products half precision"),
    "--memory-efficient-bf16": _same("--bf16", "weights are float32, products bfloat16"),
    "--no-progress-bar": _same("--log-format simple", "one line for each --log-interval updates"),
    "--local-save-interval-updates": ForeignFlag(
        "all checkpoints go to --save-dir",
        ("--save-interval-updates",),
        takes_value=True,
        keeps_value=True,
    ),
    "--all-gather-list-size": _left_out_with_value("messages between ranks have any size"),
    "--azureml-logging": _left_out("records are written to metrics.jsonl in --save-dir"),
    "--broadcast-buffers": _left_out("models have no buffers that training changes"),
    "--bucket-cap-mb": _left_out_with_value("gradients are summed block by block"),
    "--checkpoint-shard-count": _left_out_with_value("a checkpoint is one folder at any layout"),
    "--checkpoint-suffix": _left_out_with_value("a checkpoint is one folder at any layout"),
    "--cluster-env": _left_out_with_value("a run resumes by the same rule on every cluster"),
    "--dataset-impl": _left_out_with_value("the kind of file is read from the file"),
    "--distribute-checkpointed-activations": _left_out(
        "--sequence-parallel spreads activations over ranks"
    ),
    "--distributed-no-spawn": _left_out(_RANKS),
    "--empty-cache-freq": _left_out_with_value("the memory that torch holds back is left to it"),
    "--fast-stat-sync": _left_out("statistics of all ranks are summed once an update"),
    "--find-unused-parameters": _left_out("parameters may be without a gradient at any layout"),
    "--fix-batches-to-gpus": _left_out("the order of the data follows from --seed alone"),
    "--flash-attention": _left_out("flash attention is used where it is there"),
    "--fp16-adam-stats": _left_out("the optimizer's state is float32"),
    "--fp16-no-flatten-grads": _left_out("gradients are never flattened"),
    "--fp32-reduce-scatter": _left_out("gradients are always summed in float32"),
    "--gradient-predivide-factor": _left_out_with_value("gradients are always summed in float32"),
    "--ignore-unused-valid-subsets": _left_out("only the sets of --valid-subset are looked for"),
    "--left-pad-source": _left_out_with_value("the side of the padding changes nothing"),
    "--left-pad-target": _left_out_with_value("the side of the padding changes nothing"),
    "--local-rank": _left_out_with_value(_RANKS),
    "--log-nvidia-smi": _left_out("each record has the memory in use"),
    "--plasma-path": _left_out_with_value("files are mapped into memory"),
    "--quiet-logs": _left_out("norms of single parameters are not logged"),
    "--seed-per-rank": _left_out("ranks always draw different random numbers"),
    "--use-old-adam": _left_out("--adam-implementation chooses Adam's"),
    "--use-plasma-view": _left_out("files are mapped into memory"),
    "--use-sharded-state": _left_out("each rank writes its part of a checkpoint"),
    "--adaptive-softmax-cutoff": _refused(_NOT_HERE),
    "--decoder-layerdrop": _refused(_NOT_HERE),
    "--decoder-layers-to-keep": _refused(_NOT_HERE),
    "--decoder-moe-freq": _refused("give --moe-freq, which holds for both stacks"),
    "--distributed-init-method": _refused(f"{_RANKS}; remove it"),
    "--distributed-rank": _refused(f"{_RANKS}; remove it"),
    "--encoder-layerdrop": _refused(_NOT_HERE),
    "--encoder-layers-to-keep": _refused(_NOT_HERE),
    "--encoder-moe-freq": _refused("give --moe-freq, which holds for both stacks"),
    "--freeze-moe": _refused("give --freeze-params '*experts*'"),
    "--full-megatron-init": _refused("give --init megatron"),
    "--model-overrides": _refused("give the flags of the model themselves"),
    "--moe-batch-prioritized-routing": _refused(_NO_EFFECT),
    "--moe-expert-ffn-dim": _refused(_NO_EFFECT),
    "--moe-normalize-expert-grad": _refused("give --clip-norm-type sparse for SparseClip's norm"),
    "--no-encoder-final-norm": _refused(_NO_EFFECT),
    "--optimizer-overrides": _refused("give the flags of the optimizer themselves"),
    "--quant-noise-pq": _refused(_NOT_HERE),
    "--quant-noise-pq-block-size": _refused(_NOT_HERE),
    "--quant-noise-scalar": _refused(_NOT_HERE),
    "--use-moe-pad-mask": _refused("give --moe-mask-padding"),
}
"""By spelling. A flag of the command itself comes before one of these."""

_COPIES = "each data-parallel rank has a copy of the weights, as pytorch_ddp"
FOREIGN_VALUES = {
    ("--ddp-backend", "c10d"): ("pytorch_ddp", _COPIES),
    ("--ddp-backend", "legacy_ddp"): ("pytorch_ddp", _COPIES),
    ("--ddp-backend", "no_c10d"): ("pytorch_ddp", _COPIES),
}
"""Values of flags that scalerun has, by flag and value: the value that is read, and why."""


def without_foreign_flags(words: Sequence[str], known: Container[str]) -> list[str]:
    """A command line in which flags and values of other trainers have given way to scalerun's.

    Each that does is logged, by the first rank of a launcher.

    Args:
        known: spellings of the command's own flags.

    Raises:
        ConfigError: a flag has no counterpart, and without it the results would be others.
    """
    result: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        spelling, equals, value = word.partition("=")
        if spelling in known:
            next_word = rest[0] if rest else ""
            replaced = FOREIGN_VALUES.get((spelling, value if equals else next_word))
            if replaced is None:
                result.append(word)
                continue
            given = value if equals else rest.popleft()
            result += [spelling, replaced[0]]
            _note(f"{spelling} {given}: {replaced[1]}")
        elif spelling in FOREIGN_FLAGS:
            flag = FOREIGN_FLAGS[spelling]
            if flag.words is None:
                raise ConfigError(f"{spelling} is not a flag of scalerun: {flag.instead}")
            if flag.takes_value and not equals:
                if not rest or rest[0].startswith("--"):
                    raise ConfigError(f"{spelling} expects a value")
                value = rest.popleft()
            result += [*flag.words, *([value] if flag.keeps_value else [])]
            read_as = f" is read as {' '.join(flag.words)}" if flag.words else " is left out"
            _note(f"{spelling}{read_as}: {flag.instead}")
        else:
            result.append(word)
    return result


def _note(text: str) -> None:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        logger.warning(text)
