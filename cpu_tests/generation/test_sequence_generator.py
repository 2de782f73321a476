import itertools
import math
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from cpu_tests.generation.tiny_models import EOS, A, Letters
from cpu_tests.world import run_world
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.launch import form_ranks
from scalerun.distributed.parallelize import parallelize
from scalerun.distributed.ranks import ALONE, Ranks
from scalerun.generation.events import Generation
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_decoder import BaseDecoder, DecoderOutput
from scalerun.models.base_model import build_model
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import TransformerLM
from scalerun.models.transformer_mt import TransformerMT, TransformerMTConfig
from scalerun.modules.incremental_state import IncrementalState, LayerState

NUM_LETTERS = 4
BYTES = ByteTokenizer()
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


class History(LayerState):
    def __init__(self, batch_size: int) -> None:
        self.tokens = torch.zeros(batch_size, 0, dtype=torch.int64)
        self.padding = torch.zeros(batch_size, 0, dtype=torch.bool)

    def reorder(self, order: Tensor) -> None:
        self.tokens, self.padding = self.tokens[order], self.padding[order]

    def join(self, other: Self) -> None:
        size = max(self.tokens.shape[1], other.tokens.shape[1])
        sides = [(x, (size - x.tokens.shape[1], 0)) for x in (self, other)]
        self.tokens = torch.cat([pad(x.tokens, ahead) for x, ahead in sides])
        self.padding = torch.cat([pad(x.padding, ahead, value=True) for x, ahead in sides])


class ToyDecoder(BaseDecoder):
    """Logits are a random function of all tokens so far, nearer ones counting more."""

    def __init__(self, vocabulary: int, *, seed: int = 0, context: int | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(vocabulary, 8, generator=generator))
        self.output = nn.Parameter(torch.randn(8, vocabulary, generator=generator))
        self.context = context
        self.calls: list[tuple[int, int]] = []

    @classmethod
    def build_model(cls, cfg: Any, *, vocab_size: int, padding_idx: int | None) -> Self:
        raise NotImplementedError

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        last_token_only: bool = False,
    ) -> DecoderOutput:
        self.calls.append((tokens_BT.shape[0], tokens_BT.shape[1]))
        state = incremental_state or self.init_incremental_state(*tokens_BT.shape)
        state.check(*tokens_BT.shape)
        [history] = state.layers
        assert isinstance(history, History)
        padding = torch.zeros_like(tokens_BT, dtype=torch.bool)
        padding = padding if padding_mask_BT is None else padding_mask_BT
        history.tokens = torch.cat([history.tokens, tokens_BT], 1)
        history.padding = torch.cat([history.padding, padding], 1)
        state.advance(tokens_BT.shape[1])
        x = self.embedding[history.tokens].masked_fill(history.padding[..., None], 0.0)
        hidden = []
        total = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            total = 0.7 * total + x[:, t]
            hidden.append(total)
        states = torch.stack(hidden, 1)[:, -tokens_BT.shape[1] :]
        logits = torch.tanh(states) @ self.output
        return DecoderOutput(logits[:, -1:] if last_token_only else logits)

    def init_incremental_state(self, batch_size: int, max_length: int) -> IncrementalState:
        return IncrementalState([History(batch_size)], batch_size=batch_size, max_length=max_length)

    def max_positions(self) -> int | None:
        return self.context

    def shard_units(self) -> list[nn.Module]:
        return []

    def training_flops_per_token(self, sequence_length: int) -> int:
        return 0


def toy(seed: int = 0, **settings: Any) -> SequenceGenerator:
    tokenizer = Letters("abcd")
    return SequenceGenerator(
        ToyDecoder(len(tokenizer.dictionary), seed=seed, **settings), tokenizer
    )


def real(seed: int = 1, **settings: Any) -> SequenceGenerator:
    """A small transformer with drawn weights, large enough to have opinions."""
    cfg = TransformerConfig(
        decoder_embed_dim=32,
        decoder_attention_heads=2,
        decoder_ffn_embed_dim=64,
        decoder_layers=2,
        max_target_positions=64,
        dropout=0.5,
        **settings,
    )
    model = build_model(
        cfg,
        vocab_size=len(BYTES.dictionary),
        padding_idx=BYTES.dictionary.pad,
        seed=seed,
        device=torch.device("cpu"),
    )
    assert isinstance(model, TransformerLM)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return SequenceGenerator(model, BYTES)


