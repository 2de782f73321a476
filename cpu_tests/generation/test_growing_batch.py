from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cpu_tests.generation.tiny_models import ARCHITECTURES, tiny_model
from scalerun.generation.growing_batch import GrowingBatch
from scalerun.models.base_model import BaseModel, build_model
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder
from scalerun.models.transformer_lm import TransformerLM
from scalerun.models.transformer_mt import TransformerMT, TransformerMTConfig

PAD, EOS, VOCAB = 1, 2, 11
VOCABULARY = 16
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


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_who_joins_on_the_way_is_read_as_if_alone(name: str) -> None:
    model = tiny_model(name)
    has_source = isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(3)

    def drawn(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    rows = [[EOS, *drawn(n)] for n in (12, 1, 5, 0, 20)]
    sources = [[*drawn(n), EOS] for n in (2, 7, 0, 4, 9)]
    batch, live = GrowingBatch(model, pad=PAD), []

    def check(found: Tensor, mine: list[int]) -> None:
        for logits, row in zip(found, mine, strict=True):
            inputs = [torch.tensor([rows[row]])]
            inputs = [torch.tensor([sources[row]]), *inputs] if has_source else inputs
            torch.testing.assert_close(logits, model(*inputs).logits[0, -1], atol=1e-4, rtol=1e-4)

    def add(*mine: int) -> None:
        read = [sources[row] for row in mine] if has_source else None
        check(batch.add([rows[row] for row in mine], read), list(mine))
        live.extend(mine)

    def read(times: int) -> None:
        for _ in range(times):
            tokens = drawn(len(live))
            for row, token in zip(live, tokens, strict=True):
                rows[row] = [*rows[row], token]
            check(batch.read(tokens), live)

    def keep(*order: int) -> None:
        batch.keep(order)
        live[:] = [live[i] for i in order]

    add(0, 1)
    read(3)
    add(2)  # shorter than the longest
    read(2)
    keep(1, 2)  # the longest leaves
    assert batch.num_columns == max(len(rows[row]) for row in live)
    read(1)
    add(3, 4)  # longer than all, beside shorter
    read(2)
    keep(3, 0)
    assert batch.num_columns == len(rows[4])
    read(9)
    keep(1)
    assert batch.num_columns == len(rows[1])
    read(2)


@pytest.mark.parametrize("name", ["rotary", "translator", "retnet"])
@torch.no_grad()
def test_what_one_sequence_cannot_compute_stays_its_own(name: str) -> None:
    model = tiny_model(name)
    sources = [[5, EOS], [6, 7, 8, EOS]] if isinstance(model, EncoderDecoder) else None
    prompts = [[EOS, 5], [EOS, 6, 7, 8, 9]]
    good, damaged = GrowingBatch(model, pad=PAD), GrowingBatch(model, pad=PAD)
    good.add(prompts, sources)
    expected = [good.read([5, 15])[0], good.read([6, 7])[0]]
    decoder = model.decoder if isinstance(model, EncoderDecoder) else model
    assert isinstance(decoder, TransformerDecoder)
    assert decoder.output_projection is not None
    damaged.add(prompts, sources)
    decoder.embedding.tokens.weight[15] = torch.nan
    for found, truth in zip([damaged.read([5, 15]), damaged.read([6, 7])], expected, strict=True):
        assert found[1].isnan().all()
        torch.testing.assert_close(found[0], truth)


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
