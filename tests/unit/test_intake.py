"""api.intake."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api import references
from api.intake import Intake
from app import media
from app.errors import InvalidRequest, MediaMemoryFull, MediaRefused, MultimodalDisabled
from app.media import FRAMES, MediaHolder, identify
from app.messages import MediaRef
from app.settings import Settings
from app.settings_sections import MediaSettings
from tests import videos
from tests.pictures import data_url, encoded
from tests.planes import Plane

PICTURE = encoded()
FRAME_URL = videos.frames_url(videos.jpegs(number=3))
FILE = videos.file()


class Desk:
    """An intake with its memory. After `close` there must be nothing in it, whatever was admitted and refused."""

    def __init__(self, folder: Path) -> None:
        self.plane = Plane()
        self.folder = folder
        self.capacity = 10_000_000

    async def admit(
        self, body: dict[str, Any], enabled: bool = True, tenant: str = "", **limits: Any
    ) -> list[MediaRef]:
        """The references that came into the body, in its order."""
        settings = Settings(model="m", enable_multimodal=enabled, media=MediaSettings(**limits))
        self.holder = MediaHolder(self.plane, self.folder, self.capacity)
        self.intake = Intake(settings, self.holder, "fingerprint")
        self.held = await self.intake.admit(body, tenant=tenant)
        return list(_references(body))

    async def release(self) -> None:
        await self.intake.release(self.held)
        assert (len(self.holder), self.holder.size, [*self.folder.iterdir()]) == (0, 0, [])

    async def refuse(self, body: dict[str, Any], kind: type[InvalidRequest], param: str, **changes: Any) -> str:
        with pytest.raises(kind) as caught:
            await self.admit(body, **changes)
        assert caught.value.param == param
        assert (len(self.holder), [*self.folder.iterdir()]) == (0, [])
        return caught.value.message


def _references(body: dict[str, Any]) -> Iterator[MediaRef]:
    for one in body["messages"]:
        for part in one["content"]:
            if isinstance(part, dict) and part["type"].endswith("_url"):
                assert part.keys() == {"type", part["type"]}
                yield references.from_url(part[part["type"]]["url"])


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def image(url: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(PICTURE) if url is None else url}, **more}


def video(url: Any = FRAME_URL, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **more}


TEXT = {"type": "text", "text": "what is this?"}


async def test_a_picture_becomes_a_reference_and_its_bytes_are_held(desk: Desk) -> None:
    body = {"messages": [message(TEXT, image(), role="user")]}
    (ref,) = await desk.admit(body)
    assert body["messages"][0]["content"][0] == TEXT
    assert (ref.modality, ref.size, ref.media_type) == ("image", len(PICTURE), "")
    assert ref.identity == identify(PICTURE, modality="image", model="fingerprint")
    assert ref.param == "messages[0].content[1].image_url"
    assert desk.plane.read(ref.source) == PICTURE
    assert desk.held == [ref.identity]
    await desk.release()


async def test_a_video_of_frames_and_one_in_a_file(desk: Desk) -> None:
    body = {"messages": [message(video(), TEXT, video(videos.file_url(FILE)))]}
    frames, file = await desk.admit(body)
    text = FRAME_URL.partition(",")[2].encode()
    assert (frames.modality, frames.media_type, frames.size) == ("video", FRAMES, len(text))
    assert (file.modality, file.media_type, file.size) == ("video", "", len(FILE))
    assert frames.identity == identify(text, modality="video", media_type=FRAMES, model="fingerprint")
    assert [ref.param for ref in (frames, file)] == [f"messages[0].content[{at}].video_url" for at in (0, 2)]
    assert (desk.plane.read(frames.source), desk.plane.read(file.source)) == (text, FILE)
    await desk.release()


async def test_nothing_that_a_client_hides_beside_a_medium_stays(desk: Desk) -> None:
    await desk.admit({"messages": [message(image(uuid="x", path="/etc/passwd"), video(uuid="x", fps=5))]})


@pytest.mark.parametrize(("kind", "url"), [("image_url", data_url(PICTURE)), ("video_url", FRAME_URL)])
async def test_the_short_form_of_a_url(desk: Desk, kind: str, url: str) -> None:
    (ref,) = await desk.admit({"messages": [message({"type": kind, kind: url})]})
    assert desk.plane.read(ref.source)


async def test_the_same_medium_twice_is_read_and_held_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    decode = media.decode

    def noted(url: str, *rest: Any) -> Any:
        reads.append(url)
        return decode(url, *rest)

    monkeypatch.setattr(media, "decode", noted)
    refs = await desk.admit({"messages": [message(image(), image(), video()), message(image(), video())]})
    assert len(reads) == 2
    assert len({ref.identity for ref in refs}) == len({ref.source.path for ref in refs}) == len(desk.holder) == 2
    assert [ref.param for ref in refs[:2]] == [f"messages[0].content[{at}].image_url" for at in (0, 1)]
    await desk.release()


async def test_the_same_bytes_under_two_urls_are_held_once(desk: Desk) -> None:
    other = data_url(PICTURE, "image/x-png")
    refs = await desk.admit({"messages": [message(image(), image(other))]})
    assert len({ref.identity for ref in refs}) == len(desk.holder) == 1
    await desk.release()


async def test_a_tenant_names_the_picture_anew(desk: Desk) -> None:
    """With a salt of its own or without: no tenant's salt is another tenant."""
    seen = set()
    for tenant, salt in (("", None), ("t", None), ("u", None), ("t", "u"), ("u", "t"), ("", "t"), ("", "u")):
        body = {"messages": [message(image())]} | ({"cache_salt": salt} if salt else {})
        (ref,) = await desk.admit(body, tenant=tenant)
        seen.add(ref.identity)
    assert len(seen) == 7


