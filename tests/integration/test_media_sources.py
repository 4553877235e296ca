"""api.media_sources over a real Redis and a real network: what is known is not got again, by whichever process."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.intake import Admission, Intake
from api.known_media import KnownMedia
from api.media_sources import AT_ONCE, MediaSources, lease_s
from api.references import from_url
from app import keys, media
from app.errors.media import MediaUnreachable, MediaUuidNotFound, MediaUuidTaken
from app.errors.requests import InvalidRequest
from app.errors.serving import BrokerUnavailable
from app.items.index import ItemIndex
from app.media import MediaHolder
from app.media.fetch import MediaFetcher
from app.media.places import MediaPlaces
from app.media.url_memo import UrlMemo
from app.media.uuids import MediaUuids
from app.messages.media import MediaRef
from app.messages.plans import Assignment
from app.settings import Settings
from app.settings_sections import ItemSettings
from tests import sounds, videos
from tests.items import descriptor, record
from tests.media_server import MediaHost, media_server
from tests.pictures import data_url, encoded
from tests.planes import Plane
from tests.polling import until

PICTURE, OTHER = encoded(), encoded(size=(9, 9))
WORKER = Assignment(worker="e", incarnation="1")


class Fleet:
    """`living` are the workers that answer."""

    def __init__(self) -> None:
        self.living = {WORKER}

    async def knows(self, worker: Assignment) -> bool:
        return worker in self.living


class Api:
    """An API process, as far as media go."""

    def __init__(self, name: str, redis: Any, folder: Path, fleet: Fleet, **settings: Any) -> None:
        self.settings = Settings(
            model="m",
            enable_multimodal=True,
            media_urls={"allow_private": "127.0.0.0/8", "allowed_ports": "any", **settings.pop("media_urls", {})},
            **settings,
        )
        self.name = name
        self.redis = redis
        self.folder = folder / name
        self.folder.mkdir()
        self.plane = Plane()
        self.index = ItemIndex(redis, "fingerprint", ItemSettings())
        places = MediaPlaces(redis, "fingerprint", name)
        self.holder = MediaHolder(self.plane, self.folder, 1_000_000, places)
        self.fetcher = MediaFetcher(self.settings.media_urls, 1_000_000)
        media = self.settings.media
        self.sources = MediaSources(
            self.settings,
            "fingerprint",
            self.holder,
            self.fetcher,
            KnownMedia(self.holder, places, self.index, fleet, lease_s(self.settings)),  # type: ignore[arg-type]
            UrlMemo(redis, self.settings.media_urls.memo_ttl_s),
            MediaUuids(redis, media.uuid_ttl_s, rebinds=media.rebind_uuids),
        )
        self.admission: Admission | None = None

    async def live(self) -> None:
        await self.redis.set(keys.api(self.name), "{}", ex=60)

    async def admit(self, *parts: dict[str, Any], **asked: Any) -> list[MediaRef]:
        """What the parts become in a request, whose media then stay held."""
        body = {"messages": [{"role": "user", "content": list(parts)}], **asked.pop("body", {})}
        self.admission = await Intake(self.settings, self.sources).admit(body, **asked)
        return [from_url(part[part["type"]]["url"]) for part in parts]

    async def once(self, *parts: dict[str, Any], **asked: Any) -> list[MediaRef]:
        """The same for a request that then ends."""
        refs = await self.admit(*parts, **asked)
        assert self.admission is not None
        await self.admission.release()
        assert self.holder.users == 0
        return refs

    async def refused(self, *parts: dict[str, Any], **asked: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            await self.admit(*parts, **asked)
        assert self.holder.users == 0
        return caught.value

    async def said(self, ref: MediaRef) -> None:
        """Wait until others can know where the bytes lie."""

        async def place() -> bool:
            return bool(await self.redis.hexists(keys.media("fingerprint", ref.identity), self.name))

        await until(place, "the place")

    async def forget(self) -> None:
        """Others needed the room."""
        for at in range(2):
            await self.holder.put(f"{at:032x}", bytes(900_000), 1)
            self.holder.release(f"{at:032x}")

    def read(self, ref: MediaRef) -> bytes:
        assert ref.source is not None
        return self.plane.read(ref.source)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
async def apis(redis: Any, tmp_path: Path, fleet: Fleet) -> AsyncIterator[Any]:
    made: list[Api] = []

    async def make(**settings: Any) -> Api:
        made.append(Api(f"api-{len(made)}", redis, tmp_path, fleet, **settings))
        await made[-1].live()
        return made[-1]

    yield make
    for one in made:
        await one.fetcher.close()
        await one.holder.close()
        assert [*one.folder.iterdir()] == []


@pytest.fixture
def web() -> Iterator[MediaHost]:
    with media_server() as host:
        yield host


def part(kind: str, url: str | None, uuid: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"type": kind, kind: None if url is None else {"url": url}}
    return made if uuid is None else made | {"uuid": uuid}


def image(url: str | None, uuid: str | None = None) -> dict[str, Any]:
    return part("image_url", url, uuid)


async def encoded_by(api: Api, ref: MediaRef, worker: Assignment = WORKER) -> None:
    """A worker has the embedding."""
    await api.index.publish(ref.identity, worker, record(ref.identity), descriptor(ref.identity, worker))


# --- known URLs ---


@pytest.mark.parametrize("how", [{"etag": True}, {"last_modified": "Mon, 01 Jan 2024 00:00:00 GMT"}])
async def test_a_known_url_is_asked_whether_it_changed(apis: Any, web: MediaHost, how: dict[str, Any]) -> None:
    api = await apis()
    url = web.put("/x.png", PICTURE, "image/png", **how)
    (first,) = await api.once(image(url))
    (again,) = await api.once(image(url))
    assert (again.identity, api.read(again)) == (first.identity, PICTURE)
    assert (web.gets(status=200), web.gets(status=304)) == (1, 1)
    web.put("/x.png", OTHER, "image/png", etag=True)
    (changed,) = await api.once(image(url))
    assert changed.identity != first.identity and api.read(changed) == OTHER
    assert (web.gets(status=200), web.gets(status=304)) == (2, 1)


async def test_a_url_without_validators_is_got_each_time(apis: Any, web: MediaHost) -> None:
    api = await apis()
    url = web.put("/x.png", PICTURE, "image/png")
    refs = [*await api.once(image(url)), *await api.once(image(url))]
    assert (web.gets(status=200), len({ref.identity for ref in refs}), api.plane.times) == (2, 1, 1)


async def test_one_get_for_each_medium_of_a_request_and_for_requests_at_once(apis: Any, web: MediaHost) -> None:
    api = await apis()
    urls = [
        web.put("/x.png", PICTURE, "image/png"),
        web.put("/x.mp4", videos.file(), "video/mp4"),
        web.put("/x.wav", sounds.file(), "audio/wav"),
    ]
    kinds = ["image_url", "video_url", "audio_url"]

    async def request() -> None:
        await api.admit(*(part(kind, url) for kind, url in zip(kinds, urls, strict=True) for _ in range(2)))

    await asyncio.gather(*(request() for _ in range(5)))
    assert [web.gets(f"/x.{ending}") for ending in ("png", "mp4", "wav")] == [1, 1, 1]
    assert api.holder.users == 15


async def test_two_urls_with_the_same_bytes_are_one_item(apis: Any, web: MediaHost) -> None:
    api = await apis()
    urls = [web.put(f"/{at}.png", PICTURE, "image/png") for at in range(2)]
    refs = await api.once(*map(image, urls), image(data_url(PICTURE)))
    assert (len({ref.identity for ref in refs}), api.plane.times) == (1, 1)


async def test_a_url_is_known_to_other_processes_too(apis: Any, web: MediaHost) -> None:
    one, two = await apis(), await apis()
    url = web.put("/x.png", PICTURE, "image/png", etag=True)
    (first,) = await one.once(image(url))
    await one.said(first)
    (second,) = await two.admit(image(url))
    assert second.source == first.source, "the bytes that the other one holds"
    assert (web.gets(status=200), web.gets(status=304), two.holder.users) == (1, 1, 0)
    assert two.admission is not None and two.admission.borrows(second.param)


async def test_what_nobody_has_any_more_is_got_without_a_question(
    apis: Any, web: MediaHost, redis: Any, fleet: Fleet
) -> None:
    one, two = await apis(), await apis()
    url = web.put("/x.png", PICTURE, "image/png", etag=True)
    (first,) = await one.once(image(url))
    await one.said(first)
    await redis.delete(keys.api(one.name))
    (second,) = await two.once(image(url))
    assert (web.gets(status=200), web.gets(status=304)) == (2, 0)
    await two.said(second)
    assert await redis.hkeys(keys.media("fingerprint", first.identity)) == [two.name.encode()], "the dead one's is gone"
    await two.forget()
    await encoded_by(two, first, Assignment(worker="e", incarnation="before"))
    await two.once(image(url))
    assert (web.gets(status=200), web.gets(status=304)) == (3, 0), "its holder does not live"


async def test_an_embedding_is_enough(apis: Any, web: MediaHost) -> None:
    api = await apis()
    url = web.put("/x.png", PICTURE, "image/png", etag=True)
    (first,) = await api.once(image(url))
    await encoded_by(api, first)
    await api.forget()
    (second,) = await api.admit(image(url))
    assert (second.identity, second.source, second.size) == (first.identity, None, len(PICTURE))
    assert (web.gets(status=200), web.gets(status=304)) == (1, 1)
    assert api.admission is not None and api.admission.borrows(second.param)


async def test_what_turns_out_to_be_gone_is_got_again(apis: Any, web: MediaHost) -> None:
    api = await apis()
    url = web.put("/x.png", PICTURE, "image/png", etag=True)
    (first,) = await api.once(image(url))
    await encoded_by(api, first)
    await api.forget()
    parts = [image(data_url(OTHER)), image(url)]
    await api.admit(*parts)
    assert api.admission is not None and api.holder.users == 1
    param = "messages[0].content[1].image_url"
    assert not api.admission.borrows("messages[0].content[0].image_url") and api.admission.borrows(param)
    await api.admission.renew(param)
    renewed = from_url(parts[1]["image_url"]["url"])
    assert (renewed.identity, api.read(renewed), renewed.param) == (first.identity, PICTURE, param)
    assert api.holder.users == 2 and not api.admission.borrows(param)
    assert (web.gets(status=200), web.gets(status=304)) == (2, 1)
    await api.admission.release()
    assert api.holder.users == 0


async def test_only_what_is_gone_is_got_again(apis: Any, web: MediaHost) -> None:
    """A uuid whose medium is still where it was is none of a URL's trouble. The URL's second part is."""
    api, other = await apis(), await apis()
    url = web.put("/x.png", PICTURE, "image/png", etag=True)
    (fetched,) = await api.once(image(url))
    (named,) = await other.once(image(data_url(OTHER), "mine"))
    await other.said(named)
    await encoded_by(api, fetched)
    await api.forget()
    parts = [image(None, "mine"), image(url), image(url)]
    await api.admit(*parts)
    assert api.admission is not None and api.admission.borrows("messages[0].content[0].image_url")
    await api.admission.renew("messages[0].content[2].image_url")
    kept, *renewed = [from_url(part["image_url"]["url"]) for part in parts]
    assert kept.source == named.source
    assert [api.read(ref) for ref in renewed] == [PICTURE, PICTURE]
    assert [api.admission.borrows(ref.param) for ref in (kept, *renewed)] == [True, False, False]
    assert web.gets(status=200) == 2
    await api.admission.release()


async def test_identity_by_text_asks_once(apis: Any, web: MediaHost) -> None:
    api = await apis(media_urls={"identity": "url"})
    url = web.put("/x.png", PICTURE, "image/png")
    (first,) = await api.once(image(url))
    web.put("/x.png", OTHER, "image/png")
    (second,) = await api.once(image(url))
    assert (second.identity, web.gets()) == (first.identity, 1)
    await api.forget()
    (third,) = await api.once(image(url))
    assert (third.identity != first.identity, web.gets()) == (True, 2), "nobody had the old one any more"


async def test_tenants_and_modalities_remember_apart(apis: Any, web: MediaHost) -> None:
    api = await apis()
    url = web.put("/x.png", PICTURE, "image/png", etag=True)
    for asked in ({}, {"tenant": "t"}, {"tenant": "u"}, {"body": {"cache_salt": "t"}}):
        await api.once(image(url), **asked)
    assert (web.gets(status=200), web.gets(status=304)) == (4, 0)
    await api.refused(part("video_url", url))
    assert web.gets(status=304) == 0


async def test_a_url_that_died_is_not_answered_from_memory(apis: Any, web: MediaHost) -> None:
    api = await apis()
    url = web.put("/x.png", PICTURE, "image/png", etag=True)
    await api.once(image(url))
    web.files.clear()
    assert isinstance(await api.refused(image(url)), MediaUnreachable)


# --- data URLs ---


@pytest.mark.parametrize("frame", ["AAAA", ""], ids=["tiny", "empty"])
async def test_frames_beyond_the_limit_take_no_memory(apis: Any, frame: str) -> None:
    api = await apis()
    url = "data:video/jpeg;base64," + ",".join([frame] * 500_000)
    tracemalloc.start()
    try:
        error = await api.refused(part("video_url", url))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "media.max_video_frames allows (1024)" in error.message
    assert peak < 4 * len(url) + 2_000_000


async def test_turns_last_as_long_as_their_threads(apis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is cancelled leaves its thread behind, with the medium in memory."""
    api, go, decode, running = await apis(), threading.Event(), media.decode, Counter[str]()

    def slow(*asked: Any) -> Any:
        running["now"] += 1
        running["most"] = max(running.values())
        go.wait(20)
        running["now"] -= 1
        return decode(*asked)

    def requests(first: int) -> list[asyncio.Task[Any]]:
        urls = [data_url(encoded(size=(9, first + at))) for at in range(AT_ONCE)]
        return [asyncio.create_task(api.admit(image(url))) for url in urls]

    monkeypatch.setattr(media, "decode", slow)
    try:
        leaving = requests(10)
        await until(lambda: running["now"] == AT_ONCE, "all turns to be taken")
        for one in leaving:
            one.cancel()
        await asyncio.wait(leaving)
        coming = requests(20)
        await until(lambda: len(api.sources._turns._waiters or ()) == AT_ONCE, "the others to wait")
    finally:
        go.set()
    await asyncio.gather(*coming)
    assert running["most"] == AT_ONCE
    assert (len(api.holder), api.holder.users) == (AT_ONCE, AT_ONCE), "who left keeps nothing"