def translator(
    tokenizer: BaseTokenizer, seed: int = 2, *, ranks: Ranks = ALONE, **settings: Any
) -> SequenceGenerator:
    """A small encoder-decoder with drawn weights, which several ranks share."""
    sharing = DistributedConfig()
    cfg = TransformerMTConfig(
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZES},
        max_source_positions=20,
        max_target_positions=20,
        dropout=0.5,
        **settings,
    )
    model = build_model(
        cfg,
        vocab_size=len(tokenizer.dictionary),
        padding_idx=tokenizer.dictionary.pad,
        seed=seed,
        device=torch.device("cpu"),
        prepare=lambda model: parallelize(
            model,
            ranks,
            sharing,
            units=model.shard_units(),
            experts=model.expert_units(),
            dtype=torch.float32,
        ),
    )
    assert isinstance(model, TransformerMT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return SequenceGenerator(model, tokenizer, control=None if ranks is ALONE else ranks.control)


SIZES = [("embed_dim", 16), ("attention_heads", 2), ("ffn_embed_dim", 32), ("layers", 2)]
SOURCES = [[A, A + 1, EOS], [EOS], [A + 3, A + 2, A, A, A + 1, A + 3, EOS], [A + 1, A + 1, EOS]]
SCHEMES: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "learned": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "rotary": {"rotary": True},
    "relative_bias": {"rel_pos_buckets": 8, "max_rel_pos": 12},
}

POSITIONS = {
    "learned": {"decoder_learned_pos": True},
    "sinusoidal": {},
    "rotary": {"rotary": True},
    "xpos": {"xpos_rel_pos": True},
}


@pytest.fixture(params=["toy", *POSITIONS])
def generator(request: pytest.FixtureRequest) -> SequenceGenerator:
    return toy() if request.param == "toy" else real(**POSITIONS[request.param])


def prompts_of(generator: SequenceGenerator) -> list[list[int]]:
    texts = ["abc", "", "d", "abcabcabcd"]
    return [generator.tokenizer.encode(text) for text in texts]


@torch.no_grad()
def next_logprobs(
    generator: SequenceGenerator,
    prompt: list[int],
    tokens: list[int],
    source: list[int] | None = None,
) -> Tensor:
    """By one full forward pass over everything before."""
    generator.model.eval()
    inputs = [torch.tensor([[generator.eos, *prompt, *tokens]])]
    if source is not None:
        inputs.insert(0, torch.tensor([source]))
    return generator.model(*inputs).logits[0, -1].float().log_softmax(-1)


def one(generator: SequenceGenerator, prompt: list[int], params: SamplingParams) -> Generation:
    [result] = generator.generate([prompt], [params])
    return result


def hypotheses(
    generator: SequenceGenerator, prompt: list[int], params: SamplingParams
) -> list[Generation]:
    [results] = generator.hypotheses([prompt], [params])
    return results


def allowed(generator: SequenceGenerator, logprobs: Tensor, *, may_end: bool) -> Tensor:
    dictionary = generator.tokenizer.dictionary
    logprobs = logprobs.clone()
    never = {*dictionary.dropped_ids, dictionary.unk}
    logprobs[sorted(never - {dictionary.eos} if may_end else never)] = -torch.inf  # type: ignore[type-var]
    return logprobs


def test_greedy_takes_what_a_full_forward_pass_finds_most_likely(
    generator: SequenceGenerator,
) -> None:
    for prompt in prompts_of(generator):
        result = one(generator, prompt, GREEDY)
        for i, token in enumerate(result.tokens):
            logprobs = next_logprobs(generator, prompt, result.tokens[:i])
            assert token == allowed(generator, logprobs, may_end=True).argmax()
            assert result.token_logprobs[i] == pytest.approx(logprobs[token].item(), abs=1e-3)
        if result.finish_reason == "stop":
            ending = next_logprobs(generator, prompt, result.tokens)
            assert ending.argmax() == generator.eos
        else:
            assert len(result.tokens) == GREEDY.max_new_tokens
        assert result.text == generator.tokenizer.decode(result.tokens)


