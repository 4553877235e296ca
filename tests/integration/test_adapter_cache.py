"""app.adapters.cache and what fetches into it: what stays on the disk, for whom, and for how long."""

import asyncio
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from app import tiny_model
from app.adapters import (
    Adapter,
    AdapterCacheFull,
    AdapterRefused,
    AdapterTooLarge,
    AdapterUnreachable,
    fetch,
    release,
)
from app.adapters.holds import HOLDS
from app.settings_adapters import AdapterSettings
from tests.adapters import WEIGHTS, make_adapter
from tests.polling import until


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """What a test holds, the next one does not."""
    yield
    for folder in [*HOLDS.held()]:
        HOLDS.release(folder)


class Place:
    """A root with sources, and a cache."""

    def __init__(self, root: Path, model: Path) -> None:
        self.sources, self.cache = root / "sources", root / "cache"
        self.sources.mkdir()
        self._model = model

    def make(self, name: str, **how: Any) -> str:
        return str(make_adapter(self.sources / name, self._model, **how))

    def settings(self, **more: Any) -> AdapterSettings:
        return AdapterSettings(cache_directory=str(self.cache), allowed_root=str(self.sources), **more)

    async def fetch(self, name: str, **more: Any) -> Adapter:
        limits = {key: more.pop(key) for key in ("cache_gb", "max_mb", "fetch_timeout_s") if key in more}
        return await fetch(name, str(self.sources / name), self.settings(**limits), **{"max_rank": 16} | more)

    def versions(self) -> set[str]:
        return {one.name for one in (self.cache / "versions").iterdir()}

    def rest(self) -> list[Path]:
        """Files and folders that are no version."""
        return [*(self.cache / "staging").iterdir(), *(self.cache / "flights").iterdir()]


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    return Place(tmp_path, model)


async def test_what_comes_back(place: Place) -> None:
    place.make("sql", rank=4)
    adapter = await place.fetch("sql")
    assert adapter.id == f"sql@{adapter.version}" and adapter.rank == 4 and adapter.path.startswith("/")
    assert contents(Path(adapter.path)) == contents(place.sources / "sql")
    assert adapter.size == sum(map(len, contents(Path(adapter.path)).values()))
    assert not [one for one in place.cache.glob("versions/*/*") if one.stat().st_mode & 0o222]
    assert place.versions() == {adapter.version} and place.rest() == []


async def test_equal_content_is_one_folder_whatever_it_is_called(place: Place) -> None:
    place.make("sql")
    shutil.copytree(place.sources / "sql", place.sources / "copy")
    (place.sources / "copy" / "README.md").write_text("not a part of it")
    first, second = await place.fetch("sql"), await place.fetch("copy")
    assert first.version == second.version and first.path == second.path and first.id != second.id
    assert place.versions() == {first.version}


async def test_other_content_at_the_same_source_is_another_version(place: Place) -> None:
    place.make("sql", seed=1)
    first = await place.fetch("sql")
    place.make("sql", seed=2)
    second = await place.fetch("sql")
    assert place.versions() == {first.version, second.version} and first.path != second.path


async def test_a_version_that_is_here_needs_no_source(place: Place) -> None:
    place.make("sql")
    first = await place.fetch("sql")
    shutil.rmtree(place.sources / "sql")
    assert await place.fetch("sql", version=first.version) == first
    with pytest.raises(AdapterRefused, match="rank is 8"):
        await place.fetch("sql", version=first.version, max_rank=4)
    with pytest.raises(AdapterUnreachable):
        await place.fetch("sql")


async def test_a_version_that_the_source_no_longer_has(place: Place) -> None:
    place.make("sql", seed=1)
    first = await place.fetch("sql")
    release(first)
    shutil.rmtree(first.path)
    place.make("sql", seed=2)
    with pytest.raises(AdapterRefused, match=f"and {first.version} is asked for"):
        await place.fetch("sql", version=first.version)
    assert place.versions() == set() and place.rest() == []


async def test_an_adapter_for_another_model(vllm: Any, place: Place, model: Path) -> None:
    place.make("own")
    other = Path(place.make("other")) / WEIGHTS
    save_file({name.replace("layers.2.", "layers.9."): one for name, one in load_file(other).items()}, other)
    with pytest.raises(AdapterRefused, match="for another one"):
        await place.fetch("other", base_model=str(model))
    assert place.versions() == set() and place.rest() == []
    await place.fetch("own", base_model=str(model))


async def test_the_least_recently_used_goes_first_and_none_that_is_held(place: Place) -> None:
    for name in "abcd":
        place.make(name, seed=ord(name))
    held, old, fresh = [await place.fetch(name) for name in "abc"]
    release(fresh)
    release(old)
    release(await place.fetch("b"))  # used again
    room = 3.5 * held.size / 1e9
    last = await place.fetch("d", cache_gb=room)
    assert place.versions() == {held.version, old.version, last.version} and place.rest() == []
    await place.fetch("b", cache_gb=room)
    with pytest.raises(AdapterCacheFull, match="adapters.cache_gb"):
        await place.fetch("c", cache_gb=room)
    assert place.versions() == {held.version, old.version, last.version} and place.rest() == []
    release(held)
    await place.fetch("c", cache_gb=room)
    assert place.versions() == {old.version, last.version, fresh.version}


