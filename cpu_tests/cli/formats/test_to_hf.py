"""Runs become folders of the transformers library."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scalerun.cli.convert import main
from scalerun.cli.converted_run import ConvertedModel, write_run
from scalerun.cli.inference import load_for_inference, load_model
from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_model import build_model
from scalerun.models.hf import parity
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig

SMALL = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 40}
SMALL |= {"max_target_positions": 64}
PLAIN = SMALL | {"decoder_attention_heads": 2}
OPT = PLAIN | {"decoder_learned_pos": True, "activation_fn": "relu"}
MOE = {"moe_freq": 2, "moe_expert_count": 4}
ARCHITECTURES = {
    "sinusoidal": {},
    "scaled": {
        "decoder_learned_pos": True, "no_scale_embedding": False, "layernorm_embedding": True,
    },
    "subln": {"subln": True, "xpos_rel_pos": True, "xpos_scale_base": 64},
    "deepnorm": {"deepnorm": True, "rel_pos_buckets": 8, "max_rel_pos": 20},
    "post": {
        "decoder_normalize_before": False, "no_token_positional_embeddings": True, "glu": True,
    },
    "rms": {
        "rms_norm": True, "glu": True, "rotary": True, "activation_fn": "swish", "subln": True,
    },
    "tied": {"share_decoder_input_output_embed": True, "layernorm_eps": 1e-6},
    "moe": MOE | {"subln": True},
    "moe_rms": MOE | {"subln": True, "rms_norm": True, "moe_top1_expert": True},
    "xmoe": MOE | {"use_xmoe": True, "moe_eval_capacity_token_fraction": 0.3},
    "xmoe_cosine": MOE | {"moe_gate": "xmoe_cosine", "moe_second_expert_policy": "all"},
    "longnet": {"segment_length": [8, 32], "dilated_ratio": [1, 2], "rotary": True},
    "longnet_mod": {
        "segment_length": [12, 48], "dilated_ratio": [1, 3], "dilated_head_offset": "mod",
    },
}  # fmt: skip
RETNET = SMALL | {"decoder_value_embed_dim": 24, "decoder_retention_heads": 2}
RETNETS = {
    "retnet": {},
    "retnet_chunks": {"chunkwise_recurrent": True, "recurrent_chunk_size": 5},
    "retnet_torchscale": {"norm_eps_mode": "torchscale"},
    "retnet_0.3.0": {"norm_eps_mode": "torchscale_0.3.0", "deepnorm": True},
    "retnet_moe": MOE | {"subln": True},
}
WORDS = {name: PLAIN | words for name, words in ARCHITECTURES.items()}
WORDS |= {name: RETNET | words for name, words in RETNETS.items()}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Writes a run whose weights are all far from where they start."""
    monkeypatch.chdir(tmp_path)

    def trained(settings, tokenizer="bytes", *, ends=1.0):
        retains = "decoder_retention_heads" in settings
        cfg = (RetNetConfig if retains else TransformerConfig)(**settings)
        arch = "retnet_lm" if retains else "transformer_lm"
        size = len(load_tokenizer(tokenizer).dictionary)
        cpu = torch.device("cpu")
        model = build_model(cfg.named(arch), vocab_size=size, padding_idx=None, seed=1, device=cpu)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            if ends != 1.0:  # texts that sometimes end early
                model.output_projection.weight[258] *= ends
        made = ConvertedModel(model, cfg, arch, size, {"file": "none"})
        write_run(made, tmp_path / "run", vocabulary={"tokenizer": tokenizer}, words=[])

    return trained


def export(*more):
    return main(["--to", "hf", "run", "--output", "theirs", *more])


def transformers():
    return pytest.importorskip("transformers")


@torch.no_grad()
def check_logits(theirs):
    """Padding on the left included."""
    ours = load_model("run")
    tokens = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(2))
    expected = ours(tokens).logits
    parity.check_logits(theirs(tokens).logits, expected, "the folder")
    mask = torch.ones_like(tokens)
    mask[0, :7] = mask[2, :1] = 0
    padded = ours(tokens, padding_mask_BT=mask == 0).logits
    found = theirs(input_ids=tokens, attention_mask=mask).logits
    real = mask.bool()
    parity.check_logits(found[real], padded[real], "the folder")


def test_a_plain_decoder_becomes_opt(trained):
    trained(OPT)
    assert export() == 0
    library = transformers()
    theirs = library.AutoModelForCausalLM.from_pretrained("theirs")
    assert type(theirs).__name__ == "OPTForCausalLM"
    check_logits(theirs.eval())


@pytest.mark.parametrize("name", ["sinusoidal", "moe", "retnet"])
def test_another_decoder_brings_its_own_modelling_file(trained, name):
    library = transformers()
    trained(WORDS[name])
    assert export() == 0
    theirs = library.AutoModelForCausalLM.from_pretrained("theirs", trust_remote_code=True)
    check_logits(theirs.eval())


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_decoder_computes_the_same_there(trained, name):
    library = transformers()
    trained(WORDS[name])
    assert export() == 0
    theirs = library.AutoModelForCausalLM.from_pretrained("theirs", trust_remote_code=True)
    check_logits(theirs.eval())
    tokens = torch.tensor([[258, 5, 6, 7]])
    new = theirs.generate(tokens, max_new_tokens=4, do_sample=False)
    assert new.shape == (1, 8) or new[0, -1] == 258


