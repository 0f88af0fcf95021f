"""The application: the answer to each address. Plans are made in the pool's threads, never in the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import fitter
from fitter.api.planner import Planner
from fitter.errors import FitterError, ModelError, TimeLimitError, UsageError, WorkerError
from fitter.machine import gpu_catalogue
from fitter.output.documents.listing_documents import CATALOGUE, SHAPES, Catalogue, Shapes
from fitter.planning.plan.layer_map import LayerMap
from fitter.planning.plan.plan import Plan
from fitter.planning.request.request import Progress
from fitter.planning.tables.file_rows import Repository, RepositoryFile
from fitter.web import planner_page
from fitter.web.allowed_files import Root, encoded
from fitter.web.guard import Guard, Hosts
from fitter.web.planner_page import worded
from fitter.web.pool import Busy, Fetching, Overtaken, Pool, Question, Unanswered
from fitter.web.questions import ASKED, KnownAnswers, PlanQuestion, PlanQuestions, Wanted, question_key, wanted

_T = TypeVar("_T")

API = "/api/v1"
"""Beginning of the addresses of the JSON API; its number changes when an old question is no longer understood."""

_STATUS = {Busy: 503, WorkerError: 503, Overtaken: 409, UsageError: 400, ModelError: 422, TimeLimitError: 504}
"""HTTP status of an error; any other error is the server's fault."""
_MEANING = {
    400: "What is asked cannot be, and why",
    409: "A newer question of the same session was asked, or the server ends",
    422: "The model cannot be read",
    500: "llama.cpp or the server failed",
    503: "Too many questions wait, or a process of llama.cpp was lost",
    504: "Nothing was found in time",
}
"""Meaning of each status."""
_REPOSITORY = 600.0
"""Seconds for all models of a repository; each has the time limit of a plan."""
_LOOK = 0.2
"""Seconds between two checks that the asker is still connected."""
_TIDY = 20.0
"""Seconds between two checks for idle planners."""


@dataclass(frozen=True)
class Settings:
    """Settings of a server. ``host`` is its address, ``root`` the offered directory."""

    root: Root | None = None
    host: str = "127.0.0.1"

    @property
    def has_devices(self) -> bool:
        """Whether plans may use this machine's devices: only if no other machine can ask."""
        return not Hosts.of(self.host).is_everywhere


class Metrics(Collector):
    """Counts questions, and reads the pool's and the known answers' figures when it is asked."""

    def __init__(self, pool: Pool, known: KnownAnswers) -> None:
        self._pool, self._known = pool, known
        self._registry = CollectorRegistry()
        self._questions = Counter("fitter_questions", "Answered questions", ["status"], registry=self._registry)
        self._seconds = Histogram(
            "fitter_answer_seconds",
            "Seconds from a question to its answer",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.3, 1, 3, 10, 30),
            registry=self._registry,
        )
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def answered(self, status: int, seconds: float) -> None:
        """Count a question that was answered with ``status`` after ``seconds``."""
        self._questions.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def collect(self) -> list[Metric]:
        """Return the current figures."""
        figures = {
            ("fitter_planners", "Planners, each with two processes of llama.cpp at most"): self._pool.planners,
            ("fitter_waiting", "Questions that wait for a planner"): self._pool.waiting,
            ("fitter_known_answers", "Answers that are kept"): len(self._known),
            ("fitter_known_answers_bytes", "Bytes of the answers that are kept"): self._known.bytes,
            ("fitter_known_answers_hits", "Questions whose answer was kept"): self._known.hits,
        }
        return [GaugeMetricFamily(name, about, value=value) for (name, about), value in figures.items()]

    def text(self) -> bytes:
        """Write all figures."""
        return generate_latest(self._registry)


