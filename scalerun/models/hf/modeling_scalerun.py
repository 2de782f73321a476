"""A decoder that scalerun trained, for the transformers library. It needs torch and that alone.

Load the folder that holds this file with ``AutoModelForCausalLM.from_pretrained(FOLDER,
trust_remote_code=True)``. Every sequence is computed whole, without a cache of keys.

B batch, T tokens, S = B * T, H heads, K width of a head, D model width, F inner width, E experts,
V vocabulary (in retention: width of a head's values).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

OFFSET = 2
"""Position 0 uses row 2 of a table."""
LARGEST_SUM = 5e4
SMALLEST_NORM = 1e-4


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's approximation of gelu."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "swish": F.silu,
}


class ScalerunConfig(PretrainedConfig):
    """Sizes and parts of a decoder; ``config.json`` names all of them."""

    model_type = "scalerun"


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, x.shape[-1:], None, self.eps).to(x.dtype) * self.weight


def make_norm(config: Any, dim: int) -> nn.Module:
    """A norm over ``dim`` features."""
    kind = RMSNorm if config.norm == "rms_norm" else nn.LayerNorm
    return kind(dim, eps=config.norm_eps)


class Places:
    """Where the tokens of a batch stand, which is known before the first layer.

    Args:
        mask_BT: 1 for real tokens, 0 for padding; None where all are real.
        shape: B and T.
    """

    def __init__(self, mask_BT: Tensor | None, shape: torch.Size, device: torch.device) -> None:
        self.padding_BT = None
        self.positions_BT = torch.arange(shape[1], device=device).unsqueeze(0)
        if mask_BT is not None and not bool(mask_BT.all()):
            self.padding_BT = mask_BT == 0
            left_B1 = self.padding_BT.long().cumprod(1).sum(1, keepdim=True)
            self.positions_BT = (self.positions_BT - left_B1).clamp_min(0)
        seen_TT = torch.ones(shape[1], shape[1], dtype=torch.bool, device=device).tril()
        self.seen_B1TT = seen_TT[None, None]
        if self.padding_BT is not None:
            self.seen_B1TT = self.seen_B1TT & ~self.padding_BT[:, None, None, :]

    def distances_BTT(self) -> Tensor:
        """Of each key (last index) from each query; negative for earlier ones."""
        return self.positions_BT[:, None, :] - self.positions_BT[:, :, None]


def turn(x_BHTK: Tensor, angle_BT: Tensor, length_BT: Tensor | float = 1.0) -> Tensor:
    """Turn neighbouring pairs of features by angles (B, 1, T, K / 2) and scale them."""
    wide = x_BHTK if x_BHTK.dtype == torch.float64 else x_BHTK.float()
    even, odd = wide[..., ::2], wide[..., 1::2]
    cos, sin = angle_BT.cos() * length_BT, angle_BT.sin() * length_BT
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x_BHTK.dtype)


def rotate(q_BHTK: Tensor, k_BHTK: Tensor, config: Any, places: Places) -> tuple[Tensor, Tensor]:
    """Rotary (arXiv:2104.09864) or XPos (arXiv:2212.10554) positions, or none."""
    if config.relative_position not in ("rotary", "xpos"):
        return q_BHTK, k_BHTK
    width = q_BHTK.shape[-1]
    positions = places.positions_BT.float()[:, None, :, None]
    steps = torch.arange(width // 2, dtype=torch.float32, device=q_BHTK.device) / (width // 2)
    angle = positions * (1.0 / (10000**steps))
    if config.relative_position == "rotary":
        return turn(q_BHTK, angle), turn(k_BHTK, angle)
    even = torch.arange(0, width, 2, dtype=torch.float32, device=q_BHTK.device)
    center = (q_BHTK.shape[2] + 1) // 2
    power = (places.positions_BT - center).float()[:, None, :, None] / config.xpos_scale_base
    scale = ((even + 0.4 * width) / (1.4 * width)) ** power
    return turn(q_BHTK, angle, scale), turn(k_BHTK, angle, 1.0 / scale)


class RelativeBias(nn.Module):
    """A learned bias for each bucket of distances (arXiv:1910.10683)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.buckets, self.largest = config.rel_pos_buckets, config.max_rel_pos
        self.weight = nn.Parameter(torch.zeros(self.buckets, config.num_attention_heads))

    def forward(self, places: Places) -> Tensor:
        """(B or 1, H, T, T)."""
        behind = -places.distances_BTT()
        half = self.buckets // 2
        base, behind = torch.where(behind < 0, half, 0), behind.abs()
        exact = half // 2
        ratio = torch.log(behind.clamp_min(1).float() / exact) / math.log(self.largest / exact)
        shared = (exact + (ratio * (half - exact)).long()).clamp_max(half - 1)
        buckets = base + torch.where(behind < exact, behind, shared)
        return F.embedding(buckets, self.weight).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Self-attention, dense or dilated (LongNet, arXiv:2307.02486)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )
        self.inner_norm = make_norm(config, dim) if config.inner_norm else None

    def forward(self, x_BTD: Tensor, places: Places, bias_BHTT: Tensor | None) -> Tensor:
        """(B, T, D)."""
        split = (self.config.num_attention_heads, -1)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x_BTD).unflatten(-1, split).transpose(1, 2) for layer in layers)
        q, k = rotate(q, k, self.config, places)
        scores_BHTT = q @ k.mT * q.shape[-1] ** -0.5
        if bias_BHTT is not None:
            scores_BHTT = scores_BHTT + bias_BHTT
        seen = places.seen_B1TT
        if self.config.segment_length:
            counts_BHTT = self.counts(places)
            seen = seen & (counts_BHTT > 0)
            scores_BHTT = scores_BHTT + counts_BHTT.to(scores_BHTT.dtype).log()
        empty = ~seen.any(-1, keepdim=True)
        scores_BHTT = scores_BHTT.masked_fill(~seen & ~empty, -math.inf)
        weights_BHTT = scores_BHTT.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        y_BTD = (weights_BHTT @ v).transpose(1, 2).flatten(2)
        return self.out_proj(y_BTD if self.inner_norm is None else self.inner_norm(y_BTD))

    def counts(self, places: Places) -> Tensor:
        """(B or 1, H, T, T): in how many branches each query sees each key."""
        num_heads, total = self.config.num_attention_heads, 0
        heads = torch.arange(num_heads, device=places.positions_BT.device)
        branches = zip(self.config.segment_length, self.config.dilated_ratio, strict=True)
        for length, ratio in branches:
            mod = self.config.dilated_head_offset == "mod"
            offset_H = heads % ratio if mod else heads // -(-num_heads // ratio)
            place_BT = places.positions_BT % length % ratio
            kept_BHT = place_BT[:, None, :] == offset_H[:, None]
            segment_BT = places.positions_BT // length
            same_BTT = segment_BT[:, :, None] == segment_BT[:, None, :]
            seen = kept_BHT[..., None] & kept_BHT[:, :, None, :] & same_BTT[:, None]
            total = total + seen.long()
        return total  # type: ignore[return-value]


