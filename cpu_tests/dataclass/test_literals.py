"""Text becomes values by type alone."""

import pytest

from scalerun.dataclass.literals import SettingType

STRINGS = SettingType.of(list[str])


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a,b", ["a", "b"]),
        (" [ a , b ] ", ["a", "b"]),
        ("'a','b'", ["a", "b"]),
        ("', ',\"x, y\"", [", ", "x, y"]),
        ("'\n'", ["\n"]),
        ("it's", ["it's"]),
        ("it's,that's", ["it's", "that's"]),
        ("a,", ["a"]),
        ("[]", []),
        ("", []),
        ("a b", ["a b"]),
        (" ", [" "]),
        ("\n", ["\n"]),
    ],
)
def test_a_list_is_cut_at_commas_outside_quotes(text, items):
    assert STRINGS.parse(text) == items


@pytest.mark.parametrize("text", [",", "a,,b", "[a", "(a]"])
def test_a_list_with_a_hole_is_refused(text):
    with pytest.raises(ValueError, match="item|close"):
        STRINGS.parse(text)


def test_optional_settings_can_be_unset():
    assert SettingType.of(int | None).parse("none") is None
    with pytest.raises(ValueError, match="whole number"):
        SettingType.of(int).parse("none")


def test_a_number_that_no_tensor_can_hold_is_refused():
    assert SettingType.of(int).parse(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(ValueError, match="too large"):
        SettingType.of(int).parse("99999999999999999999")


@pytest.mark.parametrize("annotation", [bytes, list[list[int]], dict[int, float], int | str, tuple])
def test_other_types_are_no_settings(annotation):
    with pytest.raises(TypeError, match="a setting cannot be"):
        SettingType.of(annotation)


@pytest.mark.parametrize(
    ("annotation", "accepted", "refused"),
    [
        (int, [3], [True, 3.0, "3", None, [3]]),
        (float, [3, 0.5], [True, "0.5", None]),
        (bool | None, [True, None], [1, "true"]),
        (list[int], [[], [1, 2]], [(1,), [1.0], ["1"], None, 1]),
        (dict[str, float], [{}, {"a": 1}], [{1: 1.0}, {"a": "1"}, []]),
    ],
)
def test_values_are_told_from_those_of_another_type(annotation, accepted, refused):
    kind = SettingType.of(annotation)
    assert all(map(kind.accepts, accepted))
    assert not any(map(kind.accepts, refused))
