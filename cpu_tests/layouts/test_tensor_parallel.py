"""Ranks that share each matrix product compute what one process does."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import distribute_tensor

from cpu_tests.world import run_world
from scalerun.criterions.base_criterion import build_criterion
from scalerun.criterions.cross_entropy import CrossEntropyConfig, cross_entropy_sum
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.collectives import all_gather
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes, ParallelDims, build_meshes
from scalerun.models.base_model import build_model
from scalerun.models.beit3 import BEiT3Config
from scalerun.models.blocks import TransformerParts
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_encoder import TransformerEncoderConfig
from scalerun.models.transformer_lm import TransformerLM
from scalerun.models.transformer_mlm import TransformerMLMConfig
from scalerun.models.transformer_mt import TransformerMTConfig
from scalerun.modules.attention import Attention
from scalerun.modules.feed_forward import GLU
from scalerun.modules.init import initialize, ones
from scalerun.modules.moe.experts import is_expert_parameter

VOCAB, PAD, TIME = 24, 1, 8
DECODER = {
    "decoder_embed_dim": 16,
    "decoder_attention_heads": 4,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
    "max_target_positions": 16,
    "dropout": 0.1,
    "activation_dropout": 0.1,
    "drop_path_rate": 0.1,
}
ENCODER = {
    "encoder_embed_dim": 16,
    "encoder_attention_heads": 4,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "max_source_positions": 16,
    "dropout": 0.1,
    "activation_dropout": 0.1,
}
RETNET = {
    "decoder_embed_dim": 16,
    "decoder_value_embed_dim": 24,
    "decoder_retention_heads": 4,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
    "max_target_positions": 16,
    "dropout": 0.1,
}
RECOMPUTE = {"checkpoint_activations": True}
SELECTIVE = {"checkpoint_activations": True, "recompute": "selective"}
CASES = {
    "decoder": TransformerConfig(**DECODER, **RECOMPUTE),
    "tied, learned positions": TransformerConfig(
        **DECODER, share_decoder_input_output_embed=True, decoder_learned_pos=True
    ),
    "SubLN, XPos": TransformerConfig(**DECODER, **RECOMPUTE, subln=True, xpos_rel_pos=True),
    "SubLN, RMSNorm": TransformerConfig(**DECODER, subln=True, rms_norm=True, rotary=True),
    "DeepNorm, norm of the embedding": TransformerConfig(
        **DECODER, deepnorm=True, layernorm_embedding=True
    ),
    "GLU": TransformerConfig(**DECODER, **SELECTIVE, glu=True),
    "relative bias": TransformerConfig(**DECODER, rel_pos_buckets=8, max_rel_pos=16),
    "LongNet": TransformerConfig(
        **DECODER,
        **RECOMPUTE,
        segment_length=[4, 8],
        dilated_ratio=[1, 2],
        dilated_merge_gradient="exact",
    ),
    "RetNet": RetNetConfig(**RETNET, **SELECTIVE),
    "RetNet, chunkwise": RetNetConfig(**RETNET, chunkwise_recurrent=True, recurrent_chunk_size=3),
    "experts": TransformerConfig(**DECODER, **SELECTIVE, moe_freq=2, moe_expert_count=4),
    "experts, SubLN": TransformerConfig(
        **DECODER, subln=True, moe_freq=1, moe_expert_count=4, moe_top1_expert=True
    ),
    "experts, RMSNorm": TransformerConfig(
        **DECODER, subln=True, rms_norm=True, moe_freq=2, moe_expert_count=4, use_xmoe=True
    ),
    "encoder": TransformerEncoderConfig(**ENCODER, **RECOMPUTE, encoder_learned_pos=True),
    "masked language model": TransformerMLMConfig(**ENCODER, layernorm_embedding=True),
    "encoder-decoder": TransformerMTConfig(
        **DECODER,
        **{k: v for k, v in ENCODER.items() if k not in DECODER},
        **RECOMPUTE,
        share_all_embeddings=True,
        rel_pos_buckets=8,
        max_rel_pos=16,
    ),
    "plug-in": TransformerConfig(**DECODER, **RECOMPUTE, rotary=True),
    "plug-in's norm": TransformerConfig(**DECODER, subln=True),
    "multiway": TransformerEncoderConfig(**ENCODER, multiway=True, subln=True),
    "BEiT-3": BEiT3Config(**ENCODER, img_size=8, patch_size=4, no_output_layer=False),
}

NO_DROPOUT = {"dropout": 0.0, "drop_path_rate": 0.0, "activation_dropout": 0.0}
FURTHER = {
    "experts on two axes": TransformerConfig(
        **DECODER | NO_DROPOUT, subln=True, moe_freq=1, moe_expert_count=4
    ),
    "dropped attention": TransformerConfig(**DECODER | NO_DROPOUT, attention_dropout=0.5),
    "recomputed dropped attention": TransformerConfig(
        **DECODER | NO_DROPOUT, **RECOMPUTE, attention_dropout=0.5
    ),
}


class WholeParts(TransformerParts):
    """Parts that know nothing of ranks, as a plug-in's may be."""

    def mixer(self, layer):
        return Attention(self.stack.dim, self.stack.num_heads, init=self.weights.attention)

    def one_norm(self, dim):
        return WholeNorm(dim)

    def dense_ffn(self):
        return GLU(self.stack.dim, self.stack.ffn_dim, init=self.weights.ffn, activation=F.silu)


