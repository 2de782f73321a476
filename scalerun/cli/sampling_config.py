"""How answers are drawn: the flags of every command that talks with a model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scalerun.cli.shared_inference import SharedInferenceConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.dataclass.scalerun_dataclass import option

DEFAULT_NEW_TOKENS = 128
DEFAULT_TOP_P = 0.9
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclass
class SamplingConfig(SharedInferenceConfig):
    """Which checkpoint to ask, and how its answers are drawn."""

    max_new_tokens: int | None = option(
        None,
        f"new tokens at most (default: {DEFAULT_NEW_TOKENS}, or what the context has room for)",
    )
    min_new_tokens: int = option(0, "new tokens before anything may end the answer")
    temperature: float = option(1.0, "divides the logits; 0 takes the most likely token (greedy)")
    top_k: int = option(0, "draw among this many of the most likely tokens; 0 for no limit")
    top_p: float | None = option(
        None,
        "draw among the most likely tokens that together have this probability; 1 for no limit "
        f"(default: {DEFAULT_TOP_P:g}, no limit with --beam)",
    )
    min_p: float = option(
        0.0, "draw among tokens with at least this share of the likeliest one's probability"
    )
    repetition_penalty: float = option(
        1.0, "divides the logits of tokens that the prompt or the answer has; 1 for none"
    )
    presence_penalty: float = option(0.0, "taken off the logit of each token that the answer has")
    frequency_penalty: float = option(
        0.0, "taken off the logit of each token as often as the answer has it"
    )
    beam: int = option(1, "search for the likeliest answer with this many hypotheses; 1 draws")
    lenpen: float = option(
        1.0,
        "with --beam, score = log-probability / length ** lenpen: larger prefers longer answers",
    )
    diverse_beam_groups: int = option(
        1, "groups of hypotheses, each kept from the tokens that earlier ones chose; divides --beam"
    )
    diverse_beam_strength: float = option(
        0.5, "nats that a token costs for each hypothesis of earlier groups that chose it"
    )
    stop: list[str] = option(
        [],
        "texts that end an answer and are cut off; repeat the flag for more; \\n, \\t, \\xHH and "
        "\\uHHHH stand for what a shell or a list cannot hold, such as \\x2c for a comma",
    )
    seed: int | None = option(None, "seed of every prompt's draws (default: a new one each time)")
    truncate_prompt: bool = option(False, "drop the beginning of prompts too long for the context")
    json: bool = option(False, "print one JSON object for each prompt")

    def validate(self) -> None:
        super().validate()
        if self.max_new_tokens == 0:
            raise ConfigError("--max-new-tokens is 0; give 1 or more")
        if self.max_new_tokens is None and self.min_new_tokens > DEFAULT_NEW_TOKENS:
            raise ConfigError(
                f"--min-new-tokens {self.min_new_tokens} needs a --max-new-tokens as large; the "
                f"default is {DEFAULT_NEW_TOKENS}"
            )
        self.params(DEFAULT_NEW_TOKENS)

    def params(self, default_new_tokens: int) -> SamplingParams:
        """The parameters of one prompt.

        Args:
            default_new_tokens: ``max_new_tokens`` where the user gave none.

        Raises:
            ConfigError: a value is out of range or two contradict each other.
        """
        top_p = self.top_p
        if top_p is None:
            top_p = DEFAULT_TOP_P if self.beam == 1 else 1.0
        return SamplingParams(
            max_new_tokens=self.max_new_tokens or default_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            beam=self.beam,
            lenpen=self.lenpen,
            diverse_beam_groups=self.diverse_beam_groups,
            diverse_beam_strength=self.diverse_beam_strength,
            stop=tuple(map(unescaped, self.stop)),
            seed=self.seed,
            truncate_prompt=self.truncate_prompt,
        )

    def fitting_params(self, room: int | None, whole_room: int | None) -> SamplingParams:
        """The parameters of a prompt, with as many new tokens by default as the context has room.

        Args:
            room: new tokens for which there is room after the prompt; None without any limit.
            whole_room: the same for an empty prompt.
        """
        if room == 0 and self.truncate_prompt:
            room = (whole_room or 0) // 2
        # Without any room the smallest request gives the error that says so.
        fitting = DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, room)
        return self.params(max(fitting, self.min_new_tokens, 1))


def unescaped(text: str) -> str:
    r"""The text with ``\n``, ``\t``, ``\r``, ``\\``, ``\xHH`` and ``\uHHHH`` replaced."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        return _ESCAPES[name] if name in _ESCAPES else chr(int(name[1:], 16))

    return re.sub(r"\\([ntr\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})", replaced, text)
