"""Models whose experts are spread over real ranks learn what one process teaches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from cpu_tests.world import run_world
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.mesh import ONE_RANK, Meshes, ModelMeshes, ParallelDims, build_meshes
from scalerun.models.base_model import BaseModel, build_model
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_mlm import TransformerMLMConfig
from scalerun.models.transformer_mt import TransformerMTConfig
from scalerun.modules.constraint import constrain
from scalerun.modules.init import canonical_name
from scalerun.modules.moe.experts import Experts, is_expert_parameter
from scalerun.optim.clip import NormType, clip_grad_norm, grad_norm

RANKS, VOCAB, PAD = 4, 19, 1
MOE: dict[str, Any] = {"moe_freq": 2, "moe_expert_count": 4}
DECODER: dict[str, Any] = {
    "decoder_embed_dim": 16,
    "decoder_attention_heads": 2,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 4,
}
ENCODER: dict[str, Any] = {
    name.replace("decoder", "encoder"): value for name, value in DECODER.items()
}
MODELS: dict[str, Callable[..., Any]] = {
    "decoder": lambda **more: TransformerConfig(
        **DECODER, **MOE, use_xmoe=True, subln=True, **more
    ),
    "encoder": lambda **more: TransformerMLMConfig(
        **ENCODER, **MOE, moe_top1_expert=True, rms_norm=True, **more
    ),
    "encoder_decoder": lambda **more: TransformerMTConfig(
        **DECODER, **ENCODER, **MOE, moe_second_expert_policy="all", **more
    ),
}
LENGTHS = [(3, 12), (2, 7), (1, 4), (2, 9)]
"""Samples and tokens of each rank; the third one has nothing but padding."""


def made(cfg: Any, meshes: ModelMeshes = ONE_RANK, **more: Any) -> BaseModel:
    model = build_model(
        cfg,
        vocab_size=VOCAB,
        padding_idx=PAD,
        seed=3,
        device=torch.device("cpu"),
        meshes=meshes,
        **more,
    )
    constrain(model)
    return model.train()


def batch(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(2, VOCAB, LENGTHS[rank], generator=generator)
    tokens[0, -2:] = PAD
    return torch.full_like(tokens, PAD) if rank == 2 else tokens


NUM_TARGETS = sum(int((batch(rank) != PAD).sum()) for rank in range(RANKS))


def run(model: BaseModel, rank: int) -> float:
    """One rank's part of the loss, forward and backward."""
    tokens = batch(rank)
    torch.manual_seed(10 + rank)
    if hasattr(model, "encoder"):
        output = model(tokens.flip(1), tokens)
    else:
        output = model(tokens, padding_mask_BT=tokens == PAD)
    targets = tokens.roll(1, 1)
    loss = F.cross_entropy(
        output.logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
    )
    loss = loss / NUM_TARGETS + 0.01 * sum(report.loss for report in output.reports)
    loss.backward()
    return loss.item()


def add_up(model: nn.Module, meshes: Meshes) -> None:
    """Add up the gradients of the ranks that hold the same parameters."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if is_expert_parameter(name):
            dist.all_reduce(parameter.grad.to_local(), group=meshes.sparse["efsdp"].get_group())
        else:
            dist.all_reduce(parameter.grad)


def shard(model: BaseModel, meshes: Meshes) -> None:
    """FSDP, as it has to be told for experts: gradients add up and are never averaged."""
    for unit in model.shard_units():
        for module in unit.modules():
            if isinstance(module, Experts):
                fully_shard(module, mesh=meshes.sparse["efsdp"])
        fully_shard(unit, mesh=meshes.dense["dp_shard"])
    fully_shard(model, mesh=meshes.dense["dp_shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[canonical_name(name)] = full.clone()
    return found


@dataclass
class Expected:
    """What one process finds, which sees all batches."""

    losses: list[float]
    gradients: dict[str, Tensor]
    norms: dict[NormType, dict[str, Tensor]]


def expect(cfg: Any) -> Expected:
    model = made(cfg)
    losses = [run(model, rank) for rank in range(RANKS)]
    named = dict(model.named_parameters())
    norms = {kind: grad_norm(named, kind).stats() for kind in NORMS}
    return Expected(losses, whole_gradients(model), norms)


def compare(cfg: Any, expected: Expected, rank: int, meshes: Meshes, *, sharded: bool) -> None:
    prepare = {"prepare": lambda model: shard(model, meshes)} if sharded else {}
    model = made(cfg, meshes.model, **prepare)
    assert run(model, rank) == pytest.approx(expected.losses[rank], rel=1e-5, abs=1e-6)
    if not sharded:
        add_up(model, meshes)
    found = whole_gradients(model)
    assert found.keys() == expected.gradients.keys()
    for name, gradient in found.items():
        difference = (gradient - expected.gradients[name]).norm()
        assert difference <= 1e-5 * expected.norms["l2"]["gnorm"], f"{name}: {difference}"

    named = dict(model.named_parameters())
    for kind, norms in expected.norms.items():
        stats = grad_norm(named, kind).stats()
        for part, norm in norms.items():
            assert stats[part].item() == pytest.approx(norm.item(), rel=1e-5), f"{kind}, {part}"
    clip_grad_norm(named, 0.1 * expected.norms["sparse"]["gnorm"].item(), "sparse")
    for name, gradient in whole_gradients(model).items():
        torch.testing.assert_close(gradient, 0.1 * found[name], rtol=1e-4, atol=1e-8)


NORMS: tuple[NormType, ...] = ("l2", "inf", "sparse")
LAYOUTS: list[tuple[str, int, bool, bool]] = [
    ("decoder", 4, False, False),
    ("decoder", 2, True, True),
    ("encoder", 2, False, True),
    ("encoder", 4, True, False),
    ("encoder_decoder", 4, False, True),
    ("encoder_decoder", 2, True, False),
]
"""Model, ranks that share the experts, whether FSDP shards the parameters, and whether blocks are
recomputed."""


def test_losses_gradients_and_norms_are_those_of_one_process() -> None:
    expected = {kind: expect(config()) for kind, config in MODELS.items()}

    def work(rank: int) -> None:
        meshes = {
            ranks: build_meshes(ParallelDims(shard=RANKS, expert=ranks), "cpu") for ranks in (2, 4)
        }
        for kind, ranks, sharded, recompute in LAYOUTS:
            cfg = MODELS[kind](checkpoint_activations=recompute)
            try:
                compare(cfg, expected[kind], rank, meshes[ranks], sharded=sharded)
            except AssertionError as error:
                raise AssertionError(f"{kind} over {ranks} ranks: {error}") from error

    run_world(RANKS, work)


def test_ranks_that_cannot_hold_equally_many_experts_are_refused() -> None:
    def work(rank: int) -> str:
        meshes = build_meshes(ParallelDims(shard=2, expert=2), "cpu")
        with pytest.raises(ConfigError) as caught:
            made(TransformerConfig(**DECODER, moe_freq=2, moe_expert_count=5), meshes.model)
        return str(caught.value)

    message = "--expert-parallel-size 2 does not divide --moe-expert-count 5; choose a divisor"
    assert run_world(2, work) == [message] * 2
