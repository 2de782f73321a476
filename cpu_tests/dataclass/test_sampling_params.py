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
        ({"beam": 0}, "--beam is 0; give 1 to 1024"),
        ({"beam": 2, "lenpen": float("inf")}, "--lenpen is inf; give a finite number"),
        ({"beam": 4, "top_p": 0.9}, "--beam 4 searches and does not draw; leave out"),
        ({"beam": 4, "top_k": 3}, "--beam 4 searches"),
        ({"beam": 4, "temperature": 0.0}, "--beam 4 searches"),
        ({"lenpen": 0.5}, "--lenpen 0.5 ranks the answers of a beam search; give --beam 2"),
        ({"stop": ("a", "")}, "--stop has an empty text, which would stop everything"),
        ({"seed": -1}, "--seed is -1; give 0 or more"),
        ({"seed": 2**63}, "--seed is 9223372036854775808; give 0 or more"),
    ],
)
def test_a_bad_value_names_its_flag(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_defaults_and_borders_are_allowed() -> None:
    SamplingParams()
    SamplingParams(max_new_tokens=1, min_new_tokens=1, temperature=0, top_p=1, seed=2**63 - 1)
    SamplingParams(beam=2, lenpen=-1.0)
