"""api.intake."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api import references
from api.intake import Admission, Intake
from app import media
from app.errors.media import MediaMemoryFull, MediaRefused, MediaUnreachable, MediaUrlRefused
from app.errors.requests import InvalidRequest, MultimodalDisabled
from app.media import FRAMES, MediaHolder, identify
from app.messages.media import MediaRef
from app.messages.tensors import Descriptor
from app.settings import Settings
from app.settings_media import MediaSettings
from tests import media_intake, sounds, videos
from tests.pictures import data_url, encoded
from tests.planes import Plane
from tests.web import Web

PICTURE = encoded()
FRAME_URL = videos.frames_url(videos.jpegs(number=3))
FILE = videos.file()
SOUND = sounds.file()


class Desk:
    """An intake with its memory. After `close` there must be nothing in it, whatever was admitted and refused."""

    def __init__(self, folder: Path) -> None:
        self.plane = Plane()
        self.folder = folder
        self.capacity = 10_000_000
        self.web = Web()

    async def admit(
        self, body: dict[str, Any], enabled: bool = True, tenant: str = "", **limits: Any
    ) -> list[MediaRef]:
        """The references that came into the body, in its order."""
        settings = Settings(model="m", enable_multimodal=enabled, media=MediaSettings(**limits))
        self.holder = MediaHolder(self.plane, self.folder, self.capacity)
        sources = media_intake.sources(settings, self.holder, self.web)
        self.admission: Admission = await Intake(settings, sources).admit(body, tenant=tenant)
        return list(_references(body))

    async def release(self) -> None:
        await self.admission.release()
        await self.empty()

    async def empty(self) -> None:
        """Nothing is held for a request, and nothing is left at the end."""
        assert self.holder.users == 0
        await self.holder.close()
        assert (len(self.holder), self.holder.size, [*self.folder.iterdir()]) == (0, 0, [])

    async def refuse(self, body: dict[str, Any], kind: type[InvalidRequest], param: str, **changes: Any) -> str:
        with pytest.raises(kind) as caught:
            await self.admit(body, **changes)
        assert caught.value.param == param
        await self.empty()
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


def held(ref: MediaRef) -> Descriptor:
    """Where the bytes lie."""
    assert ref.source is not None
    return ref.source


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def image(url: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(PICTURE) if url is None else url}, **more}


def audio(url: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": sounds.file_url(SOUND) if url is None else url}, **more}


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
    assert desk.plane.read(held(ref)) == PICTURE
    assert desk.admission.held == (ref.identity,)
    await desk.release()


async def test_a_video_of_frames_and_one_in_a_file(desk: Desk) -> None:
    body = {"messages": [message(video(), TEXT, video(videos.file_url(FILE)))]}
    frames, file = await desk.admit(body)
    text = FRAME_URL.partition(",")[2].encode()
    assert (frames.modality, frames.media_type, frames.size) == ("video", FRAMES, len(text))
    assert (file.modality, file.media_type, file.size) == ("video", "", len(FILE))
    assert frames.identity == identify(text, modality="video", media_type=FRAMES, model="fingerprint")
    assert [ref.param for ref in (frames, file)] == [f"messages[0].content[{at}].video_url" for at in (0, 2)]
    assert (desk.plane.read(held(frames)), desk.plane.read(held(file))) == (text, FILE)
    await desk.release()


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "ogg"])
async def test_audio_as_openai_has_it_and_under_a_url(desk: Desk, kind: str) -> None:
    data = sounds.file(ending=f".{kind}")
    body = {"messages": [message(sounds.input_audio(data, kind), audio())]}
    theirs, ours = await desk.admit(body)
    assert [part["type"] for part in body["messages"][0]["content"]] == ["audio_url", "audio_url"]
    assert (theirs.modality, theirs.media_type, theirs.param) == ("audio", "", "messages[0].content[0].input_audio")
    assert ours.param == "messages[0].content[1].audio_url"
    assert (desk.plane.read(held(theirs)), desk.plane.read(held(ours))) == (data, SOUND)
    await desk.release()


@pytest.mark.parametrize(
    "given",
    [
        None,
        "data:audio/wav;base64,AAAA",
        {},
        {"data": "AAAA"},
        {"data": "AAAA", "format": "exe"},
        {"data": 5, "format": "wav"},
        {"url": "http://127.0.0.1/x", "format": "wav"},
    ],
)
async def test_audio_that_openai_does_not_have(desk: Desk, given: Any) -> None:
    body = {"messages": [message({"type": "input_audio", "input_audio": given})]}
    await desk.refuse(body, MediaRefused, "messages[0].content[0].input_audio")


async def test_media_of_every_kind_from_the_network_in_any_role_and_order(desk: Desk) -> None:
    desk.web.pages = {
        "http://a/p": (PICTURE, "image/png"),
        "https://b/v": (FILE, ""),
        "file:///c": (SOUND, "application/octet-stream"),
    }
    tool = message(image("http://a/p"), TEXT, role="tool")
    body = {"messages": [tool, message(video("https://b/v"), TEXT, audio("file:///c"), image("http://a/p"), image())]}
    refs = await desk.admit(body)
    assert [ref.modality for ref in refs] == ["image", "video", "audio", "image", "image"]
    assert sorted(desk.web.asked) == sorted(desk.web.pages), "each once"
    assert desk.web.most == 3, "all at once"
    accepted = dict(zip(desk.web.asked, desk.web.accepted, strict=True))
    assert list(map(accepted.get, desk.web.pages)) == ["image/*", "video/*", "audio/*, video/ogg"]
    assert len({ref.identity for ref in refs}) == 3, "content names them"
    await desk.release()


@pytest.mark.parametrize(
    ("part", "data", "declared", "said"),
    [
        (image("http://x"), b"<html>", "image/png", "not an image in a known format"),
        (image("http://x"), SOUND, "", "not an image in a known format"),
        (video("http://x"), b"<html>", "video/mp4", "not a video in a known format"),
        (video("http://x"), videos.frame_list([PICTURE]).encode(), "video/jpeg", "not a video in a known format"),
        (audio("http://x"), b"<html>", "", "not audio in a known format"),
        (image("http://x"), b"", "image/png", "the image is empty"),
        (video("http://x"), b"", "video/mp4", "the video is empty"),
        (audio("http://x"), b"", "audio/wav", "the audio is empty"),
    ],
)
async def test_what_the_network_gives_is_looked_at(
    desk: Desk, part: dict[str, Any], data: bytes, declared: str, said: str
) -> None:
    desk.web.pages = {"http://x": (data, declared)}
    body = {"messages": [message(TEXT, part)]}
    assert said in await desk.refuse(body, MediaRefused, f"messages[0].content[1].{part['type']}")


async def test_one_bad_medium_lets_go_of_all_others(desk: Desk) -> None:
    desk.web.pages = {f"http://{at}": (encoded(size=(at + 2, 5)), "") for at in range(5)}
    body = {"messages": [message(*(image(f"http://{at}") for at in range(6)))]}
    await desk.refuse(body, MediaUnreachable, "messages[0].content[5].image_url")


async def test_nobody_is_asked_while_a_url_is_refused(desk: Desk) -> None:
    body = {"messages": [message(image("http://x"), video("http://private/x"))]}
    await desk.refuse(body, MediaUrlRefused, "messages[0].content[1].video_url")
    assert desk.web.asked == []


async def test_nothing_that_a_client_hides_beside_a_medium_stays(desk: Desk) -> None:
    await desk.admit({"messages": [message(image(uuid="x", path="/etc/passwd"), video(uuid="y", fps=5))]})


@pytest.mark.parametrize(
    ("kind", "url"),
    [("image_url", data_url(PICTURE)), ("video_url", FRAME_URL), ("audio_url", sounds.file_url(SOUND))],
)
async def test_the_short_form_of_a_url(desk: Desk, kind: str, url: str) -> None:
    (ref,) = await desk.admit({"messages": [message({"type": kind, kind: url})]})
    assert desk.plane.read(held(ref))


async def test_the_same_medium_twice_is_read_and_held_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    decode = media.decode

    def noted(url: str, *rest: Any) -> Any:
        reads.append(url)
        return decode(url, *rest)

    monkeypatch.setattr(media, "decode", noted)
    refs = await desk.admit({"messages": [message(image(), image(), video()), message(image(), video())]})
    assert len(reads) == 2
    assert len({ref.identity for ref in refs}) == len({held(ref).path for ref in refs}) == len(desk.holder) == 2
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
    assert (await Intake(Settings(model="m"), None).admit(body)).held == ()
    assert repr(body) == before


@pytest.mark.parametrize("part", [image(), video(), audio(), sounds.input_audio(SOUND)])
async def test_media_need_the_switch_which_the_answer_names(desk: Desk, part: dict[str, Any]) -> None:
    body = {"messages": [message(TEXT), message(TEXT, part)]}
    said = await desk.refuse(body, MultimodalDisabled, "messages[1].content[1]", enabled=False)
    assert "--enable-multimodal" in said


@pytest.mark.parametrize("kind", ["image_pil", "input_image", "file", "vision_chunk", "x"])
async def test_other_kinds_are_refused_with_or_without_the_switch(desk: Desk, kind: str) -> None:
    body = {"messages": [message({"type": kind, kind: {"url": "file:///etc/passwd"}})]}
    said = await desk.refuse(body, MediaRefused, "messages[0].content[0]")
    assert "image_url, video_url, audio_url and input_audio are" in said and "passwd" not in said
    await desk.refuse(body, MultimodalDisabled, "messages[0].content[0]", enabled=False)


@pytest.mark.parametrize("kind", ["image_embeds", "video_embeds", "audio_embeds", "prompt_embeds"])
@pytest.mark.parametrize("enabled", [True, False])
async def test_embeddings_of_clients_are_refused(desk: Desk, kind: str, enabled: bool) -> None:
    part = {"type": kind, kind: "UEsDBA==", "data": "UEsDBA=="}
    said = await desk.refuse(
        {"messages": [message(TEXT, part)]}, MediaRefused, f"messages[0].content[1].{kind}", enabled=enabled
    )
    assert "embeddings are not taken" in said


HIDDEN = ["image_url", "input_image", "video_url", "audio_url", "input_audio", "image_pil", "image_embeds"]


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


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
@pytest.mark.parametrize("url", [5, None, {"url": 5}, {"url": None}, {}, ["data:"]])
async def test_a_medium_without_a_url(desk: Desk, kind: str, url: Any) -> None:
    body = {"messages": [message({"type": kind, kind: url})]}
    assert f"{kind} needs a url" in await desk.refuse(body, MediaRefused, f"messages[0].content[0].{kind}")


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        (image(data_url(b"no picture")), {}, "not an image"),
        (image(data_url(PICTURE)), {"max_item_mb": 1e-6}, "media.max_item_mb"),
        (image(data_url(PICTURE)), {"max_image_pixels": 34}, "media.max_image_pixels"),
        (image(FRAME_URL), {}, "must have an image/ media type"),
        (video(data_url(PICTURE)), {}, "must have a video/ media type"),
        (audio(data_url(PICTURE)), {}, "must have an audio/ media type"),
        (audio(sounds.file_url(PICTURE)), {}, "not audio"),
        (audio(), {"max_item_mb": 1e-3}, "media.max_item_mb"),
        (audio(), {"max_audio_seconds": 0.4}, "media.max_audio_seconds"),
        (audio(), {"max_audio_decoded_mb": 0.01}, "media.max_audio_decoded_mb"),
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


@pytest.mark.parametrize(
    ("limits", "at", "said"),
    [
        ({"max_items": 3}, 3, "more media than media.max_items allows (3)"),
        ({"max_images": 1}, 3, "more image parts than media.max_images allows (1)"),
        ({"max_videos": 0}, 1, "more video parts than media.max_videos allows (0)"),
        ({"max_audios": 0}, 2, "more audio parts than media.max_audios allows (0)"),
    ],
)
async def test_too_many_are_refused_before_any_is_read(desk: Desk, limits: dict[str, int], at: int, said: str) -> None:
    parts = [image("http://x"), video("http://x"), audio("http://x"), image("not even a url")]
    param = f"messages[0].content[{at}].{parts[at]['type']}"
    assert await desk.refuse({"messages": [message(*parts)]}, MediaRefused, param, **limits) == said
    assert desk.web.asked == []


async def test_memory_that_is_full_lets_go_of_what_was_taken(desk: Desk) -> None:
    desk.capacity = 6_000
    with pytest.raises(MediaMemoryFull):
        await desk.admit({"messages": [message(image(), video(videos.file_url(FILE)))]})
    await desk.empty()


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
    await desk.empty()


KWARGS = {"min_pixels": 64, "size": {"a": 1}}
OF_PICTURE = identify(PICTURE, modality="image", model="fingerprint")


async def test_processor_settings_are_taken_where_they_are_trusted_and_name_the_medium(desk: Desk) -> None:
    names = []
    for kwargs in (None, {}, KWARGS, dict(reversed(KWARGS.items())), {"min_pixels": 65}):
        body = {"messages": [message(image())], "mm_processor_kwargs": kwargs}
        (ref,) = await desk.admit(body, trust_mm_processor_kwargs=True)
        assert "mm_processor_kwargs" not in body
        assert (ref.processor_kwargs or {}) == (kwargs or {})
        assert desk.plane.read(held(ref)) == PICTURE
        assert desk.admission.held == (OF_PICTURE,), "the bytes' own name"
        names.append(ref.identity)
        await desk.release()
    assert names[0] == names[1] == OF_PICTURE and names[2] == names[3] and len(set(names)) == 3


@pytest.mark.parametrize(
    ("kwargs", "trusted", "said"),
    [
        (KWARGS, False, "media.trust_mm_processor_kwargs"),
        ("x", False, "media.trust_mm_processor_kwargs"),
        ([1], True, "are an object"),
        ({"x": "y" * 2000}, True, "2000 characters at most"),
        ({"use_audio_in_video": True}, True, "audio out of a video"),
    ],
)
async def test_processor_settings_that_are_refused(desk: Desk, kwargs: Any, trusted: bool, said: str) -> None:
    body = {"messages": [message(image("http://x"))], "mm_processor_kwargs": kwargs}
    changes = {"trust_mm_processor_kwargs": trusted}
    assert said in await desk.refuse(body, InvalidRequest, "mm_processor_kwargs", **changes)
    assert desk.web.asked == []


@pytest.mark.parametrize("kwargs", [None, {}])
async def test_no_processor_settings_are_nothing_to_refuse(desk: Desk, kwargs: Any) -> None:
    await desk.admit({"messages": [message(image())], "mm_processor_kwargs": kwargs})
