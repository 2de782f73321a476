import pytest
import torch

from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.errors import ConfigError
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.tasks.translator import SearchSettings, Translator

BYTES = ByteTokenizer()
EOS = BYTES.dictionary.eos
SOURCES = [[*BYTES.encode(text), EOS] for text in ("a b", "the owl", "c", "x y z")]


@pytest.fixture
def translator():
    """Makes translators around one model with drawn weights."""
    sizes = {"embed_dim": 16, "attention_heads": 2, "ffn_embed_dim": 32, "layers": 1}
    changes = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sizes.items()}
    model = build_model(
        ARCH_REGISTRY.config_for("mt_tiny").replace(**changes, max_target_positions=30),
        vocab_size=len(BYTES.dictionary),
        padding_idx=BYTES.dictionary.pad,
        seed=1,
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return lambda **settings: Translator(
        SequenceGenerator(model, BYTES), SearchSettings(**settings)
    )


def test_a_beam_of_one_takes_the_likeliest_token_each_time(translator):
    mine = translator(beam=1, max_len_b=8)
    model = mine.generator.model
    for source, [answer] in zip(SOURCES, mine.translate(SOURCES), strict=True):
        for i, token in enumerate(answer.tokens):
            logits = model(torch.tensor([source]), torch.tensor([[EOS, *answer.tokens[:i]]])).logits
            allowed = logits[0, -1].clone()
            allowed[sorted({*BYTES.dictionary.dropped_ids} - {EOS})] = -torch.inf
            allowed[EOS] = allowed[EOS] if i else -torch.inf
            assert token == allowed.argmax()


def test_each_source_has_as_many_translations_as_the_beam(translator):
    for answers in translator(beam=3, max_len_b=6).translate(SOURCES):
        assert len({tuple(answer.tokens) for answer in answers}) == 3
        scores = [answer.score for answer in answers]
        assert scores == sorted(scores, reverse=True)


def test_a_translation_keeps_to_its_limits(translator):
    mine = translator(beam=2, max_len_a=2.0, max_len_b=1, min_len=3)
    for source, answers in zip(SOURCES, mine.translate(SOURCES), strict=True):
        for answer in answers:
            assert 3 <= len(answer.tokens) <= 2 * len(source) + 1


@pytest.mark.parametrize("beam", [1, 2])
def test_a_translation_fits_the_model_whatever_the_limits(translator, beam):
    mine = translator(beam=beam, max_len_b=1000, min_len=1000)
    for answers in mine.translate(SOURCES):
        assert all(len(answer.tokens) == 30 for answer in answers)


@pytest.mark.parametrize(
    ("a", "b", "source", "room", "longest"),
    [(0, 200, 9, None, 200), (1.2, 10, 9, None, 20), (0.01, 0, 9, None, 1), (0, 200, 9, 50, 50)],
)
def test_the_longest_translation_is_a_line_of_the_source(a, b, source, room, longest):
    params = SearchSettings(max_len_a=a, max_len_b=b).params(source, room)
    assert params.max_new_tokens == longest


def test_a_refusal_names_the_flag_as_it_was_given():
    with pytest.raises(ConfigError, match="--eval-bleu-beam is 0"):
        SearchSettings(beam=0).check("--eval-bleu-")


def test_a_shortest_translation_above_the_longest_is_refused():
    with pytest.raises(ConfigError, match="^--min-len 50 is above the 10 tokens of --max-len-b"):
        SearchSettings(min_len=50, max_len_b=10).check()
    SearchSettings(min_len=50, max_len_a=1.2, max_len_b=10).check()
