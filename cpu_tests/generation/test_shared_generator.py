"""One rank asks, and those that share the model's products answer with it."""

import pytest
import torch

from cpu_tests.world import run_world
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.launch import form_ranks
from scalerun.distributed.ranks import ALONE, Ranks
from scalerun.generation.events import Generation
from scalerun.generation.shared_generator import SharedGenerator
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import build_model
from scalerun.models.transformer_config import TransformerConfig

BYTES = ByteTokenizer()
PROMPTS = [list(text.encode()) for text in ("ab", "", "hello", "b")]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=12),
    SamplingParams(seed=3, top_p=0.9, max_new_tokens=9),
    SamplingParams(beam=3, max_new_tokens=6),
    SamplingParams(beam=4, diverse_beam_groups=2, lenpen=0.5, max_new_tokens=5),
]


def shared(ranks: Ranks) -> SharedGenerator:
    cfg = TransformerConfig(
        decoder_embed_dim=32,
        decoder_attention_heads=2,
        decoder_ffn_embed_dim=64,
        decoder_layers=2,
        max_target_positions=32,
    )
    model = build_model(
        cfg,
        vocab_size=len(BYTES.dictionary),
        padding_idx=BYTES.dictionary.pad,
        seed=1,
        device=torch.device("cpu"),
        meshes=ranks.model_meshes,
    )
    assert isinstance(model, BaseDecoder)
    return SharedGenerator(model, BYTES, ranks=ranks.control)


def test_two_ranks_answer_as_one_does_and_know_all_answers() -> None:
    def ask(generator: SharedGenerator) -> list[list[Generation]]:
        with generator.leading():
            answers = generator.hypotheses(PROMPTS, PARAMS)
            with pytest.raises(UserError, match="exceeds the model's context of 32"):
                generator.generate([[97] * 40], PARAMS[:1])
            # A seed that nobody gave has to be the same on both, or their products are of
            # different tokens.
            answers += generator.hypotheses([[97]] * 2, [SamplingParams(max_new_tokens=20)] * 2)
            pieces: list[str] = []
            [spoken] = generator.generate(
                PROMPTS[:1], PARAMS[:1], on_text=lambda i, text: pieces.append(text)
            )
            assert "".join(pieces) == spoken.text
        return answers

    def work(rank: int) -> tuple[list[list[Generation]], int]:
        ranks = form_ranks(DistributedConfig(model_parallel_size=2), "cpu", local_rank=rank)
        generator = shared(ranks)
        here = sum(
            (p.to_local() if hasattr(p, "to_local") else p).numel()
            for p in generator.model.parameters()
        )
        if ranks.is_main:
            return ask(generator), here
        heard: list[list[Generation]] = []
        # What the followers choose is seen where they choose it.
        answers_of = SharedGenerator.__mro__[1]._answers  # type: ignore[attr-defined]

        def listen(self, *call):  # type: ignore[no-untyped-def]
            heard.extend(found := answers_of(self, *call))
            return found

        SharedGenerator.__mro__[1]._answers = listen  # type: ignore[attr-defined]
        generator.follow()
        return heard, here

    (first, held), (second, _) = run_world(2, work)
    texts = [[answer.tokens for answer in answers] for answers in first]
    assert [[answer.tokens for answer in answers] for answers in second][: len(texts)] == texts
    assert [[a.score for a in answers] for answers in second[: len(first)]] == [
        [a.score for a in answers] for answers in first
    ]
    whole = shared(ALONE)
    alone = ask(whole)
    assert texts[: len(PROMPTS)] == [
        [answer.tokens for answer in answers] for answers in alone[: len(PROMPTS)]
    ]
    assert held < 0.65 * sum(p.numel() for p in whole.model.parameters())