# --- uuids ---


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("image_url", data_url(PICTURE)),
        ("video_url", videos.file_url(videos.file())),
        ("video_url", videos.frames_url(videos.jpegs(number=2))),
        ("audio_url", sounds.file_url(sounds.file())),
    ],
    ids=["image", "video", "frames", "audio"],
)
async def test_a_uuid_stands_for_what_came_with_it(apis: Any, kind: str, url: str) -> None:
    one, two = await apis(), await apis()
    (filled,) = await one.once(part(kind, url, "mine"))
    (reused,) = await one.once(part(kind, None, "mine"))
    assert reused == filled
    await one.said(filled)
    (elsewhere,) = await two.admit(part(kind, None, "mine"))
    assert elsewhere == filled, "other processes know it, and where the bytes lie"


async def test_openai_audio_has_uuids_too(apis: Any) -> None:
    api = await apis()
    (filled,) = await api.once(sounds.input_audio(sounds.file()) | {"uuid": "mine"})
    (reused,) = await api.once({"type": "input_audio", "input_audio": None, "uuid": "mine"})
    assert reused == filled


async def test_uuids_that_stand_for_nothing(apis: Any) -> None:
    api = await apis()
    await api.once(image(data_url(PICTURE), "mine"))
    for asked, unknown in [
        ({}, image(None, "other")),
        ({"tenant": "t"}, image(None, "mine")),
        ({"body": {"cache_salt": "t"}}, image(None, "mine")),
        ({}, part("video_url", None, "mine")),
    ]:
        error = await api.refused(unknown, **asked)
        assert (type(error), error.status, error.code) == (MediaUuidNotFound, 400, "media_uuid_not_found")
        assert error.param == f"messages[0].content[0].{unknown['type']}"
    for nothing in (image(None), {"type": "input_audio", "input_audio": None}):
        assert (await api.refused(nothing)).code == "invalid_media"


