"""A response that is made in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

import orjson

from api import context, metrics
from api.generation import Detached
from api.stored.store import RUNNING, Response, failed
from api.stored.turn import Turn
from app.errors.base import Failure
from app.errors.serving import BrokerUnavailable

log = logging.getLogger(__name__)

#: How long the end of a response is written again while Redis is away.
INSIST_FOR_S = 30.0
STOPPED = "the response was cancelled, or the API process that ran it was stopped"


class Run(Detached):
    """`states` are what the response is like from its creation to its end (see `api.vllm_responses.states`)."""

    def __init__(self, turn: Turn, states: AsyncGenerator[Response, None], created: Response) -> None:
        """It is kept already, as `created`."""
        self.id = created["id"]
        self.answer = orjson.dumps(created)
        self._turn = turn
        self._states = states
        self._last = created

    async def run(self) -> None:
        async for response in self._states:
            self._last = response
            if response["status"] in RUNNING:
                await self._note(response)
            else:
                await self._insist(response)

    async def failed(self, failure: Failure) -> None:
        self._last = failed(self._last, failure.message)
        await self._insist(self._last)

    async def close(self) -> None:
        """Whatever stopped it, it has an end."""
        await self._states.aclose()
        if self._last["status"] in RUNNING:
            await self._insist(failed(self._last, STOPPED))

    async def _note(self, response: Response) -> None:
        try:
            await self._turn.goes_on(response)
        except BrokerUnavailable as error:
            log.warning("response %s counts as queued until its end: %s", self.id, error)

    async def _insist(self, response: Response) -> None:
        until = time.monotonic() + INSIST_FOR_S
        while True:
            try:
                return await self._turn.goes_on(response)
            except BrokerUnavailable as error:
                if time.monotonic() >= until:
                    log.error("the end of response %s is not stored: %s", self.id, error)
                    metrics.STORED.labels(error.code).inc()
                    return
            await asyncio.sleep(0.5)


async def queue(turn: Turn, states: AsyncGenerator[Response, None]) -> Run:
    """A response that is found as queued from now on. Raises BrokerUnavailable or InvalidRequest."""
    try:
        run = Run(turn, states, await turn.queued(await anext(states)))
    except BaseException:
        await states.aclose()
        raise
    context.current().on_close.append(run.close)
    return run
