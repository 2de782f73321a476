"""SequenceGenerator: greedy, sampled and beam-searched continuations of prompts.

B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalerun.data.answer_text import AnswerText
from scalerun.data.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.models.base_decoder import BaseDecoder
from scalerun.modules.beam_search import BeamSearch, Hypothesis
from scalerun.modules.incremental_state import IncrementalState
from scalerun.modules.sampling import choose_tokens

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class Generation:
    """A continuation."""

    tokens: list[int]
    """New tokens, those of a stop string included, the end of the document not."""
    token_logprobs: list[float]
    """Natural log-probability of each token under the model's own distribution: at temperature 1,
    with no token ruled out."""
    text: str
    """The new text, without the stop string."""
    finish_reason: str
    """``stop``: the document ended or a stop string came; ``length``: ``max_new_tokens``."""
    score: float
    """Log-probability of the continuation, with the end of the document if it was chosen; in a
    beam search divided by length ** lenpen."""


class _Row:
    """A prompt that is being continued."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: BaseTokenizer,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.params = params
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.score = 0.0
        self.finish_reason = ""
        self.stream = AnswerText(tokenizer, prompt[1:], params.stop)
        self._on_text = on_text
        # On the CPU whatever the model runs on: every device draws the same numbers.
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def accept(self, token: int, logprob: float, *, ends: bool) -> None:
        """Take the chosen token; ``ends``: it is the end of the document."""
        self.score += logprob
        if ends:
            self._finish(STOP)
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        count = len(self.tokens)
        self._show(self.stream.push(token, may_stop=count >= self.params.min_new_tokens))
        if self.stream.stopped:
            self._finish(STOP)
        elif count == self.params.max_new_tokens:
            self._finish(LENGTH)

    def result(self) -> Generation:
        return Generation(
            self.tokens, self.logprobs, self.stream.text, self.finish_reason, self.score
        )

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._show(self.stream.finish())

    def _show(self, text: str) -> None:
        if text and self._on_text is not None:
            self._on_text(self.index, text)


