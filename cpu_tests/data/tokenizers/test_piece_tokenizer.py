import numpy as np
import pytest
import sentencepiece

from cpu_tests.masked_data import sentences, write_vocabulary
from scalerun.data.tokenizers.piece_tokenizer import PieceTokenizer
from scalerun.dataclass.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder, sentences(200, seed=1))
    return folder


@pytest.fixture
def make(folder, tmp_path):
    def make(listing=None, **options):
        path = folder / "dict.txt"
        if listing is not None:
            path = tmp_path / "dict.txt"
            path.write_text(listing, encoding="utf-8")
        return PieceTokenizer(folder / "sentencepiece.bpe.model", path, **options)

    return make


def test_the_vocabulary_is_in_the_documented_order(make, folder):
    tokenizer = make()
    lines = (folder / "dict.txt").read_text(encoding="utf-8").splitlines()
    listed = [line.rpartition(" ")[0].replace("\u2581", " ") for line in lines]
    names = ["<s>", "<pad>", "</s>", "<unk>", *listed, "<mask>"]
    names += [f"<mask_{i}>" for i in range(100)]
    names += [f"madeupword{i:04d}" for i in range(-len(names) % 8)]
    assert [tokenizer.token_text(i) for i in range(len(tokenizer.dictionary))] == names
    assert tokenizer.token_text(tokenizer.mask) == "<mask>"
    assert tokenizer.num_listed == len(listed)


def test_ids_are_those_of_the_pieces_as_strings(make, folder):
    """Looked up one by one, as the description has it; what the list lacks is unknown."""
    lines = (folder / "dict.txt").read_text(encoding="utf-8").splitlines()
    tokenizer = make("\n".join(lines[::2]) + "\n")
    numbers = {line.rpartition(" ")[0]: 4 + i for i, line in enumerate(lines[::2])}
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    texts = [*sentences(30, seed=5), "\u00e9t\u00e9 the cat"]
    for text in texts:
        assert tokenizer.encode(text) == [
            numbers.get(piece, 3) for piece in model.encode(text, out_type=str)
        ]
    documents = ["\n".join(texts[i : i + 3]) for i in range(0, 31, 3)]
    for document, ids in zip(documents, tokenizer.encode_batch(documents), strict=True):
        expected = [i for line in document.split("\n") for i in [*tokenizer.encode(line), 2]]
        assert np.asarray(ids).tolist() == expected[:-1]


def test_text_comes_back(make):
    text = "the old cat sleeps\nan owl sings"
    assert make().decode([0, *make().encode(text)]) == text


def test_another_list_is_another_vocabulary(make, folder):
    lines = (folder / "dict.txt").read_text(encoding="utf-8")
    assert make().digest == make(lines).digest
    swapped = lines.splitlines()
    swapped[0], swapped[1] = swapped[1], swapped[0]
    assert make("\n".join(swapped)).digest != make().digest


def test_pieces_that_the_list_lacks_are_counted_aloud(make, folder, caplog):
    lines = (folder / "dict.txt").read_text(encoding="utf-8").splitlines()
    make()
    assert not caplog.records
    make("\n".join(lines[1:]) + "\n")
    assert f"lacks 1 of the {len(lines) + 3} pieces" in caplog.text
    assert f"the first is {lines[0].rpartition(' ')[0]!r}" in caplog.text


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ("the\n", r"--dict-file .*dict\.txt:1 is 'the'; a line is a symbol, a space, a count"),
        ("a 1\na 2\n", r"--dict-file .*dict\.txt:2 has 'a' a second time"),
        ("a 1\n<mask> 1\n", r"--dict-file .*dict\.txt:2 has '<mask>', which every vocabulary has"),
        ("zebra 1\n", "lists no piece of --spm-model .* not one vocabulary"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(make, listing, message):
    with pytest.raises(UserError, match=message):
        make(listing)


def test_a_file_that_is_no_model_is_refused(folder, tmp_path):
    (tmp_path / "x.model").write_bytes(b"nothing")
    with pytest.raises(UserError, match="--spm-model .* is not a sentencepiece model"):
        PieceTokenizer(tmp_path / "x.model", folder / "dict.txt")
    with pytest.raises(UserError, match="--spm-model .* cannot be read: No such file"):
        PieceTokenizer(tmp_path / "none.model", folder / "dict.txt")
