"""ByteTokenizer: UTF-8 bytes as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, Ids, content_digest
from scalerun.data.tokenizers.dictionary import Dictionary

NUM_BYTES = 256
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")


class ByteTokenizer(BaseTokenizer):
    """Ids 0..255 are the bytes of the text; the special symbols follow. It needs no file."""

    def __init__(self) -> None:
        self.dictionary = Dictionary(
            num_real_symbols=NUM_BYTES + len(SPECIAL_SYMBOLS),
            bos=NUM_BYTES,
            pad=NUM_BYTES + 1,
            eos=NUM_BYTES + 2,
            unk=NUM_BYTES + 3,
            digest=content_digest("bytes", *SPECIAL_SYMBOLS),
        )
        self.files = {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> Sequence[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(index for index in ids if index < NUM_BYTES).decode(errors="replace")

    def piece(self, index: int) -> str:
        return f"<0x{index:02X}>" if index < NUM_BYTES else self.token_text(index)

    def token_text(self, index: int) -> str:
        if index < 0x80:
            return chr(index)
        if index < NUM_BYTES:
            return self.piece(index)
        special = index - NUM_BYTES
        return SPECIAL_SYMBOLS[special] if special < len(SPECIAL_SYMBOLS) else f"<filler {index}>"