class Retention(nn.Module):
    """Attention without softmax whose weights decay with distance (arXiv:2307.08621)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        dim, value_dim = config.hidden_size, config.value_dim
        self.q_proj, self.k_proj = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.v_proj, self.g_proj = (nn.Linear(dim, value_dim, bias=False) for _ in range(2))
        self.out_proj = nn.Linear(value_dim, dim, bias=False)

    def forward(self, x_BTD: Tensor, places: Places, bias_BHTT: Tensor | None) -> Tensor:
        """(B, T, D)."""
        split = (self.config.num_attention_heads, -1)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x_BTD).unflatten(-1, split).transpose(1, 2) for layer in layers)
        if places.padding_BT is not None:
            k = k.masked_fill(places.padding_BT[:, None, :, None], 0.0)
        width = q.shape[-1]
        turns = 1.0 / (10000 ** torch.linspace(0, 1, width // 2, device=x_BTD.device))
        angle = places.positions_BT.float()[:, None, :, None] * turns
        q, k = turn(q, angle), turn(k, angle, width**-0.5)
        weights_BHTT = (q @ k.mT) * self.decay(places).to(q.dtype)
        o_BHTV = (weights_BHTT @ v).float() if v.dtype != torch.float64 else weights_BHTT @ v
        if self.config.norm_eps_mode == "torchscale":
            o_BHTV = o_BHTV / weights_BHTT.abs().sum(-1, keepdim=True).clamp(1.0, LARGEST_SUM)
        elif self.config.norm_eps_mode == "torchscale_0.3.0":
            o_BHTV = o_BHTV / weights_BHTT.sum(-1, keepdim=True).abs().clamp_min(1.0)
        o_BHTV = F.rms_norm(o_BHTV, o_BHTV.shape[-1:], None, self.config.norm_eps).to(v.dtype)
        return self.out_proj(F.silu(self.g_proj(x_BTD)) * o_BHTV.transpose(1, 2).flatten(2))

    def decay(self, places: Places) -> Tensor:
        """(B or 1, H, T, T): each head's factor to the power of the distance, over its root."""
        heads = torch.arange(self.config.num_attention_heads, device=places.positions_BT.device)
        log_H11 = torch.log(1 - 2.0 ** (-5 - heads.float()))[:, None, None]
        kept = torch.exp(-places.distances_BTT()[:, None].float() * log_H11).tril()
        count_B1T1 = places.positions_BT[:, None, :, None] + 1.0
        total = torch.expm1(count_B1T1 * log_H11) / torch.expm1(log_H11)
        return kept / torch.where(log_H11 == 0.0, count_B1T1, total).sqrt()


