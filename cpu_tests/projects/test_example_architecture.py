"""The architecture of projects/example_architecture: the laws that every decoder obeys."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scalerun.models.base_model import ARCH_REGISTRY, MODEL_REGISTRY, build_model
from scalerun.plugins import load_plugins

FOLDER = Path(__file__).parents[2] / "projects/example_architecture"
VOCABULARY, LENGTH = 40, 12


@pytest.fixture(scope="module")
def config():
    """The preset, made smaller; what it registers is forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODEL_REGISTRY, "_entries", dict(MODEL_REGISTRY._entries))
        patch.setattr(ARCH_REGISTRY, "_presets", dict(ARCH_REGISTRY._presets))
        load_plugins(str(FOLDER))
        preset = ARCH_REGISTRY.config_for("qk_norm_tiny")
        yield replace(preset, decoder_embed_dim=16, decoder_ffn_embed_dim=32, decoder_layers=2)
        for name in [name for name in sys.modules if name.endswith(f".{FOLDER.name}.qk_norm")]:
            del sys.modules[name]


def build(config):
    model = build_model(
        config, vocab_size=VOCABULARY, padding_idx=1, seed=1, device=torch.device("cpu")
    )
    return model.eval()


@pytest.fixture
def model(config):
    return build(config)


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, VOCABULARY, (2, LENGTH), generator=generator)


def logits(model, tokens, **inputs):
    with torch.no_grad():
        return model(tokens, **inputs).logits


def test_it_is_one_short_file():
    [file] = FOLDER.glob("*.py")
    assert len(file.read_text(encoding="utf-8").splitlines()) < 120


def test_decoding_step_by_step_equals_one_pass(model, tokens):
    state = model.init_incremental_state(2, LENGTH)
    cuts = [(0, 5), (5, 6), (6, LENGTH)]
    steps = [logits(model, tokens[:, i:j], incremental_state=state) for i, j in cuts]
    torch.testing.assert_close(torch.cat(steps, dim=1), logits(model, tokens))


def test_a_later_token_never_changes_an_earlier_logit(model, tokens):
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] - 4 + 1) % (VOCABULARY - 4) + 4
    before, after = logits(model, tokens), logits(model, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_documents_in_one_sequence_do_not_see_each_other(model, tokens):
    ids = torch.tensor([0] * 5 + [1] * 7).expand(2, LENGTH)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, LENGTH)
    joined = logits(model, tokens, document_ids_BT=ids, positions_BT=positions)
    torch.testing.assert_close(joined[:, 5:], logits(model, tokens[:, 5:]))


def test_it_has_the_plain_decoders_parameters_and_the_gains(config, model):
    plain = build(ARCH_REGISTRY.config_for("lm_tiny").replace(
        decoder_embed_dim=16, decoder_ffn_embed_dim=32, decoder_layers=2
    ))  # fmt: skip
    gains = 2 * config.decoder_layers * config.decoder_stack().head_dim
    count = sum(p.numel() for p in model.parameters())
    assert count == sum(p.numel() for p in plain.parameters()) + gains


def test_scores_do_not_depend_on_the_size_of_the_projections(config, tokens):
    """The law of QK-Norm: queries and keys have a fixed length whatever their weights are."""
    model = build(config.replace(qk_norm_eps=1e-12))
    before = logits(model, tokens)
    with torch.no_grad():
        for layer in model.layers:
            for projection in (layer.mixer.q_proj, layer.mixer.k_proj):
                projection.weight *= 10
                projection.bias *= 10
    torch.testing.assert_close(logits(model, tokens), before)


def test_bfloat16_stays_near_float32(model, tokens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = logits(model, tokens)
    torch.testing.assert_close(narrow.float(), logits(model, tokens), rtol=0.1, atol=0.1)


def test_it_trains_validates_and_generates_from_a_folder_outside_the_tree(
    run, corpus, tiny, records, tmp_path
):
    folder = shutil.copytree(FOLDER, tmp_path / "somewhere/else")
    words = [*tiny, "--user-dir", folder, "--arch", "qk_norm_tiny", "--qk-norm-eps", "1e-5"]
    words += ["--subln", "--save-dir", "run", "--lr", "0.01", "--max-update", "30"]
    command = run("train", corpus, *words)
    assert command.code == 0, command.stderr
    losses = [record["loss"] for record in records(tmp_path / "run", "train")]
    assert losses[-1] < 0.8 * losses[0]
    score = run("validate", "--path", "run", "--cpu")
    assert score.code == 0, score.stderr
    answer = run("interactive_cli", "--path", "run", "--cpu", stdin="Line 1: the\n")
    assert answer.code == 0, answer.stderr
    assert answer.stdout.startswith("Line 1: the")


def test_its_flag_is_checked(run, corpus, tiny):
    words = [*tiny, "--user-dir", FOLDER, "--arch", "qk_norm_lm", "--qk-norm-eps", "2"]
    command = run("train", corpus, *words, "--max-update", "1")
    assert command.code == 2
    assert command.error == "error: --qk-norm-eps is 2; give a number above 0, below 1"
