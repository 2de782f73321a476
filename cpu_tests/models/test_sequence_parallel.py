"""Decoders on slices of sequences compute what they compute on whole ones, and others refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

from cpu_tests.world import run_world
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.models.base_model import build_model
from scalerun.models.longnet import longnet_base
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder
from scalerun.models.transformer_mlm import TransformerMLMConfig
from scalerun.models.transformer_mt import TransformerMTConfig

VOCAB, PAD, RANKS = 19, 1, 4
SIZES: dict[str, Any] = {
    "decoder_embed_dim": 16,
    "decoder_attention_heads": 4,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
    "max_target_positions": 32,
    "segment_length": [4, 8, 64],
    "dilated_ratio": [1, 2, 4],
}
MODELS: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "learned": {"decoder_learned_pos": True, "dilated_head_offset": "mod"},
    "rotary": {"rotary": True, "dilated_merge_gradient": "exact"},
    "xpos": {"xpos_rel_pos": True, "xpos_scale_base": 16, "subln": True},
    "recomputed": {"checkpoint_activations": True},
}
LENGTHS = (32, 21, 3)
"""Tokens of the sequences; the last two do not fill their slices."""


def made(cfg: ScalerunDataclass, meshes: ModelMeshes = ONE_RANK) -> TransformerDecoder:
    model = build_model(
        cfg,
        vocab_size=VOCAB,
        padding_idx=PAD,
        seed=2,
        device=torch.device("cpu"),
        meshes=meshes,
    ).double()
    assert isinstance(model, TransformerDecoder)
    return model


def batch(num_tokens: int, *, positions: bool) -> Batch:
    generator = torch.Generator().manual_seed(num_tokens)
    text = torch.randint(2, VOCAB, (2, num_tokens + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[0, 1::5] = IGNORE_INDEX
    count = int((targets != IGNORE_INDEX).sum())
    places = torch.arange(num_tokens).expand(2, -1) % 7
    return Batch(text[:, :-1], targets, count, [0, 1], positions=places if positions else None)


def loss_of(model: TransformerDecoder, batch: Batch) -> Tensor:
    logits = model(**batch.net_input()).logits
    return F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def numbers(model: TransformerDecoder, batch: Batch, *, add_up: bool) -> list[Tensor]:
    """The loss and all gradients, over all ranks."""
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    found = [torch.zeros(()) if each is None else each.clone() for each in found]
    if add_up:
        for each in found:
            dist.all_reduce(each)
    return found


def compare(mesh: DeviceMesh, changes: dict[str, Any], *, positions: bool) -> None:
    cfg = TransformerConfig(**SIZES, **changes)
    # XPos has tables in float32, which are about another center where slices are filled up.
    tolerance = 1e-4 if cfg.xpos_rel_pos else 1e-9
    alone, shared = made(cfg), made(cfg, ModelMeshes(sequence=mesh))
    for num_tokens in LENGTHS:
        whole = batch(num_tokens, positions=positions)
        length = shared.slice_length(num_tokens)
        part = whole.part(mesh.get_local_rank(), length)
        assert num_tokens <= length * RANKS <= 32
        torch.testing.assert_close(
            numbers(shared, part, add_up=True),
            numbers(alone, whole, add_up=False),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=num_tokens: f"{changes}, {n} tokens: {text}",
        )


def check_refusals(mesh: DeviceMesh) -> None:
    """What comes from code, not from flags, and would read only a part of the sequence."""
    model = made(TransformerConfig(**SIZES), ModelMeshes(sequence=mesh))
    tokens = torch.full((2, 4), 5)
    with pytest.raises(ValueError, match="cannot decode with a state"):
        model(tokens, incremental_state=model.init_incremental_state(2, 8))
    with pytest.raises(ValueError, match="neither padding nor zero keys"):
        model(tokens, padding_mask_BT=tokens == 5)
    with pytest.raises(ValueError, match="does not fit slices of 6 tokens"):
        model(torch.full((2, 6), 5))


def test_losses_and_gradients_are_those_of_whole_sequences() -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        for name, changes in MODELS.items():
            compare(mesh, changes, positions=name == "learned")
        check_refusals(mesh)

    run_world(RANKS, work)


class Axis:
    """An axis of two ranks that nothing is sent over."""

    def size(self) -> int:
        return 2


LONG = {"segment_length": [4], "dilated_ratio": [1]}
NO_LONGNET = "only decoders can use whose attention is dilated .--segment-length, --dilated-ratio"


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (TransformerConfig(), NO_LONGNET),
        (RetNetConfig(), NO_LONGNET),
        (TransformerMLMConfig(**LONG), NO_LONGNET),
        (TransformerMTConfig(), NO_LONGNET),
        (TransformerConfig(**LONG, moe_freq=2, moe_expert_count=2), "does not go with --moe-freq"),
        (TransformerConfig(**LONG, drop_path_rate=0.1), "does not go with --drop-path-rate"),
    ],
)
def test_models_that_would_compute_something_else_are_refused(
    cfg: ScalerunDataclass, words: str
) -> None:
    axis: Any = Axis()
    with pytest.raises(ConfigError, match=f"--seq-parallel-size 2 .*{words}"):
        made(cfg, ModelMeshes(sequence=axis))


def test_slices_fit_every_layer() -> None:
    axis: Any = Axis()
    model = made(longnet_base(), ModelMeshes(sequence=axis))
    assert model.slice_length(4096) == 2048
    assert model.slice_length(4098) == 4096
    assert model.slice_length(7) == 4
    assert made(longnet_base()).slice_length(7) == 7
