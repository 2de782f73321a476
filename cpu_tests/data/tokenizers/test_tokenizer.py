import pytest

from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.dataclass.errors import ConfigError, UserError


@pytest.mark.parametrize("kind", ["bpe", "unigram", "json"])
def test_a_copy_of_the_files_gives_the_same_tokenizer(model_files, tmp_path, kind):
    tokenizer = load_tokenizer(str(model_files[kind]))
    ((name, source),) = tokenizer.files.items()
    (tmp_path / name).write_bytes(source.read_bytes())
    assert load_tokenizer(str(tmp_path / name)).digest == tokenizer.digest


def test_tokenizers_differ_in_their_digest(model_files):
    specs = ["bytes", *(str(model_files[kind]) for kind in ("bpe", "unigram", "json"))]
    assert len({load_tokenizer(spec).digest for spec in specs}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "--tokenizer is required"),
        ((None, "vocab.json"), "are given together"),
        (("bytes", "vocab.json", "merges.txt"), "exclude each other"),
        (("bytes", None, None, "<doc>"), "does not apply to --tokenizer bytes"),
    ],
)
def test_contradicting_flags_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(*arguments)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--tokenizer no\.model does not exist"):
        load_tokenizer("no.model")
    with pytest.raises(UserError, match="is a folder"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"--merges-filename m\.txt does not exist"):
        load_tokenizer(None, __file__, "m.txt")
