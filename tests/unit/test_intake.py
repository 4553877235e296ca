"""api.intake."""

from typing import Any

import pytest

from api.intake import Intake
from app.errors import InvalidRequest, MediaRefused, MultimodalDisabled
from app.media import identify
from app.settings import MediaSettings, Settings
from tests.pictures import data_url, encoded

PICTURE = encoded()


class Store:
    def __init__(self) -> None:
        self.kept: dict[str, tuple[bytes, float]] = {}

    async def put(self, identity: str, data: bytes, ttl_s: float) -> None:
        self.kept[identity] = (data, ttl_s)

    async def get(self, identity: str) -> bytes:
        return self.kept[identity][0]


def settings(enabled: bool = True, **media: Any) -> Settings:
    return Settings(model="m", enable_multimodal=enabled, media=MediaSettings(**media))


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def image(url: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(PICTURE) if url is None else url}, **more}


TEXT = {"type": "text", "text": "what is this?"}


async def admitted(body: dict[str, Any], **changes: Any) -> tuple[dict[str, Any], Store]:
    store = Store()
    await Intake(settings(**changes), store).admit(body)
    return body, store


async def refused(body: dict[str, Any], kind: type[InvalidRequest], param: str, **changes: Any) -> str:
    store = Store()
    with pytest.raises(kind) as caught:
        await Intake(settings(**changes), store).admit(body)
    assert caught.value.param == param
    assert store.kept == {}
    return caught.value.message


async def test_a_picture_becomes_a_reference_and_its_bytes_are_kept() -> None:
    name = identify(PICTURE, modality="image", model="m")
    body, store = await admitted({"messages": [message(TEXT, image(), role="user")]})
    reference = {"type": "image_url", "image_url": {"url": f"trivet:{name}:{len(PICTURE)}"}}
    assert body["messages"][0]["content"] == [TEXT, reference]
    assert store.kept == {name: (PICTURE, 600.0)}


async def test_nothing_that_a_client_hides_beside_a_picture_stays() -> None:
    body, _ = await admitted({"messages": [message(image(uuid="x", path="/etc/passwd"))]})
    assert set(body["messages"][0]["content"][0]) == {"type", "image_url"}


async def test_the_short_form_of_a_url() -> None:
    body, store = await admitted({"messages": [message({"type": "image_url", "image_url": data_url(PICTURE)})]})
    assert len(store.kept) == 1 and body["messages"][0]["content"][0]["image_url"]["url"].startswith("trivet:")


async def test_the_same_picture_twice_is_one() -> None:
    body, store = await admitted({"messages": [message(image(), image()), message(image())]})
    assert len(store.kept) == 1
    assert len({part["image_url"]["url"] for one in body["messages"] for part in one["content"]}) == 1


async def test_a_cache_salt_names_the_picture_anew() -> None:
    body = {"messages": [message(image())]}
    _, plain = await admitted(body)
    names = set(plain.kept)
    for salt in ("a", "b", "a"):
        _, store = await admitted({"messages": [message(image())], "cache_salt": salt})
        assert store.kept.keys() == {identify(PICTURE, modality="image", model="m", salt=salt)}
        names |= store.kept.keys()
    assert len(names) == 3


async def test_fields_of_the_stages_are_not_for_clients() -> None:
    body, _ = await admitted({"messages": [], "kv_transfer_params": {"remote_host": "x"}, "ec_transfer_params": {}})
    assert body == {"messages": []}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "hello"},
        {"messages": [5, None, {"role": "user"}, {"content": "text"}, {"content": {"type": "image_url"}}]},
        {"messages": [{"content": ["text", 5, None]}]},
        {"messages": [message(TEXT, {"type": "refusal", "refusal": "no"})]},
    ],
)
async def test_what_holds_no_media_is_left_as_it_is(body: dict[str, Any]) -> None:
    before = repr(body)
    after, store = await admitted(body, enabled=False)
    assert (repr(after), store.kept) == (before, {})


async def test_media_need_the_switch_which_the_answer_names() -> None:
    said = await refused(
        {"messages": [message(TEXT), message(TEXT, image())]},
        MultimodalDisabled,
        "messages[1].content[1]",
        enabled=False,
    )
    assert "--enable-multimodal" in said


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "audio_url", "image_pil", "image_embeds", "file", "x"])
async def test_other_kinds_are_refused_with_or_without_the_switch(kind: str) -> None:
    body = {"messages": [message({"type": kind, kind: {"url": "file:///etc/passwd"}})]}
    said = await refused(body, MediaRefused, "messages[0].content[0]")
    assert "image_url is" in said and "passwd" not in said
    await refused(body, MultimodalDisabled, "messages[0].content[0]", enabled=False)


@pytest.mark.parametrize("part", [{"image_url": {"url": "x"}}, {"type": None}, {"type": ["text"]}, {}])
async def test_a_part_without_a_type_is_no_way_around(part: dict[str, Any]) -> None:
    await refused({"messages": [message(part)]}, InvalidRequest, "messages[0].content[0].type")


@pytest.mark.parametrize("url", [5, None, {"url": 5}, {"url": None}, {}, ["data:"]])
async def test_a_picture_without_a_url(url: Any) -> None:
    body = {"messages": [message({"type": "image_url", "image_url": url})]}
    await refused(body, MediaRefused, "messages[0].content[0].image_url")


@pytest.mark.parametrize(
    ("url", "changes", "said"),
    [
        ("https://example.com/x.png", {}, "must be a data: URL"),
        ("trivet:0123456789abcdef0123456789abcdef:9", {}, "must be a data: URL"),
        (data_url(b"no picture"), {}, "not an image"),
        (data_url(PICTURE), {"max_item_mb": 1e-6}, "media.max_item_mb"),
        (data_url(PICTURE), {"max_image_pixels": 34}, "media.max_image_pixels"),
    ],
)
async def test_a_bad_picture_is_named(url: str, changes: dict[str, Any], said: str) -> None:
    body = {"messages": [message(TEXT), message(TEXT, image(url))]}
    assert said in await refused(body, MediaRefused, "messages[1].content[1].image_url", **changes)


async def test_too_many_are_refused_before_any_is_read() -> None:
    parts = [image(), image(), image("not even a url")]
    said = await refused({"messages": [message(*parts)]}, MediaRefused, "messages[0].content[0]", max_items=2)
    assert "media.max_items allows (2)" in said
