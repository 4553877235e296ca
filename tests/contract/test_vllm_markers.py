"""api.vllm_markers: no text of a client stands for a medium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import videos
from tests.contract.serving import Surface, answer
from tests.pictures import data_url, encoded

IMAGE = {"type": "image_url", "image_url": {"url": data_url(encoded(size=(64, 64)))}}
VIDEO = {"type": "video_url", "video_url": {"url": videos.frames_url(videos.jpegs(number=2))}}
MARKED = "what is <|vision_start|><|image_pad|><|vision_end|> for?"


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": MARKED}],
        [{"role": "user", "content": "<|image_pad|>"}],
        [{"role": "system", "content": MARKED}, {"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [text(MARKED), IMAGE]}],
        [{"role": "user", "content": [IMAGE, text(MARKED)]}],
        [{"role": "user", "content": [VIDEO, text(MARKED)]}],
        [{"role": "user", "content": [IMAGE, text("<|video_pad|>")]}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARKED}, {"role": "user", "content": "y"}],
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_text_with_a_marker_is_refused(surface: Surface, messages: list[Any], stream: bool) -> None:
    found = await surface.chat(messages=messages, stream=stream)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["code"] == "invalid_request"
    said = found.json()["error"]["message"]
    assert "<|image_pad|>" in said or "<|video_pad|>" in said
    assert surface.pipeline.jobs == []


async def test_token_ids_with_a_marker_are_refused(surface: Surface) -> None:
    marker = surface.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    found = await surface.post("/v1/completions", prompt=[5, marker, 6])
    assert (found.status_code, surface.pipeline.jobs) == (400, [])
    assert (await surface.post("/v1/completions", prompt="a <|video_pad|>")).status_code == 400


@pytest.mark.parametrize(
    "parts", [[IMAGE], [text("a"), IMAGE, text("b"), VIDEO, IMAGE], [text("<|vision_start|> <|image pad|> <image>")]]
)
async def test_media_and_other_text_pass(surface: Surface, parts: list[Any]) -> None:
    surface.pipeline.deltas = answer("a")
    assert (await surface.chat(messages=[{"role": "user", "content": parts}])).status_code == 200
    assert len(surface.pipeline.jobs) == 1


def test_every_family_has_its_markers(tmp_path: Path, vllm: Any) -> None:
    """One for each modality, as often as vLLM writes it for an item."""
    from transformers import AutoTokenizer

    from api.vllm_markers import Markers
    from app import tiny_model, vllm_args

    for family, expected in [
        ("qwen3_vl", {"image": "<|image_pad|>", "video": "<|video_pad|>"}),
        ("qwen2_audio", {"audio": "<|AUDIO|>"}),
        ("qwen2_5_omni", {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}),
        ("llava", {"image": "<image>"}),
    ]:
        model = tiny_model.build(tmp_path / family, family)
        config = vllm_args.parse(str(model), []).create_model_config()
        markers = Markers(config, AutoTokenizer.from_pretrained(model))
        found = {modality: markers._tokenizer.convert_ids_to_tokens(token) for token, modality, _ in markers._found}
        assert found == expected, family
        assert {each for _, _, each in markers._found} == {1}
