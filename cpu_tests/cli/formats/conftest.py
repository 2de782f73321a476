"""Tiny folders as the transformers library writes them, made by hand."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

VOCAB, DIM, HEADS, FFN, LAYERS, POSITIONS = 61, 16, 2, 40, 2, 24
TEXTS = ["once upon a time there was an owl", "the owl sat on the mat", "time and again"]


def drawn(shapes, seed=1):
    """Random tensors of these shapes; biases and norms too, so that none is forgotten."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes.items()}


def norms(*names, dim=DIM):
    return {f"{name}.{kind}": (dim,) for name in names for kind in ("weight", "bias")}


def opt_shapes(vocab=VOCAB, *, before=True, tied=True):
    top = "model.decoder"
    shapes = {
        f"{top}.embed_tokens.weight": (vocab, DIM),
        f"{top}.embed_positions.weight": (POSITIONS + 2, DIM),
    }
    shapes |= norms(f"{top}.final_layer_norm") if before else {}
    for layer in range(LAYERS):
        at = f"{top}.layers.{layer}"
        shapes |= norms(f"{at}.self_attn_layer_norm", f"{at}.final_layer_norm")
        for name in ("q", "k", "v", "out"):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (DIM, DIM)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (DIM,)
        shapes |= {f"{at}.fc1.weight": (FFN, DIM), f"{at}.fc1.bias": (FFN,)}
        shapes |= {f"{at}.fc2.weight": (DIM, FFN), f"{at}.fc2.bias": (DIM,)}
    return shapes if tied else shapes | {"lm_head.weight": (vocab, DIM)}


OPT_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "word_embed_proj_dim": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_dim": FFN,
    "max_position_embeddings": POSITIONS,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def gpt2_shapes(vocab=VOCAB):
    shapes = {"wte.weight": (vocab, DIM), "wpe.weight": (POSITIONS, DIM)} | norms("ln_f")
    for layer in range(LAYERS):
        at = f"h.{layer}"
        shapes |= norms(f"{at}.ln_1", f"{at}.ln_2")
        for name, (a, b) in {
            "attn.c_attn": (DIM, 3 * DIM),
            "attn.c_proj": (DIM, DIM),
            "mlp.c_fc": (DIM, 4 * DIM),
            "mlp.c_proj": (4 * DIM, DIM),
        }.items():
            shapes |= {f"{at}.{name}.weight": (a, b), f"{at}.{name}.bias": (b,)}
    return {f"transformer.{key}": shape for key, shape in shapes.items()}


GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": DIM,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    "bos_token_id": VOCAB - 1,
    "eos_token_id": VOCAB - 1,
}


def write_bpe(folder, *, vocab=VOCAB, special=("<s>", "<pad>", "</s>", "<unk>"), last=()):
    """GPT-2's two files, of a vocabulary of this size; letters, then made-up names."""
    letters = sorted({letter.replace(" ", "Ġ") for text in TEXTS for letter in text})
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    names = [*special, *letters, *(a + b for a, b in merges)]
    names += [f"x{i}" for i in range(vocab - len(names) - len(last))] + list(last)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    text = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
    (folder / "merges.txt").write_text(text)


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory):
    """Where the library copies modelling files to; it asks when it is imported."""
    os.environ.setdefault("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


@pytest.fixture
def write_folder(tmp_path, monkeypatch):
    """Writes a folder ``theirs`` -> its path, and the state it holds."""
    monkeypatch.chdir(tmp_path)

    def write(config, state, name="theirs"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write


@pytest.fixture
def opt_folder(write_folder):
    """A folder of a tiny OPT with its tokenizer."""
    folder = write_folder(OPT_CONFIG, drawn(opt_shapes()))
    write_bpe(folder)
    return folder


@pytest.fixture
def gpt2_folder(write_folder):
    """A folder of a tiny GPT-2 with its tokenizer, whose last symbol ends a text."""
    folder = write_folder(GPT2_CONFIG, drawn(gpt2_shapes()))
    write_bpe(folder, special=(), last=("<|endoftext|>",))
    return folder
