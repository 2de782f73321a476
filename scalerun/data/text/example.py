"""Examples: a source that is given and a target that is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from scalerun.data.text.document_kind import DocumentKind, EncodedDocuments
from scalerun.data.text.jsonl_dataset import JsonlDataset, parse_strings
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, Ids

SOURCE_KEY = "src"
TARGET_KEY = "tgt"


class Example(str):
    """The text of a source and a target, with one space between; empty without a target.

    Spaces at the end of the source and white space at the end of the target are dropped.
    """

    source: str
    target: str
    """Begins with the space."""

    def __new__(cls, source: str, target: str) -> Self:
        """Join the two texts."""
        source, target = source.rstrip(" "), target.rstrip()
        example = super().__new__(cls, f"{source} {target}" if target else "")
        example.source, example.target = source, f" {target}" if target else ""
        return example


def parse_example(line: bytes) -> Example:
    """The example of one JSON line.

    Raises:
        BadRecord: it has no strings under ``src`` and ``tgt``.
    """
    return Example(*parse_strings(line, (SOURCE_KEY, TARGET_KEY)))


def encode_examples(
    tokenizer: BaseTokenizer, examples: Sequence[str], num_threads: int
) -> EncodedDocuments:
    """Tokens of examples.

    Those of a source are what a prompt of the same text becomes. Where the tokenizer would join the
    end of the source and the beginning of the target, the target is tokenised by itself.
    """
    given = [example for example in examples if isinstance(example, Example)]
    assert len(given) == len(examples)
    sources = tokenizer.encode_batch([e.source for e in given], num_threads=num_threads)
    wholes = tokenizer.encode_batch(examples, num_threads=num_threads)
    ids: list[Ids] = []
    for example, source, whole in zip(given, sources, wholes, strict=True):
        source, whole = list(source), list(whole)
        joined = whole[: len(source)] != source
        ids.append(source + tokenizer.encode(example.target) if joined else whole)
    num_bytes = [len(example.target.encode()) for example in given]
    return EncodedDocuments(ids, num_bytes, [len(source) for source in sources])


EXAMPLES = DocumentKind(
    f"{SOURCE_KEY} and {TARGET_KEY}",
    partial(JsonlDataset, parse=parse_example),
    encode_examples,
    cut="the beginning of the source, and the end of a target that is too long by itself",
)
"""Sources with targets, of which the targets alone are predicted."""
