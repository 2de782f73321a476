from __future__ import annotations

import pytest

from scalerun.cli.registries import CHOOSERS
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.parser import parse_config
from scalerun.models.transformer_mt import mt_base, mt_tied_base


def test_mt_base_is_the_base_encoder_decoder_of_torchscale() -> None:
    for stack in mt_base().stacks():
        assert (stack.dim, stack.ffn_dim, stack.num_layers, stack.num_heads) == (512, 2048, 6, 8)
        assert (stack.axes.residual, stack.axes.absolute_position) == ("post_norm", "sinusoidal")


def test_mt_tied_base_is_that_with_what_the_documented_command_adds() -> None:
    tied, plain = mt_tied_base().to_dict(), mt_base().to_dict()
    assert {name: tied[name] for name in plain if tied[name] != plain[name]} == {
        "dropout": 0.3,
        "share_decoder_input_output_embed": True,
    }


def test_an_encoder_decoder_is_for_translation_where_no_task_is_named() -> None:
    words = ["data", "--arch", "mt_base", "--max-update", "5", "--lr", "0.1", "--max-tokens", "9"]
    cfg = parse_config(ScalerunConfig, words, prog="train", choosers=CHOOSERS)
    assert (cfg.task._name, cfg.task.data) == ("translation", "data")
    with pytest.raises(ConfigError, match="^--task is required"):
        parse_config(ScalerunConfig, ["data", "--arch", "lm_base"], prog="t", choosers=CHOOSERS)
