"""Words: scores of tokens, added up over the words of the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer


@dataclass(frozen=True)
class Word:
    """One word of a text, or the end of a document."""

    text: str
    """Without white space; the end symbol's name at the end of a document."""
    logprob: float
    """Natural log-probability of all its tokens, those of the white space before it included."""
    num_tokens: int
    document: int
    """Which document it is in, from 0."""
    is_end: bool = False


class WordReader:
    """Cuts a stream of tokens into the words between white space.

    A word begins where the tokenizer marks white space. The white space before a word belongs to
    it, that at the end of a document to the end symbol; so all scores together are those of the
    tokens. A token that spans several words counts as one.

    Args:
        tokenizer: whose tokens they are.
    """

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_words = 0
        """Words so far, without the ends of documents."""
        self._document = 0
        self._ids: list[int] = []
        self._logprob = 0.0
        self._has_text = False

    def push(self, token: int, logprob: float) -> Iterator[Word]:
        """Read a token; gives the words that are complete by it."""
        is_end = token == self.tokenizer.dictionary.eos
        if self._has_text and (is_end or self.tokenizer.starts_word(token)):
            yield self._finish()
        self._ids.append(token)
        self._logprob += logprob
        if is_end:
            yield self._finish(is_end=True)
            self._document += 1
            return
        text = self.tokenizer.decode([token])
        self._has_text = self._has_text or bool(text.strip())
        if self._has_text and text[-1:].isspace():
            yield self._finish()

    def finish(self) -> Iterator[Word]:
        """Gives the last word of a stream that does not end with a document."""
        if self._has_text:
            yield self._finish()

    def _finish(self, *, is_end: bool = False) -> Word:
        name = self.tokenizer.token_text(self._ids[-1])
        text = name if is_end else self.tokenizer.decode(self._ids).strip()
        word = Word(text, self._logprob, len(self._ids), self._document, is_end)
        self.num_words += not is_end
        self._ids, self._logprob, self._has_text = [], 0.0, False
        return word


@dataclass
class WordStats:
    """What the occurrences of one word have in common."""

    count: int = 0
    logprob: float = 0.0
    """Sum over the occurrences."""
    next_logprob: float = 0.0
    """Sum over the words that follow them."""
    without_next: int = 0
    """Occurrences that no word follows, at the end of a document."""

    @property
    def mean_logprob(self) -> float:
        """Mean natural log-probability of the word."""
        return self.logprob / self.count

    @property
    def mean_next_logprob(self) -> float | None:
        """Mean natural log-probability of what follows it; None where nothing ever does."""
        followed = self.count - self.without_next
        return self.next_logprob / followed if followed else None


class WordTable:
    """Statistics by word."""

    def __init__(self) -> None:
        self.stats: dict[str, WordStats] = {}
        self._previous: WordStats | None = None

    def add(self, word: Word) -> None:
        """Count the next word of a text."""
        if self._previous is not None:
            if word.is_end:
                self._previous.without_next += 1
            else:
                self._previous.next_logprob += word.logprob
        stats = self.stats.setdefault(word.text, WordStats())
        stats.count += 1
        stats.logprob += word.logprob
        stats.without_next += word.is_end
        self._previous = None if word.is_end else stats

    def finish(self) -> None:
        """Nothing more comes: the last word is followed by none."""
        if self._previous is not None:
            self._previous.without_next += 1
            self._previous = None

    def by_count(self) -> list[tuple[str, WordStats]]:
        """The words, the frequent ones first, equally frequent ones in alphabetical order."""
        return sorted(self.stats.items(), key=lambda item: (-item[1].count, item[0]))
