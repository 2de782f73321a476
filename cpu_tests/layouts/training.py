"""A few updates of a small model at any layout, with the real parts of a run."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpu_tests.conftest import make_corpus, make_parallel_corpus
from scalerun.cli.assembly import build_parts
from scalerun.cli.registries import CHOOSERS
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.parser import parse_config
from scalerun.distributed.launch import form_ranks
from scalerun.distributed.ranks import ALONE
from scalerun.distributed.stop_signal import StopSignal
from scalerun.plugins import load_plugins
from scalerun.trainer import Trainer

BATCHES = 4
"""Of an update, over all ranks: the same ones at every layout."""

COMMON = [
    "--tokenizer", "bytes", "--batch-size", "2", "--lr", "0.01", "--clip-norm", "1",
    "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "2", "--cpu", "--log-format", "none",
    "--log-interval", "1", "--no-epoch-checkpoints", "--seed", "3",
]  # fmt: skip
LANGUAGE = ["--task", "streaming_language_modeling", "--tokens-per-sample", "16"]
TRANSLATION = ["--task", "translation", "--source-lang", "en", "--target-lang", "es"]
DECODER = [
    *LANGUAGE, "--arch", "transformer_lm", "--decoder-layers", "2", "--decoder-embed-dim", "16",
    "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "4",
]  # fmt: skip
PAIR = [
    *TRANSLATION, "--arch", "transformer_mt", "--encoder-layers", "1", "--encoder-embed-dim", "16",
    "--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "4", "--decoder-layers", "2",
    "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "4",
    "--dropout", "0",
]  # fmt: skip
ARCHITECTURES = {
    "dense": [*DECODER, "--dropout", "0.1", "--share-decoder-input-output-embed"],
    "subln": [*DECODER, "--subln", "--xpos-rel-pos", "--dropout", "0", "--checkpoint-activations"],
    "longnet": [
        *DECODER, "--dropout", "0", "--segment-length", "4,16", "--dilated-ratio", "1,2",
    ],
    "moe": [
        *DECODER, "--moe-freq", "2", "--moe-expert-count", "4", "--use-xmoe", "--dropout", "0.1",
        "--criterion", "moe_cross_entropy", "--clip-norm-type", "sparse",
        "--share-decoder-input-output-embed",
    ],
    "retnet": [
        *LANGUAGE, "--arch", "retnet_lm", "--decoder-layers", "2", "--decoder-embed-dim", "16",
        "--decoder-value-embed-dim", "32", "--decoder-ffn-embed-dim", "32",
        "--decoder-retention-heads", "2",
    ],
    "encoder-decoder": [*PAIR, "--share-all-embeddings"],
    "encoder-decoder, moe": [
        *PAIR, "--moe-freq", "2", "--moe-expert-count", "4", "--criterion", "moe_cross_entropy",
        "--encoder-layers", "2",
    ],
}  # fmt: skip


def make_data(data):
    """A folder with text for every task."""
    make_corpus(data)
    return make_parallel_corpus(data)


@dataclass
class Run:
    """What a few updates gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    """Target tokens and sequences of each update."""
    valid: list[tuple[float, int]] = field(default_factory=list)
    """Loss and target tokens of each validation."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whole ones of the first update, before clipping."""
    sample_ids: list[int] = field(default_factory=list)
    """Sequences that this rank read."""


def make_trainer(data, home, words, *, updates, data_size=1, batches=BATCHES, common=COMMON):
    """The Trainer that the command would make, alone or as one of the process group's ranks."""
    alone = not torch.distributed.is_initialized()
    argv = [str(data), *common, *words, "--max-update", str(updates), "--save-dir", str(home)]
    argv += ["--update-freq", str(batches // data_size)]
    cfg = parse_config(
        ScalerunConfig, argv, prog="test", choosers=CHOOSERS, load_plugins=load_plugins
    )
    rank = 0 if alone else torch.distributed.get_rank()
    ranks = ALONE if alone else form_ranks(cfg.distributed, "cpu", local_rank=rank)
    assert ranks.data_size == data_size
    Path(home).mkdir(parents=True, exist_ok=True)
    parts = build_parts(cfg, Path(home), ranks)
    return Trainer(cfg, parts, StopSignal())


def whole(tensor):
    """A tensor with the parts of all ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def train(trainer):
    """Train to the end -> :class:`Run`."""
    run = Run()
    clip, step = trainer.optimizer.clip_grad_norm, trainer.train_step

    def record_gradients(*args, **kwargs):
        if trainer.num_updates == 0:
            run.gradients = {
                name: whole(param.grad)
                for name, param in trainer.optimizer.named_params.items()
                if param.grad is not None
            }
        return clip(*args, **kwargs)

    def record_samples(batches):
        run.sample_ids += [i for batch in batches for i in batch.sample_ids]
        return step(batches)

    class Records:
        def write(self, record):
            if record["kind"] == "train":
                run.losses.append(record["loss"])
                run.norms.append(record["gnorm"])
                run.sizes.append((record["wpb"], record["bsz"]))
            elif record["kind"] == "valid":
                run.valid.append((record["loss"], record["tokens"]))

        def advance(self, num_updates):
            pass

    trainer.optimizer.clip_grad_norm = record_gradients
    trainer.train_step = record_samples
    trainer.sinks = Records()
    with trainer.parts.checkpoints:
        trainer.resume()
        trainer.train()
    return run
