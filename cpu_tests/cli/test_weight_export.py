from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scalerun.cli.converted_run import ConvertedModel, write_run
from scalerun.cli.inference import load_model
from scalerun.cli.weight_export import consolidated, ties, torchscale_file
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.base_model import ARCH_REGISTRY, MODEL_REGISTRY, build_model

SIDE = {"layers": 1, "embed_dim": 8, "ffn_embed_dim": 8, "attention_heads": 2}


def settings(arch, **changes):
    cfg = ARCH_REGISTRY.config_for(arch)
    sides = [side for side in ("encoder", "decoder") if hasattr(cfg, f"{side}_layers")]
    sizes = {f"{side}_{name}": value for side in sides for name, value in SIDE.items()}
    return cfg.replace(**{k: v for k, v in sizes.items() if hasattr(cfg, k)} | changes)


@pytest.fixture
def make(tmp_path):
    """A run of an untrained model."""

    def make(arch, **changes):
        cfg, cpu = settings(arch, **changes), torch.device("cpu")
        model = build_model(cfg, vocab_size=40, padding_idx=None, seed=1, device=cpu)
        write_run(
            ConvertedModel(model, cfg, arch, 40, {}), tmp_path / "run", vocabulary=None, words=[]
        )
        return str(tmp_path / "run")

    return make


@pytest.mark.parametrize("arch", ARCH_REGISTRY.names())
def test_the_tensors_that_a_model_lists_twice_are_known(arch):
    """Of every architecture, tied in every way that it can be."""
    cfg = ARCH_REGISTRY.config_for(arch)
    names = [name for name in vars(cfg) if name.startswith("share_")]
    for tied in [{}, *({name: True} for name in names)]:
        try:
            own = cfg.replace(**tied)
            own.validate()
        except ConfigError:
            continue
        with torch.device("meta"):
            model = MODEL_REGISTRY.class_for(own).build_model(own, vocab_size=40, padding_idx=None)
        by_id = {}
        twice = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in by_id:
                twice[name] = by_id[id(tensor)]
            by_id.setdefault(id(tensor), name)
        assert ties(own.to_dict()) == twice


def test_a_shared_table_is_in_the_file_once(make, tmp_path):
    run = make("transformer_mt", share_all_embeddings=True)
    file = tmp_path / "w.safetensors"
    num_tensors, size = consolidated(run, file, part="model", dtype=None)
    loaded, expected = load_file(file), load_model(run).state_dict()
    copy, original = "decoder.embedding.tokens.weight", "encoder.embedding.tokens.weight"
    assert expected.keys() - loaded.keys() == {copy}
    assert (num_tensors, size) == (len(loaded), file.stat().st_size)
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)
    with safe_open(file, "pt") as opened:
        assert opened.metadata()[copy] == original


def test_experts_come_apart_in_order(make, tmp_path):
    run = make("transformer_lm", moe_freq=1, moe_expert_count=3, moe_mask_padding=False)
    paths = tmp_path / "t.safetensors", tmp_path / "t.json"
    torchscale_file(run, *paths, part="model", user_dir=None)
    loaded, ours = load_file(paths[0]), load_model(run).state_dict()
    for expert in range(3):
        key = f"layers.0.moe_layer.experts.{expert}.fc1.weight"
        assert torch.equal(loaded[key], ours["layers.0.ffn.experts.fc1_weight"][expert])
    fields = json.loads(paths[1].read_text())
    assert (fields["moe_expert_count"], fields["use_xmoe"]) == (3, False)


def test_what_cannot_go_to_torchscale_leaves_no_file(make, tmp_path):
    run = make("transformer_lm", rms_norm=True)
    paths = tmp_path / "t.safetensors", tmp_path / "t.json"
    with pytest.raises(UserError, match="--rms-norm, which TorchScale has no form for"):
        torchscale_file(run, *paths, part="model", user_dir=None)
    assert not any(path.exists() for path in paths)