class FeedForward(nn.Module):
    """``fc2(norm(activation(fc1(x))))``, or gated: ``fc2(norm(activation(fc1(x)) * gate(x)))``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, ffn_dim, gated = config.hidden_size, config.ffn_dim, config.ffn == "glu"
        self.activation = ACTIVATIONS[config.activation]
        self.fc1 = nn.Linear(dim, ffn_dim, bias=not gated)
        self.gate = nn.Linear(dim, ffn_dim, bias=False) if gated else None
        self.inner_norm = make_norm(config, ffn_dim) if config.ffn_inner_norm else None
        self.fc2 = nn.Linear(ffn_dim, dim, bias=not gated)

    def forward(self, x_BTD: Tensor, places: Places) -> Tensor:
        """(B, T, D)."""
        h_BTF = self.activation(self.fc1(x_BTD))
        if self.gate is not None:
            h_BTF = h_BTF * self.gate(x_BTD)
        return self.fc2(h_BTF if self.inner_norm is None else self.inner_norm(h_BTF))


class Gate(nn.Module):
    """How well each expert suits each token: linear, or X-MoE (arXiv:2204.09179)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.kind, dim, experts = config.gate, config.hidden_size, config.num_experts
        if self.kind == "linear":
            self.weight = nn.Parameter(torch.zeros(experts, dim))
            return
        width = 16 if self.kind == "xmoe" else max(experts // 2, 2)
        self.reduction = nn.Parameter(torch.zeros(width, dim))
        self.expert_rows = nn.Parameter(torch.ones(experts, width))
        if self.kind == "xmoe_cosine":
            self.log_temperature = nn.Parameter(torch.zeros(1))

    def forward(self, x_SD: Tensor) -> Tensor:
        """(S, E)."""
        if self.kind == "linear":
            return F.linear(x_SD, self.weight.to(x_SD.dtype))
        reduced = F.linear(x_SD, self.reduction.to(x_SD.dtype))
        rows = F.normalize(self.expert_rows.to(x_SD.dtype), dim=-1, eps=SMALLEST_NORM)
        if self.kind == "xmoe":
            return F.linear(reduced, rows)
        reduced = F.normalize(reduced, dim=-1, eps=SMALLEST_NORM)
        return F.linear(reduced, rows) * torch.exp(-self.log_temperature)


class Router(nn.Module):
    """One or two experts for each token, while they have places (arXiv:2006.16668)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config)

    def forward(self, x_SD: Tensor, real_S: Tensor) -> tuple[Tensor, Tensor]:
        """(choices, S) experts and weights; a weight is 0 where a token found no place."""
        config = self.config
        wide = config.gate_in_float32 and x_SD.dtype != torch.float64
        logits_SE = self.gate(x_SD.float() if wide else x_SD)
        first_S = logits_SE.argmax(-1)
        experts_KS = first_S[None]
        if config.experts_per_token == 2:
            rest_SE = logits_SE.scatter(1, first_S[:, None], -math.inf)
            experts_KS = torch.stack((first_S, rest_SE.argmax(-1)))
        weights_KS = logits_SE.softmax(-1).gather(1, experts_KS.t()).t()
        before = config.normalize_before_dropping
        if config.experts_per_token == 2 and before:
            weights_KS = self.normalized(weights_KS)
        wanted_KS = real_S.expand_as(experts_KS).clone()
        if config.experts_per_token == 2 and config.second_expert == "random":
            wanted_KS[1] &= 2.0 * weights_KS[1] > 0.5
        chosen = F.one_hot(experts_KS, config.num_experts) * wanted_KS[..., None]
        earlier = chosen.flatten(0, 1).cumsum(0).view_as(chosen) - chosen
        places_KS = earlier.gather(2, experts_KS[..., None])[..., 0]
        kept_KS = wanted_KS & (places_KS < self.capacity(int(real_S.sum())))
        weights_KS = weights_KS.masked_fill(~kept_KS, 0.0)
        if config.experts_per_token == 2 and not before:
            weights_KS = self.normalized(weights_KS)
        return experts_KS, weights_KS

    def capacity(self, num_tokens: int) -> int:
        """Places of an expert."""
        share = self.config.capacity_fraction
        if share > 0:
            return int(-(-share * num_tokens // 1))
        return int(self.config.experts_per_token * -(-num_tokens // self.config.num_experts))

    @staticmethod
    def normalized(weights_KS: Tensor) -> Tensor:
        """Each token's weights over their sum."""
        smallest = torch.finfo(weights_KS.dtype).eps
        return weights_KS / weights_KS.sum(0, keepdim=True).clamp(min=smallest)


class StackedNorm(nn.Module):
    """A norm with a gain, and for LayerNorm a bias, for each expert."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.eps, shape = config.norm_eps, (config.num_experts, config.ffn_dim)
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = None if config.norm == "rms_norm" else nn.Parameter(torch.zeros(shape))

    def forward(self, h_RF: Tensor, expert: int) -> Tensor:
        """(R, F) of one expert's rows."""
        shape = h_RF.shape[-1:]
        if self.bias is None:
            wide = h_RF if h_RF.dtype == torch.float64 else h_RF.float()
            return F.rms_norm(wide, shape, None, self.eps).to(h_RF.dtype) * self.weight[expert]
        return F.layer_norm(h_RF, shape, self.weight[expert], self.bias[expert], self.eps)


class Experts(nn.Module):
    """Feed-forward layers as stacks of weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        num, dim, ffn_dim = config.num_experts, config.hidden_size, config.ffn_dim
        self.activation = ACTIVATIONS[config.activation]
        self.fc1_weight = nn.Parameter(torch.zeros(num, ffn_dim, dim))
        self.fc1_bias = nn.Parameter(torch.zeros(num, ffn_dim))
        self.inner_norm = StackedNorm(config) if config.expert_inner_norm else None
        self.fc2_weight = nn.Parameter(torch.zeros(num, dim, ffn_dim))
        self.fc2_bias = nn.Parameter(torch.zeros(num, dim))

    def forward(self, x_RD: Tensor, expert: int) -> Tensor:
        """(R, D) of one expert's rows."""
        h_RF = self.activation(F.linear(x_RD, self.fc1_weight[expert], self.fc1_bias[expert]))
        if self.inner_norm is not None:
            h_RF = self.inner_norm(h_RF, expert)
        return F.linear(h_RF, self.fc2_weight[expert], self.fc2_bias[expert])


class MixtureOfExperts(nn.Module):
    """Each token is seen by one or two experts, if they have places."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mask_padding = config.mask_padding
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor, places: Places) -> Tensor:
        """(B, T, D)."""
        x_SD = x_BTD.flatten(0, 1)
        real_S = torch.ones(len(x_SD), dtype=torch.bool, device=x_SD.device)
        if self.mask_padding and places.padding_BT is not None:
            real_S = ~places.padding_BT.flatten()
        experts_KS, weights_KS = self.router(x_SD, real_S)
        y_SD = torch.zeros_like(x_SD)
        for chosen_S, weight_S in zip(experts_KS, weights_KS, strict=True):
            for expert in chosen_S[weight_S > 0].unique().tolist():
                rows = ((chosen_S == expert) & (weight_S > 0)).nonzero()[:, 0]
                part = self.experts(x_SD[rows], expert) * weight_S[rows, None].to(x_SD.dtype)
                y_SD = y_SD.index_add(0, rows, part)
        return y_SD.view_as(x_BTD)


class Residual(nn.Module):
    """The norm of a branch, before it or after the sum (DeepNorm: arXiv:2203.00555)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.before, self.alpha = config.residual == "pre_norm", config.alpha
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, x_BTD: Tensor, branch: nn.Module, *more: Any) -> Tensor:
        """The new stream (B, T, D)."""
        if self.before:
            return self.alpha * x_BTD + branch(self.norm(x_BTD), *more)
        return self.norm(self.alpha * x_BTD + branch(x_BTD, *more))


