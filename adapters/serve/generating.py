"""One request for text: read it, wait in the line, hand on what the engine's thread says."""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.answers import EventStream
from posttrainllm.adapters.serve.body import parse_object, read_body
from posttrainllm.adapters.serve.dialect import Dialect
from posttrainllm.adapters.serve.errors import as_api_error, renamed
from posttrainllm.adapters.serve.guard import Endpoint, Guard, Refuse
from posttrainllm.adapters.serve.prepare import count_choices
from posttrainllm.adapters.serve.scheduler import Scheduler
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.serve.submission import ClientGoneError, Submission, unless_gone
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["Generating"]

_CLIENT_GONE = 499  # nobody reads it
_Result = TypeVar("_Result")


class Generating:
    """The endpoints that generate.

    Args:
        scheduler: what answers.
        settings: what requests are held against.
        guard: of all endpoints.
        encoder: its thread parses and encodes: long prompts take seconds, and the event loop has streams to send.
    """

    def __init__(self, scheduler: Scheduler, settings: ServeSettings, guard: Guard, encoder: Executor) -> None:
        self._scheduler, self._settings, self._guard, self._encoder = scheduler, settings, guard, encoder

    def endpoint(self, dialect: Dialect, refused: Refuse | None = None) -> Endpoint:
        """The endpoint of a dialect.

        Args:
            dialect: how it is asked and answers.
            refused: the shape of errors; None for OpenAI's.

        Returns:
            What to route to.
        """

        async def generated(request: Request) -> Response:
            try:
                return await self._generate(request, dialect)
            except PosttrainllmError as error:
                raise renamed(as_api_error(error), dialect.names) from None

        return self._guard.guarded(generated, dialect.name, refused=refused)

    async def _generate(self, request: Request, dialect: Dialect) -> Response:
        arrived = time.perf_counter()
        request_id = request.state.id = f"{dialect.id_prefix}-{secrets.token_hex(12)}"
        settings, scheduler = self._settings, self._scheduler
        tokenizer = scheduler.engine.pair.tokenizer
        data = await self._body(request, any_type=dialect.any_type)
        headers = {"x-request-id": request_id}
        try:
            body = await unless_gone(request, self._aside(lambda: dialect.parse(parse_object(data), settings)))
            if body is None:
                assert dialect.nothing is not None, "a dialect says what it answers to nothing"
                self._guard.ended(request, "ok")
                return JSONResponse(dialect.nothing(settings), headers=headers)
            LOGGER.debug("%s: %s", request_id, body)
            with scheduler.admission.room(count_choices(body)) as put:
                work = await unless_gone(request, self._aside(lambda: dialect.prepare(body, settings, tokenizer)))
                seconds = settings.request_timeout_s
                submission = Submission(put, work, request_id, arrived=arrived, seconds=seconds)
            shape = dialect.shape_of(
                request_id=request_id,
                created=int(time.time()),
                model=settings.name,
                fingerprint=lambda: f"{settings.fingerprint}-w{scheduler.engine.width}",
                tokenizer=tokenizer,
            )

            def finish() -> None:
                submission.close()
                self._guard.ended(request, submission.ending)
                LOGGER.info("%s %s", request.url.path, submission.summary)

            if work.stream:
                return EventStream(dialect.stream(submission, work, shape), finish, headers, dialect.media_type)
            try:
                return JSONResponse(await unless_gone(request, dialect.whole(submission, work, shape)), headers=headers)
            finally:
                finish()
        except ClientGoneError:
            if request.state.endpoint is not None:  # else `finish` has said so
                self._guard.ended(request, "cancelled")
                LOGGER.info("%s %s: the client left while its request was read", request.url.path, request_id)
            return Response(status_code=_CLIENT_GONE)

    async def _body(self, request: Request, *, any_type: bool) -> bytes:
        settings = self._settings
        return await read_body(request, settings.max_body_bytes, seconds=settings.body_timeout_s, any_type=any_type)

    async def _aside(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
