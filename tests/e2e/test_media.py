"""Media by URL and by uuid in every topology: how often they are fetched, what names them, and what is refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import videos
from tests.e2e.prompts import picture, user
from tests.e2e.second_api import second_api
from tests.e2e.stack import Stack
from tests.media_server import MediaHost, media_server
from tests.pictures import data_url, encoded

ENCODED = "trivet:ec_encoded_items_total"
QUESTION = "What is it?"


@pytest.fixture(scope="module")
def web() -> Iterator[MediaHost]:
    with media_server() as host:
        yield host


@pytest.fixture(params=["agg", "pd", "e_pd", "e_p_d"])
def stack(request: pytest.FixtureRequest, stacks: Mapping[str, Stack]) -> Stack:
    return stacks[request.param]


def part(kind: str, url: str | None, uuid: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"type": kind, kind: None if url is None else {"url": url}}
    return made if uuid is None else made | {"uuid": uuid}


def image(url: str | None, uuid: str | None = None) -> dict[str, Any]:
    return part("image_url", url, uuid)


def ask(stack: Stack, *parts: dict[str, Any] | str, tokens: int = 8) -> Any:
    with stack.client as client:
        return client.chat.completions.create(
            model="tiny",
            messages=user(*parts),
            max_tokens=tokens,
            temperature=0,  # type: ignore[arg-type]
        )


def said(answer: Any) -> str:
    return answer.choices[0].message.content or ""


def cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def encodes(stack: Stack) -> float:
    return sum(stack.counter(kind, ENCODED) for kind in stack.workers())


def photo(seed: int) -> bytes:
    import base64

    return base64.b64decode(picture(seed, (256, 192)).partition(",")[2])


def test_one_get_for_each_medium_of_a_request(stack: Stack, web: MediaHost) -> None:
    seed = sum(map(ord, stack.topology))
    still, film = photo(seed), videos.file(seed, 16, (96, 64))
    paths = [f"/{stack.topology}.png", f"/{stack.topology}.mp4"]
    urls = [web.put(paths[0], still, "image/png"), web.put(paths[1], film, "video/mp4")]
    fetched = ask(stack, image(urls[0]), part("video_url", urls[1]), image(urls[0]), QUESTION)
    assert [web.gets(path) for path in paths] == [1, 1]
    inline = ask(
        stack,
        image(data_url(still)),
        part("video_url", videos.file_url(film)),
        image(data_url(still)),
        QUESTION,
    )
    assert said(fetched) == said(inline) != ""


def test_a_known_url_costs_a_question(stack: Stack, web: MediaHost) -> None:
    path = f"/known-{stack.topology}.png"
    url = web.put(path, photo(301), "image/png", etag=True)
    first = ask(stack, image(url), QUESTION)
    before = encodes(stack)
    assert said(ask(stack, image(url), QUESTION)) == said(first)
    assert (web.gets(path, 200), web.gets(path, 304), encodes(stack) - before) == (1, 1, 0)
    web.put(path, photo(302), "image/png", etag=True)
    changed = ask(stack, image(url), QUESTION)
    assert said(changed) == said(ask(stack, image(data_url(photo(302))), QUESTION))
    assert (web.gets(path, 200), web.gets(path, 304), encodes(stack) - before) == (2, 1, 1)


def test_two_urls_with_the_same_bytes_are_one_item(stack: Stack, web: MediaHost) -> None:
    data = photo(303 + len(stack.topology))
    urls = [web.put(f"/same-{at}-{stack.topology}.png", data, "image/png") for at in range(2)]
    before = encodes(stack)
    one, two = (ask(stack, image(url), QUESTION) for url in urls)
    assert said(one) == said(two)
    assert encodes(stack) - before == 1
    assert cached(two) > 0, "and one KV cache"


def test_the_same_text_with_two_pictures(stack: Stack) -> None:
    """Different answers, and neither has the KV blocks of the other's picture."""
    ones = [ask(stack, image(data_url(photo(seed))), QUESTION, tokens=16) for seed in (311, 312)]
    assert len({said(one) for one in ones}) == 2
    assert cached(ones[1]) < 64, "what comes before the picture at most"


def test_a_uuid_stands_for_a_picture(stack: Stack) -> None:
    url = data_url(photo(321))
    filled = ask(stack, image(url, "catalog-42"), QUESTION)
    before = encodes(stack)
    reused = ask(stack, image(None, "catalog-42"), QUESTION)
    assert said(reused) == said(filled) and encodes(stack) == before
    assert cached(reused) > 0, "its KV blocks are found by content"
    other = ask(stack, image(data_url(photo(322)), "catalog-42"), QUESTION, tokens=16)
    assert said(ask(stack, image(None, "catalog-42"), QUESTION, tokens=16)) == said(other)
    assert said(other) == said(ask(stack, image(data_url(photo(322))), QUESTION, tokens=16))


def test_a_uuid_that_stands_for_nothing(stack: Stack) -> None:
    found = stack.post({"model": "tiny", "messages": user(image(None, "never-seen"))})
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (400, "media_uuid_not_found")
    assert error["param"] == "messages[0].content[0].image_url"
    assert stack.post({"model": "tiny", "messages": user(image(None))}).status_code == 400


