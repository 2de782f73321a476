import pytest

from scalerun.models.base_model import ARCH_REGISTRY
from scalerun.models.hf.family import ACTIVATIONS
from scalerun.models.hf.opt import OPT, opt_fields
from scalerun.models.transformer_config import TransformerConfig

PLAIN = TransformerConfig(decoder_learned_pos=True, activation_fn="relu")


@pytest.mark.parametrize("name", ["opt_125m", "opt_350m", "opt_175b"])
def test_the_presets_are_opt(name):
    cfg = ARCH_REGISTRY.config_for(name)
    fields = opt_fields(cfg, 50272)
    assert fields["hidden_size"] == cfg.decoder_embed_dim
    assert fields["max_position_embeddings"] == 2048
    complete = OPT.complete(fields, "config.json")
    assert complete["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.3, "attention_dropout": 0.2, "no_emb_dropout": False},
        {"init": "torchscale", "drop_path_rate": 0.1},
        {"decoder_normalize_before": False},
        {"share_decoder_input_output_embed": True, "max_target_positions": 77},
        {"checkpoint_activations": True},
    ],
)
def test_settings_of_training_and_opts_own_leave_it_one(settings):
    assert opt_fields(PLAIN.replace(**settings), 64) is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder_learned_pos": False},
        {"rotary": True},
        {"rel_pos_buckets": 8, "max_rel_pos": 20},
        {"subln": True},
        {"deepnorm": True},
        {"rms_norm": True},
        {"glu": True},
        {"layernorm_eps": 1e-6},
        {"layernorm_embedding": True},
        {"no_scale_embedding": False},
        {"moe_freq": 2, "moe_expert_count": 4},
        {"segment_length": [8], "dilated_ratio": [1]},
    ],
)
def test_whatever_opt_does_not_compute_makes_it_another_model(settings):
    assert opt_fields(PLAIN.replace(**settings), 64) is None


@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS.values())))
def test_every_activation_goes_there_and_back(activation):
    fields = opt_fields(PLAIN.replace(activation_fn=activation), 64)
    assert ACTIVATIONS[fields["activation_function"]] == activation
