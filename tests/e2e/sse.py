"""What a stream says, event by event and put together."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

DONE = "[DONE]"
#: Strings that go on from part to part.
TEXTS = ("text", "content", "reasoning", "arguments")


class Event(NamedTuple):
    """`kind` is empty in OpenAI's older APIs, whose last event has the data `[DONE]`."""

    kind: str
    data: Any


def events(text: str) -> list[Event]:
    """What a client reads, less comments. Fails for what is no event of one line of JSON."""
    assert text.endswith("\n\n")
    return [_event(one) for one in text.removesuffix("\n\n").split("\n\n") if not one.startswith(":")]


def _event(text: str) -> Event:
    *head, data = text.split("\n")
    assert data.startswith("data: ") and len(head) <= 1, text
    payload = data.removeprefix("data: ")
    kind = head[0].removeprefix("event: ") if head else ""
    return Event(kind, payload if payload == DONE else json.loads(payload))


def chunks(text: str) -> list[Any]:
    """Those of a stream of chat or completions, which must end with `[DONE]`, and with nothing after it."""
    *found, last = [one.data for one in events(text)]
    assert last == DONE and DONE not in found
    return found


def whole(found: list[Any]) -> dict[str, Any]:
    """Chunks as the answer that they are parts of, with `message` for `delta`. Where they are cut means nothing.

    Fails for parts that no client could put together: a choice that goes on after its end, a call named twice.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in found:
        for choice in chunk["choices"]:
            into = choices.setdefault(choice["index"], {})
            assert into.get("finish_reason") is None, "a choice goes on after its end"
            delta = choice.get("delta")
            _add(into, {**choice, "message": delta} if delta is not None else choice)
        answer |= {name: value for name, value in chunk.items() if name != "choices"}
    for choice in choices.values():
        choice.pop("delta", None)
    return answer | {"choices": [choices[index] for index in sorted(choices)]}


def merged(found: list[Event]) -> list[dict[str, Any]]:
    """The events of a stream of responses or messages, with the deltas that follow each other as one."""
    joined: list[dict[str, Any]] = []
    for event in found:
        data = {name: value for name, value in event.data.items() if name != "sequence_number"}
        last = joined[-1] if joined else {}
        if "delta" in data and _place(data) == _place(last):
            last["delta"] = _sum(last["delta"], data["delta"])
            if "logprobs" in data:
                last["logprobs"] = last["logprobs"] + data["logprobs"]
        else:
            joined.append(data)
    return joined


def _place(data: dict[str, Any]) -> Any:
    delta = data.get("delta")
    kind = delta.get("type") if isinstance(delta, dict) else None
    return data.get("type"), data.get("index"), data.get("output_index"), data.get("content_index"), kind


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, str):
        return first + second
    return {name: value if name == "type" else first[name] + value for name, value in second.items()}


def _add(into: dict[str, Any], part: dict[str, Any]) -> None:
    """Text and lists go on where those in `into` ended; of other values the first that is not null counts."""
    for name, value in part.items():
        before = into.get(name)
        if name == "tool_calls":
            _add_calls(into.setdefault(name, []), value)
        elif isinstance(value, dict):
            into[name] = {} if before is None else before
            _add(into[name], value)
        elif before is None:
            into[name] = list(value) if isinstance(value, list) else value
        elif isinstance(value, list) or (name in TEXTS and value is not None):
            into[name] = before + value


def _add_calls(into: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    for part in parts:
        if part["index"] == len(into):
            into.append({})
        call = into[part["index"]]
        assert not call or not ({"id", "type"} & part.keys() or "name" in part["function"]), "a call named twice"
        _add(call, part)
