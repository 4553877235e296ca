"""`hf://` sources, from a hub on loopback."""

import asyncio
import os
import sys
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
from tests.hub_server import Hub, hub_server

TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """Two of the same name."""
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_model.build(folder / "tiny")
    made = [make_adapter(folder / str(seed), model, seed=seed, targets=["q_proj"]) for seed in (1, 2)]
    return [{name: (one / name).read_bytes() for name in (CONFIG, WEIGHTS)} for one in made]


@pytest.fixture
def hub(adapters: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as served:
        served.repos["org/sql"] = adapters[0] | {"README.md": b"", "training_args.bin": b"pickle"}
        served.repos["org/sql@refs%2Fpr%2F1"] = adapters[1]
        point_to(served.url, monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield served


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does where the library is imported after it is set."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + TEMPLATE)


class Place:
    def __init__(self, cache: Path) -> None:
        self.cache = cache

    async def fetch(self, source: str, max_mb: float = 10) -> dict[str, bytes]:
        """The files that are fetched."""
        settings = AdapterSettings(cache_directory=str(self.cache), max_mb=max_mb)
        adapter = await fetch("sql", source, settings, max_rank=16, urls=MediaUrlSettings())
        release(adapter)
        return {one.name: one.read_bytes() for one in self.cache.glob(f"versions/{adapter.version}/*")}

    async def refusal(self, source: str, max_mb: float = 10) -> AdapterRefused:
        with pytest.raises(AdapterRefused) as caught:
            await self.fetch(source, max_mb)
        assert not list(self.cache.glob("*/*"))
        assert "127.0.0.1" not in caught.value.message
        return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "cache")


async def test_a_repository(place: Place, hub: Hub, adapters: list[dict[str, bytes]], tmp_path: Path) -> None:
    assert await place.fetch("hf://org/sql") == adapters[0]
    assert not any("training_args" in path for path, _ in hub.requests)
    assert all(has_token for path, has_token in hub.requests if "org/sql" in path)
    assert not (tmp_path / "hub").exists()


async def test_a_revision(place: Place, hub: Hub, adapters: list[dict[str, bytes]]) -> None:
    assert await place.fetch("hf://org/sql@main") == adapters[0]
    assert await place.fetch("hf://org/sql@refs/pr/1") == adapters[1]
    refusal = await Place(place.cache.parent / "other").refusal("hf://org/sql@v9")
    assert isinstance(refusal, AdapterUnreachable) and refusal.message == "org/sql on the hub has no revision v9"


async def test_the_token_stays_with_the_hub(place: Place, hub: Hub, adapters: list[dict[str, bytes]]) -> None:
    with hub_server() as storage:
        storage.repos["big/files"] = adapters[0]
        commit = next(iter(storage.answer("/api/models/big/files")[2].decode().split('"sha": "')[1:]))[:40]
        hub.moved[WEIGHTS] = f"{storage.url}/big/files/resolve/{commit}/{WEIGHTS}"
        assert await place.fetch("hf://org/sql") == adapters[0]
        assert [has_token for _, has_token in storage.requests] == [False]


async def test_repositories_that_are_not_given(place: Place, hub: Hub) -> None:
    assert "no repository org/absent, or shows it to others alone" in (await place.refusal("hf://org/absent")).message
    hub.errors |= {"org/gated": (403, "GatedRepo"), "org/broken": (500, ""), "org/private": (401, "RepoNotFound")}
    assert "the hub refuses org/gated (403)" in (await place.refusal("hf://org/gated")).message
    assert "the hub refuses org/broken (500)" in (await place.refusal("hf://org/broken")).message
    assert "shows it to others alone" in (await place.refusal("hf://org/private")).message
    assert "cannot be the name of a repository" in (await place.refusal("hf://org/a--b")).message


async def test_files_that_are_missing(place: Place, hub: Hub, adapters: list[dict[str, bytes]]) -> None:
    hub.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b""}
    assert (await place.refusal("hf://org/model")).message == f"hf://org/model has no {CONFIG} and no {WEIGHTS}"
    hub.repos["org/pickle"] = {CONFIG: adapters[0][CONFIG], "adapter_model.bin": b""}
    assert "has adapter_model.bin: pickle is refused" in (await place.refusal("hf://org/pickle")).message


async def test_more_bytes_than_allowed(place: Place, hub: Hub) -> None:
    assert isinstance(await place.refusal("hf://org/sql", max_mb=0.01), AdapterTooLarge)


async def test_a_hub_that_breaks_off_or_is_not_there(place: Place, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut = 100
    refusal = await place.refusal("hf://org/sql")
    assert isinstance(refusal, AdapterUnreachable) and "cannot be reached, or broke" in refusal.message
    point_to(f"http://127.0.0.1:{reserve()}", monkeypatch)
    assert "(ConnectError)" in (await place.refusal("hf://org/sql")).message


async def test_offline_the_hubs_own_cache_is_taken(
    place: Place, hub: Hub, adapters: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = (await place.refusal("hf://org/sql@main")).message
    assert message == f"HF_HUB_OFFLINE is set, and the hub's cache here has no {CONFIG} of org/sql at main"
    repo = tmp_path / "hub" / "models--org--sql"
    for name in ("refs", "snapshots/abc"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    for name, data in adapters[0].items():
        (repo / "snapshots" / "abc" / name).write_bytes(data)
    assert await place.fetch("hf://org/sql") == adapters[0]
    assert hub.requests == []


FETCH = """
import asyncio, sys
from app.adapters import fetch
from app.settings_adapters import AdapterSettings
assert not {"boto3", "huggingface_hub", "safetensors"} & sys.modules.keys()
print(asyncio.run(fetch("sql", "hf://org/sql", AdapterSettings(cache_directory=sys.argv[1]), max_rank=16)).path)
assert "boto3" not in sys.modules
"""


async def test_a_process_of_its_own(place: Place, hub: Hub, adapters: list[dict[str, bytes]]) -> None:
    """With the variable itself; and nothing that only a source needs is imported before one does."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-W", "error", "-c", FETCH, str(place.cache)],
        env=environment | {"HF_ENDPOINT": hub.url},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        printed, _ = await process.communicate()
    assert process.returncode == 0
    (version,) = place.cache.glob("versions/*")
    assert printed.decode().strip() == str(version)
    assert {one.name: one.read_bytes() for one in version.iterdir()} == adapters[0]
