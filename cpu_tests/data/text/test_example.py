import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.collate import Collater
from scalerun.data.text.example import EXAMPLES, Example, encode_examples, parse_example
from scalerun.data.text.jsonl_dataset import BadRecord, JsonlDataset
from scalerun.data.text.layout import TextFile
from scalerun.data.text.part import Part
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.token_block_dataset import Packing, TokenBlockDataset
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.errors import UserError

END = ByteTokenizer().dictionary.eos
PAD = ByteTokenizer().dictionary.pad


def line(source, target):
    return json.dumps({"src": source, "tgt": target}).encode() + b"\n"


def test_source_and_target_are_joined_by_one_space():
    example = parse_example(line("ask:  ", " answer \n"))
    assert example == "ask:  answer"
    assert (example.source, example.target) == ("ask:", "  answer")
    assert Example("kept\n", "a") == "kept\n a"
    assert Example("no target", " \n") == ""


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b'{"src": "a"}', r"no key 'tgt' \(keys: 'src'\)"),
        (b'{"text": "a"}', r"no key 'src' \(keys: 'text'\)"),
        (b'{"src": "a", "tgt": 1}', "the value of 'tgt' is a number instead of a string"),
        (b'{"src": null, "tgt": "a"}', "the value of 'src' is null"),
        (b"[]", "a list instead of a JSON object with the key 'src' and 'tgt'"),
    ],
)
def test_a_record_without_both_strings_is_refused(text_file, record, reason):
    with pytest.raises(BadRecord, match=reason):
        parse_example(record)
    file = text_file(line("a", "b") + b"\n" + record)
    with pytest.raises(UserError, match=rf"web\.jsonl:3: {reason}"):
        list(JsonlDataset(file, parse=parse_example))


def test_a_text_file_has_no_examples(text_file):
    with pytest.raises(UserError, match=r"book\.txt is one text, and this --task"):
        list(JsonlDataset(text_file(b"abc", "book.txt"), parse=parse_example))


def test_an_example_without_a_target_is_counted_as_empty(text_file):
    dataset = JsonlDataset(text_file(line("a", "b") + line("a", " ")), parse=parse_example)
    assert list(dataset) == ["a b"]
    assert (dataset.counts.documents, dataset.counts.empty) == (1, 1)


def test_a_part_is_chosen_by_source_and_target_together(text_file):
    content = b"".join(line("same", str(i)) for i in range(50))
    kept, held = (
        list(JsonlDataset(text_file(content), part=Part(0.4, held_out=side), parse=parse_example))
        for side in (False, True)
    )
    assert len(kept) + len(held) == 50
    assert kept
    assert held


TEXTS = st.text(st.sampled_from("abcdo  \n'é."), max_size=12)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "json"])
def test_a_source_has_the_tokens_of_a_prompt_and_the_whole_says_the_text(
    kind, sentencepiece_tokenizer, json_tokenizer
):
    tokenizer = {
        "bytes": ByteTokenizer(), "sentencepiece": sentencepiece_tokenizer, "json": json_tokenizer,
    }[kind]  # fmt: skip

    @given(st.lists(st.tuples(TEXTS, TEXTS.filter(str.strip)), min_size=1, max_size=4))
    @settings(max_examples=60)
    def check(pairs):
        examples = [Example(*pair) for pair in pairs]
        encoded = encode_examples(tokenizer, examples, 1)
        for example, ids, source in zip(examples, encoded.ids, encoded.sources, strict=True):
            assert list(ids[:source]) == tokenizer.encode(example.source)
            assert tokenizer.decode(ids) == str(example)
            assert source < len(ids)
        assert encoded.num_bytes == [len(e.target.encode()) for e in examples]

    check()


def test_only_targets_and_ends_are_predicted_and_counted(tmp_path, text_file):
    tokenizer = ByteTokenizer()
    cache = TokenCache(tmp_path / "cache", tokenizer, kind=EXAMPLES)
    file = cache.load(text_file(line("ab", "cd") + line("e", "f")))
    assert file.sources.tolist() == [2, 1]
    assert file.num_targets == len(" cd") + len(" f") + 2
    assert file.num_bytes == 5
    blocks = TokenBlockDataset(
        [file], np.arange(2), Packing("complete", 16, split_long=False), end_id=END
    )
    batch = Collater(PAD, document_masking=True)(blocks[:], [0])
    row = [-100, -100, *b" cd", END, -100, *b" f", END]
    assert batch.targets.tolist() == [row + [-100] * (16 - len(row))]
    assert batch.num_targets == file.num_targets
    assert batch.document_ids[0, :10].tolist() == [1] * 6 + [2] * 4


def test_tokens_of_examples_are_kept_apart_from_those_of_texts(tmp_path, text_file):
    record = json.dumps({"text": "whole", "src": "a", "tgt": "b"}).encode()
    as_text = TokenCache(tmp_path / "cache", ByteTokenizer()).load(text_file(record))
    as_example = TokenCache(tmp_path / "cache", ByteTokenizer(), kind=EXAMPLES).load(
        text_file(record)
    )
    assert as_text.tokens.tolist() == [*b"whole", END]
    assert as_example.tokens.tolist() == [*b"a b", END]
    assert as_text.sources is None


EXAMPLE_TEXTS = st.lists(
    st.tuples(st.text("abc", max_size=12), st.text("xyz", min_size=1, max_size=12)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(EXAMPLE_TEXTS, st.sampled_from(["complete", "eos", "eos_pad_8"]), st.integers(3, 15))
@settings(max_examples=150)
def test_every_target_that_can_be_is_a_target_once_whatever_its_source(
    tmp_path_factory, pairs, mode, length
):
    """The reference: of a long example the source gives way first, then the target's end."""
    folder = tmp_path_factory.mktemp("examples")
    path = folder / "a.jsonl"
    path.write_bytes(b"".join(line(*pair) for pair in pairs))

    file = TokenCache(folder / "cache", ByteTokenizer(), kind=EXAMPLES).load(
        TextFile(path, "a.jsonl")
    )
    for split_long in (False, True):
        blocks = TokenBlockDataset(
            [file], np.arange(len(pairs)), Packing(mode, length, split_long), end_id=END
        )
        batch = Collater(PAD)(blocks[:], range(len(blocks)))
        predicted = [t for row in batch.targets.tolist() for t in row if t >= 0]
        targets = [[*f" {target}".encode(), END] for _, target in pairs]
        expected = [t for each in targets for t in (each if split_long else each[:length])]
        assert predicted == expected
        assert batch.num_targets == len(expected)
        kept = sum(min(len(f"{s} {t}") + 1, length) for s, t in pairs)
        if not split_long:
            assert blocks.num_tokens - blocks.num_dropped == kept
        assert blocks.num_long == sum(len(f"{s} {t}") + 1 > length for s, t in pairs)