async def test_a_cache_salt_names_the_picture_anew(desk: Desk) -> None:
    names = set()
    for salt in (None, "a", "b", "a"):
        (ref,) = await desk.admit({"messages": [message(image())], "cache_salt": salt})
        salts = json.dumps(["", salt]) if salt else ""
        named = identify(PICTURE, modality="image", model="fingerprint", salt=salts)
        assert ref.identity == named
        names.add(ref.identity)
    assert len(names) == 3


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "prompt_embeds"])
@pytest.mark.parametrize("value", [{"remote_host": "x"}, {}, "x", [], 0])
async def test_fields_of_the_stages_are_not_for_clients(desk: Desk, name: str, value: Any) -> None:
    for enabled in (True, False):
        said = await desk.refuse({"messages": [], name: value}, InvalidRequest, name, enabled=enabled)
        assert name in said
    await desk.refuse({"vllm_xargs": {"k": 1, name: value}}, InvalidRequest, f"vllm_xargs.{name}")


async def test_fields_of_the_stages_that_say_nothing_are_dropped(desk: Desk) -> None:
    body: dict[str, Any] = {
        "messages": [],
        "kv_transfer_params": None,
        "vllm_xargs": {"k": 1, "ec_transfer_params": None},
    }
    await desk.admit(body)
    assert body == {"messages": [], "vllm_xargs": {"k": 1}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "hello", "vllm_xargs": 5},
        {"messages": [5, None, {"role": "user"}, {"content": "text"}, {"content": {"type": "image_url"}}]},
        {"messages": [{"content": ["text", 5, None]}]},
        {"messages": [message(TEXT, {"type": "refusal", "refusal": "no"})]},
    ],
)
async def test_what_holds_no_media_is_left_as_it_is(desk: Desk, body: dict[str, Any]) -> None:
    before = repr(body)
    assert await Intake(Settings(model="m"), None, "").admit(body) == []
    assert repr(body) == before


@pytest.mark.parametrize("part", [image(), video()])
async def test_media_need_the_switch_which_the_answer_names(desk: Desk, part: dict[str, Any]) -> None:
    body = {"messages": [message(TEXT), message(TEXT, part)]}
    said = await desk.refuse(body, MultimodalDisabled, "messages[1].content[1]", enabled=False)
    assert "--enable-multimodal" in said


@pytest.mark.parametrize("kind", ["input_audio", "audio_url", "image_pil", "input_image", "file", "vision_chunk", "x"])
async def test_other_kinds_are_refused_with_or_without_the_switch(desk: Desk, kind: str) -> None:
    body = {"messages": [message({"type": kind, kind: {"url": "file:///etc/passwd"}})]}
    said = await desk.refuse(body, MediaRefused, "messages[0].content[0]")
    assert "image_url and video_url are" in said and "passwd" not in said
    await desk.refuse(body, MultimodalDisabled, "messages[0].content[0]", enabled=False)


@pytest.mark.parametrize("kind", ["image_embeds", "video_embeds", "audio_embeds", "prompt_embeds"])
@pytest.mark.parametrize("enabled", [True, False])
async def test_embeddings_of_clients_are_refused(desk: Desk, kind: str, enabled: bool) -> None:
    part = {"type": kind, kind: "UEsDBA==", "data": "UEsDBA=="}
    said = await desk.refuse(
        {"messages": [message(TEXT, part)]}, MediaRefused, f"messages[0].content[1].{kind}", enabled=enabled
    )
    assert "embeddings are not taken" in said


