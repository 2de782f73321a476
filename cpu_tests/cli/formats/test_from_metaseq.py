"""Checkpoints of metaseq, made by hand in its format, become runs."""

import argparse
import json

import pytest
import torch

from cpu_tests.cli.formats.conftest import (
    DIM,
    FFN,
    HEADS,
    LAYERS,
    OPT_CONFIG,
    drawn,
    opt_shapes,
    write_bpe,
)
from scalerun.cli.convert import main
from scalerun.cli.inference import load_for_inference, load_model
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.hf.reference import opt_logits

VOCAB = 64
TOKENS = torch.tensor([[2, 5, 60, 7, 33, 1, 0, 9], [3, 3, 4, 58, 11, 12, 13, 63]])
RECORD = {
    "decoder_attention_heads": HEADS,
    "decoder_embed_dim": DIM,
    "activation_fn": "relu",
    "decoder_learned_pos": True,
    "no_scale_embedding": True,
}


@pytest.fixture
def weights():
    """OPT's weights under the library's keys, from which the files are made."""
    return drawn(opt_shapes(VOCAB))


def metaseq_state(state, *, combined=False):
    """The same under metaseq's keys, with the embedding listed twice."""
    own = {}
    for key, tensor in state.items():
        key = key.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
        own[key] = tensor
    own["decoder.output_projection.weight"] = own["decoder.embed_tokens.weight"]
    own["decoder.version"] = torch.tensor([3.0])
    if combined:
        for layer in range(LAYERS):
            at = f"decoder.layers.{layer}.self_attn."
            for kind in ("weight", "bias"):
                thirds = [own.pop(f"{at}{name}_proj.{kind}") for name in "kvq"]
                own[f"{at}qkv_proj.{kind}"] = torch.cat(thirds)
    return own


def divided(state, ranks):
    """What each tensor rank stores: its heads, its hidden units, its rows of the vocabulary."""
    parts = [{} for _ in range(ranks)]
    for key, tensor in state.items():
        columns = key.endswith(("fc2.weight", "out_proj.weight"))
        rows = ("embed_tokens.weight", "output_projection.weight", "fc1.weight", "fc1.bias")
        split = key.endswith(rows) or ".q_proj" in key or ".k_proj" in key or ".v_proj" in key
        if ".qkv_proj." in key:
            cut = [third.chunk(ranks) for third in tensor.chunk(3)]
            pieces = [torch.cat([third[rank] for third in cut]) for rank in range(ranks)]
        elif columns or split:
            pieces = tensor.chunk(ranks, 1 if columns else 0)
        else:
            pieces = [tensor] * ranks
        for part, piece in zip(parts, pieces, strict=True):
            part[key] = piece.clone()
    return parts


