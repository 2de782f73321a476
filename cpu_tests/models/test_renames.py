import itertools
import re

import pytest

from scalerun.models.renames import FIELDS, Renames
from scalerun.models.torchscale import keys, retnet

EXAMPLES = {
    "layer": ["0", "17"],
    "half": ["", ".A", ".B"],
    "kind": ["weight", "bias"],
    "qkvo": ["q", "k", "v", "out"],
    "qkvgo": ["q", "k", "v", "g", "out"],
    "fc": ["fc1", "fc2"],
    "fcg": ["fc1", "fc2", "gate"],
}


def filled(pattern):
    """Names that a template stands for."""
    names = re.findall(r"\{(\w+)\}", pattern)
    for values in itertools.product(*(EXAMPLES[name] for name in names)):
        yield pattern.format(**dict(zip(names, values, strict=True)))


def test_a_name_goes_there_and_back():
    table = Renames((("layers.{layer}.a{half}.{kind}", "l.{layer}.b{half}.{kind}"), ("x", "y")))
    assert table.ours("layers.3.a.B.bias") == "l.3.b.B.bias"
    assert table.theirs("l.3.b.bias") == "layers.3.a.bias"
    assert (table.ours("x"), table.theirs("y")) == ("y", "x")


@pytest.mark.parametrize("name", ["layers.x.a.bias", "layers.3.a.C.bias", "layers_3.a.bias", "xx"])
def test_a_foreign_name_is_none(name):
    table = Renames((("layers.{layer}.a{half}.{kind}", "b.{layer}{half}{kind}"), ("x", "y")))
    assert table.ours(name) is None


def test_the_first_pair_that_fits_counts():
    table = Renames((("new", "ours"), ("old", "ours")))
    assert (table.ours("old"), table.ours("new"), table.theirs("ours")) == ("ours", "ours", "new")


@pytest.mark.parametrize("module", [keys, retnet])
def test_what_goes_out_comes_in_under_the_same_name(module):
    """For every name of the table, with everything that its fields may be."""
    assert set(EXAMPLES) == set(FIELDS)
    names = [name for _, ours in module.RENAMES.pairs for name in filled(ours)]
    assert len(names) >= 30
    for name in names:
        assert module.RENAMES.ours(module.RENAMES.theirs(name)) == name
