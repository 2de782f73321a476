"""The HTTP application: routes, who may use them, and what becomes of a request."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scalerun.service.completion import Answer, request_for
from scalerun.service.deadlines import Deadlines
from scalerun.service.errors import SERVER, ApiError, bad_field
from scalerun.service.metrics import ServiceMetrics
from scalerun.service.responses import (
    LEFT,
    ClientLeftError,
    EventStream,
    read_body,
    while_connected,
)
from scalerun.service.scheduler import Scheduler
from scalerun.service.schema import CompletionRequest, Model, parse_request

PAGE_FILES = {"page.css": "text/css", "page.js": "text/javascript"}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
ALIASES = (
    "/completions",
    "/engines/{engine}/completions",
    "/v1/engines/{engine}/completions",
    "/v2/engines/{engine}/completions",
)
"""metaseq's paths; as there, the engine's name says nothing."""


@dataclass(frozen=True)
class ServiceLimits:
    """What one request may ask for."""

    max_tokens: int
    """New tokens of each answer."""
    max_body_bytes: int
    request_seconds: float
    """From a request's arrival to the end of its answer."""


class Service:
    """What the routes share.

    Args:
        scheduler: where completions are computed.
        model: what is served.
        limits: of requests.
        metrics: where requests are counted.
        api_key: what clients must show; None lets everybody in.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        model: Model,
        limits: ServiceLimits,
        metrics: ServiceMetrics,
        api_key: str | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.model = model
        self.limits = limits
        self.metrics = metrics
        self.deadlines = Deadlines(limits.request_seconds)
        self._api_key = None if api_key is None else api_key.encode()

    def drain(self, seconds: float) -> None:
        """Take no more requests; those under way have so long to end."""
        self.scheduler.is_stopping = True
        self.deadlines.end_within(seconds)

    def authorize(self, request: Request) -> None:
        """Let in who has the key, and no other site's page.

        Raises:
            ApiError: 401 without the key, 403 for a foreign page.
        """
        if request.headers.get("sec-fetch-site") == "cross-site":
            raise ApiError(403, "pages of other sites may not use this server", code="cross_site")
        if self._api_key is None:
            return
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        # The bytes that came: headers are read as Latin-1.
        right = hmac.compare_digest(shown.strip().encode("latin-1"), self._api_key)
        if scheme.lower() != "bearer" or not right:
            raise ApiError(
                401,
                "this server needs its API key, as the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    async def complete(self, request: Request) -> Response:
        """Answer a request for completions."""
        arrived = asyncio.get_running_loop().time()
        self.authorize(request)
        async with self.deadlines.limit(arrived):
            body = await read_body(request, limit=self.limits.max_body_bytes)
            asked = parse_request(body)
            answer = await self._begin(asked)
        if asked.stream:
            return EventStream(
                answer.next_events,
                limit=lambda: self.deadlines.limit(arrived),
                release=lambda: self.scheduler.leave(answer.call),
            )
        try:
            async with self.deadlines.limit(arrived):
                content = await while_connected(request.receive, answer.whole())
        finally:
            self.scheduler.leave(answer.call)
        return Response(content, media_type="application/json")

    async def _begin(self, asked: CompletionRequest) -> Answer:
        if asked.model not in (None, self.model.id):
            raise ApiError(
                404,
                f"model: this server has {self.model.id!r} and no other",
                param="model",
                code="model_not_found",
            )
        if asked.max_tokens > self.limits.max_tokens:
            raise bad_field(
                "max_tokens", f"is {asked.max_tokens}; this server allows {self.limits.max_tokens}"
            )
        engine = self.scheduler.engine
        # In a thread: a long text takes a while to cut into tokens, and others want to go on.
        requests = await asyncio.to_thread(
            lambda: [request_for(prompt, asked, engine) for prompt in asked.prompts]
        )
        return Answer(asked, self.scheduler.submit(requests), self.model.id, engine.tokenizer)


class Observed:
    """Counts what the application answers, by route and status."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and look at its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            # Paths that lead nowhere are the clients' words, of which there is no end.
            route = getattr(scope.get("route"), "path", "other")
            counted = 499 if scope.get(LEFT) else status
            self.metrics.requests.labels(route, str(counted)).inc()


def build_application(service: Service) -> ASGIApp:
    """The routes."""
    # FastAPI's own pages load scripts from elsewhere; docs/serving.md describes the interface.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for path in ("/v1/completions", *ALIASES):
        app.add_api_route(path, service.complete, methods=["POST"], response_model=None)
    _add_models(app, service)
    _add_page(app)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if service.scheduler.is_working:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopping"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientLeftError)
    async def drop(request: Request, error: ClientLeftError) -> Response:
        request.scope[LEFT] = True
        return Response(status_code=400)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        response = ApiError(error.status_code, _route_message(request, error)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def apologise(request: Request, error: Exception) -> Response:
        # The traceback goes to the log, not to the client.
        return ApiError(500, "the server made a mistake; its log has more", type=SERVER).response()

    return Observed(app, service.metrics)


def _route_message(request: Request, error: HTTPException) -> str:
    if error.status_code == 405:
        return f"{request.method} is not possible here"
    return "there is nothing at this path"


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        service.authorize(request)
        return JSONResponse({"object": "list", "data": [service.model.model_dump()]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        service.authorize(request)
        if name != service.model.id:
            raise ApiError(404, f"this server has {service.model.id!r} and no other", param="model")
        return JSONResponse(service.model.model_dump())


def _add_page(app: FastAPI) -> None:
    folder = resources.files("scalerun.service") / "page"

    def add(path: str, name: str, media_type: str) -> None:
        content = (folder / name).read_bytes()

        async def file() -> Response:
            return Response(content, media_type=media_type, headers=PAGE_HEADERS)

        app.add_api_route(path, file, methods=["GET", "HEAD"], response_model=None)

    add("/", "index.html", "text/html")
    for name, media_type in PAGE_FILES.items():
        add(f"/page/{name}", name, media_type)
