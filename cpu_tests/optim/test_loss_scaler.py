import pytest
import torch

from scalerun.dataclass.configs import CommonConfig
from scalerun.optim.loss_scaler import FLOOR_PATIENCE, DynamicLossScaler


def scaler(**settings):
    return DynamicLossScaler(CommonConfig(**settings))


def test_a_clean_run_grows_at_256_512_1024_2048():
    made = scaler()
    grown, scale = [], made.scale_value
    for update in range(1, 3001):
        made.update(finite=True)
        if made.scale_value != scale:
            assert made.scale_value == 2 * scale
            grown.append(update)
            scale = made.scale_value
    assert grown == [256, 512, 1024, 2048]


def test_with_a_steady_window_it_grows_at_every_window():
    made = DynamicLossScaler(CommonConfig(fp16_scale_window=10), grow_window=False)
    for _ in range(40):
        made.update(finite=True)
    assert made.scale_value == 4 * 2**4


def test_an_overflow_halves_scale_and_window():
    made = scaler(fp16_init_scale=64.0, fp16_scale_window=8)
    made.update(finite=False)
    assert (made.scale_value, made.window) == (32, 4)
    for _ in range(4):
        assert made.scale_value == 32
        made.update(finite=True)
    assert (made.scale_value, made.window) == (64, 8)


def test_the_window_does_not_fall_below_one():
    made = scaler(fp16_init_scale=2.0**20, fp16_scale_window=2)
    for _ in range(5):
        made.update(finite=False)
    assert made.window == 1


def test_a_tolerated_share_of_overflows_does_not_shrink():
    made = scaler(fp16_init_scale=64.0, fp16_scale_tolerance=0.29)
    for update in range(9):
        made.update(finite=update % 4 != 3)
    assert made.scale_value == 64
    made.update(finite=False)
    assert made.scale_value == 32


def test_at_the_floor_it_stops_after_some_overflows_in_a_row():
    made = scaler(fp16_init_scale=4.0, min_loss_scale=1.0)
    for _ in range(2):
        made.update(finite=False)
    for _ in range(FLOOR_PATIENCE - 1):
        assert made.scale_value == 1
        made.update(finite=False)
    made.update(finite=True)
    made.scale_value = 1.0
    for _ in range(FLOOR_PATIENCE - 1):
        made.update(finite=False)
    with pytest.raises(FloatingPointError, match=r"10 times in a row.*--min-loss-scale 1;"):
        made.update(finite=False)


def test_a_restored_scaler_goes_on_as_if_never_stopped():
    pattern = [True] * 300 + [False, True, False] + [True] * 400 + [False] * 3 + [True] * 300
    straight, cut = scaler(), scaler()
    for index, finite in enumerate(pattern):
        if index % 97 == 0:
            restored = scaler(fp16_init_scale=1.0)
            restored.load_state_dict(cut.state_dict())
            cut = restored
        straight.update(finite)
        cut.update(finite)
        assert cut.state_dict() == straight.state_dict()


def test_the_loss_is_multiplied():
    assert scaler(fp16_init_scale=8.0).scale(torch.tensor(0.5)) == 4
