"""Sources that are no adapter for the model, through the API's route and the workers' fetch: why, and nothing more."""

import io
import os
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import keys, tiny_model
from app.adapters.holds import HOLDS
from app.adapters.intake import CONFIG, WEIGHTS
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaUrlSettings
from tests.adapters import TARGETS, make_adapter
from tests.certificates import certified
from tests.integration.adapter_api import client
from tests.integration.adapter_cluster import LIMITS, MODEL, Member, RealSources, cluster
from tests.media_server import MediaHost, media_server
from tests.messages import DECODE, PREFILL
from tests.polling import until
from tests.s3_server import S3_ENVIRONMENT, S3Server, s3_server

HOST = "localhost"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MediaHost, Path]]:
    """A host, and the authority that vouches for it."""
    context, authority = certified(HOST, tmp_path_factory.mktemp("tls"))
    with media_server(context) as host:
        yield host, authority


class Place:
    """Where adapters lie, and those that a bad one is made of."""

    def __init__(self, root: Path, model: Path, s3: S3Server, host: MediaHost) -> None:
        self.root, self.model, self.s3, self.host = root, model, s3, host

    def adapter(self, name: str, **more: Any) -> Path:
        return make_adapter(self.root / name, self.model, **more)


def good(place: Place) -> str:
    return str(place.adapter("good"))


def a_missing_file(place: Place) -> str:
    folder = place.adapter("missing")
    (folder / WEIGHTS).unlink()
    return str(folder)


def a_folder_that_is_not_there(place: Place) -> str:
    return f"file://{place.root}/nothing"


def a_folder_elsewhere(place: Place) -> str:
    return str(place.root.parent)


def a_link_out_of_the_root(place: Place) -> str:
    folder = place.adapter("link")
    (folder / CONFIG).rename(place.root.parent / "elsewhere.json")
    (folder / CONFIG).symlink_to(place.root.parent / "elsewhere.json")
    return str(folder)


def a_larger_rank(place: Place) -> str:
    return str(place.adapter("rank", rank=2 * LIMITS.max_rank))


def a_pickle(place: Place) -> str:
    folder = place.adapter("pickle")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    return str(folder)


def truncated_weights(place: Place) -> str:
    folder = place.adapter("truncated")
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1000)
    return str(folder)


def no_configuration(place: Place) -> str:
    folder = place.adapter("configuration")
    (folder / CONFIG).write_text("{")
    return str(folder)


def modules_of_another_model(place: Place) -> str:
    folder = place.adapter("other", targets=[*TARGETS])
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data.replace(b"self_attn", b"cross_att"))
    return str(folder)


def a_bucket_that_is_not_there(place: Place) -> str:
    return "s3://nobodys-bucket/sql"


def a_key_that_is_not_there(place: Place) -> str:
    place.s3.upload(place.adapter("uploaded"), "adapters", "team/sql")
    return "s3://adapters/team/other"


def an_archive_that_leads_out(place: Place) -> str:
    folder, packed = place.adapter("packed"), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder / WEIGHTS, WEIGHTS)
        archive.add(folder / CONFIG, f"../{CONFIG}")
    place.host.put("/sql.tar.gz", packed.getvalue(), "application/gzip")
    return place.host.url("/sql.tar.gz", HOST)


def an_archive_that_is_not_there(place: Place) -> str:
    return place.host.url("/status/404", HOST)


#: And what the answer says of each.
BAD: dict[Callable[[Place], str], str] = {
    a_missing_file: f"has no {WEIGHTS}",
    a_folder_that_is_not_there: "No such file or directory",
    a_folder_elsewhere: "out of adapters.allowed_root",
    a_link_out_of_the_root: "out of adapters.allowed_root",
    a_larger_rank: "the adapter's rank is 16, and the engine's --max-lora-rank is 8",
    a_pickle: "adapter_model.bin: pickle is refused",
    truncated_weights: "it is truncated, or no safetensors file",
    no_configuration: f"{CONFIG}: it is no JSON",
    modules_of_another_model: "the adapter is for another one",
    a_bucket_that_is_not_there: "there is no S3 bucket nobodys-bucket",
    a_key_that_is_not_there: f"s3://adapters/team/other has no {CONFIG}",
    an_archive_that_leads_out: f"the archive's member '../{CONFIG}' leads out of it",
    an_archive_that_is_not_there: "the URL's host answered with status 404",
}


@pytest.fixture
def place(tmp_path: Path, model: Path, s3: S3Server, https: tuple[MediaHost, Path]) -> Place:
    (tmp_path / "root").mkdir()
    return Place(tmp_path / "root", model, s3, https[0])


@pytest.fixture
async def members(
    vllm: Any,
    redis: Any,
    tmp_path: Path,
    place: Place,
    https: tuple[MediaHost, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[list[Member]]:
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    reachable: dict[str, Any] = {
        "allow_private": "127.0.0.0/8,::1/128",
        "allowed_ports": "any",
        "ca_bundle": str(https[1]),
    }
    own = AdapterSettings(
        cache_directory=str(tmp_path / "cache"), allowed_root=str(place.root), s3_endpoint_url=place.s3.url
    )
    settings = {"model": str(place.model), "served_model_name": MODEL, "adapters": own}
    sources = RealSources(MediaUrlSettings(**reachable))
    async with cluster(redis, sources, PREFILL, DECODE, settings=settings) as made:
        yield made


def cached(cache: Path) -> list[str]:
    """What is in the cache: versions, what is being fetched, and flights."""
    return sorted(str(one.relative_to(cache)) for one in cache.glob("*/*"))


@pytest.mark.parametrize("bad", BAD, ids=lambda one: one.__name__)
async def test_a_bad_source_leaves_nothing(
    redis: Any, members: list[Member], place: Place, tmp_path: Path, bad: Callable[[Place], str]
) -> None:
    async with client(redis) as http:
        uri = bad(place)
        refused = await http.post("/v1/loras", json={"lora_name": "sql", "source": {"uri": uri}})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_adapter"), refused.text
        assert f"{DECODE.worker}, {PREFILL.worker}: " in error["message"] and BAD[bad] in error["message"]
        assert str(tmp_path) not in error["message"]
        await until(lambda: not cached(tmp_path / "cache"), "nothing is in the cache")
        assert not HOLDS.held() and not any(one.adapters._held.loads or one.engine.most for one in members)
        assert not any(one.adapters.held or one.adapters.failed for one in members)
        assert (await http.get("/v1/loras")).json()["count"] == 0
        # But why, for those who ask, and not for long.
        assert set(await redis.keys("*lora*")) == {keys.lora_loads(MODEL).encode()}
        assert (await http.get("/v1/loras/sql")).json()["state"] == "failed"
        await _is_loaded_then(http, members, good(place), tmp_path / "cache")


async def _is_loaded_then(http: httpx.AsyncClient, members: list[Member], uri: str, cache: Path) -> None:
    """The name is free, and the workers are as good as new."""
    loaded = await http.post("/v1/loras", json={"lora_name": "sql", "source": {"uri": uri}})
    assert loaded.status_code == 200, loaded.text
    assert [one.engine.loaded for one in members] == [[loaded.json()["id"]]] * 2
    assert cached(cache) == [f"versions/{loaded.json()['version']}"]
    assert (await http.delete("/v1/loras/sql")).status_code == 200
    await until(lambda: not any(one.adapters.held for one in members) and not HOLDS.held(), "it goes")