async def test_who_fetched_twice_releases_twice(place: Place) -> None:
    place.make("a", seed=1)
    place.make("b", seed=2)
    adapter = await place.fetch("a")
    assert await place.fetch("a") == adapter
    release(adapter)
    room = 1.5 * adapter.size / 1e9
    with pytest.raises(AdapterCacheFull):
        await place.fetch("b", cache_gb=room)
    release(adapter)
    second = await place.fetch("b", cache_gb=room)
    assert place.versions() == {second.version}
    with pytest.raises(KeyError):
        release(adapter)


async def test_larger_than_the_cache_or_than_allowed(place: Place) -> None:
    place.make("sql")
    with pytest.raises(AdapterTooLarge, match="cache_gb"):
        await place.fetch("sql", cache_gb=1e-6)
    with pytest.raises(AdapterTooLarge, match="max_mb"):
        await place.fetch("sql", max_mb=0.01)
    assert place.versions() == set() and place.rest() == []


async def test_a_cache_that_cannot_be_written(place: Place) -> None:
    place.make("sql")
    place.cache.write_text("a file where the folder should be")
    with pytest.raises(AdapterCacheFull, match="cannot be written to: "):
        await place.fetch("sql")


async def test_the_same_source_asked_for_by_many_at_once(place: Place) -> None:
    place.make("sql")
    found = await asyncio.gather(*(place.fetch("sql") for _ in range(10)))
    assert len({*found}) == 1 and place.rest() == []
    for one in found:
        release(one)
    with pytest.raises(KeyError):
        release(found[0])


async def test_what_a_process_said_of_a_source_before_it_died(place: Place) -> None:
    """After it had told the version, and before it removed the file."""
    source = place.make("sql", seed=1)
    first = await place.fetch("sql")
    flight = place.cache / "flights" / hashlib.sha256(source.encode()).hexdigest()
    flight.write_text(first.version)
    place.make("sql", seed=2)
    second = await place.fetch("sql")
    assert second.version != first.version and place.rest() == []
    flight.write_text("0" * 32)  # one that the cache does not have any more
    assert await place.fetch("sql", fetch_timeout_s=20) == second
    assert place.rest() == []


FETCH = """
import asyncio, sys
from app.adapters import fetch
from app.settings_adapters import AdapterSettings
cache, root, source = sys.argv[1:]
settings = AdapterSettings(cache_directory=cache, allowed_root=root)
print("ready", flush=True)
sys.stdin.readline()
print(asyncio.run(fetch("sql", source, settings, max_rank=16)).id, flush=True)
sys.stdin.readline()
"""


def fetcher(place: Place, source: Path) -> "subprocess.Popen[str]":
    """A process that fetches when it is told to, and then holds what it has until it is told to end."""
    command = [sys.executable, "-W", "error", "-c", FETCH, str(place.cache), str(place.sources), str(source)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_processes_that_fetch_the_same_at_once(place: Place) -> None:
    processes = [fetcher(place, Path(place.make("sql"))) for _ in range(3)]
    try:
        assert [hear(one) for one in processes] == ["ready"] * 3
        for one in processes:
            say(one)
        (found,) = {hear(one) for one in processes}
        assert place.versions() == {found.removeprefix("sql@")} and place.rest() == []
        place.make("other", seed=1)
        room = 1.5 * sum(one.stat().st_size for one in (place.sources / "other").iterdir()) / 1e9
        with pytest.raises(AdapterCacheFull):  # what others hold is held
            await place.fetch("other", cache_gb=room)
    finally:
        for one in processes:
            say(one)
            one.communicate(timeout=30)
    assert [one.returncode for one in processes] == [0] * 3
    other = await place.fetch("other", cache_gb=room)  # until they end
    assert place.versions() == {other.version}


@pytest.mark.parametrize("delay_s", [0, 0.002, 0.005, 0.01, 0.02, 0.05])
async def test_who_gives_up_leaves_nothing(delay_s: float, place: Place) -> None:
    """Wherever the fetch is by then; without a delay it has only begun."""
    place.make("sql")
    fetching = asyncio.create_task(place.fetch("sql"))
    await asyncio.sleep(delay_s)
    fetching.cancel()
    (found,) = await asyncio.gather(fetching, return_exceptions=True)
    if isinstance(found, Adapter):
        release(found)
    assert isinstance(found, asyncio.CancelledError) or delay_s
    await place.fetch("sql")  # it waits for the other one to end
    assert place.rest() == []
    await until(lambda: len(HOLDS.held()) == 1, "the other one is not held")
    HOLDS.release(*HOLDS.held())
    assert HOLDS.held() == []
