"""SequenceGenerator: greedy, sampled and beam-searched continuations of prompts.

B rows, N hypotheses of all rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.ranks import Control
from scalerun.generation.beam_search import BeamSearch, best_tokens
from scalerun.generation.constraints import Constraints
from scalerun.generation.continuation import Continuation, Generation
from scalerun.generation.growing_batch import GrowingBatch
from scalerun.generation.sampling import choose_tokens
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import BaseModel
from scalerun.models.encoder_decoder import EncoderDecoder


class SequenceGenerator:
    """Continues prompts, one token after the other, reusing what it has computed.

    A generated text begins like a training document: with the separator, then the prompt. An
    encoder-decoder continues it by what it has read of a source, which is encoded once; its prompts
    are the beginnings that a translation must have, mostly empty. A prompt gives the same answer
    alone as in a batch, up to rounding in the model's arithmetic.

    All prompts of a call that fit into the context side by side are worked on together, with all
    their hypotheses: memory limits how many to hand over.

    Args:
        model: a decoder, or an encoder with a decoder; set to evaluation for the time of a call.
        tokenizer: the vocabulary of what is generated.
        control: of the ranks that share the model's weights or experts; all of them must make the
            same calls, each with prompts of its own that need the same number of batches.
    """

    def __init__(
        self,
        model: BaseDecoder | EncoderDecoder,
        tokenizer: BaseTokenizer,
        *,
        control: Control | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.control = control
        self.eos = tokenizer.dictionary.eos
        never = set(tokenizer.dictionary.dropped_ids) - {self.eos}
        if tokenizer.dictionary.unk is not None:
            never.add(tokenizer.dictionary.unk)
        self._constraints = Constraints(eos=self.eos, never=sorted(never))

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    def room(self, prompt_length: int) -> int | None:
        """New tokens for which the context has room after a prompt; None where it has no end."""
        context = self.model.max_positions()
        # The separator comes first, and the last new token is never read.
        return None if context is None else max(context - prompt_length, 0)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        sources: Sequence[Sequence[int]] | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Generation]:
        """Continue each prompt by its own parameters.

        Args:
            prompts: tokens without special symbols; may be empty.
            params: one for each prompt.
            sources: for each prompt the tokens that an encoder-decoder reads, as in training.
            on_text: called with a prompt's index and its next piece of text as soon as the piece is
                certain; the pieces of a prompt join to its text.

        Raises:
            UserError: a prompt does not fit into the context with its new tokens, or a source is
                too long for the encoder, or ``allowed_tokens`` leaves no way on, or the model's
                output is not finite.
        """
        rows = self._rows(prompts, params, sources, on_text)
        with self._evaluating():
            for batch in self._batches([row for row in rows if row.params.beam == 1]):
                self._sample(batch)
            searched = self._search_all([row for row in rows if row.params.beam > 1])
        for index, answers in searched.items():
            if on_text is not None and answers[0].text:
                on_text(index, answers[0].text)
        return [searched[row.index][0] if row.index in searched else row.result() for row in rows]

    def hypotheses(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Generation]]:
        """All ``beam`` answers of each prompt's search, the best first; errors as in generate."""
        rows = self._rows(prompts, params, sources, None)
        with self._evaluating():
            searched = self._search_all(rows)
        return [searched[row.index] for row in rows]

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

    def _rows(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        sources: Sequence[Sequence[int]] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> list[Continuation]:
        if (sources is not None) != isinstance(self.model, EncoderDecoder):
            raise ValueError("an encoder-decoder needs sources, and nothing else has a use for any")
        each = [None] * len(prompts) if sources is None else sources
        for source in sources or ():
            self._check_source(source)
        return [
            Continuation(i, self.fit(prompt, param), param, self.tokenizer, source, on_text)
            for i, (prompt, param, source) in enumerate(zip(prompts, params, each, strict=True))
        ]

    def _check_source(self, source: Sequence[int]) -> None:
        assert isinstance(self.model, EncoderDecoder)
        limit = self.model.encoder.max_positions()
        if limit is not None and len(source) > limit:
            raise UserError(
                f"a source of {len(source)} tokens exceeds the model's {limit} source positions; "
                "shorten it"
            )

    def _batches(self, rows: list[Continuation]) -> list[list[Continuation]]:
        """Rows that can run side by side: padded to the longest, all still fit into the context."""
        context = self.model.max_positions()
        batches: list[list[Continuation]] = []
        for row in sorted(rows, key=lambda row: len(row.prompt)):
            batch = [*batches[-1], row] if batches else [row]
            if batches and (context is None or _columns(batch) <= context):
                batches[-1] = batch
            else:
                batches.append([row])
        return batches

    def _sample(self, rows: list[Continuation]) -> None:
        """Draw or take greedily until every row has finished."""
        with self._growing(rows) as batch:
            logprobs_BV = batch.start(*_inputs(rows))
            while True:
                self._choose(rows, logprobs_BV)
                going = [i for i, row in enumerate(rows) if not row.finish_reason]
                if not going:
                    return
                order = going if len(going) < len(rows) else None
                rows = [rows[i] for i in going]
                logprobs_BV = batch.read([row.tokens[-1] for row in rows], order)

    def _choose(self, rows: list[Continuation], logprobs_BV: Tensor) -> None:
        """Give each row its next token."""
        allowed_BV = self._constraints.apply(
            logprobs_BV, [(row.params, row.tokens) for row in rows]
        )
        chosen_B = choose_tokens(
            allowed_BV,
            temperature_B=allowed_BV.new_tensor([row.params.temperature for row in rows]),
            top_k_B=torch.tensor([row.params.top_k for row in rows], device=self.device),
            top_p_B=_doubles([row.params.top_p for row in rows], self.device),
            uniform_B=_doubles([row.uniform() for row in rows], self.device),
        )
        logprobs_B = logprobs_BV.gather(1, chosen_B[:, None])[:, 0]
        for row, token, logprob in zip(rows, chosen_B.tolist(), logprobs_B.tolist(), strict=True):
            row.accept(token, logprob, ends=token == self.eos)

    def _search_all(self, rows: list[Continuation]) -> dict[int, list[Generation]]:
        """The answers to each row by its index, the best first."""
        answers = {}
        for batch in self._batches(rows):
            for row, search in zip(batch, self._search(batch), strict=True):
                if not search.finished:
                    raise UserError(
                        "allowed_tokens leaves no answer that the search could end with; let it "
                        "name more tokens"
                    )
                answers[row.index] = [row.found(answer) for answer in search.finished]
        return answers

    def _search(self, rows: list[Continuation]) -> list[BeamSearch]:
        """Beam searches, done; the hypotheses of all rows are read side by side."""
        searches = [row.search(self.eos) for row in rows]
        beam = max(search.beam for search in searches)
        with self._growing(rows) as batch:
            logprobs_NV = batch.start(*_inputs(rows))
            while True:
                begun = [
                    (row.params, answer.tokens)
                    for row, search in zip(rows, searches, strict=True)
                    for answer in search.live
                ]
                best = best_tokens(self._constraints.apply(logprobs_NV, begun), beam=beam)
                order: list[int] = []
                first = 0
                for search in searches:
                    last = first + len(search.live)
                    if search.live:
                        parents = search.step(*(each[first:last] for each in best))
                        order += [first + parent for parent in parents]
                    first = last
                if not order:
                    return searches
                tokens = [answer.tokens[-1] for search in searches for answer in search.live]
                logprobs_NV = batch.read(tokens, order)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            # Weights that ranks share are gathered into tensors that training goes on with, so
            # inference mode must not make those.
            mode = torch.inference_mode(self.control is None)
            with _uncompiled(self.model), mode, torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def _growing(self, rows: list[Continuation]) -> GrowingBatch:
        return GrowingBatch(
            self.model,
            pad=self.tokenizer.dictionary.pad,
            max_length=_columns(rows),
            control=self.control,
        )


def _uncompiled(model: BaseModel) -> AbstractContextManager[object]:
    """Where sequences grow, what is compiled would be compiled anew all the time."""
    if not model.is_compiled:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _columns(rows: list[Continuation]) -> int:
    """Tokens that the state of a batch must hold; the last new one is never read."""
    longest = max(len(row.prompt) for row in rows)
    return longest + max(row.params.max_new_tokens for row in rows) - 1


def _inputs(rows: list[Continuation]) -> tuple[list[list[int]], list[Sequence[int]] | None]:
    """Prompts and sources."""
    sources = [row.source for row in rows if row.source is not None]
    return [row.prompt for row in rows], sources or None


def _doubles(numbers: list[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