def test_a_batch_gives_what_each_prompt_gives_alone(generator: SequenceGenerator) -> None:
    prompts = prompts_of(generator) * 2
    params = [
        GREEDY,
        SamplingParams(seed=1, max_new_tokens=3),
        SamplingParams(seed=2, top_k=3, temperature=0.7, max_new_tokens=9),
        SamplingParams(seed=3, top_p=0.8, min_new_tokens=5, max_new_tokens=20),
        SamplingParams(beam=2, max_new_tokens=5),
        SamplingParams(seed=1, max_new_tokens=12, stop=("b", "e")),
        SamplingParams(seed=5, temperature=3.0, max_new_tokens=1),
        SamplingParams(seed=6, max_new_tokens=7),
    ]
    together = generator.generate(prompts, params)
    for prompt, param, result in zip(prompts, params, together, strict=True):
        alone = one(generator, prompt, param)
        assert result.tokens == alone.tokens
        assert result.text == alone.text
        assert result.finish_reason == alone.finish_reason
        assert result.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-3)


def test_logprobs_are_those_of_the_untempered_unrestricted_distribution() -> None:
    generator = toy()
    params = SamplingParams(temperature=0.3, top_k=2, min_new_tokens=8, max_new_tokens=8, seed=1)
    prompt = generator.tokenizer.encode("ab")
    result = one(generator, prompt, params)
    for i, token in enumerate(result.tokens):
        expected = next_logprobs(generator, prompt, result.tokens[:i])[token]
        assert result.token_logprobs[i] == pytest.approx(expected.item(), abs=1e-5)
    assert result.score == pytest.approx(sum(result.token_logprobs))


def test_the_score_counts_the_end_of_the_document() -> None:
    generator = toy()
    for seed in range(50):
        result = one(generator, [], SamplingParams(seed=seed))
        if result.finish_reason == "stop":
            ending = next_logprobs(generator, [], result.tokens)[EOS].item()
            assert result.score == pytest.approx(sum(result.token_logprobs) + ending, abs=1e-4)
            return
    raise AssertionError("no text ended")


@pytest.mark.parametrize("limits", [(1, 1), (5, 5), (0, 3), (4, 6)])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_lengths_are_exact(limits: tuple[int, int], temperature: float) -> None:
    low, high = limits
    generator = toy()
    params = [
        SamplingParams(min_new_tokens=low, max_new_tokens=high, temperature=temperature, seed=seed)
        for seed in range(20)
    ]
    results = generator.generate([[]] * 20, params)
    for result in results:
        assert low <= len(result.tokens) <= high
        assert len(result.token_logprobs) == len(result.tokens)
        assert set(result.tokens) <= set(range(A, A + NUM_LETTERS))
        if result.finish_reason == "length":
            assert len(result.tokens) == high


def test_frequencies_of_samples_are_those_of_the_model() -> None:
    generator = toy()
    prompt = generator.tokenizer.encode("ab")
    count = 4000
    params = [
        SamplingParams(seed=seed, max_new_tokens=1, min_new_tokens=1, temperature=1.5)
        for seed in range(count)
    ]
    results = generator.generate([prompt] * count, params)
    chosen = torch.tensor([result.tokens[0] for result in results])
    frequencies = torch.bincount(chosen, minlength=len(generator.tokenizer.dictionary)) / count
    logprobs = allowed(generator, next_logprobs(generator, prompt, []), may_end=False)
    expected = (logprobs / 1.5).softmax(-1)
    # Four standard deviations of a binomial share.
    assert torch.all((frequencies - expected).abs() < 4 * (expected / count).sqrt() + 1e-9)


def test_a_seed_decides_and_without_one_texts_differ() -> None:
    generator = toy()
    long = {"max_new_tokens": 40, "min_new_tokens": 40, "temperature": 3.0}
    seeded = [SamplingParams(seed=7, **long)] * 2 + [SamplingParams(seed=8, **long)]  # type: ignore[arg-type]
    one_, same, other = generator.generate([[]] * 3, seeded)
    assert one_ == same
    assert one_.tokens != other.tokens
    fresh = generator.generate([[]] * 2, [SamplingParams(**long)] * 2)  # type: ignore[arg-type]
    assert fresh[0].tokens != fresh[1].tokens