class Block(nn.Module):
    """Mix tokens, then compute on each."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.mixer_residual, self.ffn_residual = Residual(config), Residual(config)
        self.mixer = Retention(config) if config.mixer == "retention" else Attention(config)
        expert = config.moe_freq > 0 and (layer + 1) % config.moe_freq == 0
        self.ffn = MixtureOfExperts(config) if expert else FeedForward(config)

    def forward(self, x_BTD: Tensor, places: Places, bias_BHTT: Tensor | None) -> Tensor:
        """The new stream (B, T, D)."""
        x_BTD = self.mixer_residual(x_BTD, self.mixer, places, bias_BHTT)
        return self.ffn_residual(x_BTD, self.ffn, places)


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, dim = config, config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, dim)
        self.positions = None
        if config.absolute_position == "learned":
            self.positions = nn.Embedding(config.max_position_embeddings + OFFSET, dim)
        self.norm = make_norm(config, dim) if config.embedding_norm else None

    def forward(self, tokens_BT: Tensor, places: Places) -> Tensor:
        """(B, T, D)."""
        x_BTD = self.config.embedding_scale * self.tokens(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(places.positions_BT + OFFSET)
        if self.config.absolute_position == "sinusoidal":
            half = self.config.hidden_size // 2
            steps = torch.arange(half, dtype=torch.float32, device=x_BTD.device)
            frequencies = torch.exp(steps * -(math.log(10000) / (half - 1)))
            angle = (places.positions_BT + OFFSET).float()[..., None] * frequencies
            x_BTD = x_BTD + torch.cat((angle.sin(), angle.cos()), dim=-1).to(x_BTD.dtype)
        return x_BTD if self.norm is None else self.norm(x_BTD)


class ScalerunForCausalLM(PreTrainedModel, GenerationMixin):
    """Predicts the next token."""

    config_class = ScalerunConfig
    main_input_name = "input_ids"

    def __init__(self, config: ScalerunConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        biased = config.relative_position == "relative_bias"
        self.relative_position = RelativeBias(config) if biased else None
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = make_norm(config, config.hidden_size) if config.final_norm else None
        self.output_projection = None
        if not config.tied_output:
            self.output_projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **ignored: Any,
    ) -> CausalLMOutput:
        """Logits (B, T, V), and the mean loss of labels (B, T), where -100 counts for nothing."""
        places = Places(attention_mask, input_ids.shape, input_ids.device)
        x_BTD = self.embedding(input_ids, places)
        bias_BHTT = None if self.relative_position is None else self.relative_position(places)
        for layer in self.layers:
            x_BTD = layer(x_BTD, places, bias_BHTT)
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        table = self.embedding.tokens if self.output_projection is None else self.output_projection
        logits_BTV = F.linear(x_BTD, table.weight)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return CausalLMOutput(loss=loss, logits=logits_BTV)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **ignored: Any
    ) -> dict[str, Any]:
        """The whole sequence again for every new token."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens."""
        return self.embedding.tokens
