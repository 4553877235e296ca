"""api.media_parts: where each API's bodies have media, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from api import media_parts
from api.media_parts import Shape
from app.errors.requests import InvalidRequest

URL = "data:image/png;base64,AAAA"


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def anthropic(*blocks: Any) -> dict[str, Any]:
    return {"messages": [user(*blocks)]}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


def found(shape: Shape, body: dict[str, Any]) -> list[tuple[str, str]]:
    """(param, URL) of the body's media, which are replaced."""
    media = []
    for path, part in list(shape.parts(body)):
        url, modality, param, uuid, _ = shape.read(path, part)
        assert (modality, uuid) == ("image", None) and url is not None
        media.append((param, url))
        shape.write(part, f"trivet:{len(media)}")
    return media


def test_images_of_a_response() -> None:
    picture = {"type": "input_image", "image_url": URL, "detail": "high", "file_id": None}
    text = {"type": "input_text", "text": "?"}
    body = {
        "input": [
            user(text, dict(picture)),
            {"type": "function_call_output", "call_id": "c", "output": [dict(picture)]},
            {"type": "function_call_output", "call_id": "c", "output": "text"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        ]
    }
    assert found(media_parts.RESPONSES, body) == [
        ("input[0].content[1].image_url", URL),
        ("input[1].output[0].image_url", URL),
    ]
    assert body["input"][0]["content"] == [
        text,
        {"type": "input_image", "image_url": "trivet:1", "detail": "auto"},
    ]


def test_an_image_of_a_response_by_its_name() -> None:
    for image_url in ({}, {"image_url": None}):
        part = {"type": "input_image", "uuid": "mine", **image_url}
        ((path, one),) = media_parts.RESPONSES.parts({"input": [user(part)]})
        found = media_parts.RESPONSES.read(path, one)
        assert (found.url, found.uuid, found.param) == (None, "mine", "input[0].content[0].image_url")
    named = media_parts.RESPONSES.read("p", {"type": "input_image", "image_url": URL, "uuid": "mine"})
    assert (named.url, named.uuid) == (URL, "mine")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (user({"type": "input_image", "uuid": "two words"}), "input[0].content[0].uuid"),
        (user({"type": "input_image", "file_id": "file_1"}), "input[0].content[0].image_url"),
        (user({"type": "input_image", "image_url": {"url": URL}}), "input[0].content[0].image_url"),
        (user({"type": "input_file", "file_data": "x"}), "input[0].content[0]"),
        (user({"type": "image_url", "image_url": {"url": URL}}), "input[0].content[0]"),
        (user({"type": "input_text", "text": "x", "image_url": URL}), "input[0].content[0].image_url"),
        (user({"type": "input_image", "image_url": URL, "image_pil": 1}), "input[0].content[0].image_pil"),
        (user({"type": "image_embeds", "image_embeds": "x"}), "input[0].content[0].image_embeds"),
        (user({"text": "x"}), "input[0].content[0].type"),
        ({"type": "computer_call_output", "output": {"image_url": URL}}, "input[0].type"),
        ({"type": ["message"]}, "input[0].type"),
    ],
)
def test_what_a_response_does_not_take(item: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        found(media_parts.RESPONSES, {"input": [item]})
    assert caught.value.param == param


def test_images_of_messages() -> None:
    base64 = image(type="base64", media_type="image/png", data="AAAA")
    body = anthropic(
        {"type": "text", "text": "?"},
        base64,
        {"type": "tool_result", "tool_use_id": "t", "content": [image(type="base64", data="BBBB")]},
        {"type": "tool_result", "tool_use_id": "t", "content": "text"},
        image(type="url", url="https://example.com"),
    )
    assert found(media_parts.MESSAGES, body) == [
        ("messages[0].content[1].source", URL),
        ("messages[0].content[2].content[0].source", "data:image/jpeg;base64,BBBB"),
        ("messages[0].content[4].source", "https://example.com"),  # the media policy refuses it
    ]
    assert base64 == {"type": "image", "source": {"type": "url", "url": "trivet:1"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (anthropic({"type": "document", "source": {"type": "text", "data": "x"}}), "messages[0].content[0]"),
        (anthropic(image()), "messages[0].content[0].source"),
        (anthropic(image(type="file", file_id="x")), "messages[0].content[0].source"),
        (anthropic(image(type="base64")), "messages[0].content[0].source"),
        (anthropic(image(type="base64", data="AAAA", media_type=5)), "messages[0].content[0].source"),
        (anthropic({"type": "image", "source": URL}), "messages[0].content[0].source"),
        (anthropic({"type": "image_embeds", "image_embeds": "x"}), "messages[0].content[0].image_embeds"),
        (anthropic({"type": "tool_result", "content": [{"type": "document"}]}), "messages[0].content[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [image(type="base64", data="A")]}]}, "messages[0].content[0]"),
        ({"system": [image(type="base64", data="AAAA")]}, "system[0]"),
    ],
)
def test_what_messages_do_not_take(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        found(media_parts.MESSAGES, body)
    assert caught.value.param == param


@pytest.mark.parametrize("shape", [media_parts.CHAT, media_parts.RESPONSES, media_parts.MESSAGES, media_parts.NONE])
@pytest.mark.parametrize(
    "odd", [None, 5, "text", {}, [None, 5, "text", []], [{"content": 5}], [{"content": [5, None]}]]
)
def test_wrong_shapes_are_left_to_the_request_model(shape: Shape, odd: Any) -> None:
    assert found(shape, {"messages": odd, "input": odd, "system": None}) == []