def test_torchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    toy().generate([[], []], [SamplingParams(seed=1), SamplingParams()])
    assert torch.equal(before, torch.get_rng_state())


def test_a_stop_string_over_several_tokens_is_cut_off_and_ends_the_text() -> None:
    generator = toy()
    free = one(generator, [], SamplingParams(seed=3, min_new_tokens=30, max_new_tokens=30))
    stop = free.text[11:14]
    at = free.text.index(stop)
    stopped = one(generator, [], SamplingParams(seed=3, min_new_tokens=0, max_new_tokens=30))
    assert stopped.text == free.text[: len(stopped.text)]
    params = SamplingParams(seed=3, max_new_tokens=30, min_new_tokens=at + 3, stop=(stop,))
    result = one(generator, [], params)
    assert result.finish_reason == "stop"
    assert result.text == free.text[:at]
    assert result.tokens == free.tokens[: at + 3]


def test_a_stop_string_before_the_minimum_is_text() -> None:
    generator = toy()
    params = SamplingParams(seed=3, min_new_tokens=9, max_new_tokens=9, stop=("a", "b", "c", "d"))
    result = one(generator, [], params)
    assert len(result.tokens) == 9
    assert len(result.text) == 8
    assert result.finish_reason == "stop"


def test_streamed_pieces_join_to_the_text(generator: SequenceGenerator) -> None:
    prompts = prompts_of(generator)
    params = [
        GREEDY,
        SamplingParams(seed=1, temperature=2.0, stop=("ab", "c"), min_new_tokens=2),
        SamplingParams(beam=3, max_new_tokens=4),
        SamplingParams(seed=4, max_new_tokens=25),
    ]
    params = [param if param.max_new_tokens < 30 else GREEDY for param in params]
    pieces: list[list[str]] = [[] for _ in prompts]
    results = generator.generate(
        prompts, params, on_text=lambda index, text: pieces[index].append(text)
    )
    assert ["".join(some) for some in pieces] == [result.text for result in results]
    assert all(all(some) for some in pieces)


def test_text_is_streamed_while_the_model_still_works() -> None:
    generator = toy()
    model = generator.model
    assert isinstance(model, ToyDecoder)
    seen: list[int] = []
    params = SamplingParams(min_new_tokens=5, max_new_tokens=5)
    generator.generate([[]], [params], on_text=lambda index, text: seen.append(len(model.calls)))
    assert seen == [1, 2, 3, 4, 5]


def test_each_token_is_read_once_and_finished_rows_are_dropped() -> None:
    generator = toy()
    model = generator.model
    assert isinstance(model, ToyDecoder)
    params = [SamplingParams(min_new_tokens=n, max_new_tokens=n) for n in (1, 3)]
    generator.generate([[A], [A, A, A]], params)
    assert model.calls == [(2, 4), (1, 1), (1, 1)]


def test_the_hypotheses_of_all_rows_are_read_side_by_side() -> None:
    generator = toy()
    model = generator.model
    assert isinstance(model, ToyDecoder)
    params = [SamplingParams(beam=n, min_new_tokens=3, max_new_tokens=3) for n in (3, 2)]
    generator.generate([[A], [A, A, A]], params)
    assert model.calls == [(2, 4), (5, 1), (5, 1)]


def test_searches_of_any_width_and_length_share_a_batch(generator: SequenceGenerator) -> None:
    prompts = prompts_of(generator)
    params = [
        SamplingParams(beam=2, max_new_tokens=9),
        SamplingParams(beam=7, max_new_tokens=3, lenpen=0.0),
        SamplingParams(beam=3, max_new_tokens=6, min_new_tokens=4, lenpen=2.0),
        SamplingParams(beam=2, max_new_tokens=8, stop=("b", "e")),
    ]
    together = generator.hypotheses(prompts, params)
    for prompt, param, results in zip(prompts, params, together, strict=True):
        alone = hypotheses(generator, prompt, param)
        assert [result.tokens for result in results] == [result.tokens for result in alone]
        assert [result.text for result in results] == [result.text for result in alone]
        scores = [result.score for result in alone]
        assert [result.score for result in results] == pytest.approx(scores, abs=1e-3)


