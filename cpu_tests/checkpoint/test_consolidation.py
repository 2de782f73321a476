import pytest
import torch

from scalerun.checkpoint.consolidation import weight_entries
from scalerun.dataclass.errors import UserError


@pytest.fixture
def save(manager, Box):
    def save(**parts):
        made = manager()
        made.save(1, {part: Box(tensors) for part, tensors in parts.items()})
        made.close()
        return made.folder.checkpoint(1)

    return save


def read(entries):
    return {entry.name: entry.read() for entry in entries}


def test_the_weights_are_those_of_the_checkpoint(save):
    model = {"embed.weight": torch.randn(5, 3), "scale": torch.tensor(2.0), "n": torch.tensor([1])}
    found = read(weight_entries(save(model=model)))
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_floating_point_numbers_get_another_format(save, dtype):
    model = {"w": torch.randn(5, 3), "n": torch.tensor([70000])}
    entries = weight_entries(save(model=model), dtype=dtype)
    assert [entry.template.dtype for entry in entries] == [dtype, torch.int64]
    found = read(entries)
    assert torch.equal(found["w"], model["w"].to(dtype))
    assert torch.equal(found["n"], model["n"])


def test_numbers_that_a_format_cannot_hold_are_refused(save):
    folder = save(model={"w": torch.tensor([1.0, -70000.0])})
    with pytest.raises(UserError, match=r"model\.w has numbers up to 70000, .* for float16"):
        read(weight_entries(folder, dtype=torch.float16))
    read(weight_entries(folder, dtype=torch.bfloat16))


def test_the_average_stands_in_for_the_weights_that_have_one(save):
    model = {"w": torch.zeros(2), "table": torch.ones(3)}
    folder = save(model=model, ema={"w": torch.full((2,), 7.0)})
    found = read(weight_entries(folder, part="ema"))
    assert found["w"].tolist() == [7, 7]
    assert found["table"].tolist() == [1, 1, 1]
    assert read(weight_entries(folder))["w"].tolist() == [0, 0]


def test_a_run_without_averages_says_so(save):
    with pytest.raises(UserError, match="has no averaged weights: the run had no --store-ema"):
        weight_entries(save(model={"w": torch.zeros(2)}), part="ema")


def test_a_tied_tensor_is_listed_once(save):
    table = torch.randn(4, 2)
    folder = save(model={"a.table": table, "b.table": table.clone(), "c": torch.zeros(1)})
    assert list(read(weight_entries(folder, ties={"b.table": "a.table"}))) == ["a.table", "c"]
    with pytest.raises(UserError, match=r"say that c is a\.table, but its tensors differ"):
        weight_entries(folder, ties={"c": "a.table"})
