"""What the model said before, in the `input` of a response, as vLLM can read it."""

from __future__ import annotations

from typing import Any

from app.errors.requests import InvalidRequest


def readable(body: dict[str, Any]) -> dict[str, Any]:
    """The body with the content of every assistant message as one text: of several parts vLLM reads the first.

    Raises InvalidRequest, which names the item, for content without a part.
    """
    items = body.get("input")
    if not isinstance(items, list):
        return body
    return {**body, "input": [_item(item, f"input[{at}]") for at, item in enumerate(items)]}


def _item(item: Any, path: str) -> Any:
    if not isinstance(item, dict) or item.get("role") != "assistant" or not isinstance(item.get("content"), list):
        return item
    content = item["content"]
    if not content:
        raise InvalidRequest("an assistant message needs content", param=f"{path}.content")
    texts = [_text(part) for part in content]
    if not all(isinstance(text, str) for text in texts):
        return item  # for vLLM's model to refuse
    text = "".join(texts)
    # vLLM's model has parts only in messages with an id, and in these nothing else.
    return {**item, "content": [{"type": "output_text", "text": text, "annotations": []}] if "id" in item else text}


def _text(part: Any) -> Any:
    if not isinstance(part, dict):
        return None
    return part.get("refusal" if part.get("type") == "refusal" else "text")
