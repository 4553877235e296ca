"""`s3://` sources, from a real S3 server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app import tiny_model
from app.adapters import AdapterRefused, AdapterTooLarge, AdapterUnreachable, fetch, release
from app.adapters.intake import CONFIG, WEIGHTS
from app.ports import reserve
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaUrlSettings
from tests.adapters import make_adapter
from tests.s3_server import S3_ENVIRONMENT, S3Server, s3_server


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    return make_adapter(folder / "sql", tiny_model.build(folder / "tiny"))


@pytest.fixture(scope="module")
def server(adapter: Path) -> Iterator[S3Server]:
    with s3_server() as started:
        started.upload(adapter, "adapters", "team/sql")
        yield started


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


class Place:
    def __init__(self, cache: Path, url: str) -> None:
        self.cache = cache
        self._url = url

    async def fetch(self, source: str, max_mb: float = 10, url: str | None = None) -> dict[str, bytes]:
        """The files that are fetched."""
        settings = AdapterSettings(cache_directory=str(self.cache), s3_endpoint_url=url or self._url, max_mb=max_mb)
        adapter = await fetch("sql", source, settings, max_rank=16, urls=MediaUrlSettings())
        release(adapter)
        return {one.name: one.read_bytes() for one in self.cache.glob(f"versions/{adapter.version}/*")}

    async def refusal(self, source: str, max_mb: float = 10, url: str | None = None) -> AdapterRefused:
        with pytest.raises(AdapterRefused) as caught:
            await self.fetch(source, max_mb, url)
        assert not list(self.cache.glob("*/*"))
        assert "127.0.0.1" not in caught.value.message
        return caught.value


@pytest.fixture
def place(tmp_path: Path, server: S3Server) -> Place:
    return Place(tmp_path / "cache", server.url)


async def test_an_adapter(place: Place, adapter: Path) -> None:
    whole = {name: (adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    assert await place.fetch("s3://adapters/team/sql") == whole
    assert await place.fetch("S3://adapters/team/sql/") == whole


async def test_the_server_that_awss_own_variable_names(
    place: Place, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    settings = AdapterSettings(cache_directory=str(tmp_path / "cache"))
    adapter = await fetch("sql", "s3://adapters/team/sql", settings, max_rank=16, urls=MediaUrlSettings())
    release(adapter)


async def test_a_bucket_or_a_key_that_is_not_there(place: Place) -> None:
    refusal = await place.refusal("s3://no-such-bucket/sql")
    assert isinstance(refusal, AdapterUnreachable) and refusal.status == 400
    assert refusal.message == "there is no S3 bucket no-such-bucket"
    assert (await place.refusal("s3://adapters/team/other")).message == f"s3://adapters/team/other has no {CONFIG}"


async def test_a_pickle(place: Place, server: S3Server) -> None:
    server.client.put_object(Bucket="adapters", Key="pickled/adapter_config.json", Body=b"{}")
    assert (await place.refusal("s3://adapters/pickled")).message == f"s3://adapters/pickled has no {WEIGHTS}"
    server.client.put_object(Bucket="adapters", Key="pickled/adapter_model.bin", Body=b"pickle")
    assert "has adapter_model.bin: pickle is refused" in (await place.refusal("s3://adapters/pickled")).message


async def test_truncated_weights(place: Place, server: S3Server, adapter: Path) -> None:
    source = server.upload(adapter, "adapters", "truncated")
    server.client.put_object(
        Bucket="adapters", Key="truncated/adapter_model.safetensors", Body=(adapter / WEIGHTS).read_bytes()[:-100]
    )
    assert "truncated" in (await place.refusal(source)).message


async def test_more_bytes_than_allowed(place: Place) -> None:
    assert isinstance(await place.refusal("s3://adapters/team/sql", max_mb=0.05), AdapterTooLarge)


async def test_no_access(place: Place) -> None:
    with s3_server(closed=True) as closed:
        message = (await place.refusal("s3://adapters/team/sql", url=closed.url)).message
    assert message.startswith("this server has no access to s3://adapters/team/sql")


async def test_no_credentials(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "(NoCredentialsError)" in (await place.refusal("s3://adapters/team/sql")).message


async def test_no_server(place: Place) -> None:
    refusal = await place.refusal("s3://adapters/team/sql", url=f"http://127.0.0.1:{reserve()}")
    assert isinstance(refusal, AdapterUnreachable) and "(EndpointConnectionError)" in refusal.message


async def test_a_url_that_is_no_server(place: Place) -> None:
    assert "does not give the adapter" in (await place.refusal("s3://adapters/team/sql", url="http://")).message
