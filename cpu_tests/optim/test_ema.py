import pytest
import torch
from torch import nn

from scalerun.dataclass.configs import EMAConfig
from scalerun.dataclass.errors import UserError
from scalerun.optim.ema import EMA


@pytest.fixture
def weight():
    return nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


def ema_of(weight, **settings):
    return EMA([("w", weight)], EMAConfig(store_ema=True, **settings))


def move(weight, update):
    with torch.no_grad():
        weight.copy_(torch.tensor([0.5, 1.5, -2.5]) * update)


def test_it_is_the_formula(weight):
    ema, expected = ema_of(weight, ema_decay=0.8), weight.detach().double()
    for update in range(1, 6):
        move(weight, update)
        ema.step(update)
        expected = 0.8 * expected + 0.2 * weight.detach().double()
    torch.testing.assert_close(ema.average["w"].double(), expected, rtol=1e-6, atol=1e-6)


def test_before_its_start_it_is_the_weight_to_the_bit(weight):
    ema = ema_of(weight, ema_decay=0.8, ema_start_update=3)
    for update in (1, 2):
        move(weight, update)
        ema.step(update)
        assert torch.equal(ema.average["w"], weight)
    move(weight, 3)
    ema.step(3)
    assert not torch.equal(ema.average["w"], weight)


def test_it_steps_at_multiples_of_its_interval_and_so_resumes_in_step(weight):
    ema = ema_of(weight, ema_decay=0.5, ema_update_freq=3)
    changed = []
    for update in range(1, 10):
        before = ema.average["w"].clone()
        move(weight, update)
        ema.step(update)
        if not torch.equal(before, ema.average["w"]):
            changed.append(update)
    assert changed == [3, 6, 9]


def test_applied_puts_the_average_in_and_the_weights_back_to_the_bit(weight):
    ema = ema_of(weight, ema_decay=0.5)
    move(weight, 7)
    before = weight.detach().clone()
    average = ema.average["w"].clone()
    with ema.applied():
        assert torch.equal(weight, average)
    assert torch.equal(weight, before)
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert torch.equal(weight, before)
    assert torch.equal(ema.average["w"], average)


def test_the_average_of_bf16_weights_is_kept_in_float32():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    ema = ema_of(weight, ema_decay=0.999)
    with torch.no_grad():
        weight.fill_(2.0)
    ema.step(1)
    assert ema.average["w"].item() == pytest.approx(1.001)


def test_state_goes_round_and_a_foreign_one_is_refused(weight):
    ema = ema_of(weight)
    move(weight, 4)
    ema.step(1)
    other = ema_of(nn.Parameter(torch.zeros(3)))
    other.load_state_dict({name: t.clone() for name, t in ema.state_dict().items()})
    assert torch.equal(other.average["w"], ema.average["w"])
    with pytest.raises(UserError, match="does not fit the model: it differs in v"):
        other.load_state_dict({"v": torch.zeros(3)})