def sharded(state, ranks):
    """(state, metadata) of each rank: a flat parameter for each layer and one for the rest."""
    groups = {"": []} | {f"decoder.layers.{i}": [] for i in range(LAYERS)}
    for key in state:
        if key in ("decoder.version", "decoder.output_projection.weight"):
            continue
        groups[next((path for path in groups if path and key.startswith(f"{path}.")), "")].append(
            key
        )
    found = [({"decoder.version": state["decoder.version"]}, []) for _ in range(ranks)]
    for path, keys in groups.items():
        flat = torch.cat([state[key].flatten() for key in keys])
        size = -(-len(flat) // ranks)
        for rank in range(ranks):
            piece = flat[rank * size : (rank + 1) * size]
            padding = size - len(piece)
            piece = torch.cat((piece, torch.full((padding,), 7.0)))
            entry = {
                "names": [key.removeprefix(f"{path}.") for key in keys],
                "shapes": [state[key].shape for key in keys],
                "numels": [state[key].numel() for key in keys],
                "padding": padding,
            }
            tied = [("decoder.embed_tokens.weight", "decoder.output_projection.weight")]
            module = {
                "fsdp_path": path,
                "params": {"flat_param_0": entry},
                "no_broadcast_optim_state": False,
                "shared_param_info": tied if path == "" else [],
            }
            found[rank][0][f"{path}.flat_param_0" if path else "flat_param_0"] = piece
            found[rank][1].append(module)
    return [
        (own, {"param_metadata": modules, "buffer_names": ["decoder.version"]})
        for own, modules in found
    ]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the files of a checkpoint ``c.pt`` by its ranks -> their folder."""
    monkeypatch.chdir(tmp_path)

    def write(state, *, parts=1, shards=1, record=RECORD):
        folder = tmp_path / "theirs"
        folder.mkdir()
        write_bpe(folder, vocab=VOCAB)
        for t, part in enumerate(divided(state, parts) if parts > 1 else [state]):
            pieces = sharded(part, shards) if shards > 1 else [(part, None)]
            for d, (own, metadata) in enumerate(pieces):
                content = {"model": own, "extra_state": {"epoch": 1}, "optimizer_history": []}
                content |= {} if record is None else {"cfg": {"model": record, "common": {}}}
                content |= {} if metadata is None else {"shard_metadata": metadata}
                name = "c" + (f"-model_part-{t}" if parts > 1 else "")
                torch.save(content, folder / f"{name}{f'-shard{d}' if shards > 1 else ''}.pt")
        return folder

    return write


def convert(file="theirs/c.pt", *more):
    return main(["--from", "metaseq", "--input", str(file), "--output", "run", *more])


@torch.no_grad()
def check(weights):
    fields = OPT_CONFIG | {"tie_word_embeddings": True}
    expected = opt_logits(fields, weights, TOKENS, "relu")
    assert torch.allclose(load_model("run")(TOKENS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize(("parts", "shards"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_the_files_of_all_ranks_are_one_model(write, weights, parts, shards, combined):
    write(metaseq_state(weights, combined=combined), parts=parts, shards=shards)
    assert convert() == 0
    check(weights)


def test_any_file_of_a_rank_names_the_checkpoint(write, weights):
    write(metaseq_state(weights), parts=2, shards=3)
    assert convert("theirs/c-model_part-1-shard0.pt") == 0
    check(weights)


def test_texts_begin_with_metaseqs_end_symbol(write, weights):
    write(metaseq_state(weights))
    assert convert() == 0
    dictionary = load_for_inference("run", device=torch.device("cpu")).task.dictionary
    assert (dictionary.eos, len(dictionary)) == (2, VOCAB)
    source = json.loads(open_text("run/checkpoint_0/converted_from.json"))
    assert (source["library"], list(source["files"])) == ("metaseq", ["c.pt"])
    assert source["fields"]["ffn_dim"] == FFN


def open_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def test_missing_settings_can_be_given_in_a_file(write, weights, tmp_path):
    write(metaseq_state(weights), record=None)
    with pytest.raises(UserError, match=r"c\.pt records no settings .*--metaseq-config"):
        convert()
    (tmp_path / "settings.yaml").write_text("activation_fn: relu\n")
    with pytest.raises(UserError, match=r"settings\.yaml has no decoder_attention_heads"):
        convert("theirs/c.pt", "--metaseq-config", "settings.yaml")
    (tmp_path / "settings.yaml").write_text(f"decoder_attention_heads: {HEADS}\n")
    assert convert("theirs/c.pt", "--metaseq-config", "settings.yaml") == 0
    check(weights)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"alibi": True}, r"c\.pt has alibi True, which has no form here; only False does"),
        ({"no_scale_embedding": False}, "no_scale_embedding False, which has no form"),
        ({"activation_fn": "swiglu"}, "activation_function 'swiglu', which has no form here"),
    ],
)
def test_settings_without_a_form_are_named(write, weights, record, message):
    write(metaseq_state(weights), record=RECORD | record)
    with pytest.raises(UserError, match=message):
        convert()


def test_missing_files_are_named(write, weights):
    folder = write(metaseq_state(weights), parts=2, shards=3)
    last = folder / "c-model_part-1-shard2.pt"
    kept = last.read_bytes()
    last.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(UserError, match=r"c-model_part-1-shard2\.pt is damaged or no weight file"):
        convert()
    last.unlink()
    with pytest.raises(UserError, match="lacks the file of tensor rank 1 and data-parallel rank 2"):
        convert()
    (folder / "c-model_part-0-shard2.pt").unlink()
    with pytest.raises(UserError, match=r"numbers of flat_param_0, and its weights need \d+"):
        convert()
    with pytest.raises(UserError, match=r"other\.pt does not exist, nor do files of ranks beside"):
        convert("theirs/other.pt")
    with pytest.raises(UserError, match="is a folder; name a file of a metaseq checkpoint"):
        convert("theirs")


def test_a_missing_tensor_rank_is_noticed(write, weights):
    folder = write(metaseq_state(weights), parts=2)
    (folder / "c-model_part-1.pt").unlink()
    with pytest.raises(UserError, match=r"in shape \(8, 16\), and the settings ask for \(16, 16\)"):
        convert()


def test_shards_without_their_metadata_are_refused(write, weights):
    folder = write(metaseq_state(weights), shards=2)
    file = folder / "c-shard1.pt"
    content = torch.load(file, weights_only=True)
    del content["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]["padding"]
    torch.save(content, file)
    with pytest.raises(UserError, match=r"c-shard1\.pt does not say how its flat par.*padd"):
        convert()


def test_ranks_that_differ_where_they_should_not_are_reported(write, weights, caplog):
    folder = write(metaseq_state(weights), parts=2)
    file = folder / "c-model_part-1.pt"
    content = torch.load(file, weights_only=True)
    content["model"]["decoder.layer_norm.bias"] += 0.5
    torch.save(content, file)
    assert convert() == 0
    assert "tensor ranks 0 and 1 differ in decoder.layer_norm.bias by up to 0.5" in caplog.text
    check(weights)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_files_that_would_have_to_be_trusted_are_refused(write, weights, capfd):
    folder = write(metaseq_state(weights))
    content = torch.load(folder / "c.pt", weights_only=True)
    torch.save(content | {"extra_state": Evil()}, folder / "c.pt")
    with pytest.raises(UserError, match="names builtins.print|names .*print; objects of foreign"):
        convert()
    assert "executed" not in capfd.readouterr().out
    torch.save(content | {"cfg": {"model": argparse.Namespace(**RECORD)}}, folder / "c.pt")
    with pytest.raises(UserError, match="holds an argparse.Namespace.*--allow-namespace"):
        convert()
    assert convert("theirs/c.pt", "--allow-namespace") == 0
    check(weights)


def test_a_conversion_that_computes_something_else_leaves_nothing(write, weights, monkeypatch):
    from scalerun.cli.formats import from_metaseq

    folder = write(metaseq_state(weights))
    true = from_metaseq.source_logits
    monkeypatch.setattr(from_metaseq, "source_logits", lambda *given: true(*given) * 1.01)
    with pytest.raises(UserError, match="logits differ by up to"):
        convert()
    assert not (folder.parent / "run").exists()


def test_its_flags_are_its_own(write, weights):
    with pytest.raises(ConfigError, match="--dict has no effect with --from metaseq"):
        convert("theirs/c.pt", "--dict", "d.txt")
