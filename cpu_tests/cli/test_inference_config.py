import pytest
import torch

from scalerun.cli.inference_config import InferenceConfig
from scalerun.dataclass.configs import CommonConfig
from scalerun.dataclass.errors import ConfigError


@pytest.mark.parametrize(
    ("trained", "flags", "dtype"),
    [
        ({}, {}, torch.float32),
        ({"bf16": True}, {}, torch.bfloat16),
        ({"bf16": True}, {"fp32": True}, torch.float32),
        ({}, {"bf16": True}, torch.bfloat16),
        ({"bf16": True}, {"fp16": True}, torch.float16),
    ],
)
def test_precision_is_that_of_training_unless_a_flag_names_one(trained, flags, dtype):
    cfg = InferenceConfig(path="run", **flags)
    cfg.validate()
    found = cfg.precision(CommonConfig(**trained), torch.device("cuda"))
    assert found.dtype is dtype


@pytest.mark.parametrize(
    ("settings", "says"),
    [({}, "--path is required"), ({"path": "a", "fp16": True, "fp32": True}, "exclude each other")],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        InferenceConfig(**settings).validate()