@pytest.mark.parametrize("uuid", ["", "a b", "x" * 129, "é", "a\n", 5, ["x"], {}])
async def test_uuids_that_are_none(apis: Any, uuid: Any) -> None:
    api = await apis()
    for url in (data_url(PICTURE), None):
        assert (await api.refused(image(url, uuid))).param == "messages[0].content[0].uuid"


async def test_a_uuid_with_other_bytes_stands_for_those(apis: Any) -> None:
    api = await apis()
    (old,) = await api.once(image(data_url(PICTURE), "mine"))
    (new,) = await api.once(image(data_url(OTHER), "mine"))
    assert new.identity != old.identity
    assert await api.once(image(None, "mine")) == [new]


@pytest.mark.parametrize("first", [True, False])
async def test_a_uuid_means_what_comes_with_it_in_the_same_request(apis: Any, web: MediaHost, first: bool) -> None:
    """Wherever that part stands, and however long its medium takes."""
    api = await apis()
    (old,) = await api.once(image(data_url(PICTURE), "mine"))
    web.put("/x.png", OTHER, "image/png")
    parts = [image(web.url("/chain/2/x.png"), "mine"), image(None, "mine")]
    one, other = await api.once(*(parts if first else parts[::-1]))
    assert one.identity == other.identity != old.identity


