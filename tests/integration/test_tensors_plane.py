"""The tensor plane between two processes, over real NIXL: within one host's memory and over TCP."""

import asyncio
import errno
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors.tensors import PeerGone, TensorError, TensorExpired, TensorIncompatible, TensorMissing, TensorTooLarge
from app.messages.tensors import Descriptor
from app.settings_sections import TensorSettings
from app.tensors import folder, nixl_reads, segment
from app.tensors.folder import Folder
from app.tensors.plane import TensorPlane
from app.tensors.segment import Header
from tests.integration.tensor_holder import PROGRESS_DELAY_US, Holder, pattern
from tests.polling import until

MIB = 1 << 20
TCP = "tcp,self"
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def start(root: Path) -> Iterator[Callable[..., Holder]]:
    """Starts holders; all are ended with the module, and have to end well unless a test killed them."""
    holders: list[Holder] = []

    def make(wire: str | None = None) -> Holder:
        holders.append(Holder(root, wire))
        return holders[-1]

    yield make
    statuses = [one.end() for one in holders]
    assert set(statuses) <= {0, -signal.SIGKILL}


@pytest.fixture(scope="module")
def holders(start: Callable[..., Holder]) -> dict[str, Holder]:
    """One whose memory is read within the host, and one that sends over TCP, as between hosts."""
    made = {"memory": start(), "tcp": start(TCP)}
    for one in made.values():
        one.hear()
    return made


