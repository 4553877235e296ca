"""What a response was made from: items in the shape of its `input`, as they are kept, sent again, and listed."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from api.media_parts import RESPONSES
from app import media
from app.errors.requests import InvalidRequest

Items = list[Any]


def of(given: Any) -> Items:
    """The `input` of a request, with a text as the message that it is short for; the request model refuses others."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else []


def name_media(body: dict[str, Any], prefix: str) -> None:
    """Give every medium whose bytes came with the body a name, by which it can be meant later."""
    for number, (_, part) in enumerate(RESPONSES.parts(body)):
        if _has_bytes(part) and part.get("uuid") is None:
            part["uuid"] = f"{prefix}:{number}"


def without_bytes(items: Items) -> Items:
    """A copy in which those media are only named. Raises InvalidRequest."""
    try:
        kept: Items = orjson.loads(orjson.dumps(items))
    except TypeError as error:  # it reads what is nested more deeply than what it writes
        raise InvalidRequest(f"the input cannot be stored: {error}", param="input") from error
    for _, part in RESPONSES.parts({"input": kept}):
        if _has_bytes(part):
            part["image_url"] = None
    return kept


def said(output: Items) -> Items:
    """What the model answered, as a part of the conversation: a message without a word is none."""
    return [item for item in output if item.get("type") != "message" or item.get("content")]


def page(
    items: Items, response_id: str, after: str | None, limit: int, order: Literal["asc", "desc"]
) -> dict[str, Any]:
    """OpenAI's list of them, at most `limit` that follow the one with the id `after`. Raises InvalidRequest."""
    listed = [_listed(item, f"item_{number}.{response_id}") for number, item in enumerate(items)]
    if order == "desc":
        listed.reverse()
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise InvalidRequest("the response has no input item of this id", param="after")
        listed = listed[ids.index(after) + 1 :]
    data = listed[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(listed) > limit}


def _listed(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """With what OpenAI's clients find in every item: an id, and in messages content that is a list."""
    found = {**item, "type": item.get("type") or "message", "id": item.get("id") or item_id}
    if found["type"] != "message":
        return found
    content = found.get("content")
    if isinstance(content, str):
        kind = {"type": "output_text", "annotations": []} if found["role"] == "assistant" else {"type": "input_text"}
        content = [{**kind, "text": content}]
    return {"status": "completed", **found, "content": content}


def _has_bytes(part: dict[str, Any]) -> bool:
    url = part.get("image_url")
    return isinstance(url, str) and media.is_data(url)
