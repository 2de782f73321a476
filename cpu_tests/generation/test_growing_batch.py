from __future__ import annotations

import pytest
import torch

from scalerun.dataclass.errors import UserError
from scalerun.distributed.ranks import Control
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


class Others(Control):
    """One rank of several, of which another calls the model ``more`` times after this one."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more
        self.own: list[bool] = []

    def any(self, flag: bool) -> bool:
        self.own.append(flag)
        if flag:
            return True
        self.more -= 1
        return self.more >= 0


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
    with GrowingBatch(model, pad=PAD, max_length=5) as batch:
        batch.start(PROMPTS, SOURCES)
        batch.read([4, 5])
        found = batch.read([6, 7, 8], order=[1, 0, 1])
    for prompt, source, row in (
        ([*PROMPTS[1], 5, 6], SOURCES[1], found[0]),
        ([*PROMPTS[0], 4, 7], SOURCES[0], found[1]),
        ([*PROMPTS[1], 5, 8], SOURCES[1], found[2]),
    ):
        whole = model(torch.tensor([source]), torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(row, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sides", [("decoder",), ("encoder", "decoder")])
@torch.no_grad()
def test_a_rank_that_is_done_calls_the_model_as_often_as_the_others(sides: tuple[str, ...]) -> None:
    model = model_of(*sides)
    assert isinstance(model, TransformerLM | TransformerMT)
    calls = calls_of(model)
    control = Others(more=2)
    with GrowingBatch(model, pad=PAD, max_length=4, control=control) as batch:
        batch.start(PROMPTS, SOURCES if len(sides) == 2 else None)
        batch.read([4, 5])
    assert control.own == [True, False, False, False]
    assert calls == [(2, 3), (2, 1), (1, 1), (1, 1)]


@torch.no_grad()
def test_a_rank_that_fails_stays_until_the_others_are_done() -> None:
    model = model_of("encoder", "decoder")
    assert isinstance(model, TransformerMT)
    calls = calls_of(model)
    model.decoder.embedding.tokens.weight[4] = torch.nan
    with (
        pytest.raises(UserError, match="not finite"),
        GrowingBatch(model, pad=PAD, max_length=4, control=Others(more=1)) as batch,
    ):
        batch.start([[4]], [[7, EOS]])
    assert calls == [(1, 1), (1, 1)]
