"""The second writing of the formulas against the library itself."""

import pytest
import torch

from scalerun.models.hf.reference import gpt2_logits, opt_logits

TOKENS = torch.randint(40, (2, 15), generator=torch.Generator().manual_seed(1))
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "swish"}


def shaken(model):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("theirs", sorted(ACTIVATIONS))
def test_opt(before, tied, theirs):
    library = pytest.importorskip("transformers")
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24}
    fields |= {"vocab_size": 40, "max_position_embeddings": 20, "do_layer_norm_before": before}
    fields |= {"activation_function": theirs, "tie_word_embeddings": tied}
    model = shaken(library.OPTForCausalLM(library.OPTConfig(**fields)))
    found = opt_logits(fields, model.state_dict(), TOKENS, ACTIVATIONS[theirs])
    assert (found - model(TOKENS).logits).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_gpt2(tied):
    library = pytest.importorskip("transformers")
    fields = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 20}
    fields |= {"layer_norm_epsilon": 1e-4, "tie_word_embeddings": tied}
    model = shaken(library.GPT2LMHeadModel(library.GPT2Config(**fields)))
    found = gpt2_logits(fields, model.state_dict(), TOKENS, "gelu_tanh")
    assert (found - model(TOKENS).logits).abs().max() < 1e-5