class SequenceGenerator:
    """Continues prompts with a decoder, one token after the other, reusing what it has computed.

    A generated text begins like a training document: with the separator, then the prompt. A prompt
    gives the same answer alone as in a batch, up to rounding in the model's arithmetic.

    Args:
        model: the decoder; set to evaluation for the time of a call.
        tokenizer: its vocabulary.
    """

    def __init__(self, model: BaseDecoder, tokenizer: BaseTokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.eos = tokenizer.dictionary.eos
        never = set(tokenizer.dictionary.dropped_ids) - {self.eos}
        if tokenizer.dictionary.unk is not None:
            never.add(tokenizer.dictionary.unk)
        self._never = sorted(never)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    def room(self, prompt_length: int) -> int | None:
        """New tokens for which the context has room after a prompt; None where it has no end."""
        context = self.model.max_positions()
        # The separator comes first, and the last new token is never read.
        return None if context is None else max(context - prompt_length, 0)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Generation]:
        """Continue each prompt by its own parameters.

        Args:
            prompts: tokens without special symbols; may be empty.
            params: one for each prompt.
            on_text: called with a prompt's index and its next piece of text as soon as the piece is
                certain; the pieces of a prompt join to its text.

        Raises:
            UserError: a prompt does not fit into the context with its new tokens, or the model's
                output is not finite.
        """
        rows = [
            _Row(i, self.fit(prompt, param), param, self.tokenizer, on_text)
            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]
        with _evaluating(self.model):
            for batch in self._batches([row for row in rows if row.params.beam == 1]):
                self._sample(batch)
            searched = {row.index: self._search(row) for row in rows if row.params.beam > 1}
        for index, answers in searched.items():
            if on_text is not None and answers[0].text:
                on_text(index, answers[0].text)
        return [searched[row.index][0] if row.index in searched else row.result() for row in rows]

    @torch.inference_mode()
    def hypotheses(self, prompt: Sequence[int], params: SamplingParams) -> list[Generation]:
        """All ``params.beam`` answers of a beam search, the best first; errors as in generate."""
        row = _Row(0, self.fit(prompt, params), params, self.tokenizer, None)
        with _evaluating(self.model):
            return self._search(row)

    def fit(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The separator and as much of the prompt as is to be read.

        Raises:
            UserError: the prompt does not fit into the context with its new tokens.
        """
        prompt = list(prompt)
        context = self.model.max_positions()
        if context is None or len(prompt) + params.max_new_tokens <= context:
            return [self.eos, *prompt]
        keep = context - params.max_new_tokens
        if params.truncate_prompt and keep >= 0:
            return [self.eos, *prompt[len(prompt) - keep :]]
        room = context if params.truncate_prompt else context - len(prompt)
        remedies = [f"give at most {room}" if room > 0 else "shorten the prompt"]
        if keep >= 0:
            remedies.append("give --truncate-prompt to drop the prompt's beginning")
        raise UserError(
            f"--max-new-tokens {params.max_new_tokens} after a prompt of {len(prompt)} tokens "
            f"exceeds the model's context of {context}; {', or '.join(remedies)}"
        )

    def _batches(self, rows: list[_Row]) -> list[list[_Row]]:
        """Rows that can run side by side: padded to the longest, all still fit into the context."""
        context = self.model.max_positions()
        batches: list[list[_Row]] = []
        for row in sorted(rows, key=lambda row: len(row.prompt)):
            batch = [*batches[-1], row] if batches else [row]
            if batches and (context is None or _columns(batch) <= context):
                batches[-1] = batch
            else:
                batches.append([row])
        return batches

    def _sample(self, rows: list[_Row]) -> None:
        """Draw or take greedily until every row has finished."""
        state, logprobs_BV = self._start(rows)
        while True:
            may_end = [len(row.tokens) >= row.params.min_new_tokens for row in rows]
            allowed_BV = self._allowed(logprobs_BV, may_end)
            chosen_B = choose_tokens(
                allowed_BV,
                temperature_B=allowed_BV.new_tensor([row.params.temperature for row in rows]),
                top_k_B=torch.tensor([row.params.top_k for row in rows], device=self.device),
                top_p_B=_doubles([row.params.top_p for row in rows], self.device),
                uniform_B=_doubles([row.uniform() for row in rows], self.device),
            )
            logprobs_B = logprobs_BV.gather(1, chosen_B[:, None])[:, 0]
            for row, token, logprob in zip(
                rows, chosen_B.tolist(), logprobs_B.tolist(), strict=True
            ):
                row.accept(token, logprob, ends=token == self.eos)
            going = [i for i, row in enumerate(rows) if not row.finish_reason]
            if not going:
                return
            if len(going) < len(rows):
                state.reorder(torch.tensor(going, device=self.device))
                rows = [rows[i] for i in going]
            logprobs_BV = self._read([[row.tokens[-1]] for row in rows], state)

    def _search(self, row: _Row) -> list[Generation]:
        """Beam search: the answers, the best first."""
        params = row.params
        search = BeamSearch(
            beam=params.beam,
            lenpen=params.lenpen,
            max_length=params.max_new_tokens,
            eos=self.eos,
            stops=lambda hypothesis: bool(params.stop) and self._text(row, hypothesis).stopped,
        )
        state, logprobs_BV = self._start([row])
        while True:
            may_end = [answer.length >= params.min_new_tokens for answer in search.live]
            order = search.step(self._allowed(logprobs_BV, may_end))
            if not order:
                break
            state.reorder(torch.tensor(order, device=self.device))
            logprobs_BV = self._read([[answer.tokens[-1]] for answer in search.live], state)
        return [
            Generation(
                tokens=list(answer.tokens),
                token_logprobs=list(answer.logprobs),
                text=self._text(row, answer).text,
                finish_reason=LENGTH if answer.is_cut else STOP,
                score=answer.score(params.lenpen),
            )
            for answer in search.finished
        ]

    def _allowed(self, logprobs_BV: Tensor, may_end: list[bool]) -> Tensor:
        """The same with ``-inf`` where a row must not go."""
        allowed_BV = logprobs_BV.clone()
        allowed_BV[:, self._never] = float("-inf")
        early = [i for i, may in enumerate(may_end) if not may]
        allowed_BV[early, self.eos] = float("-inf")
        return allowed_BV

    def _text(self, row: _Row, hypothesis: Hypothesis) -> AnswerText:
        text = AnswerText(self.tokenizer, row.prompt[1:], row.params.stop)
        for count, token in enumerate(hypothesis.tokens, start=1):
            text.push(token, may_stop=count >= row.params.min_new_tokens)
        text.finish()
        return text

    def _start(self, rows: list[_Row]) -> tuple[IncrementalState, Tensor]:
        """Read the prompts, padded on the left; log-probabilities (B, V) of what follows."""
        width = max(len(row.prompt) for row in rows)
        missing = [width - len(row.prompt) for row in rows]
        pad = self.tokenizer.dictionary.pad
        state = self.model.init_incremental_state(len(rows), _columns(rows))
        tokens = [[pad] * n + row.prompt for n, row in zip(missing, rows, strict=True)]
        padding_BT = None
        if any(missing):
            first_B = torch.tensor(missing, device=self.device)
            padding_BT = torch.arange(width, device=self.device) < first_B[:, None]
        return state, self._read(tokens, state, padding_BT)

    def _read(
        self, tokens: list[list[int]], state: IncrementalState, padding_BT: Tensor | None = None
    ) -> Tensor:
        """Extend the state by tokens; log-probabilities (B, V) of what follows, in float32."""
        output = self.model(
            torch.tensor(tokens, device=self.device),
            padding_mask_BT=padding_BT,
            incremental_state=state,
            last_token_only=True,
        )
        logprobs_BV = output.whole_logits()[:, -1].float().log_softmax(-1)
        if bool(logprobs_BV.isnan().any()):
            raise UserError(
                "the model's output is not finite: its weights are damaged, or training had "
                "diverged when they were saved; take an earlier checkpoint"
            )
        return logprobs_BV


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _columns(rows: list[_Row]) -> int:
    """Tokens that the state of a batch must hold; the last new one is never read."""
    longest = max(len(row.prompt) for row in rows)
    return longest + max(row.params.max_new_tokens for row in rows) - 1


def _doubles(numbers: list[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
