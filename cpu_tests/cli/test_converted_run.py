from __future__ import annotations

import pytest
import torch

from scalerun.cli import converted_run
from scalerun.cli.converted_run import ConvertedModel, compare, write_run
from scalerun.dataclass.errors import UserError
from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.models.transformer_config import TransformerConfig


def small(seed=1):
    cfg = TransformerConfig(
        decoder_layers=1, decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2
    )
    cpu = torch.device("cpu")
    return cfg, build_model(cfg, vocab_size=264, padding_idx=None, seed=seed, device=cpu)


@pytest.mark.parametrize("arch", ["lm_tiny", "mlm_tiny", "mt_tiny"])
def test_every_kind_of_model_is_compared(arch):
    cfg, cpu = ARCH_REGISTRY.config_for(arch), torch.device("cpu")
    models = [
        build_model(cfg, vocab_size=40, padding_idx=None, seed=seed, device=cpu)
        for seed in (1, 1, 2)
    ]
    compare(models[0], models[1])
    with pytest.raises(UserError, match="differs from the converted weights"):
        compare(models[0], models[2])


def test_equal_weights_with_other_logits_are_noticed():
    (_, model), (cfg, _) = small(), small()
    cfg.activation_fn = "relu"
    other = build_model(cfg, vocab_size=264, padding_idx=None, seed=1, device=torch.device("cpu"))
    with pytest.raises(UserError, match="gives other logits"):
        compare(model, other)


def test_gates_that_draw_draw_alike():
    (cfg, _), cpu = small(), torch.device("cpu")
    cfg = cfg.replace(
        moe_freq=1,
        moe_expert_count=4,
        moe_second_expert_policy="sampling",
        moe_deterministic_eval=False,
    )
    models = [
        build_model(cfg, vocab_size=264, padding_idx=None, seed=1, device=cpu) for _ in range(2)
    ]
    tokens = torch.arange(16).unsqueeze(0)
    assert not torch.equal(models[0].eval()(tokens).logits, models[0](tokens).logits)
    compare(*models)


def test_a_checkpoint_that_is_not_what_was_converted_is_taken_away(tmp_path, monkeypatch):
    cfg, model = small()
    monkeypatch.setattr(converted_run, "load_model", lambda path: small(seed=2)[1])
    converted = ConvertedModel(model, cfg, "transformer_lm", 264, {"file": "weights.pt"})
    with pytest.raises(UserError, match="differs from the converted weights"):
        write_run(converted, tmp_path / "run", vocabulary={"tokenizer": "bytes"}, words=[])
    assert not (tmp_path / "run").exists()


def test_a_run_is_shorter_than_the_models_positions(tmp_path):
    cfg, model = small()
    cfg.max_target_positions = 40
    model._max_positions = 40
    converted = ConvertedModel(model, cfg, "transformer_lm", 264, {})
    run = converted_run.run_config(converted, {"tokenizer": "bytes"})
    assert run.task.tokens_per_sample == 40
