import io

import pytest
import sentencepiece

from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from scalerun.dataclass.errors import UserError


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train a model with sentencepiece's own, lossy, defaults."""

    def train(**options):
        model = io.BytesIO()
        words = ["the cat sat on the mat", "a dog and a cat"] * 5
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(words), model_writer=model, vocab_size=40, minloglevel=2,
            hard_vocab_limit=False, **options,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("model") / "lossy.model"
        path.write_bytes(model.getvalue())
        return path

    return train


def test_roles_come_from_the_model_and_a_missing_pad_is_added(train):
    tokenizer = SentencePieceTokenizer(train())
    dictionary = tokenizer.dictionary
    assert (dictionary.unk, dictionary.bos, dictionary.eos) == (0, 1, 2)
    assert dictionary.pad == dictionary.num_real_symbols - 1
    assert tokenizer.token_text(dictionary.pad) == "<pad>"


def test_another_piece_can_end_documents(train):
    path = train(user_defined_symbols=["<doc>"])
    tokenizer = SentencePieceTokenizer(path, "<doc>")
    assert tokenizer.token_text(tokenizer.dictionary.eos) == "<doc>"
    assert tokenizer.digest != SentencePieceTokenizer(path).digest
    with pytest.raises(UserError, match="no piece for the piece '<none>'; name one"):
        SentencePieceTokenizer(path, "<none>")


def test_a_model_without_end_symbol_needs_one_named(train):
    path = train(bos_id=-1, eos_id=-1, user_defined_symbols=["<doc>"])
    with pytest.raises(UserError, match="--end-of-document-symbol"):
        SentencePieceTokenizer(path)
    dictionary = SentencePieceTokenizer(path, "<doc>").dictionary
    assert dictionary.bos == dictionary.eos


def test_a_lossy_model_is_known_as_such(train):
    assert not SentencePieceTokenizer(train()).is_lossless()


@pytest.mark.parametrize("content", [b"", b"plain text", b"\x00\xff" * 50])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "x.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.model is not a sentencepiece model"):
        SentencePieceTokenizer(path)


def test_the_character_that_sentencepiece_writes_for_spaces_survives(sentencepiece_tokenizer):
    text = "a\N{LOWER ONE EIGHTH BLOCK} b"
    assert sentencepiece_tokenizer.decode(sentencepiece_tokenizer.encode(text)) == text