def test_a_uuid_holds_in_another_api_process(agg: Stack, model: Path) -> None:
    here, there = (data_url(photo(seed)) for seed in (323, 324))
    with second_api(agg.redis_url, model, TRIVET_ENABLE_MULTIMODAL="true") as base_url:
        other = replace(agg, base_url=base_url)
        filled = [ask(agg, image(here, "from-here"), QUESTION), ask(other, image(there, "from-there"), QUESTION)]
        before = encodes(agg)
        reused = [ask(other, image(None, "from-here"), QUESTION), ask(agg, image(None, "from-there"), QUESTION)]
        assert [said(one) for one in reused] == [said(one) for one in filled] and encodes(agg) == before
        # Another medium for the name is another medium for both.
        ask(other, image(there, "from-here"), QUESTION)
        assert said(ask(agg, image(None, "from-here"), QUESTION)) == said(filled[1])
        unknown = other.post({"model": "tiny", "messages": user(image(None, "never-seen"))})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "media_uuid_not_found")


def blank(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return out.getvalue()


def gif(frames: int) -> bytes:
    """So many times the same one."""
    one = encoded(kind="GIF", size=(64, 48))
    begin = 13 + (3 << (one[10] & 7) + 1)  # after the header and its colours
    return one[:begin] + one[begin:-1] * frames + one[-1:]


def _png(width: int, height: int) -> bytes:
    """A header that claims a size, and no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


BAD: dict[str, bytes] = {
    "no picture": b"hello",
    "a page": b"<html></html>",
    "truncated": encoded(size=(64, 64))[:60],
    "half a JPEG": encoded(kind="JPEG", size=(300, 300))[:700],
    "50,000 x 50,000": _png(50_000, 50_000),
    "1 x 20,000": blank(1, 20_000),
    "2 x 20,000": blank(2, 20_000),
    "no size": _png(0, 0),
}


def test_bad_pictures_are_the_clients_fault_and_nothing_stays_behind(e_p_d: Stack) -> None:
    stack = e_p_d
    good = ask(stack, image(data_url(photo(331))), QUESTION)
    for name, data in BAD.items():
        found = stack.post({"model": "tiny", "messages": user("a", image(data_url(data)))})
        error = found.json()["error"]
        assert found.status_code == 400, (name, found.text)
        assert error["param"] == "messages[0].content[1].image_url", (name, error)
        assert ("media.max_image_pixels" in error["message"]) is (name == "50,000 x 50,000"), (name, error)
        assert "0x" not in error["message"] and "/" not in error["message"].replace("w/h", ""), (name, error)
    tiny = stack.post({"model": "tiny", "messages": user(image(data_url(blank(1, 1)))), "max_tokens": 2})
    assert tiny.status_code in (200, 400), tiny.text
    assert said(ask(stack, image(data_url(photo(331))), QUESTION)) == said(good)


def test_of_many_frames_one_is_taken_or_none(e_p_d: Stack) -> None:
    """A GIF is its first frame, however many there are; of a video there is a limit."""
    still, moving = (ask(e_p_d, image(data_url(gif(frames), "image/gif")), QUESTION) for frames in (1, 10_000))
    assert said(moving) == said(still)
    (tiny,) = videos.jpegs(number=1, size=(8, 8))
    messages = user(part("video_url", videos.frames_url([tiny] * 10_000)), QUESTION)
    error = e_p_d.post({"model": "tiny", "messages": messages}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_media", "messages[0].content[0].video_url")
    assert "media.max_video_frames" in error["message"]


#: This host, in ways that it may not be asked in.
HIDDEN = ["http://0.0.0.0:{port}", "http://127.1:{port}", "http://2130706433:{port}", "http://me@127.0.0.1:{port}"]


@pytest.mark.parametrize("host", HIDDEN)
def test_a_host_that_may_not_be_asked_is_asked_by_nobody(agg: Stack, web: MediaHost, host: str) -> None:
    """Nor by way of a redirect, although it would answer."""
    web.put("/hidden.png", photo(342), "image/png")
    target, before = host.format(port=web.port) + "/hidden.png", web.gets()
    redirects = [f"/redirect/{status}?{target}" for status in (301, 307)]
    for url in (target, *map(web.url, redirects)):
        found = agg.post({"model": "tiny", "messages": user(QUESTION, image(url))})
        error = found.json()["error"]
        assert (found.status_code, error["code"]) == (400, "media_url_refused"), found.text
        assert error["param"] == "messages[0].content[1].image_url"
    assert [web.gets(path) for path in ("/hidden.png", *redirects)] == [0, 1, 1]
    assert web.gets() - before == 2


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/x.png",
        "http://[::1]/x.png",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x.png",
        "trivet:0",
    ],
)
def test_refused_urls_are_asked_for_by_nobody(agg: Stack, web: MediaHost, url: str) -> None:
    good = web.put("/beside.png", photo(341), "image/png")
    before = web.gets()
    found = agg.post({"model": "tiny", "messages": user(image(good), image(url))})
    assert (found.status_code, web.gets()) == (400, before), found.text
    assert found.json()["error"]["param"] == "messages[0].content[1].image_url"
    assert "passwd" not in found.text and "169.254" not in found.text


def test_markers_in_text_are_no_media_and_end_nothing(stack: Stack) -> None:
    marked = "<|vision_start|><|image_pad|><|vision_end|>"
    for messages in (
        user(marked),
        user(image(data_url(photo(351))), marked),
        user(marked, image(data_url(photo(351)))),
    ):
        assert stack.post({"model": "tiny", "messages": messages}).status_code == 400
    assert said(ask(stack, image(data_url(photo(351))), QUESTION))
