"""Engine: answers requests that come at any time, side by side.

N sequences, B of them new, T tokens, K alternatives, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.distributed.ranks import Control
from scalerun.generation.beam_search import best_tokens
from scalerun.generation.context_room import ContextRoom
from scalerun.generation.continuation import Continuation, Draws, Search
from scalerun.generation.events import Alternatives, Listener, PromptScore
from scalerun.generation.growing_batch import GrowingBatch
from scalerun.generation.request import Request
from scalerun.generation.rules import Rules
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import BaseModel
from scalerun.models.encoder_decoder import EncoderDecoder

MAX_LOGITS = 2**28
"""Logits of prompts that are scored at once, unless a single prompt has more."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """What a request that was handed in is known by."""

    continuation: Continuation

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt that are read, without the separator."""
        return len(self.continuation.prompt)

    @property
    def num_new_tokens(self) -> int:
        """Tokens of all answers so far, those included that ``best_of`` leaves out."""
        return self.continuation.num_new_tokens


class Engine:
    """Answers requests side by side; those that come later join the ones under way.

    A generated text begins like a training document: with the separator, then the prompt. An
    encoder-decoder continues it by what it has read of a source, which is encoded once; its prompts
    are the beginnings that a translation must have, mostly empty. A request has the same answers
    alone as beside others, up to rounding in the model's arithmetic.

    One thread hands in, cancels and steps; :meth:`check` may be called by any. Listeners are called
    inside :meth:`step`. What computes in another number format calls it under autocast.

    Args:
        model: a decoder, or an encoder with a decoder; set to evaluation.
        tokenizer: the vocabulary of what is generated.
        max_num_seqs: sequences side by side at most; an answer is one, and so is a hypothesis. None
            for no limit.
        max_num_tokens: tokens that they have room for at most: their number times the length that
            the longest may reach. None for no limit.
        control: of the ranks that share the model's weights or experts; all of them must step until
            :meth:`step` is False, each with requests of its own.
    """

    def __init__(
        self,
        model: BaseDecoder | EncoderDecoder,
        tokenizer: BaseTokenizer,
        *,
        max_num_seqs: int | None = 64,
        max_num_tokens: int | None = None,
        control: Control | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.control = control
        self.context = ContextRoom(model, len(tokenizer.dictionary))
        self.rules = Rules(tokenizer.dictionary)
        self._batch = GrowingBatch(model, pad=tokenizer.dictionary.pad)
        self._waiting: deque[Continuation] = deque()
        self._live: list[Continuation] = []

    @property
    def num_live(self) -> int:
        """Sequences that are being continued."""
        return sum(len(each.steps) for each in self._live)

    def check(self, request: Request) -> None:
        """Refuse what can never be answered.

        Raises:
            UserError: the prompt does not fit into the context with its new tokens, there are more
                answers than the engine has room for, a source is missing or too long or of no use,
                or a token is not in the vocabulary.
        """
        self.context.check(request)
        rows = request.params.num_rows
        if self.max_num_seqs is not None and rows > self.max_num_seqs:
            params = request.params
            param = "beam" if params.beam > 1 else "n" if params.best_of is None else "best_of"
            raise UserError(
                f"--{param.replace('_', '-')} {rows} needs more sequences than the "
                f"{self.max_num_seqs} that run side by side; give at most {self.max_num_seqs}",
                param=param,
            )
        prompt = self.context.fit(request.prompt, request.params)
        tokens = rows * (len(prompt) + request.params.max_new_tokens)
        if self.max_num_tokens is not None and tokens > self.max_num_tokens:
            raise UserError(
                f"a prompt of {len(prompt)} tokens with {rows} times --max-new-tokens "
                f"{request.params.max_new_tokens} needs room for {tokens} tokens, and there is "
                f"room for {self.max_num_tokens}; shorten one of them",
                param="max_new_tokens",
            )

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Hand a request in; it is begun when all that came earlier are, and there is room.

        Args:
            listener: called for each event, from :meth:`step`.

        Raises:
            UserError: as :meth:`check` does.
        """
        self.check(request)
        kind = Search if request.params.beam > 1 else Draws
        prompt = self.context.fit(request.prompt, request.params)
        continuation = kind(request, prompt, self.tokenizer, listener)
        self._waiting.append(continuation)
        return Ticket(continuation)

    def cancel(self, ticket: Ticket) -> None:
        """Break a request off; its listener hears no more. One that is over stays so."""
        ticket.continuation.end()

    def cancel_all(self) -> None:
        """Break all requests off."""
        for continuation in (*self._waiting, *self._live):
            continuation.end()

    def step(self) -> bool:
        """Give each answer its next token, those of newcomers included; False: there was nothing.

        One call of the model reads the last tokens of all sequences, and another the prompts of
        the requests for which there is room.
        """
        with self._computing():
            self._keep()
            newcomers = self._admitted()
            some_read, some_add = self._on_any_rank(bool(self._live), bool(newcomers))
            logits = []
            if self._live:
                tokens = [token for each in self._live for _, token in each.steps]
                logits.append(self._batch.read(tokens))
            elif some_read:
                self._batch.read_nothing()
            if newcomers:
                logits.append(self._add(newcomers))
            elif some_add:
                self._batch.add_nothing()
            self._live += newcomers
            if logits:
                self._advance(torch.cat(logits))
        return some_read or some_add

    def _keep(self) -> None:
        """Let the batch hold what goes on and nothing else."""
        order, first = [], 0
        for each in self._live:
            order += [first + row for row, _ in each.steps]
            first += each.num_sequences
            each.num_sequences = len(each.steps)
        self._live = [each for each in self._live if not each.is_over]
        self._batch.keep(order)

    def _on_any_rank(self, reads: bool, adds: bool) -> tuple[bool, bool]:
        if self.control is None:
            return reads, adds
        some_read, some_add = self.control.max(float(reads), float(adds))
        return some_read > 0, some_add > 0

    def _admitted(self) -> list[Continuation]:
        """The requests that begin now: the first that wait, as many as there is room for."""
        newcomers: list[Continuation] = []
        rows = sum(each.params.num_rows for each in self._live)
        longest = max((each.max_length for each in self._live), default=0)
        width = 0
        while self._waiting:
            head = self._waiting[0]
            if not head.is_over:
                rows += head.params.num_rows
                longest = max(longest, head.max_length)
                width = max(width, len(head.inputs))
                if not self._has_room(rows, longest):
                    break
                if newcomers and not self._can_join(newcomers, head, width):
                    break
                newcomers.append(head)
            self._waiting.popleft()
        return newcomers

    def _has_room(self, rows: int, longest: int) -> bool:
        fits = self.max_num_seqs is None or rows <= self.max_num_seqs
        return fits and (self.max_num_tokens is None or rows * longest <= self.max_num_tokens)

    def _can_join(self, newcomers: Sequence[Continuation], head: Continuation, width: int) -> bool:
        """Whether one call can read all their prompts: all of them scored, or none."""
        if newcomers[0].params.echo != head.params.echo:
            return False
        rows = len(newcomers) + 1
        return not head.params.echo or rows * width * self.context.vocabulary <= MAX_LOGITS

    def _add(self, newcomers: Sequence[Continuation]) -> Tensor:
        """Logits (B, V) of what follows the prompts of newcomers."""
        sources = [each.request.source for each in newcomers if each.request.source is not None]
        scored = newcomers[0].params.echo
        logits = self._batch.add(
            [each.inputs for each in newcomers], sources or None, all_logits=scored
        )
        if not scored:
            return logits
        for each, logits_TV in zip(newcomers, logits, strict=True):
            score = _prompt_score(each, logits_TV[-len(each.inputs) :])
            if any(map(math.isnan, score.logprobs)):
                each.fail(_not_finite())
                continue
            each.prompt_scored(score)
            if each.params.max_new_tokens == 0 and isinstance(each, Draws):
                each.finish_empty()
        return logits[:, -1].float()

    def _advance(self, logits_NV: Tensor) -> None:
        """Give every answer its next token."""
        # A few rows come from a product with the vocabulary in front, and lie across it.
        logits_NV = logits_NV.contiguous()
        # A probability is needed for few of the tokens, and what is not finite shows in the norm.
        norms_N = logits_NV.logsumexp(-1)
        broken = [not math.isfinite(norm) for norm in norms_N.tolist()]
        drawn: list[tuple[Draws, int]] = []
        searched: list[tuple[Search, int]] = []
        first = 0
        for each in self._live:
            rows = range(first, first + each.num_sequences)
            if not each.is_over and any(broken[row] for row in rows):
                each.fail(_not_finite())
            elif isinstance(each, Draws) and not each.is_over:
                drawn.append((each, first))
            elif isinstance(each, Search) and not each.is_over:
                searched.append((each, first))
            first = rows.stop
        if drawn:
            self._draw(drawn, logits_NV, norms_N)
        if searched:
            self._search(searched, logits_NV, norms_N)

    def _draw(self, drawn: Sequence[tuple[Draws, int]], logits_NV: Tensor, norms_N: Tensor) -> None:
        """Choose for all that draw, each with the place of its first sequence.

        Args:
            norms_N: what a row's logits are above its log-probabilities.
        """
        choices = [choice for each, _ in drawn for choice in each.going]
        owners = [each for each, _ in drawn for _ in each.going]
        rows = [first + row for each, first in drawn for row in each.sources()]
        logits_BV, norms_B = _rows(logits_NV, rows), _rows(norms_N, rows)
        chosen_B = self.rules.choose(logits_BV, choices)
        logprobs_B = logits_BV.gather(1, chosen_B[:, None])[:, 0] - norms_B
        wanted = max(choice.params.logprobs or 0 for choice in choices)
        tops = _alternatives(logits_BV - norms_B[:, None], wanted) if wanted else [[]] * len(rows)
        for owner, choice, token, logprob, top in zip(
            owners, choices, chosen_B.tolist(), logprobs_B.tolist(), tops, strict=True
        ):
            owner.accept(choice, token, logprob, top)
        for each, _ in drawn:
            each.settle()

    def _search(
        self, searched: Sequence[tuple[Search, int]], logits_NV: Tensor, norms_N: Tensor
    ) -> None:
        """Choose for all that search; arguments as in :meth:`_draw`."""
        rows = [first + i for each, first in searched for i in range(each.num_sequences)]
        begun = [
            (each.params, answer.tokens) for each, _ in searched for answer in each.search.live
        ]
        logprobs_NV = _rows(logits_NV, rows) - _rows(norms_N, rows)[:, None]
        allowed_NV = self.rules.allowed(logprobs_NV, begun)
        best = best_tokens(allowed_NV, beam=max(each.params.beam for each, _ in searched))
        first = 0
        for each, _ in searched:
            mine = slice(first, first + each.num_sequences)
            each.advance(*(some[mine] for some in best))
            first = mine.stop

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        # Weights that ranks share are gathered into tensors that training goes on with, so
        # inference mode must not make those.
        mode = torch.inference_mode(self.control is None)
        with _uncompiled(self.model), mode, torch.no_grad():
            yield


def _uncompiled(model: BaseModel) -> AbstractContextManager[object]:
    """Where sequences grow, what is compiled would be compiled anew all the time."""
    if not model.is_compiled:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _rows(tensor_N: Tensor, rows: list[int]) -> Tensor:
    """The named rows; the tensor itself where those are all."""
    if rows == list(range(len(tensor_N))):
        return tensor_N
    return tensor_N[torch.tensor(rows, device=tensor_N.device)]


def _prompt_score(continuation: Continuation, logits_TV: Tensor) -> PromptScore:
    """What the model thinks of a prompt, from the logits behind each of its inputs."""
    prompt = continuation.prompt
    logprobs_TV = logits_TV[: len(prompt)].float().log_softmax(-1)
    tokens_T = torch.tensor(prompt, dtype=torch.int64, device=logits_TV.device)
    logprobs_T = logprobs_TV.gather(1, tokens_T[:, None])[:, 0]
    wanted = continuation.params.logprobs or 0
    return PromptScore(logprobs_T.tolist(), _alternatives(logprobs_TV, wanted) if wanted else [])


def _alternatives(logprobs_BV: Tensor, count: int) -> list[Alternatives]:
    """The likeliest ``count`` tokens of each row, the likeliest first."""
    if count == 0:
        return [[] for _ in logprobs_BV]
    best = logprobs_BV.topk(min(count, logprobs_BV.shape[1]))
    return [
        list(zip(tokens, logprobs, strict=True))
        for tokens, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _not_finite() -> UserError:
    return UserError(
        "the model's output is not finite: its weights are damaged, or training had diverged when "
        "they were saved; take an earlier checkpoint"
    )
