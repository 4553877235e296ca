"""app.media.store on the real tensor plane: another process's plane reads what the holder keeps, both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest

from app.errors.tensors import TensorError
from app.media import MediaHolder
from app.settings_sections import TensorSettings
from app.tensors import folder
from app.tensors.plane import TensorPlane

A, B = "a" * 32, "b" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


async def _plane(root: Path, label: str, transport: Literal["auto", "nixl"]) -> AsyncIterator[TensorPlane]:
    own = folder.make_folder(root, label)
    plane = TensorPlane(own.path, TensorSettings(directory=str(root), transport=transport), 100)
    try:
        await plane.start()
        yield plane
    finally:
        await plane.close()
        own.remove()


@pytest.fixture
async def holding(root: Path) -> AsyncIterator[TensorPlane]:
    async for plane in _plane(root, "api", "auto"):
        yield plane


@pytest.fixture(params=["auto", "nixl"])
async def reading(root: Path, request: pytest.FixtureRequest) -> AsyncIterator[TensorPlane]:
    async for plane in _plane(root, "worker", request.param):
        yield plane


def buffers(plane: TensorPlane) -> list[str]:
    return [one.name for one in plane.directory.iterdir() if not one.name.startswith(".")]


async def test_a_worker_reads_what_is_held_and_nothing_after_that(holding: TensorPlane, reading: TensorPlane) -> None:
    holder = MediaHolder(holding, holding.directory, 10_000_000)
    data = bytes(range(256)) * 5000
    source = await holder.put(A, data, 60)
    assert bytes(await reading.read(source)) == data
    again = await holder.put(A, data, 600)
    assert (again.nonce, again.address) == (source.nonce, source.address) and again.expires_at > source.expires_at
    holder.release(A)
    assert bytes(await reading.read(again)) == data
    holder.release(A)
    assert bytes(await reading.read(again)) == data, "it is kept"
    await holder.close()
    assert (buffers(holding), holder.size) == ([], 0)
    with pytest.raises(TensorError):
        await reading.read(again)


async def test_many_requests_at_once(holding: TensorPlane, reading: TensorPlane) -> None:
    """Twenty media, ten requests for each, coming and going as they like."""
    holder = MediaHolder(holding, holding.directory, 10_000_000)

    async def request(number: int) -> None:
        identity = f"{number % 20:032x}"
        data = identity.encode() * (1 + number % 20 * 500)
        source = await holder.put(identity, data, 60)
        assert bytes(await reading.read(source)) == data
        holder.release(identity)

    await asyncio.gather(*(request(number) for number in range(200)))
    assert (holder.users, len(holder)) == (0, 20)
    await holder.close()
    assert (buffers(holding), holder.size, len(holder)) == ([], 0, 0)


async def test_room_is_made_while_others_read(holding: TensorPlane, reading: TensorPlane) -> None:
    """Twenty media where six have room, five at a time: each is read whole while it is held."""
    holder = MediaHolder(holding, holding.directory, 6 * 104_096)
    turns = asyncio.Semaphore(5)

    async def request(number: int) -> None:
        identity = f"{number % 20:032x}"
        data = bytes([number % 20]) * 100_000
        async with turns:
            source = await holder.put(identity, data, 60)
            assert bytes(await reading.read(source)) == data
            holder.release(identity)

    await asyncio.gather(*(request(number) for number in range(100)))
    assert (holder.users, holder.size <= holder.capacity) == (0, True)
    await holder.close()
    assert (buffers(holding), holder.size) == ([], 0)


async def test_requests_that_are_cancelled_leave_nothing(holding: TensorPlane) -> None:
    holder = MediaHolder(holding, holding.directory, 100_000_000)
    for delay in range(12):
        coming = asyncio.create_task(holder.put(B, bytes(3_000_000), 60))
        await asyncio.sleep(delay / 2000)
        coming.cancel()
        (result,) = await asyncio.gather(coming, return_exceptions=True)
        if not isinstance(result, BaseException):
            holder.release(B)
    await holder.close()
    assert (buffers(holding), holder.size) == ([], 0)
