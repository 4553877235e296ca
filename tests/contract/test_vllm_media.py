"""The API's adapter to vLLM's media handling: it opens and decodes nothing, and references come through whole."""

from __future__ import annotations

from typing import Any

import pytest

from api import references
from app.messages.media import MediaRef, Modality
from app.messages.tensors import Descriptor
from tests.contract.serving import frames, step


def reference(modality: Modality, digit: str) -> dict[str, Any]:
    """A part as the intake leaves it."""
    source = Descriptor(
        agent="a", host="h", path="/x", address=1, metadata="bWV0YQ==" * 100, name="n", nonce="0" * 16, dtype="uint8",
        shape=[77], nbytes=77, expires_at=1.5,
    )  # fmt: skip
    param = f"messages[0].content[{digit}].{modality}_url"
    ref = MediaRef(
        modality=modality, identity=digit * 32, size=77, media_type="video/jpeg" * (modality == "video"), param=param,
        source=source,
    )  # fmt: skip
    kind = f"{modality}_url"
    return {"type": kind, kind: {"url": references.to_url(ref)}}


async def test_media_stay_references(serving: Any, pipeline: Any) -> None:
    """No pixel is decoded in the API: vLLM's chat parser gets references and leaves one placeholder for each."""
    pipeline.deltas = [[step(0, "x", [1], finish_reason="length")]]
    kinds: list[Modality] = ["video", "image", "image", "video", "image"]
    parts = [reference(modality, str(at)) for at, modality in enumerate(kinds)]
    text = {"type": "text", "text": "a"}
    await frames(
        serving,
        stream=True,
        messages=[
            {"role": "user", "content": [parts[0], text, parts[1], text, parts[2]]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": [parts[3], parts[4]]},
        ],
    )
    (job,) = pipeline.jobs
    expected = [references.from_url(part[part["type"]]["url"]) for part in parts]
    media = job.prompt.media
    assert len(media) == len(parts)
    token = serving.client.renderer.tokenizer.convert_tokens_to_ids
    for modality in ("image", "video"):
        # Whole, and in the order of their placeholders.
        assert [ref for ref in media if ref.modality == modality] == [
            ref for ref in expected if ref.modality == modality
        ]
        assert job.prompt.token_ids.count(token(f"<|{modality}_pad|>")) == kinds.count(modality)


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/x.png", "file:///etc/passwd", "data:image/png;base64,aGVsbG8=", f"trivet:{'0' * 32}:77"]
)
async def test_the_connector_opens_nothing(serving: Any, pipeline: Any, kind: str, url: str) -> None:
    with pytest.raises(Exception, match="did not pass the intake"):
        await frames(serving, stream=True, messages=[{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}])


async def test_nothing_that_the_connector_inherits_opens_anything(vllm: Any) -> None:
    """Whatever vLLM adds to it has to be looked at here: all that fetches takes references, or refuses."""
    import inspect

    from api.references import ForeignReference
    from api.vllm_media import ReferenceConnector

    connector = ReferenceConnector()
    names = [name for name in dir(connector) if name.startswith(("fetch_", "load_"))]
    assert len(names) >= 14
    for name in names:
        given = ("data:image/png;base64,AAEC",) if name.startswith("fetch") else ("data:,", None)
        with pytest.raises(ForeignReference):
            found = getattr(connector, name)(*given)
            if inspect.isawaitable(found):
                await found


def test_no_field_of_a_request_reaches_the_stages_past_the_intake(serving: Any) -> None:
    """What becomes of a client's fields in `extra_args`, which engines take transfer parameters from."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from api.intake import INTERNAL_FIELDS

    fields = set(ChatCompletionRequest.model_fields)
    suspicious = {name for name in fields if "transfer" in name or "embeds" in name or "xargs" in name}
    assert suspicious <= {*INTERNAL_FIELDS, "vllm_xargs"}
    request = serving.chat_request({"model": "tiny", "messages": [], "vllm_xargs": {"k": 1}}, "t")
    assert request.to_sampling_params(5, {}).extra_args == {"k": 1}


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_a_request_cannot_choose_how_its_media_are_processed(serving: Any, pipeline: Any, name: str) -> None:
    """It would be another item under the same identity."""
    pipeline.deltas = [[step(0, "x", [1], finish_reason="length")]]
    with pytest.raises(Exception, match="disabled by default"):
        await frames(
            serving,
            stream=True,
            messages=[{"role": "user", "content": [reference("video", "1")]}],
            **{name: {"video": {"num_frames": 2}}},
        )
    assert pipeline.jobs == []