HIDDEN = ["image_url", "video_url", "audio_url", "input_audio", "image_pil", "image_embeds", "video_embeds"]


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("outer", [TEXT, {"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "x"}])
async def test_no_medium_hides_in_a_part_of_another_kind(desk: Desk, outer: dict[str, Any], name: str) -> None:
    """vLLM's chat parser takes a part with a uuid for whatever medium it has, whatever its type says."""
    body = {"messages": [message({**outer, "uuid": "u", name: "http://127.0.0.1/x"})]}
    said = await desk.refuse(body, MediaRefused, f"messages[0].content[0].{name}")
    assert "127.0.0.1" not in said
    body = {"messages": [message({**outer, "uuid": "u", name: None})]}
    assert await desk.admit(body) == [] and name not in body["messages"][0]["content"][0]


async def test_no_second_medium_hides_beside_one(desk: Desk) -> None:
    body = {"messages": [message(image(video_url={"url": FRAME_URL}))]}
    await desk.refuse(body, MediaRefused, "messages[0].content[0].video_url")


@pytest.mark.parametrize("part", [{"image_url": {"url": "x"}}, {"type": None}, {"type": ["text"]}, {}])
async def test_a_part_without_a_type_is_no_way_around(desk: Desk, part: dict[str, Any]) -> None:
    await desk.refuse({"messages": [message(part)]}, InvalidRequest, "messages[0].content[0].type")


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
@pytest.mark.parametrize("url", [5, None, {"url": 5}, {"url": None}, {}, ["data:"]])
async def test_a_medium_without_a_url(desk: Desk, kind: str, url: Any) -> None:
    body = {"messages": [message({"type": kind, kind: url})]}
    assert f"{kind} needs a url" in await desk.refuse(body, MediaRefused, f"messages[0].content[0].{kind}")


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        (image("https://example.com/x.png"), {}, "must be a data: URL"),
        (image("trivet:0123456789abcdef0123456789abcdef:9"), {}, "must be a data: URL"),
        (image(data_url(b"no picture")), {}, "not an image"),
        (image(data_url(PICTURE)), {"max_item_mb": 1e-6}, "media.max_item_mb"),
        (image(data_url(PICTURE)), {"max_image_pixels": 34}, "media.max_image_pixels"),
        (image(FRAME_URL), {}, "must have an image/ media type"),
        (video(data_url(PICTURE)), {}, "must have a video/ media type"),
        (video("https://example.com/x.mp4"), {}, "must be a data: URL"),
        (video(videos.file_url(PICTURE)), {}, "not a video"),
        (video(videos.file_url(FILE)), {"max_item_mb": 1e-3}, "media.max_item_mb"),
        (video(), {"max_video_frames": 2}, "media.max_video_frames"),
        (video(), {"max_image_pixels": 34}, "media.max_image_pixels"),
    ],
)
async def test_a_bad_medium_is_named_and_good_ones_before_it_are_let_go(
    desk: Desk, part: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    body = {"messages": [message(TEXT), message(TEXT, part)]}
    param = f"messages[1].content[1].{part['type']}"
    assert said in await desk.refuse(body, MediaRefused, param, **changes)
    small = data_url(encoded(kind="GIF", size=(2, 2)))
    assert len(small) < 200
    body = {"messages": [message(image(small)), message(TEXT, part)]}
    if "max_item_mb" not in changes:
        assert said in await desk.refuse(body, MediaRefused, param, **changes)


async def test_too_many_are_refused_before_any_is_read(desk: Desk) -> None:
    parts = [image(), video(), image("not even a url")]
    said = await desk.refuse({"messages": [message(*parts)]}, MediaRefused, "messages[0].content[0]", max_items=2)
    assert "media.max_items allows (2)" in said


async def test_memory_that_is_full_lets_go_of_what_was_taken(desk: Desk) -> None:
    desk.capacity = 6_000
    with pytest.raises(MediaMemoryFull):
        await desk.admit({"messages": [message(image(), video(videos.file_url(FILE)))]})
    assert (len(desk.holder), desk.holder.size, [*desk.folder.iterdir()]) == (0, 0, [])


async def test_a_client_that_leaves_lets_go_of_what_was_taken(desk: Desk) -> None:
    put = MediaHolder.put
    second = asyncio.Event()

    async def slow(self: MediaHolder, *given: Any) -> Any:
        if len(self):
            second.set()
            await asyncio.Event().wait()
        return await put(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MediaHolder, "put", slow)
        admitting = asyncio.create_task(desk.admit({"messages": [message(image(), video())]}))
        await asyncio.wait_for(second.wait(), 10)
        admitting.cancel()
        await asyncio.wait({admitting})
    assert (len(desk.holder), desk.holder.size, [*desk.folder.iterdir()]) == (0, 0, [])