@pytest.mark.parametrize("has_source", [False, True])
@pytest.mark.parametrize("lenpen", [0.0, 1.0])
def test_a_wide_beam_is_exhaustive_search(lenpen: float, has_source: bool) -> None:
    tokenizer = Letters("ab")
    generator = SequenceGenerator(ToyDecoder(len(tokenizer.dictionary), seed=4), tokenizer)
    source = None
    if has_source:
        generator, source = translator(tokenizer), [A, A + 1, A, EOS]
    prompt, length = tokenizer.encode("ab"), 4
    answers = []
    for count in range(length + 1):
        for tokens in itertools.product((A, A + 1), repeat=count):
            chosen = [*tokens] if count == length else [*tokens, EOS]
            total = sum(
                next_logprobs(generator, prompt, chosen[:i], source)[token].item()
                for i, token in enumerate(chosen)
            )
            answers.append((total / len(chosen) ** lenpen, list(tokens), chosen[-1] == EOS))
    answers.sort(key=lambda answer: -answer[0])
    params = SamplingParams(beam=32, max_new_tokens=length, lenpen=lenpen)
    sources = None if source is None else [source]
    [found] = generator.hypotheses([prompt], [params], sources=sources)
    found = found[:5]
    assert [result.tokens for result in found] == [tokens for _, tokens, _ in answers[:5]]
    assert [result.score for result in found] == pytest.approx(
        [score for score, _, _ in answers[:5]], abs=1e-4
    )
    assert [result.finish_reason == "stop" for result in found] == [
        end for _, _, end in answers[:5]
    ]


def test_beam_scores_are_those_of_full_forward_passes(generator: SequenceGenerator) -> None:
    for prompt in prompts_of(generator):
        params = SamplingParams(beam=4, max_new_tokens=6, min_new_tokens=2, lenpen=0.6)
        results = hypotheses(generator, prompt, params)
        assert results[0] == one(generator, prompt, params)
        for result in results:
            total = 0.0
            for i, token in enumerate(result.tokens):
                expected = next_logprobs(generator, prompt, result.tokens[:i])[token].item()
                assert result.token_logprobs[i] == pytest.approx(expected, abs=1e-3)
                total += expected
            length = len(result.tokens)
            assert 2 <= length <= 6
            if result.finish_reason == "stop":
                total += next_logprobs(generator, prompt, result.tokens)[generator.eos].item()
                length += 1
            assert result.score == pytest.approx(total / length**0.6, abs=1e-2)


def test_a_stop_string_ends_the_answers_of_a_beam() -> None:
    generator = toy()
    params = SamplingParams(beam=5, max_new_tokens=6, min_new_tokens=2, stop=("a",))
    results = hypotheses(generator, [], params)
    assert any(result.tokens[-1] == A for result in results)
    for result in results:
        assert "a" not in result.text[1:]
        if result.tokens[1:] and result.tokens[-1] == A:
            assert result.finish_reason == "stop"
            assert result.text == generator.tokenizer.decode(result.tokens[:-1])


def test_a_text_fills_the_context_exactly_and_not_more() -> None:
    generator = real(decoder_learned_pos=True)
    prompt = BYTES.encode("a" * 60)
    assert generator.room(60) == 4
    full = SamplingParams(min_new_tokens=4, max_new_tokens=4)
    assert len(one(generator, prompt, full).tokens) == 4
    with pytest.raises(
        UserError,
        match=r"--max-new-tokens 5 after a prompt of 60 tokens exceeds the model's context of 64; "
        r"give at most 4, or give --truncate-prompt",
    ):
        one(generator, prompt, SamplingParams(max_new_tokens=5))


