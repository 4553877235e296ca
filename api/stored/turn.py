"""One response of a conversation: what was said before it, and what is kept of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import Any

import orjson
from pydantic import BaseModel

from api import metrics
from api.media_parts import Medium, Part, Shape
from api.stored import items
from api.stored.items import Items
from api.stored.store import CONTINUABLE, Response, ResponseStore, Stored
from app.errors.requests import InvalidRequest, ResponseNotFound
from app.errors.serving import BrokerUnavailable

log = logging.getLogger(__name__)

PREVIOUS = "previous_response_id"
OFF = "this server stores no responses (api.response_store_ttl_s is 0)"


class Wishes(BaseModel):
    """What a request for a response says of keeping it. Null is the default; OpenAI's for `store` is true."""

    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None

    def check(self) -> None:
        """Raise InvalidRequest for what cannot go together."""
        if self.background and self.store is False:
            raise InvalidRequest("a response in the background has to be stored", param="store")
        if self.background and self.stream:
            raise InvalidRequest("a response in the background is not streamed here: get it by its id", param="stream")


class Turn:
    """`id` names the response, if it is to be kept, and `tenant` whose it is."""

    def __init__(self, store: ResponseStore, tenant: str, wishes: Wishes, previous: Items) -> None:
        self.background = bool(wishes.background)
        self.previous = previous
        self._store = store
        self._tenant = tenant
        self._wishes = wishes
        self._keeps = wishes.store is not False
        self._given = b""

    def named(self, request_id: str) -> str:
        """The id for the request: of its own even if a client sends one `X-Request-Id` twice, if it is kept."""
        return f"{request_id}.{secrets.token_hex(8)}" if self._keeps else request_id

    def note(self, body: dict[str, Any], name: str) -> None:
        """Remember what is to be kept of the input, before media in it become references; `name` begins their names.

        Raises InvalidRequest for more than is stored.
        """
        if not self._keeps:
            return
        items.name_media(body, name)
        self._given = orjson.dumps(self.previous + items.without_bytes(items.of(body.get("input"))))
        if len(self._given) > self._store.max_bytes:
            raise InvalidRequest(
                f"with all that was said before the input is larger than {self._store.max_bytes // 1000} KB, which are "
                'stored (api.response_store_max_kb): send "store": false',
                param="input",
            )

    def shape(self, shape: Shape) -> Shape:
        """One that finds the media of the conversation before, too."""
        return Continued(shape, self.previous) if self.previous else shape

    def told(self, response: Response, *, stored: bool | None = None) -> Response:
        """The response as clients get it, who asked for more than vLLM knows of."""
        known = {PREVIOUS: self._wishes.previous_response_id, "background": self.background}
        return {**response, **known, "store": self._keeps if stored is None else stored}

    async def queued(self, response: Response) -> Response:
        """Keep a response that has yet to be made. Raises BrokerUnavailable, or InvalidRequest for one too large."""
        told = self.told({**response, "status": "queued"})
        if not await self._store.keep(self._tenant, told, self._given):
            raise InvalidRequest("with its tools and settings the response is larger than what is stored")
        return told

    async def goes_on(self, response: Response) -> None:
        """Say so of one that was queued. Raises BrokerUnavailable."""
        written = await self._store.settle(self._tenant, self.told(response), len(self._given))
        if written is not None and response["status"] in CONTINUABLE:
            metrics.STORED.labels("stored" if written == response["status"] else "too_large").inc()

    async def ended(self, response: Response) -> Response:
        """Keep it, and say in it whether it was: what the client waited for is not lost for that."""
        if not self._keeps:
            return self.told(response)
        try:
            stored = await self._store.keep(self._tenant, self.told(response), self._given)
            outcome = "stored" if stored else "too_large"
        except BrokerUnavailable as error:
            stored, outcome = False, error.code
        if not stored:
            log.warning("response %s is not stored: %s", response["id"], outcome)
        metrics.STORED.labels(outcome).inc()
        return self.told(response, stored=stored)


class Continued:
    """The shape of a body whose conversation began before it."""

    def __init__(self, shape: Shape, previous: Items) -> None:
        self._shape = shape
        self._previous = previous

    def parts(self, body: dict[str, Any]) -> Iterator[tuple[str, Part]]:
        for _, part in self._shape.parts({"input": self._previous}):
            yield PREVIOUS, part
        yield from self._shape.parts(body)

    def read(self, path: str, part: Part) -> Medium:
        medium = self._shape.read(path, part)
        return medium._replace(param=PREVIOUS) if path == PREVIOUS else medium

    def write(self, part: Part, url: str) -> None:
        self._shape.write(part, url)


async def begin(store: ResponseStore | None, tenant: str, body: dict[str, Any]) -> Turn | None:
    """None where nothing is stored. Raises InvalidRequest, ResponseNotFound, BrokerUnavailable, ValidationError."""
    wishes = Wishes.model_validate(body)
    previous_id = wishes.previous_response_id
    if store is None:
        if wishes.background:
            raise InvalidRequest(f"{OFF}, so none runs in the background", param="background")
        if previous_id is not None:
            raise ResponseNotFound(f"{OFF}: send the conversation as input", param=PREVIOUS)
        return None
    wishes.check()
    if previous_id is None:
        return Turn(store, tenant, wishes, [])
    previous = known(await store.find(tenant, previous_id), previous_id, PREVIOUS)
    if previous.status not in CONTINUABLE:
        raise InvalidRequest(f"the response to continue is {previous.status}, and not completed", param=PREVIOUS)
    return Turn(store, tenant, wishes, previous.input + items.said(previous.response["output"]))


def known(stored: Stored | None, response_id: str, param: str) -> Stored:
    """Raises ResponseNotFound."""
    if stored is None:
        raise ResponseNotFound(f"there is no response {response_id[:100]!r}, or it is no longer stored", param=param)
    return stored
