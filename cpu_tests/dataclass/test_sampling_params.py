import pytest

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens is 0; give 1 or more"),
        ({"min_new_tokens": -1}, "--min-new-tokens is -1; give 0 to 128"),
        (
            {"min_new_tokens": 6, "max_new_tokens": 5},
            "--min-new-tokens is 6; give 0 to 5, the value of --max-new-tokens",
        ),
        ({"temperature": -1.0}, r"--temperature is -1; give 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"top_k": -1}, r"--top-k is -1; give 0 \(no limit\) or more"),
        ({"top_p": 2.0}, "--top-p is 2; give a number above 0 and up to 1"),
        ({"top_p": 0.0}, "--top-p is 0; give a number above 0 and up to 1"),
        ({"top_p": float("nan")}, "--top-p is nan"),
        ({"min_p": -0.1}, r"--min-p is -0.1; give a number from 0 \(no limit\) to 1"),
        ({"min_p": float("nan")}, "--min-p is nan"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty is 0; give 0.01 to 100"),
        ({"repetition_penalty": 1e-39}, "--repetition-penalty is 1e-39; give 0.01 to 100"),
        ({"frequency_penalty": 101.0}, "--frequency-penalty is 101; give -100 to 100"),
        ({"repetition_penalty": float("inf")}, "--repetition-penalty is inf"),
        ({"presence_penalty": float("nan")}, "--presence-penalty is nan; give -100 to 100"),
        ({"frequency_penalty": float("inf")}, "--frequency-penalty is inf; give -100 to 100"),
        ({"n": 0}, "--n is 0; give 1 to 1024"),
        ({"best_of": 2, "n": 3}, "--best-of is 2; give 3, the value of --n, to 1024"),
        ({"best_of": 1025}, "--best-of is 1025"),
        ({"logprobs": -1}, "--logprobs is -1; give 0 to 100"),
        ({"logprobs": 101}, "--logprobs is 101"),
        ({"echo": True, "max_new_tokens": -1}, "--max-new-tokens is -1; give 0"),
        ({"beam": 0}, "--beam is 0; give 1 to 1024"),
        ({"beam": 2, "lenpen": float("inf")}, "--lenpen is inf; give a finite number"),
        ({"beam": 4, "top_p": 0.9}, "--beam 4 searches and does not draw; leave out"),
        ({"beam": 4, "top_k": 3}, "--beam 4 searches"),
        ({"beam": 4, "temperature": 0.0}, "--beam 4 searches"),
        ({"beam": 4, "min_p": 0.1}, "--beam 4 searches"),
        ({"beam": 4, "presence_penalty": 1.0}, "leave out --repetition-penalty"),
        ({"beam": 4, "repetition_penalty": 1.2}, "leave out --repetition-penalty"),
        ({"beam": 4, "best_of": 4}, "--beam 4 ranks so many answers by itself; leave out --best"),
        ({"beam": 4, "n": 5}, "give at most --n 4"),
        ({"beam": 4, "logprobs": 2}, "--beam 4 keeps no alternatives"),
        ({"beam": 4, "echo": True, "max_new_tokens": 0}, "--max-new-tokens 0 wants none"),
        ({"lenpen": 0.5}, "--lenpen 0.5 ranks the answers of a beam search; give --beam 2"),
        ({"stop": ("a", "")}, "--stop has an empty text, which would stop everything"),
        ({"seed": -1}, "--seed is -1; give 0 or more"),
        ({"seed": 2**63}, "--seed is 9223372036854775808; give 0 or more"),
    ],
)
def test_a_bad_value_names_its_flag(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SamplingParams(**settings)  # type: ignore[arg-type]
    assert caught.value.param in settings


def test_defaults_and_borders_are_allowed() -> None:
    SamplingParams()
    SamplingParams(max_new_tokens=1, min_new_tokens=1, temperature=0, top_p=1, seed=2**63 - 1)
    SamplingParams(beam=2, lenpen=-1.0)
    SamplingParams(echo=True, max_new_tokens=0)
    SamplingParams(n=2, best_of=2, min_p=1.0, repetition_penalty=0.5, presence_penalty=-2.0)
    SamplingParams(beam=3, n=3, echo=True, logprobs=0)


@pytest.mark.parametrize(
    ("settings", "rows", "ranked"),
    [
        ({}, 1, False),
        ({"n": 3}, 3, False),
        ({"n": 3, "best_of": 3}, 3, False),
        ({"n": 3, "best_of": 5}, 5, True),
        ({"beam": 4}, 4, True),
        ({"beam": 4, "n": 4}, 4, True),
    ],
)
def test_rows_are_answers_or_hypotheses(settings: dict[str, int], rows: int, ranked: bool) -> None:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    assert (params.num_rows, params.is_ranked) == (rows, ranked)