async def test_a_uuid_with_two_media_in_one_request_is_refused(apis: Any, web: MediaHost) -> None:
    api = await apis()
    url = web.put("/x.png", PICTURE, "image/png")
    for other in (image(data_url(OTHER), "mine"), part("video_url", videos.file_url(videos.file()), "mine")):
        error = await api.refused(image(data_url(PICTURE), "mine"), other)
        assert (error.status, error.code) == (400, "invalid_media") and "uuid" in error.message
        assert error.param == f"messages[0].content[1].{other['type']}"
    await api.once(image(data_url(PICTURE), "mine"), image(url, "mine"))  # the same bytes


async def test_a_uuid_with_other_bytes_can_be_refused(apis: Any) -> None:
    api = await apis(media={"rebind_uuids": False})
    (old,) = await api.once(image(data_url(PICTURE), "mine"))
    await api.once(image(data_url(PICTURE), "mine"))
    error = await api.refused(image(data_url(OTHER), "mine"))
    assert (type(error), error.status, error.code) == (MediaUuidTaken, 400, "media_uuid_taken")
    assert "media.rebind_uuids" in error.message
    assert await api.once(image(None, "mine")) == [old]


async def test_a_uuid_whose_medium_is_gone(apis: Any, fleet: Fleet) -> None:
    api = await apis()
    (ref,) = await api.once(image(data_url(PICTURE), "mine"))
    await encoded_by(api, ref)
    await api.forget()
    (reused,) = await api.admit(image(None, "mine"))
    assert (reused.identity, reused.source) == (ref.identity, None), "a worker has its embedding"
    assert api.admission is not None
    with pytest.raises(MediaUuidNotFound):
        await api.admission.renew("messages[0].content[0].image_url")
    fleet.living.clear()
    assert (await api.refused(image(None, "mine"))).code == "media_uuid_not_found"


