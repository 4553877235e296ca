"""vLLM's serving layer over a pipeline that has the answers already: no Redis, no workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
from fastapi import FastAPI

from api import context, errors
from api.context import RequestContext
from api.intake import Intake
from api.middleware import RequestId
from api.routes import chat, completions, embeddings, messages, models, responses, stored_responses, tokenize
from app.errors.base import TrivetError
from app.messages.deltas import Delta
from tests import media_intake
from tests.web import Web

ROUTES = (chat, completions, embeddings, messages, models, responses, stored_responses, tokenize)


class Pipeline:
    """Answers every job with the same deltas; the real one needs Redis and workers."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.deltas: list[list[Delta]] = []
        self.error: TrivetError | None = None
        #: What comes after the first step waits for it, where it is given.
        self.gate: asyncio.Event | None = None

    async def stream(self, job: Any) -> AsyncGenerator[list[Delta], None]:
        self.jobs.append(job)
        for deltas in self.deltas:
            yield deltas
            if self.gate is not None:
                await self.gate.wait()
        if self.error is not None:
            raise self.error


class NoAdapters:
    """None is published: vLLM's serving code and ours say what becomes of other names."""

    async def enter(self, _asked: Any, _model: Any) -> None:
        pass

    async def published(self) -> list[Any]:
        return []


async def untried(spec: dict[str, Any]) -> dict[str, Any]:
    """Takes every grammar for good; the real one needs a process of its own."""
    return {"_backend": "xgrammar", "_backend_was_auto": True, "choice_as_grammar": spec["choice"] is not None}


def step(seq: int, text: str, tokens: list[int], **more: Any) -> Delta:
    return Delta(request="r", seq=seq, text=text, token_ids=tokens, **more)


def answer(*texts: str, finish: str | None = "stop", stop: Any = None, **first: Any) -> list[list[Delta]]:
    """A token of its own for each text. `first`: what the first delta says of the prompt."""
    steps = [step(seq, text, [100 + seq], **(first if seq == 0 else {})) for seq, text in enumerate(texts)]
    steps[-1].finish_reason, steps[-1].stop_reason = finish, stop
    return [[one] for one in steps]


def spoken(tokenizer: Any, text: str, finish: str = "stop", **first: Any) -> list[list[Delta]]:
    """The text as a worker sends it: token by token, and nothing for a token that ends inside a character."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = [tokenizer.decode(tokens[: end + 1], skip_special_tokens=False) for end in range(len(tokens))]
    texts, said = [], ""
    for one in whole:
        ends = not one.endswith("�")
        texts.append(one[len(said) :] if ends else "")
        said = one if ends else said
    assert said == text
    steps = answer(*texts, finish=finish, **first)
    for (one,), token in zip(steps, tokens, strict=True):
        one.token_ids = [token]
    return steps


async def frames(serving: Any, **body: Any) -> list[str]:
    context.enter(RequestContext("test", 2e9))
    request = serving.chat_request({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}, "test")
    found = await serving.chat(request)
    return [frame if isinstance(frame, str) else frame.decode() for frame in [frame async for frame in found]]


class Event(NamedTuple):
    """One of a stream's events; `kind` is empty in OpenAI's older APIs, whose last has the data `[DONE]`."""

    kind: str
    data: Any


def events(text: str) -> list[Event]:
    """What a client reads. Fails for what is no event of one line of JSON."""
    assert text.endswith("\n\n")
    return [_event(one) for one in text.removesuffix("\n\n").split("\n\n")]


def _event(text: str) -> Event:
    *head, data = text.split("\n")
    assert data.startswith("data: ") and len(head) <= 1
    kind = head[0].removeprefix("event: ") if head else ""
    payload = data.removeprefix("data: ")
    return Event(kind, payload if payload == "[DONE]" else json.loads(payload))


def chunks(text: str) -> list[Any]:
    """Those of an OpenAI stream, which must end with `[DONE]`, and with nothing after it."""
    found = [one.data for one in events(text)]
    assert found.pop() == "[DONE]" and "[DONE]" not in found
    return found


class Surface:
    """The routes over a serving layer, as a client reaches them."""

    def __init__(self, serving: Any, settings: Any, holder: Any) -> None:
        self.serving = serving
        self.pipeline = serving.client._pipeline
        self.tokenizer = serving.client.renderer.tokenizer
        self.app = FastAPI()
        intake = Intake(settings, media_intake.sources(settings, holder, Web()))
        self.services = SimpleNamespace(
            settings=settings,
            in_flight=0,
            intake=intake,
            serving=serving,
            store=None,
            background=None,
            adapters=NoAdapters(),
        )
        self.app.state.services = self.services
        self.app.add_middleware(RequestId)
        errors.install(self.app)
        for route in ROUTES:
            self.app.include_router(route.router)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://api")

    async def post(self, path: str, **body: Any) -> httpx.Response:
        found = await self.http.post(path, json=body, headers={"X-Request-Id": "mine"})
        assert self.services.in_flight == 0
        return found

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})
