"""Media of every form through vLLM's serving layer: what reaches the pipeline, with one placeholder for each."""

from __future__ import annotations

from typing import Any

import pytest

from tests import videos
from tests.contract.serving import Surface, answer
from tests.pictures import data_url, encoded

PICTURE = data_url(encoded(size=(64, 64)))


def part(kind: str, url: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: url, **more}


IMAGE = part("image_url", {"url": PICTURE, "detail": "low"})
TEXT = {"type": "text", "text": "what?"}


async def media(surface: Surface, *messages: dict[str, Any], **more: Any) -> list[Any]:
    """The references in the only job."""
    surface.pipeline.__init__()
    surface.pipeline.deltas = answer("a")
    found = await surface.chat(messages=list(messages), **more)
    assert found.status_code == 200, found.text
    (job,) = surface.pipeline.jobs
    token = surface.tokenizer.convert_tokens_to_ids
    for modality in ("image", "video"):
        count = sum(ref.modality == modality for ref in job.prompt.media)
        assert job.prompt.token_ids.count(token(f"<|{modality}_pad|>")) == count
    return list(job.prompt.media)


async def test_several_in_any_order_in_any_role(surface: Surface) -> None:
    video = part("video_url", videos.frames_url(videos.jpegs(number=2)))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    found = await media(
        surface,
        {"role": "system", "content": [TEXT]},
        {"role": "user", "content": [IMAGE, TEXT, video, part("image_url", PICTURE)]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [TEXT, IMAGE]},
    )
    assert sorted(ref.modality for ref in found) == ["image", "image", "image", "video"]
    assert {ref.param for ref in found if ref.modality == "image"} == {
        "messages[1].content[0].image_url",
        "messages[1].content[3].image_url",
        "messages[3].content[1].image_url",
    }


@pytest.mark.parametrize("null", [None, {"url": None}])
async def test_a_uuid_beside_a_medium_and_alone(surface: Surface, null: Any) -> None:
    (filled,) = await media(surface, {"role": "user", "content": [{**IMAGE, "uuid": "mine"}, TEXT]})
    (reused,) = await media(surface, {"role": "user", "content": [part("image_url", null, uuid="mine"), TEXT]})
    assert (reused.identity, reused.source) == (filled.identity, filled.source)
    unknown = await surface.chat(messages=[{"role": "user", "content": [part("image_url", null, uuid="other")]}])
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "media_uuid_not_found")


async def test_processor_settings_of_clients_need_trust(surface: Surface) -> None:
    message = {"role": "user", "content": [IMAGE]}
    found = await surface.chat(messages=[message], mm_processor_kwargs={"min_pixels": 4})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "mm_processor_kwargs")
    assert "media.trust_mm_processor_kwargs" in found.json()["error"]["message"]
    assert len(await media(surface, message, mm_processor_kwargs=None)) == 1


async def test_a_kind_that_the_model_does_not_take(surface: Surface) -> None:
    from tests import sounds

    found = await surface.chat(messages=[{"role": "user", "content": [sounds.input_audio(sounds.file())]}])
    assert found.status_code == 400 and "audio" in found.json()["error"]["message"], found.text
    assert surface.pipeline.jobs == []