@pytest.mark.parametrize("away", ["places", "items"])
async def test_a_uuid_is_not_unknown_because_redis_is_away(apis: Any, web: MediaHost, away: str) -> None:
    """400 would tell the client to give up. A URL can be asked for again."""
    from app.redis import connect

    api = await apis()
    await api.once(image(data_url(PICTURE), "mine"))
    url = web.put("/x.png", OTHER, "image/png", etag=True)
    await api.once(image(url))
    await api.forget()
    nobody = connect("redis://127.0.0.1:1/0", 0.2, name="test")
    known = api.sources._known
    try:
        if away == "places":
            known._places = MediaPlaces(nobody, "fingerprint", "me")
        else:
            known._items = ItemIndex(nobody, "fingerprint", ItemSettings())
        with pytest.raises(BrokerUnavailable):
            await api.admit(image(None, "mine"))
        await api.once(image(url))
    finally:
        await nobody.aclose()
    assert web.gets(status=200) == 2


async def test_a_uuid_lasts_as_long_as_it_is_used(apis: Any, redis: Any) -> None:
    api = await apis(media={"uuid_ttl_s": 1000})
    await api.once(image(data_url(PICTURE), "mine"))
    (key,) = [one async for one in redis.scan_iter(f"{keys.PREFIX}uuid:*")]
    assert key.endswith(b":mine") and await redis.ttl(key) > 990
    await redis.expire(key, 5)
    await api.once(image(None, "mine"))
    assert await redis.ttl(key) > 990


