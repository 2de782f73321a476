from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer


def test_ids_are_the_bytes_and_the_size_is_264():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 0x0A]
    assert len(tokenizer.dictionary) == 264
    assert tokenizer.files == {}


def test_bytes_that_are_no_text_become_replacement_characters():
    assert ByteTokenizer().decode([0x61, 0xFF, 0x62]) == "a\N{REPLACEMENT CHARACTER}b"


def test_ids_are_shown_as_characters_bytes_or_names():
    tokenizer = ByteTokenizer()
    assert [tokenizer.token_text(i) for i in (0x41, 0xE2, 258, 263)] == [
        "A", "<0xE2>", "</s>", "<filler 263>",
    ]  # fmt: skip
