"""What asks for a stored response."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from redis.exceptions import RedisError

from api import openapi_bodies
from api.services import Services
from api.stored import ResponseStore, Stored, items
from api.stored.store import RUNNING
from api.stored.turn import OFF, known
from app.errors.requests import InvalidRequest, ResponseNotFound
from app.errors.serving import BrokerUnavailable

router = APIRouter(tags=["OpenAI"])

ANSWERS: dict[str, Any] = {"responses": openapi_bodies.answers()}
PATH = "/v1/responses/{response_id}"


class Named(NamedTuple):
    """The response that a path names, for the tenant that asks."""

    id: str
    tenant: str
    store: ResponseStore
    services: Services

    async def found(self) -> Stored:
        return known(await self.store.find(self.tenant, self.id), self.id, "response_id")


async def _named(request: Request, response_id: str) -> Named:
    services: Services = request.app.state.services
    if services.store is None:
        raise ResponseNotFound(f"there is no response {response_id[:100]!r}: {OFF}", param="response_id")
    return Named(response_id, getattr(request.state, "tenant", ""), services.store, services)


OfPath = Annotated[Named, Depends(_named)]


@router.get(PATH, openapi_extra=ANSWERS, response_model=None)
async def get_response(named: OfPath, stream: bool = False) -> Response:
    """A stored response, with the status that it has now; 404 where `api.response_store_ttl_s` is 0."""
    if stream:
        raise InvalidRequest("the events of a stored response are not kept: ask without stream", param="stream")
    return _json((await named.found()).response)


@router.delete(PATH, openapi_extra=ANSWERS, response_model=None)
async def delete_response(named: OfPath) -> Response:
    """Forget a stored response. One that is being made is cancelled."""
    stored = await named.found()
    await named.store.delete(named.tenant, named.id)
    if stored.status in RUNNING:
        await _stop(named)
    return _json({"id": named.id, "object": "response", "deleted": True})


@router.post(f"{PATH}/cancel", openapi_extra=ANSWERS, response_model=None)
async def cancel_response(named: OfPath) -> Response:
    """Stop a response in the background, whichever API process runs it. One that has ended stays as it is.

    Others are cancelled by closing their connection.
    """
    response = (await named.found()).response
    if not response["background"]:
        raise InvalidRequest("only a response in the background can be cancelled", param="response_id")
    if response["status"] not in RUNNING:
        return _json(response)
    cancelled = {**response, "status": "cancelled"}
    if await named.store.settle(named.tenant, cancelled) is None:
        return _json((await named.found()).response)  # it ended meanwhile
    await _stop(named)
    return _json(cancelled)


@router.get(f"{PATH}/input_items", openapi_extra=ANSWERS, response_model=None)
async def list_input_items(
    named: OfPath,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """What a stored response was made from, with all that was said before. Images by name, where their bytes came."""
    return _json(items.page((await named.found()).input, named.id, after, limit, order))


async def _stop(named: Named) -> None:
    try:
        await named.services.background.cancel(named.id)
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"the response may still be made: {type(error).__name__} from Redis") from error


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