# --- places ---


async def test_places_live_as_long_as_their_leases(apis: Any, redis: Any) -> None:
    api = await apis()
    (ref,) = await api.once(image(data_url(PICTURE)))
    key = keys.media("fingerprint", ref.identity)
    await api.said(ref)
    assert ref.source is not None
    assert 0 < await redis.ttl(key) <= ref.source.expires_at - time.time()
    await api.forget()

    async def unsaid() -> bool:
        return not await redis.exists(key)

    await until(unsaid, "its end")


async def test_the_longest_lease_is_what_a_place_lives_for(redis: Any) -> None:
    key = keys.media("fingerprint", "a" * 32)
    longest = 0
    for api, lease in (("a", 500), ("b", 100), ("c", 900)):
        source = descriptor("a" * 32, WORKER, expires_at=time.time() + lease)
        MediaPlaces(redis, "fingerprint", api).add("a" * 32, source)

        async def said(api: str = api) -> bool:
            return bool(await redis.hexists(key, api))

        await until(said, "the place")
        longest = max(longest, lease)
        assert longest - 60 < await redis.ttl(key) <= longest


@pytest.mark.parametrize(
    "entry", [b"nonsense", descriptor("a" * 32, WORKER, expires_at=time.time() + 5).model_dump_json()]
)
async def test_a_place_that_is_none(redis: Any, entry: Any) -> None:
    await redis.set(keys.api("x"), "{}")
    await redis.hset(keys.media("fingerprint", "a" * 32), "x", entry)
    assert await MediaPlaces(redis, "fingerprint", "me").find("a" * 32) is None


async def test_without_redis_media_still_come(apis: Any, web: MediaHost) -> None:
    from app.redis import connect

    api = await apis()
    nobody = connect("redis://127.0.0.1:1/0", 0.2, name="test")
    try:
        places = MediaPlaces(nobody, "fingerprint", "me")
        api.holder._places = places
        api.sources._memo = UrlMemo(nobody, 60)
        await api.once(image(web.put("/x.png", PICTURE, "image/png", etag=True)))
        assert await places.find("a" * 32) is None
        await until(lambda: places.lost >= 2, "the counting")
    finally:
        await nobody.aclose()
