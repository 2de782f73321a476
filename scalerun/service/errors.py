"""What a client is told when something is wrong, in the form that OpenAI's clients read."""

from __future__ import annotations

import re

from pydantic import ValidationError
from starlette.responses import JSONResponse

from scalerun.dataclass.errors import UserError

INVALID = "invalid_request_error"
OVERLOADED = "overloaded_error"
SERVER = "server_error"
FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Parameters whose name in a request is not the one of the sampling parameters."""
_SHOWN = 64
"""Characters of a client's own words that an error repeats."""


class ApiError(Exception):
    """A request that cannot be answered; becomes a response.

    Args:
        status: of HTTP.
        message: one sentence for the client.
        type: of OpenAI's errors.
        param: the field of the body that is wrong, if one is.
        code: a word for programs.
        retry_after: seconds after which another try makes sense; None where none does.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that says it."""
        fields = {"type": self.type, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **fields}}

    def response(self) -> JSONResponse:
        """The whole response."""
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        elif self.status >= 500:
            # What ran into a limit once would do so again: OpenAI's clients obey this.
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 413:
            headers["connection"] = "close"
        return JSONResponse(self.body(), self.status, headers=headers)


def bad_field(param: str, message: str) -> ApiError:
    """A field of the body has a wrong value."""
    return ApiError(400, f"{param}: {message}", param=param)


def of_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Inside of stream_options the field that is wrong has a name of its own.
    depth = 2 if first["loc"][:1] == ("stream_options",) else 1
    name = ".".join(str(part)[:_SHOWN] for part in first["loc"][:depth]) or "body"
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        message = "this server has no such parameter"
    elif first["type"] == "model_type" and not first["loc"]:
        message = "has to be a JSON object with a prompt"
    elif first["type"] == "missing":
        message = "is required"
    elif first["type"] == "string_unicode":
        message = "has half of a surrogate pair, which is no text"
    return bad_field(name, message[0].lower() + message[1:])


def of_user_error(error: UserError) -> ApiError:
    """What the engine says of a request, with its flags called by their names in a body."""

    def field(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return FIELDS.get(name, name)

    param = None if error.param is None else FIELDS.get(error.param, error.param)
    return ApiError(400, re.sub(r"--([a-z][a-z-]*)", field, str(error)), param=param)
