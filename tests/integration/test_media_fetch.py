"""app.media.fetch against a media host on loopback."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpcore
import pytest

from app.errors.base import TrivetError
from app.errors.media import MediaFetchesBusy, MediaRefused, MediaTooLarge, MediaUnreachable, MediaUrlRefused
from app.media.dialer import Resolver
from app.media.fetch import Fetched, MediaFetcher
from app.media.response import PIECES, body
from app.settings import SettingsError
from app.settings_media import MediaUrlSettings
from tests.certificates import certified
from tests.media_server import BOMB_BYTES, MediaHost, media_server
from tests.polling import until

LOOPBACK = {"allow_private": "127.0.0.0/8", "allowed_ports": "any"}
LIMIT = 200_000
PART = "messages[1].content[0].image_url"
PICTURE = bytes(range(256)) * 400
JULY = "Tue, 01 Jul 2025 10:00:00 GMT"


@pytest.fixture
def host() -> Iterator[MediaHost]:
    with media_server() as served:
        served.put("/cat.png", PICTURE, "Image/PNG; q=1")
        yield served


@pytest.fixture
async def opened() -> AsyncIterator[Any]:
    """`opened(**limits)` is a fetcher that may reach loopback, closed with the test."""
    async with AsyncExitStack() as stack:

        def open_one(resolver: Resolver | None = None, **limits: Any) -> MediaFetcher:
            fetcher = MediaFetcher(MediaUrlSettings(**LOOPBACK | limits), LIMIT, resolver=resolver)
            stack.push_async_callback(fetcher.close)
            return fetcher

        yield open_one


async def fetch(fetcher: MediaFetcher, url: str, param: str = PART, **asked: Any) -> Fetched:
    async with fetcher.fetch(url, param, **asked) as fetched:
        return fetched


async def failure(fetcher: MediaFetcher, url: str, accept: str = "image/*") -> TrivetError:
    with pytest.raises(TrivetError) as caught:
        await fetch(fetcher, url, PART, accept=accept)
    assert caught.value.param == PART
    assert not re.search(r"0x|\d+\.\d+\.\d+\.\d+|[<>]|::|/tmp|Error\b", caught.value.message), caught.value.message
    return caught.value


async def test_a_medium(host: MediaHost, opened: Any) -> None:
    fetched = await fetch(opened(), host.url("/cat.png"), PART, accept="image/*")
    assert fetched == Fetched(PICTURE, "image/png", None, None, False)
    (asked,) = host.requests
    assert asked.headers["accept-encoding"] == "identity" and asked.headers["accept"] == "image/*"
    assert asked.headers["host"] == f"127.0.0.1:{host.port}" and "authorization" not in asked.headers


async def test_nothing_of_loopback_is_fetched_by_default(host: MediaHost) -> None:
    fetcher = MediaFetcher(MediaUrlSettings(allowed_ports=frozenset({"any"})), LIMIT)
    for name in ("127.0.0.1", "localhost", "localhost.", "[::ffff:127.0.0.1]", "127.1", "0x7f000001", "2130706433"):
        assert isinstance(await failure(fetcher, host.url("/cat.png", name)), MediaUrlRefused), name
    assert (host.connections, host.gets()) == (0, 0)
    assert fetcher.counts == {"media_url_refused": 7}
    await fetcher.close()


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("/missing.png", MediaUnreachable, "status 404"),
        ("/status/429", MediaUnreachable, "status 429"),
        ("/status/500", MediaUnreachable, "status 500"),
        ("/status/206", MediaUnreachable, "status 206"),
        ("/status/304", MediaUnreachable, "status 304"),
        ("/redirect/301?http://10.0.0.1/", MediaUrlRefused, "allow_private"),
        ("/redirect/302?http://[::1]/", MediaUrlRefused, "allow_private"),
        ("/redirect/307?http://169.254.169.254/latest/meta-data", MediaUrlRefused, "allow_private"),
        ("/redirect/302?file:///etc/passwd", MediaUrlRefused, "scheme"),
        ("/redirect/302?http://good.example\\@127.0.0.1/", MediaUrlRefused, "backslash"),
        ("/redirect/302?http://u:p@127.0.0.1/", MediaUrlRefused, "user or a password"),
        ("/redirect/302?", MediaUrlRefused, "more than 3 redirects"),
        ("/chain/4/cat.png", MediaUrlRefused, "more than 3 redirects"),
        ("/loop", MediaUrlRefused, "more than 3 redirects"),
        ("/endless", MediaTooLarge, "media.max_item_mb allows (0.2 MB)"),
        ("/endless-chunks", MediaTooLarge, "media.max_item_mb"),
        ("/huge", MediaTooLarge, "media.max_item_mb"),
        ("/long/cat.png", MediaUnreachable, "broke its answer off"),
        ("/crumbs/cat.png", MediaUnreachable, "pieces that are too small"),
        ("/garbage", MediaUnreachable, "other than HTTP"),
        ("/bomb", MediaRefused, "compressed"),
        ("/html", MediaRefused, "another type of content"),
        ("/empty", MediaRefused, "empty body"),
    ],
)
async def test_a_host_that_misbehaves(
    host: MediaHost, opened: Any, path: str, kind: type[TrivetError], said: str
) -> None:
    error = await failure(opened(), host.url(path))
    assert type(error) is kind and said in error.message
    assert error.status == 400, "no status that clients retry"


@pytest.mark.parametrize("path", ["/slow/cat.png", "/stall/cat.png", "/silent"])
async def test_a_host_that_takes_too_long(host: MediaHost, opened: Any, path: str) -> None:
    error = await failure(opened(fetch_timeout_s=0.5), host.url(path))
    assert type(error) is MediaUnreachable and "media_urls.fetch_timeout_s (0.5 s)" in error.message
    assert error.status == 400, "no status that clients retry"


async def test_a_host_that_is_not_there(opened: Any) -> None:
    with media_server() as gone:
        pass
    assert isinstance(await failure(opened(), gone.url("/cat.png")), MediaUnreachable)


@pytest.mark.parametrize(
    ("declared", "accept", "fits"),
    [
        ("image/png", "image/*", True),
        ("image/png", "*/*", True),
        ("image/png", "audio/*, image/png;q=0.5", True),
        ("video/mp4", "image/*", False),
        ("video/ogg", "audio/*,video/ogg", True),
        ("application/octet-stream", "image/*", True),
        ("binary/octet-stream", "image/*", True),
        ("application/ogg", "audio/*", True),
        ("application/json", "*/*", False),
        ("application/xhtml+xml", "*/*", False),
        ("application/pdf", "*/*", False),
        ("text/plain", "*/*", False),
        ("nonsense", "*/*", False),
        ("", "image/*", True),
    ],
)
async def test_types_of_content(host: MediaHost, opened: Any, declared: str, accept: str, fits: bool) -> None:
    url = host.put("/typed", PICTURE, declared)
    if fits:
        fetched = await fetch(opened(), url, PART, accept=accept)
        assert (fetched.data, fetched.media_type) == (PICTURE, declared)
    else:
        assert "type of content" in (await failure(opened(), url, accept)).message


async def test_a_body_shorter_than_it_is_long_ends_where_the_host_says(host: MediaHost, opened: Any) -> None:
    assert (await fetch(opened(), host.url("/short/cat.png"), PART)).data == PICTURE[:-1]


async def test_the_largest_body_fits(host: MediaHost, opened: Any) -> None:
    assert (await fetch(opened(), host.put("/a", bytes(LIMIT), "image/png"), PART)).data == bytes(LIMIT)
    assert isinstance(await failure(opened(), host.put("/b", bytes(LIMIT + 1), "image/png")), MediaTooLarge)


async def test_large_bodies_are_whole(host: MediaHost) -> None:
    """Beyond what is joined on the event loop."""
    data = PICTURE * 50
    fetcher = MediaFetcher(MediaUrlSettings(**LOOPBACK), len(data))
    assert (await fetch(fetcher, host.put("/large", data, "video/mp4"), PART)).data == data
    await fetcher.close()


async def test_a_small_body_may_come_in_crumbs(host: MediaHost, opened: Any) -> None:
    host.put("/small.png", PICTURE[:1800], "image/png")
    assert (await fetch(opened(), host.url("/crumbs/small.png"), PART)).data == PICTURE[:1800]


async def test_pieces_that_are_here_already_are_taken_in_turns() -> None:
    turns, done = 0, asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(PIECES):
            yield b"ab"
        done.set()

    async def everything_else() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    got, _ = await asyncio.gather(body(httpcore.Response(200, content=pieces()), LIMIT), everything_else())
    assert got == b"ab" * PIECES and turns > PIECES // 100


async def test_a_bomb_is_not_even_read(host: MediaHost) -> None:
    fetcher = MediaFetcher(MediaUrlSettings(**LOOPBACK), BOMB_BYTES)
    assert "compressed" in (await failure(fetcher, host.url("/bomb"))).message
    await fetcher.close()


async def test_redirects_are_followed_and_can_be_off(host: MediaHost, opened: Any) -> None:
    assert (await fetch(opened(), host.url("/chain/3/cat.png"), PART)).data == PICTURE
    for status in (301, 302, 303, 307, 308):
        assert (await fetch(opened(), host.url(f"/redirect/{status}?../cat.png"), PART)).data == PICTURE
    before = host.gets()
    assert "allow_redirects" in (await failure(opened(allow_redirects=False), host.url("/chain/1/cat.png"))).message
    assert host.gets() == before + 1, "where it leads nobody looked"


async def test_a_known_medium_is_asked_for_and_not_sent(host: MediaHost, opened: Any) -> None:
    url, fetcher = host.put("/cat.png", PICTURE, "image/png", etag=True, last_modified=JULY), opened()
    first = await fetch(fetcher, url, PART)
    assert first.etag == host.files["/cat.png"].etag and first.last_modified == JULY
    again = await fetch(fetcher, url, PART, etag=first.etag, last_modified=first.last_modified)
    assert again == Fetched(b"", "", first.etag, first.last_modified, True)
    assert host.gets("/cat.png", 304) == 1
    host.put("/cat.png", PICTURE[1:], "image/png", etag=True)
    changed = await fetch(fetcher, url, PART, etag=first.etag, last_modified=first.last_modified)
    assert changed.data == PICTURE[1:] and changed.etag not in (None, first.etag)
    assert fetcher.counts == {"fetched": 2, "not_modified": 1}


async def test_a_date_alone_is_enough_to_ask(host: MediaHost, opened: Any) -> None:
    url, fetcher = host.put("/cat.png", PICTURE, "image/png", last_modified=JULY), opened()
    first = await fetch(fetcher, url, PART)
    assert (first.etag, first.last_modified) == (None, JULY)
    assert (await fetch(fetcher, url, PART, last_modified=JULY)).not_modified


@pytest.mark.parametrize(("date", "kept"), [(JULY, None), ("Tue, 01 Jul 2025 10:00:01 GMT", JULY), ("yesterday", None)])
async def test_a_date_of_this_very_second_tells_nothing(
    host: MediaHost, opened: Any, date: str, kept: str | None
) -> None:
    host.put("/cat.png", PICTURE, "image/png", last_modified=JULY, date=date)
    assert (await fetch(opened(), host.url("/cat.png"), PART)).last_modified == kept


async def test_what_a_redirect_leads_to_is_always_fetched_anew(host: MediaHost, opened: Any) -> None:
    """Next time it may lead to another picture, of the same date."""
    host.put("/cat.png", PICTURE, "image/png", etag=True, last_modified=JULY)
    fetched = await fetch(opened(), host.url("/redirect/302?/cat.png"), PART, last_modified=JULY)
    assert fetched == Fetched(PICTURE, "image/png", None, None, False)
    assert [("if-modified-since" in one.headers) for one in host.requests] == [True, False]


async def test_who_asks_at_the_same_time_shares_one_get(host: MediaHost, opened: Any) -> None:
    url, fetcher = host.url("/cat.png"), opened()
    got = await asyncio.gather(*(fetch(fetcher, url, f"messages[{at}]") for at in range(10)))
    assert [one.data for one in got] == [PICTURE] * 10 and host.gets("/cat.png") == 1
    await fetch(fetcher, url, PART)
    assert host.gets("/cat.png") == 2, "what came before is not kept"


async def test_each_gets_the_failure_for_its_own_part(host: MediaHost, opened: Any) -> None:
    fetcher = opened()
    parts = [f"messages[{at}]" for at in range(4)]
    got = await asyncio.gather(*(fetch(fetcher, host.url("/missing"), part) for part in parts), return_exceptions=True)
    assert [one.param for one in got if isinstance(one, MediaUnreachable)] == parts and host.gets() == 1


async def test_other_conditions_are_other_gets(host: MediaHost, opened: Any) -> None:
    url, fetcher = host.put("/cat.png", PICTURE, "image/png", etag=True), opened()
    etag = host.files["/cat.png"].etag
    known, unknown = await asyncio.gather(fetch(fetcher, url, PART, etag=etag), fetch(fetcher, url, PART))
    assert (known.not_modified, unknown.not_modified) == (True, False) and host.gets() == 2


async def test_a_bound_on_fetches_at_once(host: MediaHost, opened: Any) -> None:
    fetcher = opened(max_concurrent_fetches=2)
    urls = [host.put(f"/{at}", bytes([at]) * 10, "image/png") for at in range(6)]
    slow = [url.replace(f":{host.port}/", f":{host.port}/slow/") for url in urls]
    got = await asyncio.gather(*(fetch(fetcher, url, PART) for url in slow))
    assert [one.data[0] for one in got] == [*range(6)] and host.peak == 2


async def test_a_medium_counts_as_fetched_until_it_is_put_away(host: MediaHost, opened: Any) -> None:
    """Its bytes are in memory."""
    fetcher, part = opened(max_concurrent_fetches=1), "messages[0]"
    url = host.put("/other.png", PICTURE, "image/png")
    async with fetcher.fetch(host.url("/cat.png"), part):
        waiting = asyncio.create_task(fetch(fetcher, url))
        await until(lambda: fetcher._slots._waiters, "who waits for a turn")
        assert host.gets() == 1
    assert (await waiting).data == PICTURE and host.gets() == 2
    assert await fetch(fetcher, url), "and all turns are given back"


async def test_who_gets_no_turn_is_told_to_try_again(host: MediaHost, opened: Any) -> None:
    fetcher = opened(max_concurrent_fetches=1, fetch_timeout_s=0.3)
    waiting = [asyncio.create_task(fetch(fetcher, host.url(f"/silent?{at}"), PART)) for at in range(3)]
    await asyncio.wait(waiting)
    assert isinstance(waiting[0].exception(), MediaUnreachable)
    assert isinstance(waiting[2].exception(), MediaFetchesBusy)


async def test_a_client_that_leaves_closes_the_connection_and_gives_its_turn_back(host: MediaHost, opened: Any) -> None:
    fetcher = opened(max_concurrent_fetches=1)
    leaving = asyncio.create_task(fetch(fetcher, host.url("/silent"), PART))
    await until(lambda: host.gets("/silent"), "a request")
    leaving.cancel()
    await asyncio.wait({leaving})
    await until(lambda: host.open == 0, "no connection")
    assert (await fetch(fetcher, host.url("/cat.png"), PART)).data == PICTURE


async def test_connections_are_used_again_for_the_same_host(host: MediaHost, opened: Any) -> None:
    fetcher = opened()
    for _ in range(3):
        await fetch(fetcher, host.url("/cat.png"), PART)
    assert (host.connections, host.gets()) == (1, 3)


class Names(Resolver):
    """Every name is loopback."""

    async def __call__(self, host: str, port: int) -> list[Any]:
        return await super().__call__("127.0.0.1", port)


async def test_tls_goes_by_the_name(opened: Any, tmp_path: Path) -> None:
    """The certificate is for media.example; the connection goes to loopback."""
    context, bundle = certified("media.example", tmp_path)
    with media_server(context) as host:
        host.put("/cat.png", PICTURE, "image/png")
        fetcher = opened(Names(), ca_bundle=str(bundle))
        assert (await fetch(fetcher, host.url("/cat.png", "media.example"), PART)).data == PICTURE
        assert host.requests[0].headers["host"] == f"media.example:{host.port}"
        error = await failure(fetcher, host.url("/cat.png", "other.example"))
        assert isinstance(error, MediaUnreachable) and "certificate" in error.message
        error = await failure(opened(Names()), host.url("/cat.png", "media.example"))
        assert "certificate" in error.message, "an authority that nobody told of"
        assert (
            "https to http"
            in (await failure(fetcher, host.url("/redirect/302?http://media.example/", "media.example"))).message
        )
        assert host.gets("/cat.png") == 1


async def test_plain_http_to_a_host_that_speaks_tls(opened: Any, tmp_path: Path) -> None:
    context, _ = certified("media.example", tmp_path)
    with media_server(context) as host:
        assert isinstance(await failure(opened(), f"http://127.0.0.1:{host.port}/cat.png"), MediaUnreachable)
    with media_server() as plain:
        assert isinstance(await failure(opened(), f"https://127.0.0.1:{plain.port}/cat.png"), MediaUnreachable)


def test_a_bundle_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="media_urls.ca_bundle"):
        MediaFetcher(MediaUrlSettings(ca_bundle=str(tmp_path / "missing.pem")), LIMIT)


async def test_a_proxy_gets_the_name_and_is_reached_wherever_it_is(host: MediaHost) -> None:
    """The proxy is this media host, on loopback, which is closed to clients."""
    named = host.put("http://media.example:80/cat.png", PICTURE, "image/png").replace(host.url(""), "")
    fetcher = MediaFetcher(MediaUrlSettings(proxy_url=f"http://ada:s%40cret@127.0.0.1:{host.port}"), LIMIT)
    assert (await fetch(fetcher, "http://media.example/cat.png", PART)).data == PICTURE
    assert host.requests[0].path == named
    assert host.requests[0].headers["proxy-authorization"] == "Basic YWRhOnNAY3JldA=="
    for url in ("http://127.0.0.1/", "http://169.254.169.254/", "http://localhost/", "http://redis/"):
        assert isinstance(await failure(fetcher, url), MediaUrlRefused)
    assert isinstance(await failure(fetcher, "https://media.example/"), MediaUnreachable)
    assert [one.path for one in host.requests[1:]] == ["media.example:443"]
    await fetcher.close()


async def test_a_file(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PICTURE)
    fetcher = opened(allowed_local_media_path=str(tmp_path))
    assert await fetch(fetcher, f"file://{tmp_path}/cat.png", PART) == Fetched(PICTURE, "", None, None, False)
    for url in ("file:///etc/passwd", f"file://{tmp_path}/../x"):
        assert isinstance(await failure(fetcher, url), MediaUrlRefused)
    assert isinstance(await failure(opened(), f"file://{tmp_path}/cat.png"), MediaUrlRefused)
    assert isinstance(await failure(fetcher, f"file://{tmp_path}/dog.png"), MediaUnreachable)


async def test_a_check_without_a_fetch(host: MediaHost, opened: Any) -> None:
    fetcher = opened()
    fetcher.check(host.url("/cat.png"), PART)
    for url in ("http://10.0.0.1/", "file:///etc/passwd"):
        with pytest.raises(MediaUrlRefused) as caught:
            fetcher.check(url, PART)
        assert caught.value.param == PART
    assert host.connections == 0


async def test_closing_ends_what_runs(host: MediaHost) -> None:
    fetcher = MediaFetcher(MediaUrlSettings(**LOOPBACK), LIMIT)
    task = asyncio.create_task(fetch(fetcher, host.url("/silent"), PART))
    await until(lambda: host.gets("/silent"), "a request")
    await fetcher.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: host.open == 0, "no connection")
