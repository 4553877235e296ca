"""api.inline_media."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import inline_media, media_parts
from api.inline_media import LARGE, MOST, Inlined, parse
from api.media_parts import CHAT, MESSAGES, NONE, RESPONSES, Shape
from app import media

SMALL = base64.b64encode(bytes(range(30))).decode()
LONG = base64.b64encode(bytes(range(256)) * (LARGE // 256)).decode()


def image(payload: str = LONG) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(content)}], **more}


def parsed(body: Any, shape: Shape = CHAT) -> tuple[Any, Shape]:
    return parse(bytearray(body if isinstance(body, bytes) else orjson.dumps(body)), shape)[:2]


def decoded(body: dict[str, Any], shape: Shape) -> list[bytes]:
    """The media of the body, as the intake takes them."""
    media_of = [shape.read(path, part) for path, part in shape.parts(body)]
    return [
        media.decode(one.url, one.modality, 10**9, 1000, one.param, one.payload)[0]
        for one in media_of
        if one.url is not None
    ]


BODIES: dict[str, tuple[dict[str, Any], Shape, int]] = {
    "an image": (chat(image()), CHAT, 1),
    "a plain string": (chat({"type": "image_url", "image_url": f"data:image/png;base64,{LONG}"}), CHAT, 1),
    "several, small ones among them": (
        chat(image(), image(SMALL), image(LONG[4:]), {"type": "text", "text": "?"}),
        CHAT,
        2,
    ),
    "audio": (chat({"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}), CHAT, 1),
    "a video's frames": (
        chat({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{LONG},{SMALL},{LONG}"}}),
        CHAT,
        1,
    ),
    "a response's image": (
        {"input": [{"content": [{"type": "input_image", "image_url": f"data:image/png;base64,{LONG}"}]}]},
        RESPONSES,
        1,
    ),
    "a message's image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": LONG},
                        }
                    ],
                }
            ]
        },
        MESSAGES,
        1,
    ),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("written", [orjson.dumps, lambda one: json.dumps(one, indent=4).encode()])
def test_media_are_cut_out_and_read(name: str, written: Any) -> None:
    asked, shape, cut = BODIES[name]
    body, found = parsed(written(asked), shape)
    assert isinstance(found, Inlined) and len(found.payloads) == cut
    assert len(orjson.dumps(body)) < LARGE, "the payload is not in it"
    assert decoded(body, found) == decoded(copy.deepcopy(asked), shape)


@pytest.mark.parametrize(
    "asked",
    [
        chat({"type": "text", "text": f'a text with "data:image/png;base64,{LONG}" in it'}),
        chat({"type": "text", "text": f"data:image/png;base64,{LONG}"}),
        chat(image(), metadata={"data": LONG}),
        chat(image(), {"type": "text", "text": f"data:image/png;base64,{LONG}"}),
        chat({f"data:image/png;base64,{LONG}": 1, "type": "text", "text": "?"}),
        chat(tools=[{"function": {"arguments": json.dumps({"data": LONG})}}]),
        chat({"type": "text", "text": "\b" + 'ase64,"data' * (LARGE // 8)}),
        [LONG, f"data:image/png;base64,{LONG}"],
    ],
)
def test_nothing_else_is_touched(asked: Any) -> None:
    body, shape = parsed(asked)
    if isinstance(asked, dict):
        assert (body, shape) == (asked, CHAT)
    else:
        assert isinstance(body, list)


def test_base64_with_escapes_is_parsed_with_the_rest() -> None:
    """As PHP writes it."""
    written = orjson.dumps(chat(image())).replace(b"/", b"\\/")
    assert parsed(written) == (chat(image()), CHAT)


@pytest.mark.parametrize("slash", [b"/", b"\\/"])
def test_text_is_what_is_no_medium(slash: bytes) -> None:
    text = {"type": "text", "text": "x" * LARGE}
    written = orjson.dumps(chat(image(), image(SMALL), text)).replace(b"/", slash)
    _, _, size = parse(bytearray(written), CHAT)
    assert LARGE < size < LARGE * 1.1
    assert parse(bytearray(orjson.dumps(chat(text))), CHAT).text_bytes == len(orjson.dumps(chat(text)))


def test_the_body_goes_with_its_media() -> None:
    received = bytearray(orjson.dumps(chat(image())))
    body = parse(received, CHAT)
    assert body.shape.read("p", body.fields["messages"][0]["content"][0]).payload is not None
    body.forget_media()
    received.clear()  # BufferError while anybody looks at it


def test_an_api_without_media_has_nothing_cut_out() -> None:
    assert parsed(chat(image()), NONE) == (chat(image()), NONE)


def test_a_word_that_a_client_writes_stands_for_nothing() -> None:
    body, shape = parsed(chat(image(), image("@" + "0" * (inline_media.WORD - 1))))
    assert [medium.payload is not None for medium in _media(body, shape)] == [True, False]


@pytest.mark.parametrize("size", [30, LARGE])
@pytest.mark.parametrize("field", ["image_url", "image_embeds"])
def test_a_part_that_is_refused_is_so_in_a_body_of_any_size(field: str, size: int) -> None:
    hidden = {"type": "text", "text": "?", field: {"url": "x"}, "input_image": None}
    body, shape = parsed(chat(image("A" * size), hidden))
    assert isinstance(shape, type(CHAT)) and "input_image" in body["messages"][0]["content"][1]
    with pytest.raises(media_parts.MediaRefused, match="cannot have this field") as caught:
        _media(body, shape)
    assert caught.value.param == f"messages[0].content[1].{field}"


def test_no_text_of_a_body_with_a_wrong_part_is_cut_out() -> None:
    text = {"type": "text", "text": f"data:image/png;base64,{LONG}"}
    asked = chat(image(), text, {"type": "image_url", "image_url": 5})
    assert parsed(asked) == (asked, CHAT)


@pytest.mark.parametrize("bad", ["sécret", "a\nb", "\x00", " "])
def test_what_is_no_base64_is_refused_by_whoever_decodes_it(bad: str) -> None:
    written = orjson.dumps(chat(image("MARK"))).replace(b"MARK", (LONG + bad).encode())
    body, shape = parsed(written)
    with pytest.raises(media_parts.MediaRefused, match="base64 is not valid"):
        decoded(body, shape)


@pytest.mark.parametrize(
    "written",
    [
        b'{"data:image/png;base64,%s' % LONG.encode(),
        b'{"a": "data:image/png;base64,%s' % LONG.encode(),
        b'{"a": "x"data:image/png;base64,%s"}' % LONG.encode(),
        b'{"a": "data:image/png;base64,%s"' % LONG.encode(),
        b'"data:image/png;base64,%s' % LONG.encode(),
        b"data" * LARGE,
    ],
)
def test_what_is_no_json_is_none(written: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError) as wrong:
        orjson.loads(written)
    with pytest.raises(orjson.JSONDecodeError) as caught:
        parsed(written)
    assert str(caught.value) == str(wrong.value), "where it is wrong"


def test_more_places_than_media_can_be_are_not_looked_at() -> None:
    asked = chat(*[{"type": "text", "text": "?", "data": "x"}] * MOST, image())
    assert parsed(asked) == (asked, CHAT)


@given(st.lists(st.sampled_from(['"', "\\", "data", ":", ";base64,", "a" * LARGE, ",", " ", "\n", "é"]), max_size=12))
def test_any_text_comes_through(pieces: list[str]) -> None:
    asked = chat({"type": "text", "text": "".join(pieces)}, image(SMALL), padding="x" * LARGE)
    assert parsed(asked) == (asked, CHAT)


def _media(body: dict[str, Any], shape: Shape) -> list[media_parts.Medium]:
    return [shape.read(path, part) for path, part in shape.parts(body)]
