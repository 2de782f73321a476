from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scalerun.generation.growing_batch import GrowingBatch
from scalerun.models.base_model import BaseModel, build_model
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import TransformerLM
from scalerun.models.transformer_mt import TransformerMT, TransformerMTConfig

PAD, EOS, VOCAB = 1, 2, 11
PROMPTS = [[EOS], [EOS, 5, 6]]
SOURCES = [[7, 8, 9, EOS], [4, EOS]]
SIZES = [("embed_dim", 16), ("attention_heads", 2), ("ffn_embed_dim", 32), ("layers", 1)]


def model_of(*sides: str) -> BaseModel:
    sizes = {f"{side}_{name}": value for side in sides for name, value in SIZES}
    kind = TransformerMTConfig if "encoder" in sides else TransformerConfig
    model = build_model(
        kind(**sizes), vocab_size=VOCAB, padding_idx=PAD, seed=3, device=torch.device("cpu")
    )
    return model.eval()


def calls_of(model: BaseModel) -> list[tuple[int, int]]:
    """Rows and tokens of each call of the decoder's first block, as they come."""
    seen: list[tuple[int, int]] = []
    decoder = model.decoder if isinstance(model, TransformerMT) else model
    assert isinstance(decoder, torch.nn.Module)
    block = decoder.layers[0]  # type: ignore[index]
    block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:2]))
    return seen


@torch.no_grad()
def test_reading_token_by_token_is_one_pass_over_all() -> None:
    model = model_of("encoder", "decoder")
    assert isinstance(model, TransformerMT)
    batch = GrowingBatch(model, pad=PAD)
    batch.add(PROMPTS, SOURCES)
    batch.read([4, 5])
    batch.keep([1, 0, 1])
    found = batch.read([6, 7, 8]).log_softmax(-1)
    for prompt, source, row in (
        ([*PROMPTS[1], 5, 6], SOURCES[1], found[0]),
        ([*PROMPTS[0], 4, 7], SOURCES[0], found[1]),
        ([*PROMPTS[1], 5, 8], SOURCES[1], found[2]),
    ):
        whole = model(torch.tensor([source]), torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(row, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sides", [("decoder",), ("encoder", "decoder")])
@torch.no_grad()
def test_who_joins_on_the_way_is_read_as_if_alone(sides: tuple[str, ...]) -> None:
    model = model_of(*sides)
    assert isinstance(model, TransformerLM | TransformerMT)
    sources = SOURCES if len(sides) == 2 else [None, None]

    def logits(i: int, tokens: list[int]) -> Tensor:
        inputs = [torch.tensor([[*PROMPTS[i], *tokens]])]
        if sources[i] is not None:
            inputs.insert(0, torch.tensor([sources[i]]))
        return model(*inputs).logits[0]

    for first, second in ((0, 1), (1, 0)):
        batch = GrowingBatch(model, pad=PAD)
        whole = batch.add([PROMPTS[first]], sources[0] and [sources[first]], all_logits=True)
        torch.testing.assert_close(whole[0], logits(first, []), atol=1e-5, rtol=0)
        batch.read([4])
        found = batch.add([PROMPTS[second]], sources[0] and [sources[second]])
        torch.testing.assert_close(found[0], logits(second, [])[-1], atol=1e-5, rtol=0)
        found = batch.read([5, 6])
        torch.testing.assert_close(found[0], logits(first, [4, 5])[-1], atol=1e-5, rtol=0)
        torch.testing.assert_close(found[1], logits(second, [6])[-1], atol=1e-5, rtol=0)
        batch.keep([1])
        found = batch.read([7])
        torch.testing.assert_close(found[0], logits(second, [6, 7])[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("sides", [("decoder",), ("encoder", "decoder")])
@torch.no_grad()
def test_calls_for_others_sake_leave_the_sequences_alone(sides: tuple[str, ...]) -> None:
    model = model_of(*sides)
    assert isinstance(model, TransformerLM | TransformerMT)
    calls = calls_of(model)
    sources = SOURCES if len(sides) == 2 else None
    plain, called = GrowingBatch(model, pad=PAD), GrowingBatch(model, pad=PAD)
    called.add_nothing()
    called.read_nothing()
    assert calls == [(1, 1), (1, 1)]
    plain.add(PROMPTS, sources)
    called.add(PROMPTS, sources)
    called.read_nothing()
    assert torch.equal(called.read([4, 5]), plain.read([4, 5]))
