"""ContextRoom: what of a prompt a model can read and still answer."""

from __future__ import annotations

from collections.abc import Sequence

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.request import Request
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.encoder_decoder import EncoderDecoder


class ContextRoom:
    """What of a prompt a model can read and still answer.

    Args:
        model: a decoder, or an encoder with a decoder.
        vocabulary: token numbers that the answer's tokenizer has.
    """

    def __init__(self, model: BaseDecoder | EncoderDecoder, vocabulary: int) -> None:
        self.context = model.max_positions()
        self.vocabulary = vocabulary
        self.encoder = model.encoder if isinstance(model, EncoderDecoder) else None

    def room(self, prompt_length: int) -> int | None:
        """New tokens for which the context has room after a prompt; None where it has no end."""
        # The separator comes first, and the last new token is never read.
        return None if self.context is None else max(self.context - prompt_length, 0)

    def fit(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """As much of the prompt as is to be read, behind the separator.

        Raises:
            UserError: the prompt does not fit into the context with its new tokens.
        """
        context, prompt = self.context, list(prompt)
        if context is None or len(prompt) + params.max_new_tokens <= context:
            return prompt
        keep = context - params.max_new_tokens
        if params.truncate_prompt and keep >= 0:
            return prompt[len(prompt) - keep :]
        room = context if params.truncate_prompt else context - len(prompt)
        remedies = [f"give at most {room}" if room > 0 else "shorten the prompt"]
        if keep >= 0:
            remedies.append("give --truncate-prompt to drop the prompt's beginning")
        raise UserError(
            f"--max-new-tokens {params.max_new_tokens} after a prompt of {len(prompt)} tokens "
            f"exceeds the model's context of {context}; {', or '.join(remedies)}",
            param="max_new_tokens" if room > 0 else "prompt",
        )

    def check(self, request: Request) -> None:
        """Refuse what the model cannot read.

        Raises:
            UserError: the prompt does not fit, a source is missing, too long or of no use, or a
                token is not in the vocabulary.
        """
        _check_tokens(request.prompt, self.vocabulary, "prompt")
        self.fit(request.prompt, request.params)
        source, encoder = request.source, self.encoder
        if source is None and encoder is None:
            return
        if source is None or encoder is None:
            raise UserError(
                "an encoder-decoder needs sources, and nothing else has a use for any",
                param="source",
            )
        if not source:
            raise UserError("the source is empty; it has at least its end symbol", param="source")
        limit = encoder.max_positions()
        if limit is not None and len(source) > limit:
            raise UserError(
                f"a source of {len(source)} tokens exceeds the model's {limit} source positions; "
                "shorten it",
                param="source",
            )
        _check_tokens(source, encoder.embedding.tokens.weight.shape[0], "source")


def _check_tokens(tokens: Sequence[int], vocabulary: int, what: str) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise UserError(
                f"the {what} has the token {token}, and the vocabulary ends at {vocabulary - 1}",
                param=what,
            )
