"""`https://` sources, from a host on loopback, under the policy for media URLs."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import tiny_model
from app.adapters import Adapter, AdapterRefused, AdapterTooLarge, AdapterUnreachable, fetch, release
from app.adapters.intake import CONFIG, WEIGHTS
from app.adapters.sources import archive
from app.ports import reserve
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaUrlSettings
from tests.adapters import make_adapter
from tests.certificates import certified
from tests.media_server import MediaHost, media_server
from tests.polling import until

NAME = "localhost"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("adapters")
    made = make_adapter(folder / "sql", tiny_model.build(folder / "tiny"), targets=["q_proj"], rank=2)
    return {name: (made / name).read_bytes() for name in (CONFIG, WEIGHTS)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MediaHost, Path]]:
    context, authority = certified(NAME, tmp_path_factory.mktemp("tls"))
    with media_server(context) as host:
        yield host, authority


def packed(files: dict[str, bytes], mode: str) -> bytes:
    into = io.BytesIO()
    if mode == "zip":
        with zipfile.ZipFile(into, "w") as one:
            for name, data in files.items():
                one.writestr(name, data)
        return into.getvalue()
    with tarfile.open(fileobj=into, mode=mode) as many:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            many.addfile(info, io.BytesIO(data))
    return into.getvalue()


class Place:
    def __init__(self, cache: Path, host: MediaHost, authority: Path) -> None:
        self.cache, self.host, self._authority = cache, host, authority

    def put(self, path: str, data: bytes) -> str:
        self.host.put(path, data, "application/octet-stream")
        return self.url(path)

    def url(self, path: str) -> str:
        return self.host.url(path, NAME)

    def urls(self, **more: Any) -> MediaUrlSettings:
        """A policy that lets this host be reached."""
        reachable = {"allow_private": "127.0.0.0/8,::1/128", "allowed_ports": "any", "ca_bundle": str(self._authority)}
        return MediaUrlSettings(**reachable | more)

    async def fetch(self, source: str, urls: MediaUrlSettings | None = None, **limits: Any) -> Adapter:
        settings = AdapterSettings(cache_directory=str(self.cache), **{"max_mb": 1} | limits)
        adapter = await fetch("sql", source, settings, max_rank=16, urls=urls or self.urls())
        release(adapter)
        return adapter

    async def refusal(self, source: str, urls: MediaUrlSettings | None = None, **limits: Any) -> AdapterRefused:
        with pytest.raises(AdapterRefused) as caught:
            await self.fetch(source, urls, **limits)
        await until(lambda: not list(self.cache.glob("*/*")), "nothing is left")
        assert "127.0.0.1" not in caught.value.message and source not in caught.value.message
        return caught.value


@pytest.fixture
def place(tmp_path: Path, served: tuple[MediaHost, Path]) -> Place:
    return Place(tmp_path / "cache", *served)


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tgz", "w:gz"), ("a.zip", "zip")])
async def test_an_archive(name: str, mode: str, place: Place, adapter: dict[str, bytes]) -> None:
    source = place.put(f"/{name}?signature=secret", packed({f"sql/{key}": data for key, data in adapter.items()}, mode))
    found = await place.fetch(source)
    assert {one.name: one.read_bytes() for one in place.cache.glob("versions/*/*")} == adapter
    assert found.path == str(place.cache / "versions" / found.version)
    assert not list(place.cache.glob("staging/*")) + list(place.cache.glob("flights/*"))


async def test_redirects(place: Place, adapter: dict[str, bytes]) -> None:
    place.put("/good.tgz", packed(adapter, "w:gz"))
    await place.fetch(place.url("/chain/3/good.tgz"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chain/4/good.tgz", "more than 3 redirects"),
        ("/loop", "more than 3 redirects"),
        ("/redirect/302?https://169.254.169.254/x.tgz", "a redirect of the URL is refused"),
        ("/redirect/302?http://localhost/x.tgz", "from https to http"),
        ("/redirect/302?", "more than 3 redirects"),
        ("/absent.tgz", "answered with status 404"),
        ("/status/500", "answered with status 500"),
        ("/long/good.tgz", "broke its answer off"),
        ("/garbage", "broke its answer off"),
        ("/html", "damaged, or neither a tar nor a zip"),
        ("/empty", "the archive"),
    ],
)
async def test_answers_that_are_no_archive(path: str, said: str, place: Place, adapter: dict[str, bytes]) -> None:
    place.put("/good.tgz", packed(adapter, "w:gz"))
    assert said in (await place.refusal(place.url(path))).message


@pytest.mark.parametrize("path", ["/endless", "/endless-chunks", "/huge"])
async def test_an_answer_without_an_end(path: str, place: Place) -> None:
    assert isinstance(await place.refusal(place.url(path)), AdapterTooLarge)


async def test_a_host_that_is_slow(place: Place, adapter: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("/good.tgz", packed(adapter, "w:gz"))
    for path in ("/slow/good.tgz", "/stall/good.tgz", "/silent"):
        refusal = await place.refusal(place.url(path), fetch_timeout_s=0.5)
        assert isinstance(refusal, AdapterUnreachable) and "fetch_timeout_s (0.5 s)" in refusal.message
    monkeypatch.setattr(archive, "STALL_S", 0.2)
    for path in ("/stall/good.tgz", "/silent"):
        assert "was silent for 0.2 s" in (await place.refusal(place.url(path))).message


async def test_the_policy_for_media_urls_holds(place: Place, adapter: dict[str, bytes]) -> None:
    source = place.put("/good.tgz", packed(adapter, "w:gz"))
    asked = place.host.connections
    closed = place.urls(allow_private="")
    assert "private, local or reserved address" in (await place.refusal(source, closed)).message
    elsewhere = place.urls(allowed_media_domains="example.com")
    assert "allowed_media_domains" in (await place.refusal(source, elsewhere)).message
    assert place.host.connections == asked
    assert (
        "allow_redirects"
        in (await place.refusal(place.url("/chain/1/good.tgz"), place.urls(allow_redirects=False))).message
    )


async def test_no_connection_or_no_trust(place: Place, adapter: dict[str, bytes]) -> None:
    source = place.put("/good.tgz", packed(adapter, "w:gz"))
    refusal = await place.refusal(source, place.urls(ca_bundle=None))
    assert isinstance(refusal, AdapterUnreachable) and "the URL's host" in refusal.message
    assert "takes no connection" in (await place.refusal(f"https://{NAME}:{reserve()}/a.tgz")).message


@pytest.mark.parametrize("mode", ["w", "w:gz", "zip"])
async def test_bad_archives_leave_nothing(mode: str, place: Place, adapter: dict[str, bytes]) -> None:
    bad: dict[str, dict[str, bytes]] = {
        "leads out of it": adapter | {"../../evil": b"x"},
        "pickle is refused": {CONFIG: adapter[CONFIG], "adapter_model.bin": b"x"},
        "truncated": adapter | {WEIGHTS: adapter[WEIGHTS][:-10]},
        "has no adapter_config.json": {WEIGHTS: adapter[WEIGHTS]},
    }
    for said, files in bad.items():
        assert said in (await place.refusal(place.put("/bad", packed(files, mode)))).message
    assert not list(place.cache.parent.rglob("evil"))
    assert "the archive" in (await place.refusal(place.put("/bad", packed(adapter, mode)[:4000]))).message


FETCH = """
import asyncio, sys
from app.adapters import fetch
from app.settings_adapters import AdapterSettings
asyncio.run(fetch("sql", sys.argv[1], AdapterSettings(cache_directory=sys.argv[2]), max_rank=16))
"""


async def test_what_a_killed_process_left_is_swept(place: Place, adapter: dict[str, bytes]) -> None:
    good = place.put("/good.tgz", packed(adapter, "w:gz"))
    policy = {
        f"TRIVET_MEDIA_URLS__{name.upper()}": value
        for name, value in {"allow_private": "127.0.0.0/8,::1/128", "allowed_ports": "any"}.items()
    } | {"TRIVET_MEDIA_URLS__CA_BUNDLE": str(place.urls().ca_bundle)}
    command = [sys.executable, "-W", "error", "-c", FETCH, place.url("/stall/good.tgz"), str(place.cache)]
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | policy, stderr=subprocess.DEVNULL)
    try:
        await until(lambda: list(place.cache.glob("staging/*/archive")), "the other one fetches", 60)
        await place.fetch(good)
        assert list(place.cache.glob("staging/*/archive")), "what a living process uses stays"
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert list(place.cache.glob("staging/*")) and list(place.cache.glob("flights/*"))
    await place.fetch(good)
    assert not list(place.cache.glob("staging/*")) + list(place.cache.glob("flights/*"))