@pytest.mark.parametrize(
    ("length", "new", "truncate", "remedy"),
    [
        (5, 65, False, "give at most 59"),
        (0, 65, True, "give at most 64"),
        (5, 65, True, "give at most 64"),
        (70, 5, False, "shorten the prompt, or give --truncate-prompt"),
    ],
)
def test_a_number_that_a_refusal_suggests_is_accepted(
    length: int, new: int, truncate: bool, remedy: str
) -> None:
    generator = real(decoder_learned_pos=True)
    prompt = BYTES.encode("a" * length)
    with pytest.raises(UserError) as caught:
        generator.fit(prompt, SamplingParams(max_new_tokens=new, truncate_prompt=truncate))
    assert remedy in str(caught.value)
    number = remedy.removeprefix("give at most ")
    if number.isdigit():
        generator.fit(prompt, SamplingParams(max_new_tokens=int(number), truncate_prompt=truncate))


def test_long_and_short_prompts_share_no_batch_that_would_outgrow_the_context() -> None:
    generator = real(decoder_learned_pos=True)
    prompts = [BYTES.encode("a" * 60), BYTES.encode("b"), BYTES.encode("c" * 30)]
    params = [SamplingParams(max_new_tokens=n, min_new_tokens=n, seed=1) for n in (4, 60, 30)]
    results = generator.generate(prompts, params)
    assert [len(result.tokens) for result in results] == [4, 60, 30]
    for prompt, param, result in zip(prompts, params, results, strict=True):
        assert one(generator, prompt, param).tokens == result.tokens


def test_truncation_keeps_the_separator_and_the_end_of_the_prompt() -> None:
    generator = toy(context=10)
    prompt = generator.tokenizer.encode("abcdabcdabcd")
    params = {"max_new_tokens": 4, "min_new_tokens": 4, "temperature": 0.0}
    cut = one(generator, prompt, SamplingParams(truncate_prompt=True, **params))  # type: ignore[arg-type]
    assert cut == one(generator, prompt[-6:], SamplingParams(**params))  # type: ignore[arg-type]
    none_left = SamplingParams(truncate_prompt=True, max_new_tokens=10, seed=1)
    assert one(generator, prompt, none_left) == one(generator, [], none_left)


def test_a_model_without_an_end_has_no_limit() -> None:
    generator = toy()
    assert generator.room(10**9) is None
    result = one(generator, [A] * 300, SamplingParams(max_new_tokens=5, min_new_tokens=5))
    assert len(result.tokens) == 5


def test_a_broken_model_is_an_error_and_not_a_text() -> None:
    generator = toy()
    with torch.no_grad():
        next(generator.model.parameters())[0] = math.nan
        next(generator.model.parameters())[A] = math.nan
    with pytest.raises(UserError, match="the model's output is not finite: its weights"):
        one(generator, [A], GREEDY)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_it_was_in_and_dropout_is_off(training: bool) -> None:
    generator = real()
    generator.model.train(training)
    first, second = (one(generator, BYTES.encode("ab"), GREEDY) for _ in range(2))
    assert first == second
    assert generator.model.training is training


def test_all_answers_can_be_had_and_the_first_is_that_of_generate() -> None:
    generator = real()
    params = [
        SamplingParams(n=3, seed=4, max_new_tokens=6, temperature=2.0),
        SamplingParams(beam=3, n=2, max_new_tokens=4),
        SamplingParams(echo=True, max_new_tokens=0),
    ]
    prompts = [BYTES.encode(text) for text in ("ab", "a", "abc")]
    every = generator.hypotheses(prompts, params)
    assert [len(answers) for answers in every] == [3, 3, 1]
    first = generator.generate(prompts, params)
    assert [answers[0].tokens for answers in every] == [answer.tokens for answer in first]
    assert first[2].prompt is not None
    for i, (token, logprob) in enumerate(zip(prompts[2], first[2].prompt.logprobs, strict=True)):
        truth = next_logprobs(generator, prompts[2][:i], [])[token].item()
        assert logprob == pytest.approx(truth, abs=1e-3)


def test_no_prompts_give_no_answers() -> None:
    assert toy().generate([], []) == []


