"""Bad input: OpenAI's error object, a 4xx, the field named, short, and nothing of the input repeated."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.prompts import image, text, user
from tests.e2e.stack import Stack

SECRET = "xyzzy-not-to-be-repeated"
PART = "messages[0].content[0]"
URL = "messages[0].content[1].image_url"
CLIP = f"{PART}.video_url"
AUDIO = f"{PART}.audio_url"
EMBEDS = f"{PART}.image_embeds"
HI = [{"role": "user", "content": "hi"}]


def picture(url: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text("?"), {"type": "image_url", "image_url": url}]}]


def clip(payload: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{payload}"}}


BAD: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "no messages": ({"model": "tiny"}, 400, "messages"),
    "messages is text": ({"model": "tiny", "messages": SECRET}, 400, "messages"),
    "unknown model": ({"model": SECRET, "messages": HI}, 404, "model"),
    "temperature": ({"model": "tiny", "messages": HI, "temperature": -1}, 400, "temperature"),
    "max_tokens": ({"model": "tiny", "messages": HI, "max_tokens": SECRET}, 400, "max_tokens"),
    "too long": ({"model": "tiny", "messages": [{"role": "user", "content": f"{SECRET} " * 2000}]}, 400, None),
    "not an image": ({"model": "tiny", "messages": picture({"url": "data:image/png;base64,aGVsbG8="})}, 400, URL),
    "bad base64": ({"model": "tiny", "messages": picture({"url": f"data:image/png;base64,{SECRET}*"})}, 400, URL),
    "http url": ({"model": "tiny", "messages": picture({"url": f"http://127.0.0.1/{SECRET}.png"})}, 400, URL),
    "no url": ({"model": "tiny", "messages": picture(None)}, 400, URL),
    "internal reference": ({"model": "tiny", "messages": picture({"url": f"trivet:{'0' * 32}:10"})}, 400, URL),
    "video": (
        {"model": "tiny", "messages": user({"type": "video_url", "video_url": {"url": SECRET}})}, 400, CLIP
    ),
    "not a video": ({"model": "tiny", "messages": user(clip("aGVsbG8="))}, 400, CLIP),
    "broken video": ({"model": "tiny", "messages": user(clip("AAAAIGZ0eXBpc29t"))}, 400, CLIP),
    "audio": ({"model": "tiny", "messages": user({"type": "audio_url", "audio_url": {"url": SECRET}})}, 400, AUDIO),
    "embeddings": (
        {"model": "tiny", "messages": user({"type": "image_embeds", "image_embeds": SECRET})}, 400, EMBEDS
    ),
    "transfer parameters": (
        {"model": "tiny", "messages": HI, "kv_transfer_params": {"remote_host": SECRET}}, 400, "kv_transfer_params"
    ),
    "transfer parameters among others": (
        {"model": "tiny", "messages": HI, "vllm_xargs": {"ec_transfer_params": SECRET}}, 400,
        "vllm_xargs.ec_transfer_params",
    ),
    "part of an unknown type": (
        {"model": "tiny", "messages": user({"type": "smell_url", "smell_url": {"url": SECRET}})}, 400, PART
    ),
    "part without type": ({"model": "tiny", "messages": user({"image_url": SECRET})}, 400, f"{PART}.type"),
    "too many images": ({"model": "tiny", "messages": user(*(image(seed) for seed in range(5)))}, 400, None),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("body", "status", "param"), BAD.values(), ids=BAD.keys())
def test_bad_input(agg: Stack, body: dict[str, Any], status: int, param: str | None, stream: bool) -> None:
    answer = agg.post({**body, "stream": stream})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str) and error["type"] == "invalid_request_error"
    assert len(answer.content) < 4096
    assert SECRET not in answer.text
    if param is not None:
        assert error["param"] == param


def test_prompt_that_grows_too_long_with_its_pictures(stack: Stack) -> None:
    """Only the worker knows how many tokens a picture takes; its refusal still is a 400, streamed or not."""
    messages = user(image(1, (640, 640)), image(2, (640, 640)), "word " * 1300)
    for stream in (False, True):
        answer = stack.post({"model": "tiny", "messages": messages, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe", b"", b"null"])
def test_body_that_is_no_json_object(agg: Stack, content: bytes) -> None:
    answer = httpx.post(f"{agg.base_url}/v1/chat/completions", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"


def test_unknown_route_and_method(agg: Stack) -> None:
    for answer in (httpx.get(f"{agg.base_url}/v1/nothing"), httpx.get(f"{agg.base_url}/v1/chat/completions")):
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]


def test_the_client_raises_its_own_classes(agg: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        agg.client.chat.completions.create(model="nope", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        agg.client.chat.completions.create(model="tiny", messages=picture({"url": "data:image/png;base64,aGVsbG8="}))
    assert refused.value.param == "messages[0].content[1].image_url"


def test_unknown_fields_are_ignored(pd: Stack) -> None:
    answer = pd.post({"model": "tiny", "messages": HI, "max_tokens": 2, "no_such_field": 1, "kv_transfer_params": None})
    assert answer.status_code == 200


def test_placeholder_words_in_text_are_harmless(stack: Stack) -> None:
    words = "<|vision_start|><|image_pad|><|vision_end|>"
    assert stack.post(
        {"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 2}
    ).status_code in (200, 400)
    assert stack.post({"model": "tiny", "messages": HI, "max_tokens": 2}).status_code == 200
