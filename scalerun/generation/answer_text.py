"""AnswerText: the text of a growing answer, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, StreamDecoder

# Enough of a prompt for a decoder to know where a character or a word goes on.
_CONTEXT_TOKENS = 16


class AnswerText:
    """A text that grows token by token, handed out as soon as no later token can change it.

    Args:
        prompt: the tokens before the answer, without the separator.
        stop: texts that end the answer.
    """

    def __init__(
        self, tokenizer: BaseTokenizer, prompt: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._decoder = StreamDecoder(tokenizer)
        for index in prompt[-_CONTEXT_TOKENS:]:
            self._decoder.push(index)
        self._stop = stop
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool) -> str:
        """Add a token; return the text that is now certain.

        Args:
            may_stop: a stop string that is complete now ends the answer; else it is plain text.
        """
        return self._grow(self._decoder.push(token), may_stop)

    def finish(self) -> str:
        """Return what was held back: the answer ends here."""
        if not self.stopped:
            self.text += self._decoder.finish()
        rest, self._given = self.text[self._given :], len(self.text)
        return rest

    def _grow(self, piece: str, may_stop: bool) -> str:
        before = len(self.text)
        self.text += piece
        if may_stop:
            found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
            if cuts := [at for at in found if at >= 0]:
                self.text = self.text[: min(cuts)]
                self.stopped = True
                return self.finish()
        ready = max(len(self.text) - self._possible_stop(), self._given)
        certain, self._given = self.text[self._given : ready], ready
        return certain

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