@pytest.mark.parametrize("name", SCHEMES)
def test_a_translation_is_what_full_passes_over_source_and_target_find(name: str) -> None:
    generator = translator(BYTES, **SCHEMES[name])
    sources = [[*BYTES.encode(text), generator.eos] for text in ("abc", "", "longer text")]
    results = generator.generate([[]] * 3, [GREEDY] * 3, sources=sources)
    assert len({tuple(result.tokens) for result in results}) == 3
    for source, result in zip(sources, results, strict=True):
        for i, token in enumerate(result.tokens):
            logprobs = next_logprobs(generator, [], result.tokens[:i], source)
            assert token == allowed(generator, logprobs, may_end=True).argmax()
            assert result.token_logprobs[i] == pytest.approx(logprobs[token].item(), abs=1e-3)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_batch_of_sources_gives_what_each_gives_alone(name: str) -> None:
    generator = translator(Letters("abcd"), **SCHEMES[name])
    params = [
        GREEDY,
        SamplingParams(seed=3, temperature=2.0, min_new_tokens=4, max_new_tokens=9),
        SamplingParams(beam=4, max_new_tokens=7, lenpen=0.6),
        SamplingParams(beam=2, max_new_tokens=10, min_new_tokens=3),
    ]
    prompts = [[], [A], [], [A, A + 2]]
    for sources in (SOURCES, SOURCES[::-1]):
        together = generator.generate(prompts, params, sources=sources)
        for prompt, param, source, result in zip(prompts, params, sources, together, strict=True):
            [alone] = generator.generate([prompt], [param], sources=[source])
            assert result.tokens == alone.tokens
            assert result.score == pytest.approx(alone.score, abs=1e-3)


def test_the_source_is_encoded_once_for_all_hypotheses() -> None:
    generator = translator(Letters("abcd"))
    assert isinstance(generator.model, TransformerMT)
    seen = []
    encoder = generator.model.encoder
    encoder.register_forward_hook(lambda module, inputs, output: seen.append(output.features.shape))
    params = SamplingParams(beam=4, max_new_tokens=5, min_new_tokens=5)
    generator.generate([[]] * 4, [params] * 4, sources=SOURCES)
    assert seen == [(4, 7, 16)]


def test_a_source_that_is_too_long_is_refused() -> None:
    generator = translator(Letters("abcd"))
    with pytest.raises(UserError, match="a source of 21 tokens exceeds the model's 20 source"):
        generator.generate([[]], [GREEDY], sources=[[A] * 21])


def test_sources_are_for_encoders_and_encoders_need_them() -> None:
    with pytest.raises(ValueError, match="an encoder-decoder needs sources"):
        translator(Letters("abcd")).generate([[]], [GREEDY])
    with pytest.raises(ValueError, match="an encoder-decoder needs sources"):
        toy().generate([[]], [GREEDY], sources=[[A]])


@pytest.mark.parametrize("beam", [1, 3])
def test_ranks_that_share_weights_write_what_one_rank_writes(beam: int) -> None:
    lengths = [2, 3, 9, 6]
    params = [
        SamplingParams(beam=beam, temperature=float(beam > 1), max_new_tokens=n) for n in lengths
    ]

    def texts(generator: SequenceGenerator, share: slice) -> list[list[int]]:
        sources, own = SOURCES[share], params[share]
        return [a.tokens for a in generator.generate([[]] * len(own), own, sources=sources)]

    def work(rank: int) -> tuple[list[list[int]], bool]:
        ranks = form_ranks(DistributedConfig(), "cpu", local_rank=rank)
        generator = translator(Letters("abcd"), ranks=ranks)
        found = texts(generator, slice(0, 1) if rank == 0 else slice(1, 4))
        generator.model(torch.tensor([SOURCES[0]]), torch.tensor([[EOS]])).logits.sum().backward()
        gradients = [parameter.grad for parameter in generator.model.parameters()]
        return found, all(gradient is not None for gradient in gradients)

    (first, trains), (second, _) = run_world(2, work)
    assert first + second == texts(translator(Letters("abcd")), slice(0, 4))
    assert trains


def test_a_compiled_model_is_not_compiled_anew_for_every_length() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    generator = translator(Letters("abcd"))
    params = [SamplingParams(beam=2, max_new_tokens=6)] * len(SOURCES)
    expected = generator.generate([[]] * 4, params, sources=SOURCES)
    generator.model.compile_blocks(backend=backend)  # type: ignore[arg-type]
    assert generator.generate([[]] * 4, params, sources=SOURCES) == expected
    assert not compiled
    generator.model(torch.tensor([SOURCES[0]]), torch.tensor([[EOS, A]]))
    assert compiled