class WholeLM(TransformerLM):
    parts_class = WholeParts


class WholeNorm(nn.Module):
    """A norm with a gain for each half of the features, and no word of meshes."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.dim = dim

    def initializers(self):
        return {"weight": ones}

    def forward(self, x):
        normed = F.layer_norm(x, (self.dim,))
        return (normed.unflatten(-1, (2, -1)) * self.weight[:, None]).flatten(-2)


class ForeignNormParts(TransformerParts):
    """Parts that know of ranks, but for their norms."""

    def one_norm(self, dim):
        return WholeNorm(dim)


class ForeignNormLM(TransformerLM):
    parts_class = ForeignNormParts


UNREGISTERED = {"plug-in": WholeLM, "plug-in's norm": ForeignNormLM}


TOKENS = torch.randint(2, VOCAB, (3, TIME), generator=torch.Generator().manual_seed(1))
TOKENS[0, -2:] = PAD
TARGETS = TOKENS.roll(-1, 1).masked_fill(TOKENS == PAD, IGNORE_INDEX)


def make(name, meshes=ONE_RANK):
    """A model with every parameter in use and the same on every rank, and how it started."""
    cfg, sizes = (
        (CASES | FURTHER)[name],
        {"vocab_size": VOCAB, "padding_idx": PAD, "meshes": meshes},
    )
    if name in UNREGISTERED:
        model = UNREGISTERED[name].build_model(cfg, **sizes)
        initialize(model, 3)
    else:
        model = build_model(cfg, seed=3, device=torch.device("cpu"), **sizes)
    start = {name: whole(p).clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            here = getattr(parameter, "placements", None)
            if here is None:
                parameter += noise
            else:
                parameter += distribute_tensor(
                    noise, parameter.device_mesh, here, src_data_rank=None
                )
    return model, start


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def run(name, model):
    """Logits and loss of a training pass; gradients are left on the parameters."""
    torch.manual_seed(7)
    model.train()
    if name == "BEiT-3":
        images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
        output = model.encode(TOKENS, images_BCHW=images, padding_mask_BT=TOKENS == PAD)
        targets = F.pad(TARGETS, (5, 0), value=IGNORE_INDEX)
    else:
        targets = TARGETS
        match name:
            case "encoder-decoder":
                output = model(TOKENS, TOKENS)
            case "multiway":
                output = model(TOKENS, padding_mask_BT=TOKENS == PAD, split=3)
            case "encoder" | "masked language model":
                output = model(TOKENS, padding_mask_BT=TOKENS == PAD)
            case _:
                output = model(TOKENS)
    logits = output.whole_logits().detach().clone()
    loss = cross_entropy_sum(
        output.logits, targets, overwrite_logits=True, vocab_mesh=output.vocab_mesh
    )
    if output.reports:
        loss = loss + sum(report.loss for report in output.reports)
    loss.backward()
    return logits, loss.detach()


def compare(name, meshes):
    """Sizes of the differences from one process, for one architecture."""
    alone, start_alone = make(name)
    shared, start_shared = make(name, meshes)
    for parameter, value in start_alone.items():
        assert torch.equal(value, start_shared[parameter]), (name, parameter)
    logits, loss = run(name, alone)
    found_logits, found_loss = run(name, shared)
    torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4, msg=lambda m: name + m)
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=1e-5, msg=lambda m: name + m)
    norm = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
    assert norm > 0
    others = dict(shared.named_parameters())
    for parameter, value in alone.named_parameters():
        found = others[parameter].grad
        assert (found is None) == (value.grad is None), (name, parameter)
        if found is not None:
            difference = (whole(found) - value.grad).abs().max() / norm
            assert difference < 1e-5, (name, parameter, float(difference), meshes)


MULTIWAY = ("multiway", "BEiT-3")


def test_two_ranks_compute_what_one_process_does():
    def work(rank):
        tensor = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
        for name in CASES:
            compare(name, ModelMeshes(tensor=tensor))
            if name not in MULTIWAY:
                compare(name, ModelMeshes(tensor=tensor, sequence_parallel=True))
        for check in CHECKS:
            check(tensor)

    run_world(2, work)


def test_four_ranks_compute_what_one_process_does():
    def work(rank):
        tensor = build_meshes(ParallelDims(tensor=4), "cpu").model.tensor
        for name in ("SubLN, XPos", "relative bias", "LongNet", "RetNet", "encoder-decoder"):
            compare(name, ModelMeshes(tensor=tensor, sequence_parallel=True))
        compare("multiway", ModelMeshes(tensor=tensor))
        check_experts_on_two_axes()

    run_world(4, work)


def check_uneven_lengths(tensor):
    """Tokens that the ranks cannot share equally are whole on each, with the same logits."""
    meshes = ModelMeshes(tensor=tensor, sequence_parallel=True)
    for name in ("decoder", "RetNet", "experts"):
        alone, shared = make(name)[0].eval(), make(name, meshes)[0].eval()
        with torch.no_grad():
            for length in (TIME, 5, 1):
                found = shared(TOKENS[:, :length]).whole_logits()
                torch.testing.assert_close(
                    found, alone(TOKENS[:, :length]).logits, rtol=1e-4, atol=1e-5
                )


def check_generation(tensor):
    """Decoding token by token gives the logits of one process."""
    meshes = ModelMeshes(tensor=tensor, sequence_parallel=True)
    for name in ("tied, learned positions", "LongNet", "RetNet, chunkwise"):
        alone, shared = make(name)[0].eval(), make(name, meshes)[0].eval()
        tokens = TOKENS[1:]
        with torch.no_grad():
            expected = alone(tokens).logits
            state = shared.init_incremental_state(2, TIME)
            for piece in tokens.split([4, 1, 1, 1, 1], 1):
                output = shared(piece, incremental_state=state, last_token_only=True)
                found = output.whole_logits()[:, 0]
                torch.testing.assert_close(
                    found, expected[:, state.length - 1], rtol=1e-4, atol=1e-5
                )


def check_criterion(tensor):
    """Loss and gradients are the same whether all logits exist or those of a few tokens."""
    batch = Batch(TOKENS, TARGETS, num_targets=20, sample_ids=[0, 1, 2])
    for name in ("tied, learned positions", "RetNet"):
        alone, _ = make(name)
        expected = None
        for chunk in (0, 5):
            criterion = build_criterion(CrossEntropyConfig(cross_entropy_chunk_tokens=chunk))
            for spread in (False, True):
                shared, _ = make(name, ModelMeshes(tensor=tensor, sequence_parallel=spread))
                losses, gradients = [], []
                for model in (alone, shared):
                    model.zero_grad()
                    torch.manual_seed(7)
                    loss = criterion(model, batch).loss_sum
                    loss.backward()
                    losses.append(loss.detach())
                    gradients.append(
                        torch.cat([whole(p.grad).flatten() for p in model.parameters()])
                    )
                torch.testing.assert_close(*losses)
                assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[0].norm()
                expected = losses[0] if expected is None else expected
                torch.testing.assert_close(losses[1], expected)


def check_dropped_attention(tensor):
    """Softmax weights are dropped by masks of each rank's own, and drawn again to recompute."""
    gradients = []
    for name in ("dropped attention", "recomputed dropped attention"):
        model, _ = make(name, ModelMeshes(tensor=tensor))
        with torch.no_grad():
            mixer = model.layers[0].mixer
            for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
                # All heads are equal, and would be with equal masks.
                layer.weight.to_local().fill_(0.1)
                layer.bias.to_local().zero_()
        mixed = []
        mixer.out_proj.register_forward_pre_hook(lambda _, x, seen=mixed: seen.append(x[0]))
        run(name, model)
        heads = all_gather(mixed[0].detach(), tensor, 2).unflatten(2, (4, 4))
        assert not torch.equal(heads[..., 0, :], heads[..., 2, :])
        gradients.append([whole(p.grad) for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def check_biases_of_other_heads(tensor):
    """A mixer with all heads cannot take the score biases of some."""
    cfg = CASES["relative bias"]
    with pytest.raises(ConfigError, match="--rel-pos-buckets gives each of the --model-parallel"):
        WholeLM.build_model(
            cfg, vocab_size=VOCAB, padding_idx=PAD, meshes=ModelMeshes(tensor=tensor)
        )


def check_experts_on_two_axes():
    """Experts on ranks of their own, each cut by the tensor axis: two ranks with equal batches."""
    meshes = build_meshes(ParallelDims(shard=2, tensor=2, expert=2), "cpu").model
    name = "experts on two axes"
    alone, start_alone = make(name)
    shared, start_shared = make(name, replace(meshes, sequence_parallel=True))
    stack = shared.layers[0].ffn.experts.fc2_weight
    assert stack.shape == (4, 16, 24)
    assert stack.to_local().shape == (2, 16, 12)
    logits, loss = run(name, alone)
    found_logits, found_loss = run(name, shared)
    torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=1e-5)
    norm = torch.stack([p.grad.norm() for p in alone.parameters()]).norm()
    for (parameter, value), other in zip(
        alone.named_parameters(), shared.parameters(), strict=True
    ):
        assert torch.equal(start_alone[parameter], start_shared[parameter]), parameter
        # The tokens of both ranks reach an expert.
        expected = value.grad * (2 if is_expert_parameter(parameter) else 1)
        assert (whole(other.grad) - expected).abs().max() < 1e-5 * norm, parameter


CHECKS = (
    check_uneven_lengths,
    check_generation,
    check_criterion,
    check_dropped_attention,
    check_biases_of_other_heads,
)
