"""Folders of the transformers library become runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpu_tests.cli.formats.conftest import (
    GPT2_CONFIG,
    OPT_CONFIG,
    VOCAB,
    drawn,
    gpt2_shapes,
    opt_shapes,
    write_bpe,
)
from scalerun.cli.convert import main
from scalerun.cli.inference import load_for_inference, load_model
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.hf import parity
from scalerun.models.hf.reference import gpt2_logits, opt_logits

TOKENS = torch.tensor([[2, 5, 60, 7, 33, 1, 0, 9], [3, 3, 4, 58, 11, 12, 13, 60]])


def convert(folder, *more):
    return main(["--from", "hf", "--input", str(folder), "--output", "run", *more])


def change(folder, **fields):
    content = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(content))


@torch.no_grad()
def ours():
    return load_model("run")(TOKENS).logits


def close(found, expected):
    return torch.allclose(found, expected, rtol=0, atol=1e-5)


@pytest.fixture(params=["library", "formula"])
def gate(request, monkeypatch):
    """Who is asked what the source computes."""
    if request.param == "library":
        pytest.importorskip("transformers")
    else:
        monkeypatch.setattr(parity, "transformers_library", lambda: None)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("theirs", "name"), [("relu", "relu"), ("gelu_new", "gelu_tanh")])
def test_a_converted_opt_computes_opts_formula(write_folder, gate, before, theirs, name):
    config = OPT_CONFIG | {"do_layer_norm_before": before, "activation_function": theirs}
    state = drawn(opt_shapes(before=before))
    assert convert(write_folder(config, state)) == 0
    full = config | {"tie_word_embeddings": True}
    assert close(ours(), opt_logits(full, state, TOKENS, name))


def test_an_output_of_its_own_is_kept(write_folder, gate):
    config = OPT_CONFIG | {"tie_word_embeddings": False}
    state = drawn(opt_shapes(tied=False))
    assert convert(write_folder(config, state)) == 0
    assert close(ours(), opt_logits(config, state, TOKENS, "relu"))


def test_a_converted_gpt2_computes_gpt2s_formula(gpt2_folder, gate):
    assert convert(gpt2_folder) == 0
    state = load_file(gpt2_folder / "model.safetensors")
    full = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, **GPT2_CONFIG}
    assert close(ours(), gpt2_logits(full, state, TOKENS, "gelu_tanh"))


def test_opt_begins_a_text_with_its_end_symbol(opt_folder):
    assert convert(opt_folder) == 0
    dictionary = load_for_inference("run", device=torch.device("cpu")).task.dictionary
    assert (dictionary.eos, dictionary.pad, len(dictionary)) == (2, 1, VOCAB)


def test_gpt2_keeps_its_rows_and_pads_with_its_only_special_symbol(gpt2_folder):
    assert convert(gpt2_folder) == 0
    run = load_for_inference("run", device=torch.device("cpu"))
    dictionary = run.task.dictionary
    assert (dictionary.eos, dictionary.pad, len(dictionary)) == (VOCAB - 1, VOCAB - 1, VOCAB)
    assert dictionary.padding_row is None
    assert run.cfg.task.final_vocab_size == VOCAB


def test_a_gpt2_goes_on_as_opt_with_the_same_logits_and_symbols(gpt2_folder, monkeypatch):
    monkeypatch.setattr(parity, "transformers_library", lambda: None)
    assert convert(gpt2_folder) == 0
    assert main(["--to", "hf", "run", "--output", "opt"]) == 0
    fields = json.loads(Path("opt/config.json").read_text())
    assert (fields["model_type"], fields["activation_function"]) == ("opt", "gelu_new")
    assert fields["pad_token_id"] == fields["eos_token_id"] == VOCAB - 1
    assert "suppress_tokens" not in json.loads(Path("opt/generation_config.json").read_text())
    assert main(["--from", "hf", "opt", "--output", "again"]) == 0
    runs = [load_for_inference(name, device=torch.device("cpu")) for name in ("run", "again")]
    assert torch.equal(*(run.model(TOKENS).logits for run in runs))
    assert len({tuple(run.task.tokenizer.encode("then the owl")) for run in runs}) == 1
    assert {len(run.task.dictionary) for run in runs} == {VOCAB}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_a_converted_run_answers_is_scored_and_tuned(kind, request, run, corpus, tmp_path):
    folder = request.getfixturevalue(f"{kind}_folder")
    command = run("convert", "--from", "hf", "--input", folder, "--output", "run")
    assert command.code == 0, command.stderr
    assert "its logits are the same" in command.stderr
    answer = run("interactive_cli", "--path", "run", "--cpu", "--json", stdin="the\n", cwd=tmp_path)
    assert answer.code == 0, answer.stderr
    score = run("validate", corpus, "--path", "run", "--cpu", cwd=tmp_path)
    assert score.code == 0, score.stderr
    words = ["--config", "run/config.yaml", "--finetune-from-model", "run", "--cpu"]
    words += ["--batch-size", "4", "--max-update", "2", "--save-dir", "tuned"]
    tuned = run("train", corpus, *words, cwd=tmp_path)
    assert tuned.code == 0, tuned.stderr


def test_another_end_symbol_is_taken_from_the_configuration(opt_folder):
    change(opt_folder, bos_token_id=0, eos_token_id=0)
    assert convert(opt_folder) == 0
    run = load_for_inference("run", device=torch.device("cpu"))
    assert run.task.dictionary.eos == 0
    assert run.cfg.task.end_of_document_symbol == "<s>"


def test_without_a_tokenizer_there_is_a_warning(write_folder, caplog):
    assert convert(write_folder(OPT_CONFIG, drawn(opt_shapes()))) == 0
    assert "no tokenizer is named or lies beside the weights" in caplog.text


def test_weights_may_be_in_several_files_and_in_half_precision(opt_folder):
    state = {key: t.half() for key, t in load_file(opt_folder / "model.safetensors").items()}
    (opt_folder / "model.safetensors").unlink()
    names = sorted(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in files.items():
        save_file({key: state[key] for key in keys}, opt_folder / file, metadata={"format": "pt"})
    index = {key: file for file, keys in files.items() for key in keys}
    path = opt_folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert convert(opt_folder) == 0
    assert close(
        ours(), opt_logits({**OPT_CONFIG, "tie_word_embeddings": True}, state, TOKENS, "relu")
    )
    (opt_folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"names b\.safetensors, which is not beside it"):
        main(["--from", "hf", str(opt_folder), "--output", "other"])


def test_old_files_of_torch_are_read_without_their_masks(write_folder):
    folder = write_folder(GPT2_CONFIG, {})
    state = {key.removeprefix("transformer."): t for key, t in drawn(gpt2_shapes()).items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool) for i in range(2)}
    (folder / "model.safetensors").unlink()
    torch.save(state | masks, folder / "pytorch_model.bin")
    assert convert(folder) == 0
    full = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, **GPT2_CONFIG}
    assert close(ours(), gpt2_logits(full, state, TOKENS, "gelu_tanh"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"word_embed_proj_dim": 8}, "word_embed_proj_dim 8 and hidden_size 16.*OPT-350m"),
        ({"enable_bias": False}, r"config\.json has enable_bias False, which has no form here"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm True, which has no form"),
        ({"activation_function": "mish"}, "activation_function 'mish', which has no form here"),
        ({"hidden_size": "16"}, r"config\.json has hidden_size '16'; give it as int"),
        ({"model_type": "llama"}, "model_type 'llama'; models of type opt and gpt2"),
        ({"num_hidden_layers": 1}, r"has model\.decoder\.layers\.1\.\S+, which the settings excl"),
        ({"num_hidden_layers": 3}, r"lacks model\.decoder\.layers\.2\.\S+, which the settings ask"),
        ({"ffn_dim": 48}, r"fc1\.weight in shape \(40, 16\), and the settings ask for \(48, 16\)"),
    ],
)
def test_what_has_no_form_is_named(opt_folder, fields, message):
    change(opt_folder, **fields)
    with pytest.raises(UserError, match=message):
        convert(opt_folder)


def test_settings_of_gpt2_without_a_form_are_named(gpt2_folder):
    change(gpt2_folder, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(UserError, match="scale_attn_by_inverse_layer_idx True, which has no form"):
        convert(gpt2_folder)
    change(gpt2_folder, scale_attn_by_inverse_layer_idx=False, embd_pdrop=0.2)
    with pytest.raises(UserError, match=r"embd_pdrop 0\.2 and resid_pdrop 0\.1"):
        convert(gpt2_folder)


def test_a_strange_weight_is_named(write_folder):
    state = drawn(opt_shapes()) | {"model.decoder.project_in.weight": torch.ones(2, 2)}
    with pytest.raises(UserError, match=r"model\.safetensors has model\.decoder\.project_in"):
        convert(write_folder(OPT_CONFIG, state))


def test_folders_that_are_none_are_refused(opt_folder, tmp_path):
    with pytest.raises(UserError, match="is no folder; give one with config.json"):
        convert(tmp_path / "absent")
    weights = opt_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or no weight file"):
        convert(opt_folder)
    weights.unlink()
    with pytest.raises(UserError, match="has no weights: neither model.safetensors nor pytorch"):
        convert(opt_folder)
    (opt_folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read as JSON"):
        convert(opt_folder)


def test_a_tokenizer_with_more_symbols_than_rows_is_refused(opt_folder):
    write_bpe(opt_folder, vocab=VOCAB + 3)
    with pytest.raises(UserError, match="has 61 rows, and the tokenizer .* has 64 symbols"):
        convert(opt_folder)


def test_a_tokenizer_whose_separator_is_settled_is_refused(opt_folder):
    message = "texts begin with symbol 2, and in bytes that cannot be the symbol between documents"
    with pytest.raises(UserError, match=message):
        convert(opt_folder, "--tokenizer", "bytes")


def test_a_conversion_that_computes_something_else_leaves_nothing(opt_folder, monkeypatch):
    from scalerun.cli.formats import from_hf

    true = from_hf.source_logits
    monkeypatch.setattr(from_hf, "source_logits", lambda *given: true(*given) + 1e-3)
    with pytest.raises(UserError, match=r"logits differ by up to 0\.001, more than"):
        convert(opt_folder)
    assert not (opt_folder.parent / "run").exists()


def test_flags_of_another_direction_are_refused(opt_folder):
    with pytest.raises(ConfigError, match="--dict has no effect with --from hf"):
        convert(opt_folder, "--dict", "d.txt")
    with pytest.raises(ConfigError, match="are two inputs; give one"):
        convert(opt_folder, "again")
    with pytest.raises(ConfigError, match="--from and --to are given"):
        convert(opt_folder, "--to", "hf")
