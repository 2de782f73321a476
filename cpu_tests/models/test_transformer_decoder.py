from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.models.transformer_decoder import TransformerDecoder, project_to_vocabulary
from scalerun.modules.block import TransformerBlock

MakeModel = Callable[..., TransformerDecoder]

POSITIONS: dict[str, dict[str, Any]] = {
    "learned": {"decoder_learned_pos": True},
    "sinusoidal": {},
    "rotary": {"rotary": True},
    "xpos": {"xpos_rel_pos": True, "xpos_scale_base": 16},
    "relative_bias": {"rel_pos_buckets": 8, "max_rel_pos": 6},
    "none": {"no_token_positional_embeddings": True},
    "learned_and_xpos": {"decoder_learned_pos": True, "xpos_rel_pos": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "pre_norm": {},
    "post_norm": {"decoder_normalize_before": False},
    "deepnorm": {"deepnorm": True},
    "subln": {"subln": True},
    "subln_rms_glu": {"subln": True, "rms_norm": True, "glu": True},
}
every_position = pytest.mark.parametrize("position", POSITIONS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def model(request: pytest.FixtureRequest, make_model: MakeModel) -> TransformerDecoder:
    """A float64 decoder in evaluation, of the position scheme that the test asks for."""
    position = request.node.callspec.params.get("position", "learned")
    kind = request.node.callspec.params.get("kind", "pre_norm")
    return make_model(**POSITIONS[position], **KINDS[kind]).double().eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(2, 19, (3, 12), generator=torch.Generator().manual_seed(7))


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the float32 tables of positions, whose center may differ."""
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


def decode(model: TransformerDecoder, tokens: Tensor, cuts: list[int]) -> Tensor:
    """Logits of all tokens, fed to an incremental state in pieces of these lengths."""
    state = model.init_incremental_state(len(tokens), 20)
    pieces = [model(piece, incremental_state=state).logits for piece in tokens.split(cuts, 1)]
    assert state.length == tokens.shape[1]
    return torch.cat(pieces, 1)


@every_position
@every_kind
@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_logit(
    position: str, kind: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 19
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@every_position
@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 4, 2], [12], [3] * 4])
@torch.no_grad()
def test_decoding_in_pieces_equals_the_full_forward(
    position: str, cuts: list[int], model: TransformerDecoder, tokens: Tensor
) -> None:
    close(decode(model, tokens, cuts), model(tokens).logits)


@every_kind
@torch.no_grad()
def test_every_kind_of_block_decodes(kind: str, model: TransformerDecoder, tokens: Tensor) -> None:
    close(decode(model, tokens, [5, 1, 1, 5]), model(tokens).logits)


@every_position
@torch.no_grad()
def test_left_padding_changes_no_logit(
    position: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    lengths = [12, 8, 3]
    padded, mask = torch.ones_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    for row, length in enumerate(lengths):
        padded[row, 12 - length :] = tokens[row, :length]
        mask[row, 12 - length :] = False
    logits = model(padded, padding_mask_BT=mask).logits
    assert logits.isfinite().all()
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length]).logits[0]
        close(logits[row, 12 - length :], alone)


@every_position
@torch.no_grad()
def test_a_token_that_sees_nothing_depends_on_nothing_else(
    position: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, :3] = True
    other = torch.cat((tokens[:, :3], tokens[:, 3:].flip(1)), 1)
    one, two = (model(x, padding_mask_BT=mask).logits[:, :3] for x in (tokens, other))
    assert one.isfinite().all()
    assert torch.equal(one, two)


@every_position
@torch.no_grad()
def test_padded_prompts_decode_as_if_alone(
    position: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    """The first row is padded on the left, the second on the right, the third not at all."""
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[0, :2] = mask[1, 4:] = True
    prompts = torch.cat((tokens[:1, :0].new_ones(1, 2), tokens[:1, :4]), 1)
    prompts = torch.cat((prompts, tokens[1:2, :6], tokens[2:, :6]))
    state = model.init_incremental_state(3, 20)
    first = model(prompts[:, :3], padding_mask_BT=mask[:, :3], incremental_state=state).logits
    model(prompts[:, 3:], padding_mask_BT=mask[:, 3:], incremental_state=state)
    rest = [model(tokens[:, t : t + 1], incremental_state=state).logits for t in range(6, 9)]
    assert first.isfinite().all()
    for row, prompt in enumerate((tokens[0, :4], tokens[1, :4], tokens[2, :6])):
        alone = model(torch.cat((prompt, tokens[row, 6:9]))[None]).logits[0, -3:]
        close(torch.cat(rest, 1)[row], alone)


@every_position
@torch.no_grad()
def test_reordered_sequences_continue_as_their_sources(
    position: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    order = torch.tensor([2, 0, 0, 1])
    state = model.init_incremental_state(3, 20)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, :2] = True
    model(tokens[:, :5], padding_mask_BT=mask, incremental_state=state)
    state.reorder(order)
    continued = model(tokens[order, 5:8], incremental_state=state).logits
    full_mask = torch.cat((mask, torch.zeros(3, 3, dtype=torch.bool)), 1)
    close(continued, model(tokens[:, :8], padding_mask_BT=full_mask).logits[order, 5:])


@every_position
@torch.no_grad()
def test_masked_documents_equal_separate_forwards(
    position: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    cuts = [[5, 4, 3], [12], [1, 10, 1]]
    ids, positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, lengths in enumerate(cuts):
        ids[row] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions[row] = torch.cat([torch.arange(length) for length in lengths])
    logits = model(tokens, positions_BT=positions, document_ids_BT=ids).logits
    for row, lengths in enumerate(cuts):
        alone = [model(piece[None]).logits[0] for piece in tokens[row].split(lengths)]
        close(logits[row], torch.cat(alone))


@torch.no_grad()
def test_positions_go_on_over_documents_unless_they_are_given(make_model: MakeModel) -> None:
    model = make_model(decoder_learned_pos=True).eval()
    tokens, ids = torch.randint(2, 19, (1, 8)), torch.arange(8)[None] // 4
    default = model(tokens, document_ids_BT=ids).logits
    explicit = model(tokens, document_ids_BT=ids, positions_BT=torch.arange(8)[None]).logits
    restarted = model(tokens, document_ids_BT=ids, positions_BT=torch.arange(8)[None] % 4).logits
    torch.testing.assert_close(default, explicit)
    assert not torch.allclose(default[:, 4:], restarted[:, 4:])


@every_position
@torch.no_grad()
def test_positions_that_are_given_matter_where_the_model_says_so(
    position: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    moved = model(tokens, positions_BT=torch.arange(12)[None] % 5).logits
    assert model.reads_positions == (not torch.equal(moved, model(tokens).logits))


@every_position
@torch.no_grad()
def test_the_last_logits_can_be_had_alone(
    position: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    last = model(tokens, last_token_only=True).logits
    assert last.shape == (3, 1, 19)
    close(last, model(tokens).logits[:, -1:])


@every_position
def test_no_mask_is_made_where_none_is_needed(
    position: str, model: TransformerDecoder, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        masks.append(kwargs["attn_mask"] is not None)
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model(tokens)
    state = model.init_incremental_state(3, 20)
    model(tokens[:, :5], incremental_state=state)
    model(tokens[:, 5:6], incremental_state=state)
    assert masks == [position == "relative_bias"] * 9


@every_position
@every_kind
def test_every_parameter_gets_a_gradient(
    position: str, kind: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    model.train()
    model(tokens).logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_padding_that_sees_nothing_has_finite_gradients(
    make_model: MakeModel, tokens: Tensor
) -> None:
    model = make_model(subln=True, rotary=True)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[0, :4] = mask[1, -3:] = mask[2] = True
    logits = model(tokens, padding_mask_BT=mask).logits
    logits[~mask].logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@contextmanager
def count_saved_bytes() -> Iterator[list[int]]:
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        total[0] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


@pytest.mark.parametrize("position", ["rotary", "relative_bias"])
def test_recomputation_changes_memory_and_not_gradients(
    position: str, make_model: MakeModel, tokens: Tensor
) -> None:
    rates = {
        "dropout": 0.2,
        "attention_dropout": 0.2,
        "activation_dropout": 0.2,
        "drop_path_rate": 0.3,
    }
    results = []
    for recompute in (False, True):
        model = make_model(checkpoint_activations=recompute, **rates, **POSITIONS[position])
        torch.manual_seed(11)
        with count_saved_bytes() as saved:
            loss = model(tokens).logits.logsumexp(-1).sum()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((loss, gradients, saved[0]))
    (loss, gradients, stored), (same_loss, same_gradients, less) = results
    assert torch.equal(loss, same_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))
    assert less < stored / 2


@every_position
def test_autocast_keeps_tables_and_stream_precise(position: str, make_model: MakeModel) -> None:
    model, tokens = make_model(**POSITIONS[position]).eval(), torch.randint(2, 19, (2, 32))
    exact = model(tokens).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens).logits
        padded = model(tokens, padding_mask_BT=torch.zeros_like(tokens).bool()).logits
    assert rounded.dtype == torch.bfloat16
    spread = exact.std().item()
    assert (rounded.float() - exact).abs().mean().item() < 0.03 * spread
    assert (padded.float() - exact).abs().mean().item() < 0.03 * spread


@torch.no_grad()
def test_a_half_precision_model_decodes(make_model: MakeModel, tokens: Tensor) -> None:
    model = make_model(xpos_rel_pos=True).bfloat16().eval()
    decoded, full = decode(model, tokens, [4, 1, 7]), model(tokens).logits
    assert decoded.dtype == torch.bfloat16
    torch.testing.assert_close(decoded, full, atol=0.1, rtol=0.1)


@torch.no_grad()
def test_more_tokens_than_learned_positions_are_refused(make_model: MakeModel) -> None:
    model = make_model(decoder_learned_pos=True)
    model(torch.zeros(1, 32, dtype=torch.long))
    with pytest.raises(ValueError, match="33 tokens exceed the model's 32 learned positions"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match="33 tokens exceed"):
        model(torch.zeros(1, 1, dtype=torch.long), positions_BT=torch.tensor([[32]]))
    state = model.init_incremental_state(1, 40)
    model(torch.zeros(1, 32, dtype=torch.long), incremental_state=state)
    with pytest.raises(ValueError, match="33 tokens exceed"):
        model(torch.zeros(1, 1, dtype=torch.long), incremental_state=state)
    assert state.length == 32


@torch.no_grad()
def test_schemes_without_a_table_go_past_the_longest_sequence(make_model: MakeModel) -> None:
    for position in ("sinusoidal", "rotary", "xpos", "relative_bias", "none"):
        model = make_model(**POSITIONS[position])
        assert model(torch.zeros(1, 40, dtype=torch.long)).logits.isfinite().all()


def test_a_state_excludes_what_follows_from_it(make_model: MakeModel, tokens: Tensor) -> None:
    model = make_model()
    state = model.init_incremental_state(3, 20)
    with pytest.raises(ValueError, match="excludes positions_BT"):
        model(tokens, positions_BT=tokens, incremental_state=state)
    with pytest.raises(ValueError, match="excludes positions_BT"):
        model(tokens, document_ids_BT=tokens, incremental_state=state)


def test_a_tied_output_uses_the_embedding(make_model: MakeModel, tokens: Tensor) -> None:
    model = make_model(share_decoder_input_output_embed=True)
    assert not any("output_projection" in name for name in model.state_dict())
    model(tokens).logits.sum().backward()
    gradient = model.embedding.tokens.weight.grad
    assert gradient is not None
    assert (gradient != 0).any(1).all()


def test_flops_follow_the_convention(make_model: MakeModel) -> None:
    plain, gated = make_model(), make_model(glu=True)
    weights = 3 * (4 * 16 * 16 + 2 * 16 * 24) + 19 * 16
    assert plain.training_flops_per_token(10) == 6 * weights + 12 * 3 * 16 * 10
    more = gated.training_flops_per_token(10) - plain.training_flops_per_token(10)
    assert more == 6 * 3 * 16 * 24


def test_blocks_compile_without_a_break(make_model: MakeModel, tokens: Tensor) -> None:
    model, compiled = make_model(xpos_rel_pos=True), make_model(xpos_rel_pos=True)
    torch._dynamo.reset()  # other tests may have used up its cache
    compiled.compile_blocks(backend="eager", fullgraph=True)
    close(compiled(tokens).logits, model(tokens).logits)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert all(isinstance(unit, TransformerBlock) for unit in compiled.shard_units())


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (8, 2), (17, 1)])
@torch.no_grad()
def test_few_rows_are_projected_as_many_are(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(*shape, 8), torch.randn(5, 8)
    found = project_to_vocabulary(x, weight)
    torch.testing.assert_close(found, torch.einsum("btd,vd->btv", x, weight))
