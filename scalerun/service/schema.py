"""The bodies of requests and answers: OpenAI's completions, checked field by field."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from scalerun.dataclass.sampling_params import MAX_PENALTY
from scalerun.service.errors import ApiError, of_validation

MAX_STOPS = 16
MAX_CHOICES = 128
"""OpenAI's limit of ``n``."""


def _refuse(message: str) -> NoReturn:
    raise PydanticCustomError("refused", "{message}", {"message": message})


def _prompt(value: Any) -> Any:
    """A text, texts, ids or lists of ids; as one rule, so that one sentence says what is wrong."""
    forms = "give a text, a list of texts, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, list):
        _refuse(forms)
    if not value:
        _refuse("is an empty list; for an empty prompt give an empty text")
    kinds = {type(item) for item in value}
    if kinds == {list}:
        kinds = {type(item) for ids in value for item in ids} or {int}
        if kinds == {int}:
            return value
    elif kinds == {int}:
        return value
    elif kinds == {str}:
        return [_text(item) for item in value]
    _refuse(forms)


def _text(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse("has half of a surrogate pair, which is no text")
    return text


def _stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        _refuse("give a text or a list of texts")
    if len(texts) > MAX_STOPS:
        _refuse(f"has {len(texts)} texts; give {MAX_STOPS} at most")
    if not all(texts):
        _refuse("has an empty text, which would stop everything")
    return [_text(text) for text in texts]


def _logit_bias(value: Any) -> Any:
    if value != {}:
        _refuse("this server changes no single tokens' probabilities; leave it out")
    return value


def _suffix(value: Any) -> Any:
    if value != "":
        _refuse("this server writes no text before a given end; leave it out")
    return value


class _Body(BaseModel):
    """Nothing is converted: what has the wrong type, or no meaning, is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def null_is_the_default(cls, fields: Any) -> Any:
        """As in OpenAI's service, a field that is null counts as left out, if there is such one."""
        if isinstance(fields, dict):
            return {
                name: value
                for name, value in fields.items()
                if value is not None or name not in cls.model_fields
            }
        return fields


class StreamOptions(_Body):
    """What a stream is to carry."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class CompletionRequest(_Body):
    """A body of ``POST /v1/completions``; the defaults are OpenAI's."""

    model: str | None = None
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_prompt)]
    max_tokens: int = Field(16, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=1 / MAX_PENALTY, le=MAX_PENALTY)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    truncate_prompt: bool = False
    user: str | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_logit_bias)] = {}
    suffix: Annotated[str, BeforeValidator(_suffix)] = ""

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_drawn(self) -> int:
        """Answers that are generated for each prompt."""
        return max(self.n, self.best_of or 0)


def parse_request(body: bytes) -> CompletionRequest:
    """Read a body.

    Raises:
        ApiError: 400, with the name of the first field that is wrong.
    """
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        request = CompletionRequest.model_validate(fields)
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8 text") from error
    except ValidationError as error:
        raise of_validation(error) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body is no JSON that this server can read") from error
    _check_together(request)
    return request


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _check_together(request: CompletionRequest) -> None:
    """Fields that contradict each other."""

    def refuse(param: str, message: str) -> NoReturn:
        raise ApiError(400, f"{param}: {message}", param=param)

    if request.best_of is not None and request.best_of < request.n:
        refuse("best_of", f"is {request.best_of}; give n, which is {request.n}, or more")
    if request.stream and request.num_drawn > request.n:
        refuse("best_of", "must be n in a stream, which cannot wait for the best answers")
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "is for streams only; set stream to true")
    if request.min_tokens > request.max_tokens:
        refuse("min_tokens", f"is above max_tokens, which is {request.max_tokens}")
    if request.max_tokens == 0 and not request.echo:
        refuse("max_tokens", "is 0, which makes sense with echo only; give 1 or more")


class Logprobs(BaseModel):
    """Tokens of a choice; the lists have one entry for each."""

    tokens: list[str]
    token_logprobs: list[float]
    """Natural logarithms, under the model itself: at temperature 1, without limits or penalties."""
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where each begins in the choice's text, in characters."""


class Choice(BaseModel):
    """One answer, or a piece of one in a stream."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Usage(BaseModel):
    """Tokens that were read, and those of all answers, also of what ``best_of`` leaves out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """An answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Model(BaseModel):
    """What is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "scalerun"
    max_model_len: int | None
    """Tokens of a prompt with its answer; null where there is no end."""