@pytest.fixture(params=["memory", "tcp"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", TCP)
    return str(request.param)


@pytest.fixture
def holder(holders: dict[str, Holder], wire: str) -> Iterator[Holder]:
    yield holders[wire]
    # A reader can do nothing that kills it.
    assert holders[wire].ask("ping")


@pytest.fixture
def tcp(holders: dict[str, Holder], monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    monkeypatch.setenv("UCX_TLS", TCP)
    yield holders["tcp"]
    assert holders["tcp"].ask("ping")


@pytest.fixture
def own(root: Path) -> Iterator[Folder]:
    made = folder.make_folder(root, "reader")
    yield made
    made.remove()


@pytest.fixture
async def plane(own: Folder, root: Path) -> AsyncIterator[Make]:
    """Makes planes in the reader's folder, by their settings."""
    planes: list[TensorPlane] = []

    async def make(transport: str = "auto", **settings: Any) -> TensorPlane:
        made = TensorPlane(
            own.path, TensorSettings(directory=str(root), transport=transport, **settings), PROGRESS_DELAY_US
        )
        await made.start()
        planes.append(made)
        return made

    yield make
    for one in planes:
        await one.close()
    left = sorted(one.name for one in own.path.iterdir() if one.name.startswith(".") and one.name != folder.LOCK)
    assert left == []


def changed(descriptor: Descriptor, **fields: Any) -> Descriptor:
    return descriptor.model_copy(update=fields)


async def test_on_one_host_the_file_gets_a_second_name(holders: dict[str, Holder], plane: Make, own: Folder) -> None:
    holder = holders["memory"]
    given = holder.publish(seed=1)
    reader = await plane()
    header = await reader.fetch(given, own.path / "a")
    assert header == Header(name="item1", nonce=given.nonce, dtype="float32", shape=(MIB // 4,), nbytes=MIB)
    assert inode(own.path / "a") == inode(given.path)
    # Once more over what is there already, and after the holder is done with it.
    await reader.fetch(given, own.path / "a")
    holder.ask("withdraw", path=given.path)
    assert segment.read_payload(own.path / "a", header) == pattern(1, MIB)
    assert (reader.counts.mapped, reader.counts.mapped_bytes, reader.counts.nixl) == (2, 2 * MIB, 0)
    assert sorted(one.name for one in own.path.iterdir()) == [folder.LOCK, "a"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EACCES])
async def test_a_file_that_cannot_be_linked_is_copied(
    number: int, holders: dict[str, Holder], plane: Make, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    given = holders["memory"].publish(seed=2)
    reader = await plane()
    monkeypatch.setattr(os, "link", refuse)
    header = await reader.fetch(given, own.path / "a")
    assert segment.read_payload(own.path / "a", header) == pattern(2, MIB)
    assert inode(own.path / "a") != inode(given.path)
    assert (reader.counts.copied, reader.counts.copied_bytes, reader.counts.mapped) == (1, MIB, 0)


async def test_nixl_brings_the_same(holder: Holder, plane: Make, own: Folder) -> None:
    given = holder.publish(seed=3, nbytes=3 * MIB + 4)
    reader = await plane("nixl")
    header = await reader.fetch(given, own.path / "a")
    assert segment.read_header(own.path / "a") == header
    assert segment.read_payload(own.path / "a", header) == pattern(3, 3 * MIB + 4)
    assert inode(own.path / "a") != inode(given.path)
    assert (reader.counts.nixl, reader.counts.nixl_bytes, reader.counts.mapped) == (1, 3 * MIB + 4, 0)


async def test_what_came_by_nixl_is_passed_on_from_where_it_came_to(holder: Holder, plane: Make, own: Folder) -> None:
    reader, third = await plane("nixl"), await plane("nixl")
    given = holder.publish(seed=4)
    await reader.fetch(given, own.path / "a")
    mapped = maps().count(str(own.path / "a"))
    passed = await reader.publish(own.path / "a", 60.0)
    assert maps().count(str(own.path / "a")) == mapped
    assert passed.agent != given.agent and passed.nonce == given.nonce
    holder.ask("withdraw", path=given.path)
    assert await third.read(passed) == pattern(4, MIB)
    assert third.counts.nixl == 1


async def test_reading_leaves_no_file(holder: Holder, plane: Make, own: Folder) -> None:
    given = holder.publish(seed=5)
    for transport in ("auto", "nixl"):
        reader = await plane(transport)
        assert await reader.read(given) == pattern(5, MIB)
        assert (reader.counts.mapped, reader.counts.nixl) == ((1, 0) if transport == "auto" else (0, 1))
    assert [one.name for one in own.path.iterdir()] == [folder.LOCK]


async def test_publishing_again_renews_the_lease_alone(plane: Make, own: Folder) -> None:
    holder = await plane()
    path = own.path / "a"
    fill(path, b"1" * 64)
    first = await holder.publish(path, 10.0)
    second = await holder.publish(path, 20.0)
    assert changed(second, expires_at=0.0) == changed(first, expires_at=0.0)
    assert 9.0 < second.expires_at - first.expires_at < 11.0 and second.expires_at > time.time() + 19
    # Another file under the name is another buffer.
    path.unlink()
    fill(path, b"2" * 64)
    third = await holder.publish(path, 10.0)
    assert third.nonce != first.nonce and third.address != first.address
    with pytest.raises(TensorMissing, match="another buffer"):
        await holder.read(first)
    assert await holder.read(third) == b"2" * 64


async def test_a_plane_reads_its_own_files(plane: Make, own: Folder) -> None:
    holder = await plane("nixl")
    fill(own.path / "a", b"x" * 64)
    given = await holder.publish(own.path / "a", 60.0)
    assert await holder.read(given) == b"x" * 64
    await holder.fetch(given, own.path / "a")
    (own.path / "a").unlink()
    with pytest.raises(TensorMissing, match="took it away"):
        await holder.read(given)
    with pytest.raises(TensorMissing, match="took it away"):
        await holder.read(changed(given, path="/nowhere/a"))


@pytest.mark.parametrize("transport", ["auto", "nixl"])
async def test_withdrawn_while_descriptors_are_out(transport: str, holder: Holder, plane: Make, own: Folder) -> None:
    reader = await plane(transport)
    given = holder.publish(seed=6)
    await reader.fetch(given, own.path / "a")
    holder.ask("withdraw", path=given.path)
    for _ in range(2):
        with pytest.raises(TensorMissing, match="item6: its holder took it away"):
            await reader.fetch(given, own.path / "b")
    with pytest.raises(TensorMissing):
        await reader.read(given)
    again = holder.publish(seed=6)
    await reader.fetch(again, own.path / "b")
    with pytest.raises(TensorMissing):
        await reader.fetch(given, own.path / "c")
    assert reader.counts.failures == {"tensor_missing": 4}
    holder.ask("withdraw", path=again.path)


async def test_withdrawn_between_payload_and_end_of_a_read(
    holder: Holder, plane: Make, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await plane("nixl")
    given = holder.publish(seed=7)
    read, asked = reader._agent.read, []

    async def withdrawing(source: Descriptor, length: int, *rest: Any) -> None:
        await read(source, length, *rest)
        if not asked:
            asked.append(await asyncio.to_thread(holder.ask, "withdraw", path=given.path))

    monkeypatch.setattr(reader._agent, "read", withdrawing)
    with pytest.raises(TensorMissing):
        await reader.fetch(given, own.path / "a")
    assert asked == [True] and not (own.path / "a").exists()


async def test_withdrawing_during_reads_gives_all_or_nothing(holder: Holder, plane: Make, own: Folder) -> None:
    reader = await plane("nixl")
    outcomes = []
    for round_ in range(8):
        given = holder.publish(seed=round_, nbytes=8 * MIB)
        reads = [asyncio.create_task(reader.read(given)) for _ in range(3)]
        await asyncio.sleep(0.004 * round_)
        holder.tell("withdraw", path=given.path)
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, TensorMissing) or outcome == pattern(round_, 8 * MIB)
            outcomes.append(type(outcome))
        holder.hear()
    assert TensorMissing in outcomes


async def test_a_holder_that_is_killed(start: Callable[..., Holder], wire: str, plane: Make, own: Folder) -> None:
    victim = start(TCP if wire == "tcp" else None)
    victim.hear()
    known, stranger = await plane("nixl", timeout_s=5.0), await plane("nixl", timeout_s=5.0)
    given = victim.publish(seed=8)
    await known.fetch(given, own.path / "a")
    victim.kill()
    begin = time.monotonic()
    for reader in (known, stranger, known):
        with pytest.raises(PeerGone, match=r"is gone|cannot be reached"):
            await reader.fetch(given, own.path / "b")
    assert time.monotonic() - begin < 5.0
    assert known.counts.failures == {"peer_gone": 2}
    # On its host its file outlives it until somebody sweeps; then the network is asked, in vain.
    nearby = await plane()
    assert await nearby.read(given) == pattern(8, MIB)
    assert folder.sweep(Path(given.path).parents[2]) == [Path(given.path).parent.name]
    with pytest.raises(PeerGone):
        await nearby.read(given)


async def test_a_silent_holder(tcp: Holder, plane: Make, own: Folder) -> None:
    reader = await plane("nixl", timeout_s=0.5)
    given = tcp.publish(seed=9, nbytes=4 * MIB)
    await reader.read(given)
    with tcp.stopped():
        begin = time.monotonic()
        with pytest.raises(PeerGone, match=r"did not send item9 within 0\.5 s"):
            await reader.fetch(given, own.path / "a")
        assert 0.4 < time.monotonic() - begin < 5.0
        assert not (own.path / "a").exists()
        # What it sends late has its place until it is there.
        assert len(late_mappings(own)) == 1
    await gone(lambda: late_mappings(own))
    assert await reader.read(given) == pattern(9, 4 * MIB)


async def test_a_fetch_that_is_cancelled(tcp: Holder, plane: Make, own: Folder) -> None:
    reader = await plane("nixl")
    given = tcp.publish(seed=10, nbytes=4 * MIB)
    await reader.read(given)
    with tcp.stopped():
        fetches = [asyncio.create_task(reader.fetch(given, own.path / f"a{one}")) for one in range(3)]
        await until(lambda: transfers(reader, 3), "three transfers")
        for one in fetches:
            one.cancel()
        outcomes = await asyncio.gather(*fetches, return_exceptions=True)
        assert [one.name for one in own.path.iterdir()] == [folder.LOCK]
        assert len(late_mappings(own)) == 3
    assert all(isinstance(one, asyncio.CancelledError) for one in outcomes)
    await gone(lambda: late_mappings(own))
    await reader.fetch(given, own.path / "a")


@pytest.mark.parametrize("turns", range(12))
async def test_cancelling_at_any_moment_leaves_nothing(
    turns: int, holders: dict[str, Holder], plane: Make, own: Folder
) -> None:
    given = holders["memory"].publish(seed=11)
    for transport in ("auto", "nixl"):
        reader = await plane(transport)
        task = asyncio.create_task(reader.fetch(given, own.path / "a"))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        assert (own.path / "a").exists() == isinstance(outcome, Header)
        await reader.withdraw(own.path / "a")
        (own.path / "a").unlink(missing_ok=True)
        await gone(lambda: late_mappings(own))


async def test_closing_during_reads(
    start: Callable[..., Holder], plane: Make, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP)
    victim = start(TCP)
    victim.hear()
    reader = await plane("nixl")
    given = victim.publish(seed=12, nbytes=4 * MIB)
    await reader.read(given)
    with victim.stopped():
        task = asyncio.create_task(reader.fetch(given, own.path / "a"))
        await until(lambda: transfers(reader, 1), "a transfer")
        await reader.close()
        with pytest.raises(TensorError, match="closed"):
            await task
        # UCX ends a process that begins to answer a peer that has left.
        victim.kill()
    assert str(own.path) not in maps()
    for attempt in (reader.fetch(given, own.path / "a"), reader.read(given), reader.publish(own.path / "a", 1.0)):
        with pytest.raises(TensorError, match="closed"):
            await attempt
    await reader.withdraw(own.path / "a")
    await reader.close()


async def test_a_descriptor_out_of_date(holders: dict[str, Holder], plane: Make, own: Folder) -> None:
    reader = await plane()
    given = holders["memory"].publish(seed=13, lease_s=0.001)
    await asyncio.sleep(0.002)
    with pytest.raises(TensorExpired, match="item13: the lease"):
        await reader.fetch(given, own.path / "a")
    assert reader.counts.failures == {"tensor_expired": 1}


@pytest.mark.parametrize("transport", ["auto", "nixl"])
async def test_a_buffer_of_another_kind(transport: str, holders: dict[str, Holder], plane: Make, own: Folder) -> None:
    reader = await plane(transport)
    given = holders["memory"].publish(seed=14)
    for fields in (
        {"dtype": "int32"},
        {"shape": [MIB // 8, 2]},
        {"nbytes": MIB // 2, "shape": [MIB // 8]},
        {"name": "another"},
        # These contradict themselves.
        {"dtype": "float16"},
        {"dtype": "object"},
        {"shape": [-1]},
        {"nbytes": MIB - 1},
    ):
        with pytest.raises(TensorIncompatible):
            await reader.fetch(changed(given, **fields), own.path / "a")
        with pytest.raises(TensorIncompatible):
            await reader.read(changed(given, **fields))
    with pytest.raises(TensorMissing):
        await reader.fetch(changed(given, nonce="0" * 16), own.path / "a")
    assert not (own.path / "a").exists()
    await reader.fetch(given, own.path / "a")


async def test_the_size_limit(holders: dict[str, Holder], plane: Make, own: Folder) -> None:
    given = holders["memory"].publish(seed=15)
    reader = await plane(max_buffer_mb=1.0)
    with pytest.raises(TensorTooLarge, match=r"item15 has 1\.04858 MB; tensors\.max_buffer_mb allows 1"):
        await reader.fetch(given, own.path / "a")
    fill(own.path / "a", bytes(MIB))
    with pytest.raises(TensorTooLarge):
        await reader.publish(own.path / "a", 1.0)
    fill(own.path / "b", bytes(999_936))
    assert len(await reader.read(await reader.publish(own.path / "b", 1.0))) == 999_936


async def test_addresses_and_metadata_that_nixl_does_not_know(holder: Holder, plane: Make, own: Folder) -> None:
    reader = await plane("nixl")
    given = holder.publish(seed=16)
    await reader.read(given)
    with pytest.raises(TensorMissing, match="no such buffer"):
        await reader.read(changed(given, address=given.address + (1 << 40)))
    for metadata in ("", "%", "aGVsbG8=", given.metadata[:-8], "A" * (1 << 18)):
        with pytest.raises(TensorIncompatible, match="metadata is broken"):
            await reader.read(changed(given, metadata=metadata))
    with pytest.raises(TensorIncompatible, match="or not of somebody"):
        await reader.read(changed(given, agent="somebody"))
    assert await reader.read(given) == pattern(16, MIB)


async def test_paths_that_are_not_for_us(
    holders: dict[str, Holder], plane: Make, own: Folder, tmp_path: Path, root: Path
) -> None:
    given = holders["memory"].publish(seed=17)
    data = content(given.path)
    (tmp_path / "outside").write_bytes(data)
    (own.path / "link").symlink_to(given.path)
    (own.path / "folder").symlink_to(tmp_path)
    os.mkfifo(own.path / "pipe", 0o600)
    paths = [tmp_path / "outside", own.path / "link", own.path / "folder/outside", own.path / "pipe", own.path]
    if os.geteuid() == 0:
        (own.path / "foreign").write_bytes(data)
        os.chown(own.path / "foreign", 1, -1)
        paths.append(own.path / "foreign")
    reader = await plane()
    for path in (*map(str, paths), relative(given.path), "", str(root / ".." / tmp_path.name), "/proc/self/mem", "\0"):
        await reader.fetch(changed(given, path=path), own.path / "a")
    # NIXL was asked each time.
    assert reader.counts.mapped == reader.counts.copied == 0 and reader.counts.nixl == len(paths) + 5


async def test_files_that_are_no_buffers(holders: dict[str, Holder], plane: Make, own: Folder) -> None:
    given = holders["memory"].publish(seed=18)
    data = content(given.path)
    reader = await plane()
    for damaged in (b"", b"x", data[:4096], data[:-1], b"x" * len(data), data[:12] + b"[" + data[13:]):
        (own.path / "bad").write_bytes(damaged)
        with pytest.raises(TensorIncompatible):
            await reader.fetch(changed(given, path=str(own.path / "bad")), own.path / "a")
        with pytest.raises(TensorIncompatible):
            await reader.publish(own.path / "bad", 1.0)
    with pytest.raises(TensorMissing, match="does not exist"):
        await reader.publish(own.path / "none", 1.0)
    fill(own.path / "empty", b"")
    with pytest.raises(TensorIncompatible, match="nothing in it"):
        await reader.publish(own.path / "empty", 1.0)
    (own.path / "link").symlink_to(given.path)
    with pytest.raises(TensorError, match="symbolic link"):
        await reader.publish(own.path / "link", 1.0)


async def test_short_memory(
    holders: dict[str, Holder], plane: Make, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    given = holders["memory"].publish(seed=19)
    reader = await plane("nixl")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TensorError, match=r"no room left in .* \(tensors\.directory\)"):
        await reader.fetch(given, own.path / "a")
    assert reader.counts.failures == {"tensor_unavailable": 1}
    assert [one.name for one in own.path.iterdir()] == [folder.LOCK]


async def test_many_at_once(holder: Holder, plane: Make, own: Folder) -> None:
    reader = await plane("nixl")
    size = 64 << 10
    given = [holder.publish(seed=100 + one, nbytes=size) for one in range(20)]
    headers = await asyncio.gather(*(reader.fetch(given[one % 20], own.path / str(one)) for one in range(200)))
    for one, header in enumerate(headers):
        assert segment.read_payload(own.path / str(one), header) == pattern(100 + one % 20, size)
    assert reader.counts.nixl == 200


async def test_what_is_known_of_a_holder_stays_bounded_under_load(
    holder: Holder, plane: Make, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reads, "_MAX_KNOWN", 4)
    reader = await plane("nixl")
    size = 64 << 10
    given = [holder.publish(seed=200 + one, nbytes=size) for one in range(20)]

    async def read_on(begin: int) -> None:
        for one in range(begin, begin + 20):
            assert await reader.read(given[one % 20]) == pattern(200 + one % 20, size)

    loads = [asyncio.create_task(read_on(begin)) for begin in range(0, 20, 4)]
    known = []
    while not all(one.done() for one in loads):
        known.append(await reader._agent.call(lambda reads: [len(one.known) for one in reads._peers.values()]))
    await asyncio.gather(*loads)
    assert max(max(one, default=0) for one in known) == 4


async def test_the_loop_goes_on_meanwhile(holders: dict[str, Holder], plane: Make, own: Folder) -> None:
    reader = await plane("nixl")
    given = holders["memory"].publish(seed=20, nbytes=32 * MIB)
    task = asyncio.create_task(reader.fetch(given, own.path / "a"))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    # Its steps alone are a handful.
    assert turns > 100


async def test_nothing_is_left_after_the_close(holder: Holder, plane: Make, own: Folder) -> None:
    given = holder.publish(seed=21)
    # The first agent of a process opens what stays open.
    await (await plane("nixl")).close()
    before = len(os.listdir("/proc/self/fd"))
    for transport in ("auto", "nixl"):
        reader = await plane(transport)
        for one in range(10):
            await reader.fetch(given, own.path / f"{transport}{one}")
            await reader.publish(own.path / f"{transport}{one}", 60.0)
        await reader.withdraw(own.path / "auto0")
        with pytest.raises(TensorMissing):
            await reader.fetch(changed(given, nonce="0" * 16), own.path / "b")
        await reader.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert str(own.path) not in maps()
    own.remove()
    assert not own.path.exists()
    own.path.mkdir()


async def test_withdrawn_addresses_are_given_back_in_time(
    plane: Make, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await plane()
    now = time.monotonic()
    given = []
    for one in range(50):
        fill(own.path / str(one), bytes(8192))
        given.append(await holder.publish(own.path / str(one), 30.0))
        await holder.withdraw(own.path / str(one))
        await holder.withdraw(own.path / str(one))
        (own.path / str(one)).unlink()
    withdrawn = holder._buffers._withdrawn
    assert len(withdrawn) == len({one.address for one in given}) == 50
    # The lease and the quarantine after it.
    monkeypatch.setattr(time, "monotonic", lambda: now + 80.0)
    await holder.withdraw(own.path / "x")
    assert len(withdrawn) == 50
    monkeypatch.setattr(time, "monotonic", lambda: now + 100.0)
    await holder.withdraw(own.path / "x")
    assert withdrawn == []


def fill(path: Path, payload: bytes) -> Header:
    header = Header(
        name=path.name, nonce=segment.new_nonce(), dtype="uint8", shape=(len(payload),), nbytes=len(payload)
    )
    segment.fill(path, header, payload)
    return header


def maps() -> str:
    return Path("/proc/self/maps").read_text()


def inode(path: str | Path) -> int:
    return os.stat(path).st_ino


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def relative(path: str) -> str:
    return os.path.relpath(path)


def late_mappings(own: Folder, *, deleted: bool = True) -> list[str]:
    """Mapped files of the reader that are not named (yet), or no more."""
    lines = maps().splitlines()
    return [one for one in lines if f"{own.path}/." in one and one.endswith("(deleted)") == deleted]


async def transfers(reader: TensorPlane, count: int) -> bool:
    """Whether so many go on."""
    return await reader._agent.call(lambda reads: len(reads._reads) == count)


async def gone(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 10.0
    while what():
        assert time.monotonic() < end, "not within 10 s"
        await asyncio.sleep(0.005)