def test_without_the_library_opt_is_compared_with_its_formula(trained, monkeypatch):
    trained(OPT)
    monkeypatch.setattr(parity, "transformers_library", lambda: None)
    assert export() == 0
    fields = json.loads(Path("theirs/config.json").read_text())
    assert (fields["model_type"], fields["hidden_size"], fields["ffn_dim"]) == ("opt", 16, 40)
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["pad_token_id"]) == (
        258,
        258,
        257,
    )
    table = load_file("theirs/model.safetensors")["model.decoder.embed_positions.weight"]
    assert table.shape == (66, 16)


def test_there_and_back_are_the_same_bits(trained, monkeypatch):
    trained(OPT | {"share_decoder_input_output_embed": True})
    monkeypatch.setattr(parity, "transformers_library", lambda: None)
    assert export() == 0
    assert main(["--from", "hf", "theirs", "--output", "again"]) == 0
    first, second = load_model("run").state_dict(), load_model("again").state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    runs = [load_for_inference(name, device=torch.device("cpu")) for name in ("run", "again")]
    texts = ["the owl", "\n\tna\u00efve \U0001f989"]
    ours, theirs = ([run.task.tokenizer.encode(text) for text in texts] for run in runs)
    assert ours == theirs
    assert runs[0].task.dictionary.eos == runs[1].task.dictionary.eos


def test_other_weights_in_the_folder_are_noticed_and_nothing_is_left(trained, monkeypatch):
    from scalerun.cli.formats import to_hf

    trained(OPT)
    monkeypatch.setattr(parity, "transformers_library", lambda: None)
    true = to_hf.read_weights

    def changed(*given):
        state = true(*given)
        state["model.decoder.layers.1.fc1.bias"][3] += 0.1
        return state

    monkeypatch.setattr(to_hf, "read_weights", changed)
    with pytest.raises(UserError, match="computes something else than its source: logits differ"):
        export()
    assert not list(Path().glob("theirs*"))


def test_a_modelling_file_cannot_be_compared_without_the_library(trained, monkeypatch):
    trained(WORDS["sinusoidal"])
    monkeypatch.setattr(parity, "transformers_library", lambda: None)
    with pytest.raises(UserError, match="pip install transformers"):
        export()
    assert not list(Path().glob("theirs*"))


def test_the_tokenizer_reads_the_same_there(trained):
    library = transformers()
    trained(OPT)
    assert export() == 0
    ours = load_for_inference("run", device=torch.device("cpu")).task.tokenizer
    theirs = library.AutoTokenizer.from_pretrained("theirs")
    for text in ("the owl  sat\n\ton", "caf\u00e9 \U0001f989 </s>"):
        ids = theirs(text)["input_ids"]
        assert ids == [ours.dictionary.eos, *ours.encode(text)]
        assert theirs.decode(ids, skip_special_tokens=True) == text


def generated(theirs, prompts, pad, **options):
    """New tokens of each prompt, up to the end symbol; prompts of one length side by side."""
    answers = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        own = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        tokens = torch.tensor([prompts[i] for i in own])
        mask = torch.ones_like(tokens)
        found = theirs.generate(tokens, attention_mask=mask, do_sample=False, **options)
        for i, row in zip(own, found[:, length:].tolist(), strict=True):
            ends = [row.index(end) for end in (258,) if end in row]
            answers[i] = [token for token in row[: ends[0] if ends else None] if token != pad]
    return [answers[i] for i in range(len(prompts))]


def check_generation(num_prompts, beams=(1, 4)):
    library = transformers()
    theirs = library.AutoModelForCausalLM.from_pretrained("theirs").eval()
    run = load_for_inference("run", device=torch.device("cpu"))
    generator = SequenceGenerator(run.model, run.task.tokenizer)
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (num_prompts,), generator=draw).tolist()
    prompts = [torch.randint(256, (n,), generator=draw).tolist() for n in lengths]
    for beam in beams:
        params = SamplingParams(
            max_new_tokens=12, beam=beam, temperature=1.0 if beam > 1 else 0.0, seed=1
        )
        ours = [each.tokens for each in generator.generate(prompts, [params] * num_prompts)]
        pad = run.task.dictionary.pad
        options = {"max_new_tokens": 12, "num_beams": beam, "length_penalty": 1.0}
        found = generated(theirs, [[258, *prompt] for prompt in prompts], pad, **options)
        assert found == ours
        assert any(len(answer) < 12 for answer in ours) or num_prompts < 100


def test_the_library_generates_the_same(trained):
    trained(OPT, ends=2.0)
    assert export() == 0
    check_generation(12)


@pytest.mark.long
def test_200_prompts_are_continued_alike_greedily_and_by_beam(trained):
    trained(OPT, ends=2.0)
    assert export() == 0
    check_generation(200)


def test_averaged_weights_have_to_be_there(trained):
    trained(OPT)
    with pytest.raises(UserError, match="has no averaged weights"):
        export("--use-ema")
    with pytest.raises(UserError, match="absent"):
        main(["--to", "hf", "absent", "--output", "theirs"])
    assert not list(Path().glob("theirs*"))


def test_encoders_are_refused():
    from scalerun.models.hf.custom import custom_fields
    from scalerun.models.transformer_mt import TransformerMTConfig

    with pytest.raises(UserError, match="decoders, LongNets and RetNets can"):
        custom_fields(TransformerMTConfig().named("transformer_mt"), 8)