@dataclass
class Server:
    """Answers questions: the settings, the pool, and the fetcher of headers, so that no planner waits for a network."""

    settings: Settings
    pool: Pool
    fetching: Fetching = field(default_factory=Fetching)
    known: KnownAnswers = field(default_factory=KnownAnswers)

    async def document(self, asked: PlanQuestion, request: Request) -> bytes:
        """Return the requested plan as JSON: a known one, or one that is made now. Raises ``FitterError``."""
        model = await self._wanted(asked)
        if model.is_repository:
            raise UsageError(f"{model.called or model.opens} holds several models: name a file of it")
        about = None
        if asked.gpus is not None:
            async with self.pool.asked(asked.session) as question:
                if model.is_elsewhere:
                    await self.fetching.fetch(question, model.opens)
            keywords = asked.keywords(has_devices=self.settings.has_devices)
            about = await asyncio.to_thread(question_key, model.opens, keywords)
            if (answer := self.known.get(about)) is not None:
                return answer
        plan, _ = await self.plan(asked, request, model, with_map=False)
        answer = await asyncio.to_thread(lambda: json.dumps(plan.to_dict()).encode())
        if about is not None and not plan.search.is_cut_short:
            self.known.put(about, answer)
        return answer

    async def plan(
        self, asked: PlanQuestion, request: Request, model: Wanted, *, with_map: bool
    ) -> tuple[Plan, LayerMap | None]:
        """Plan ``model``, for a page with its layer map and alternatives. Raises ``FitterError``."""
        keywords = asked.keywords(has_devices=self.settings.has_devices)

        def ask(planner: Planner, question: Question) -> tuple[Plan, LayerMap | None]:
            # the header may have been removed meanwhile: fetch it again
            plan = planner.fit(on_progress=lambda _: question.check(), alternatives=with_map, **keywords)
            return _without_paths(plan, model), planner.layer_map(plan) if with_map else None

        return await self._answer(asked, request, model, ask)

    async def panel(self, asked: PlanQuestion, request: Request, name: str) -> str:
        """Plan the model, or every model of a repository, and write a side of the page. Raises ``FitterError``."""
        model = await self._wanted(asked)
        if not model.is_repository:
            plan, layer_map = await self.plan(asked, request, model, with_map=True)
            return await asyncio.to_thread(planner_page.panel, plan, layer_map, name)
        keywords = asked.keywords(has_devices=self.settings.has_devices)

        def ask(planner: Planner, question: Question) -> Repository:
            def on_progress(progress: Progress) -> None:
                question.check()
                question.said = progress.text

            return planner.repository(on_progress=on_progress, **keywords)

        planned = _below_root(await self._answer(asked, request, model, ask, seconds=_REPOSITORY), model)
        return await asyncio.to_thread(planner_page.repository_panel, planned, name, self.settings.root)

    async def _wanted(self, asked: PlanQuestion) -> Wanted:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, wanted, asked.model, self.settings.root)

    async def _answer(
        self,
        asked: PlanQuestion,
        request: Request,
        model: Wanted,
        ask: Callable[[Planner, Question], _T],
        *,
        seconds: float | None = None,
    ) -> _T:
        """Ask a planner of ``model``, until the asker disconnects."""
        async with self.pool.asked(asked.session) as question:

            def ask_and_release(planner: Planner) -> _T:
                try:
                    return ask(planner, question)
                finally:
                    if asked.gpus is None:
                        # a process with a real card uses memory of it
                        planner.release()

            watching = asyncio.ensure_future(_watch(request, question))
            try:
                if model.is_elsewhere:
                    await self.fetching.fetch(question, model.opens)
                about = tuple(asked.gpus or ())
                return await self.pool.answer(question, model.opens, about, ask_and_release, seconds=seconds)
            finally:
                watching.cancel()


async def _watch(request: Request, question: Question) -> None:
    """End the question when its asker disconnects."""
    while not await request.is_disconnected():
        await asyncio.sleep(_LOOK)
    question.end()


def _without_paths(plan: Plan, model: Wanted) -> Plan:
    """Remove directories of this machine from the plan."""
    build = plan.llama_cpp
    return replace(
        plan,
        model=replace(plan.model, path=model.called or plan.model.path),
        llama_cpp=None if build is None else replace(build, libllama=os.path.basename(build.libllama)),
    )


def _below_root(planned: Repository, model: Wanted) -> Repository:
    """Name the files of a directory by their paths below the root."""
    folder = model.called
    if folder is None:
        return planned
    prefix = folder.removeprefix("./")

    def named(each: RepositoryFile) -> RepositoryFile:
        path = prefix + encoded(each.name)
        plan = None if each.plan is None else replace(each.plan, model=replace(each.plan.model, path=path))
        return replace(each, name=encoded(each.name), path=path, plan=plan)

    found = {each.name: named(each) for each in planned.found}
    best = None if planned.best is None else found[planned.best.name]
    return replace(planned, address=folder, found=tuple(found.values()), best=best)


def application(settings: Settings, pool: Pool) -> Guard:
    """Make the ASGI application for ``pool``, whose end closes the pool."""
    server = Server(settings, pool)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.pool.prepare()
        tidying = asyncio.ensure_future(_tidy(server.pool))
        yield
        tidying.cancel()
        await server.pool.close()
        server.fetching.close()

    app = FastAPI(
        title="fitter serve",
        version=fitter.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
    )
    _add_errors(app, settings)
    _add_pages(app, server)
    _add_api(app, server)
    return Guard(app, Hosts.of(settings.host))


async def _tidy(pool: Pool) -> None:
    while True:
        await asyncio.sleep(_TIDY)
        # one error must not keep the other planners
        with suppress(FitterError):
            await pool.close_idle()


