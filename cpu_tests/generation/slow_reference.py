"""What a request's answers have to be: one by one, a full forward pass for every token, in Python.

It shares no line with the package's generation.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.request import Request
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.encoder_decoder import EncoderDecoder


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    total: float = 0.0
    length: int = 0


class SlowReference:
    def __init__(self, model: BaseDecoder | EncoderDecoder, tokenizer: BaseTokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        dictionary = tokenizer.dictionary
        self.eos = dictionary.eos
        self.never = {*dictionary.dropped_ids, dictionary.unk} - {self.eos}

    @torch.no_grad()
    def logits(self, request: Request, tokens: list[int]) -> list[list[float]]:
        """Of what follows the separator and each of the tokens."""
        inputs = [torch.tensor([[self.eos, *tokens]])]
        if request.source is not None:
            inputs.insert(0, torch.tensor([request.source]))
        return self.model(*inputs).logits[0].tolist()

    def prompt_logprobs(self, request: Request) -> list[float]:
        prompt = list(request.prompt)
        rows = map(log_softmax, self.logits(request, prompt))
        return [row[token] for row, token in zip(rows, prompt, strict=False)]

    def answers(self, request: Request) -> list[Answer]:
        params = request.params
        if params.beam > 1:
            return self.search(request)[: params.n]
        drawn = [self.draw(request, number) for number in range(params.best_of or params.n)]
        if params.best_of is not None and params.best_of > params.n:
            drawn.sort(key=lambda answer: -answer.total / max(answer.length, 1))
        return drawn[: params.n]

    def draw(self, request: Request, number: int) -> Answer:
        params = request.params
        stream = random.Random(f"{params.seed}/{number}")
        answer = Answer()
        while len(answer.tokens) < params.max_new_tokens:
            row = self.logits(request, [*request.prompt, *answer.tokens])[-1]
            logprobs = log_softmax(row)
            allowed = self.ruled(row, request, answer.tokens)
            token = chosen(allowed, params, stream.random())
            answer.total += logprobs[token]
            answer.length += 1
            if token == self.eos:
                answer.reason = "stop"
                break
            answer.tokens.append(token)
            answer.logprobs.append(logprobs[token])
            answer.tops.append(sorted(logprobs, reverse=True)[: params.logprobs or 0])
            if self.stopped(answer.tokens, params) is not None:
                answer.reason = "stop"
                break
        answer.reason = answer.reason or "length"
        answer.text = self.text(answer.tokens, params)
        return answer

    def ruled(self, row: list[float], request: Request, answer: list[int]) -> dict[int, float]:
        """The logits of the tokens that may come, with penalties."""
        params = request.params
        allowed = {}
        for token, logit in enumerate(row):
            if token in self.never:
                continue
            if token == self.eos and len(answer) < params.min_new_tokens:
                continue
            if token in request.prompt or token in answer:
                penalty = params.repetition_penalty
                logit = logit / penalty if logit > 0 else logit * penalty
            count = answer.count(token)
            logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            allowed[token] = logit
        return allowed

    def search(self, request: Request) -> list[Answer]:
        """Beam search: keep the best that go on and the best that are done."""
        params, live, done = request.params, [Answer()], []

        def score(answer: Answer) -> float:
            return answer.total / answer.length**params.lenpen

        while live:
            grown = []
            for parent in live:
                row = log_softmax(self.logits(request, [*request.prompt, *parent.tokens])[-1])
                for token, logprob in enumerate(row):
                    early = token == self.eos and parent.length < params.min_new_tokens
                    if token not in self.never and not early:
                        grown.append((parent.total + logprob, parent, token, logprob))
            grown.sort(key=lambda each: -each[0])
            live = []
            for total, parent, token, logprob in grown[: 2 * params.beam]:
                answer = Answer(
                    parent.tokens, parent.logprobs, total=total, length=parent.length + 1
                )
                if token == self.eos:
                    answer.reason = "stop"
                    done.append(answer)
                    continue
                answer.tokens = [*parent.tokens, token]
                answer.logprobs = [*parent.logprobs, logprob]
                if self.stopped(answer.tokens, params) is not None:
                    answer.reason = "stop"
                elif len(answer.tokens) == params.max_new_tokens:
                    answer.reason = "length"
                (done if answer.reason else live).append(answer)
                if len(live) == params.beam:
                    break
            done = sorted(done, key=lambda each: -score(each))[: params.beam]
            if live and len(done) == params.beam:
                lengths = (live[0].length + 1, params.max_new_tokens)
                if score(done[-1]) >= max(live[0].total / n**params.lenpen for n in lengths):
                    break
        for answer in done:
            answer.text = self.text(answer.tokens, params)
        return done

    def stopped(self, tokens: list[int], params: SamplingParams) -> int | None:
        """Where the text is cut, if a stop string ends in its last token."""
        if len(tokens) < params.min_new_tokens:
            return None
        before, after = (len(self.tokenizer.decode(some)) for some in (tokens[:-1], tokens))
        text = self.tokenizer.decode(tokens)
        found = [
            at
            for stop in params.stop
            for at in range(len(text))
            if text.startswith(stop, at) and before < at + len(stop) <= after
        ]
        return min(found, default=None)

    def text(self, tokens: list[int], params: SamplingParams) -> str:
        return self.tokenizer.decode(tokens)[: self.stopped(tokens, params)]


def log_softmax(row: list[float]) -> list[float]:
    largest = max(row)
    total = math.log(sum(math.exp(logit - largest) for logit in row)) + largest
    return [logit - total for logit in row]


def chosen(allowed: dict[int, float], params: SamplingParams, uniform: float) -> int:
    """By temperature, top-k, top-p, min-p, and a number in [0, 1)."""
    order = sorted(allowed, key=lambda token: (-allowed[token], token))
    if params.temperature == 0:
        return order[0]
    if params.top_k:
        order = order[: params.top_k]
    best = allowed[order[0]]
    masses = {token: math.exp((allowed[token] - best) / params.temperature) for token in order}
    total, before, kept = sum(masses.values()), 0.0, {}
    for token in order:
        if before < params.top_p or params.top_p == 1:
            kept[token] = masses[token]
        before += masses[token] / total
    kept = {token: mass for token, mass in kept.items() if mass >= params.min_p}
    point, passed = uniform * sum(kept.values()), 0.0
    for token in sorted(kept):
        passed += kept[token]
        if point < passed:
            return token
    return max(kept)
