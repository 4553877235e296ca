"""What no engine could compile gets 400 from every endpoint that takes it, and the engines live."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.stack import MODEL, Stack
from tests.e2e.varied_requests import GREEDY, Ask, chat, completion, message, response

NO_SCHEMA = {"type": "object", "properties": {"a": {"type": "nothing"}}}


def _format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


def _outputs(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


BAD: dict[str, dict[str, Any]] = {
    "schema": _format(NO_SCHEMA),
    "schema that refers to nothing": _format({"$ref": "#/$defs/nothing"}),
    "schema of structured outputs": _outputs(json=NO_SCHEMA),
    "schema that is no JSON": _outputs(json="{"),
    "regex": _outputs(regex="(("),
    "regex with a range backwards": _outputs(regex="[z-a]"),
    "grammar": _outputs(grammar="root ::= ("),
    "grammar without a root": _outputs(grammar='other ::= "a"'),
    "grammar with an unknown rule": _outputs(grammar="root ::= nowhere"),
    "no choices": _outputs(choice=[]),
    "structural tag that is no JSON": _outputs(structural_tag="{"),
    "structural tag of no kind": _outputs(structural_tag='{"type": "structural_tag", "format": {"type": "nothing"}}'),
    "two kinds at once": _outputs(regex="a", choice=["a"]),
}


def _incarnations(stack: Stack) -> set[str]:
    return {one.incarnation for one in stack.all_workers()}


def _status(stack: Stack, ask: Ask, **more: Any) -> int:
    answer = httpx.post(f"{stack.base_url}{ask.path}", json={"model": MODEL, **ask.body, **more}, timeout=120)
    if answer.status_code != 200:
        assert len(answer.content) < 4096
        assert answer.json()["error"]["type"] == "invalid_request_error", answer.text
    return answer.status_code


@pytest.mark.parametrize("wrong", BAD.values(), ids=BAD.keys())
def test_each_kind(stack: Stack, wrong: dict[str, Any]) -> None:
    before = _incarnations(stack)
    asks = [chat(tokens=4, **GREEDY), completion(tokens=4, **GREEDY)]
    if "structured_outputs" in wrong:
        asks.append(response(tokens=4))
    for ask in asks:
        for stream in (False, True):
            assert _status(stack, ask, **wrong, stream=stream) == 400
    assert _status(stack, chat(tokens=4, **GREEDY)) == 200
    assert _incarnations(stack) == before


def test_the_format_of_a_response(stack: Stack) -> None:
    form = {"text": {"format": {"type": "json_schema", "name": "it", "schema": NO_SCHEMA}}}
    for stream in (False, True):
        assert _status(stack, response(tokens=4, **form), stream=stream) == 400


def test_the_format_of_a_message(stack: Stack) -> None:
    form = {"output_config": {"format": {"type": "json_schema", "schema": NO_SCHEMA}}}
    for stream in (False, True):
        assert _status(stack, message(tokens=4, **form), stream=stream) == 400


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_the_parameters_of_a_tool(stack: Stack, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": NO_SCHEMA, "strict": True}}
    for stream in (False, True):
        assert _status(stack, chat(tokens=4, **GREEDY, tools=[tool], tool_choice=choice), stream=stream) == 400