def _add_pages(app: FastAPI, server: Server) -> None:
    root = server.settings.root

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> str:
        return planner_page.page(root, has_devices=server.settings.has_devices)

    @app.get("/api", response_class=HTMLResponse, include_in_schema=False)
    def api_page() -> str:
        return planner_page.api_page(app.openapi())

    @app.post("/panel/{name}", include_in_schema=False)
    async def panel(name: Literal["a", "b"], asked: PlanQuestion, request: Request) -> dict[str, str | None]:
        """Return a part of the page. Errors are answers, too: a browser logs every other status as a failure."""
        try:
            return {"html": await server.panel(asked, request, name), "error": None}
        except Overtaken:
            return {"html": None, "error": None}
        except (FitterError, Unanswered) as error:
            return {"html": None, "error": planner_page.told(worded(error.args[0]), root)}

    @app.get("/progress/{session}", include_in_schema=False)
    def progress(session: str) -> dict[str, str]:
        """Return the progress of the session's question about a repository."""
        return {"said": planner_page.told(server.pool.said(session), root)}

    for path, (kind, text) in planner_page.static().items():
        app.add_api_route(path, _constant(text, kind), include_in_schema=False)


def _constant(text: str, kind: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(text, media_type=kind)

    return answer


def _add_api(app: FastAPI, server: Server) -> None:
    metrics = Metrics(server.pool, server.known)

    async def answer(asked: PlanQuestion, request: Request) -> tuple[int, bytes]:
        """Return the status of an answer, and its document."""
        began, status = time.monotonic(), 500
        try:
            document = await server.document(asked, request)
            status = 200
            return status, document
        except (FitterError, Unanswered) as error:
            status = status_of(error)
            return status, json.dumps({"error": planner_page.told(str(error), server.settings.root)}).encode()
        finally:
            metrics.answered(status, time.monotonic() - began)

    @app.post(f"{API}/plan", summary="Plan a model", responses=_answers())
    async def plan(asked: PlanQuestion, request: Request) -> Response:
        """The plan, as fitter --json prints it. One that does not fit has "fits" false and says why in "problems"."""
        status, document = await answer(asked, request)
        return Response(document, status, media_type="application/json")

    @app.post(f"{API}/plans", summary="Plan several models", responses=_answers("The plans, in the questions' order"))
    async def plans(asked: PlanQuestions, request: Request) -> Response:
        """For each question the status and the answer of one that is asked alone."""
        answers = await asyncio.gather(*(answer(each, request) for each in asked.questions))
        parts = (b'{"status":%d,"answer":%s}' % each for each in answers)
        return Response(b'{"answers":[%s]}' % b",".join(parts), media_type="application/json")

    @app.get(f"{API}/models", summary="The models below the server's directory")
    def models() -> dict[str, Any]:
        """Their paths, which a question takes as its model, and bytes; none where no directory is offered."""
        models = server.settings.root.models() if server.settings.root is not None else ()
        return {"models": [{"model": each.path, "bytes": each.bytes, "files": len(each.files)} for each in models]}

    @app.get(f"{API}/shapes", summary="The models that can be planned without a file")
    def shapes() -> JSONResponse:
        """As fitter shapes --json prints them."""
        return JSONResponse(SHAPES.write(Shapes(tuple(planner_page.shapes()))))

    @app.get(f"{API}/gpus", summary="The cards that are known by name")
    def gpus() -> JSONResponse:
        """As fitter devices --catalogue --json prints them."""
        return JSONResponse(CATALOGUE.write(Catalogue(tuple(gpu_catalogue.gpus().values()))))

    @app.get("/health", summary="Whether the server answers")
    def health() -> dict[str, Any]:
        """Its version, how many questions wait, and whether llama.cpp has started, before the first question."""
        waiting, is_ready = server.pool.waiting, server.pool.is_ready
        return {"status": "ok", "ready": is_ready, "version": fitter.__version__, "waiting": waiting}

    @app.get("/metrics", summary="The server's figures for Prometheus", response_class=Response)
    def figures() -> Response:
        """In Prometheus's text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)


class Refusal(BaseModel):
    """The reason for a missing answer, in one line."""

    error: str


def _answers(what: str = "The plan") -> dict[int | str, dict[str, Any]]:
    """List the possible answers to a question, for the OpenAPI document."""
    plan = {"description": what, "content": {"application/json": {"schema": {"type": "object"}}}}
    return {200: plan, **{status: {"model": Refusal, "description": words} for status, words in _MEANING.items()}}


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def _add_errors(app: FastAPI, settings: Settings) -> None:
    def said(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": planner_page.told(message, settings.root)}, status, headers)

    @app.exception_handler(FitterError)
    @app.exception_handler(Unanswered)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return said(status_of(error), str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        _, *path = first["loc"]
        of_question = ""
        if path[:1] == ["questions"] and len(path) > 1:
            of_question, path = f" of question {path[1] + 1}", path[2:]
        where = next((word for word in path if isinstance(word, str)), "the body")
        # one of several types is what each of them says
        wrong = "no value of this kind is taken" if where in ASKED else first["msg"]
        return said(400, f"{where}{of_question}: {wrong}: see /api for what may be asked")

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return said(error.status_code, f"{error.detail}: see /api for what may be asked", error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        traceback.print_exception(error, file=sys.stderr)
        return said(500, "the server failed unexpectedly: its terminal says why")
