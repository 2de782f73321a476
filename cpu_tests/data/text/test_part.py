import pytest

from scalerun.data.text.part import Part, check_valid_fraction
from scalerun.dataclass.errors import ConfigError

TEXTS = [f"document {i} \u00e9" for i in range(4000)]
RECORDED = [2, 5, 36, 37, 41, 48, 53]


def test_each_document_lies_on_one_side():
    kept, held_out = Part(0.25, held_out=False), Part(0.25, held_out=True)
    assert all((text in kept) != (text in held_out) for text in TEXTS)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.25, 0.9])
def test_the_share_is_that_asked_for(fraction):
    """Within four standard deviations of a draw for each document."""
    share = sum(text in Part(fraction, held_out=True) for text in TEXTS) / len(TEXTS)
    assert abs(share - fraction) <= 4 * (fraction * (1 - fraction) / len(TEXTS)) ** 0.5


def test_a_larger_share_holds_the_smaller_one():
    """Whoever raises the share never trains on what was held out before."""
    small, large = (Part(fraction, held_out=True) for fraction in (0.1, 0.2))
    assert all(text in large for text in TEXTS if text in small)


def test_the_side_of_a_document_never_changes():
    """Recorded: another version that draws otherwise would train on what was held out."""
    assert [i for i in range(60) if TEXTS[i] in Part(0.1, held_out=True)] == RECORDED


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 10.0])
def test_a_share_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(ConfigError, match="--valid-fraction is .*; give a share from 0 to below 1"):
        check_valid_fraction(fraction)
