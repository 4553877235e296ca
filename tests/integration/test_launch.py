"""`trivet up`, `down`, `status` and `chat` with quick stand-ins for the parts: real processes, a real Redis."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app import keys
from app.launch import sessions
from app.launch.state import ComponentState, Phase, State
from app.redis import connect
from app.registry import Fleet, Registry
from tests.polling import until
from tests.redis_server import free_port
from tests.routing import ask, router

ROOT = Path(__file__).resolve().parents[2]
PD = ("--topology", "pd", "--model", "some/model", "--served-model-name", "tiny")


@dataclass
class Answer:
    code: int
    out: str
    err: str


class Trivet:
    """The command in a home of its own, on ports that are free."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.redis_port, self.api_port, self.flower_port = free_port(), free_port(), free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
        self.environment = kept | {"TRIVET_HOME": str(home), "CUDA_VISIBLE_DEVICES": "", "TRIVET_WORKER__LEASE_S": "2"}
        self.redis_url = f"redis://127.0.0.1:{self.redis_port}/0"

    @property
    def flags(self) -> tuple[str, ...]:
        ports = ("--api-port", str(self.api_port), "--flower-port", str(self.flower_port))
        return (*PD, "--redis-url", self.redis_url, *ports, "--timeout", "60")

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.fake_parts", "trivet", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment,
            cwd=ROOT,
        )

    async def run(self, *arguments: str) -> Answer:
        return await answer_of(await self.start(*arguments))

    @property
    def state(self) -> State:
        state = self.last_state()
        assert state is not None
        return state

    def last_state(self) -> State | None:
        path = self.home / "default" / "state.json"
        return State.model_validate_json(path.read_bytes()) if path.exists() else None

    def part(self, name: str) -> ComponentState:
        return next(one for one in self.state.components if one.name == name)

    def pid(self, name: str) -> int:
        return self.part(name).pid

    async def ready_again(self, name: str, killed: int) -> ComponentState:
        def another() -> ComponentState | None:
            part = self.part(name)
            return part if part.pid != killed and part.phase is Phase.READY else None

        return await until(another, f"{name} is ready again", 30)

    @asynccontextmanager
    async def up(self, *more: str) -> AsyncIterator[Answer]:
        """Up while the block runs."""
        answer = await self.run("up", "--detach", *self.flags, *more)
        try:
            assert answer.code == 0, answer
            yield answer
        finally:
            await self.run("down")


async def answer_of(process: asyncio.subprocess.Process, limit_s: float = 60.0) -> Answer:
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return Answer(process.returncode, out.decode(), err.decode())


@pytest.fixture
async def trivet(tmp_path: Path) -> AsyncIterator[Trivet]:
    made = Trivet(tmp_path / "home")
    yield made
    if (state := made.last_state()) is not None:
        with suppress(ProcessLookupError):
            if state.running:
                os.kill(state.pid, signal.SIGKILL)
        for one in state.components:
            await sessions.kill(one.pid, one.ticks)


def left_of(state: State) -> list[str]:
    """What an `up` may not leave behind."""
    left = [f"{one.name} {sessions.leftovers(one.pid, one.ticks)}" for one in state.components if one.pid]
    left = [one for one in left if not one.endswith(" []")]
    left += still_there([name for one in state.components for name in one.shared_memory])
    return left + ([str(state.sockets)] if state.sockets.exists() else [])


def still_there(names: list[str]) -> list[str]:
    return [name for name in names if Path("/dev/shm", name).exists()]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def engine_of(worker: int) -> int:
    """The descendant that stands for the worker's engine."""
    return await until(lambda: next((pid for pid in sessions.members(worker) if pid != worker), 0), "a descendant")


async def test_up_in_the_foreground_shows_progress_and_leaves_nothing_after_a_signal(trivet: Trivet) -> None:
    process = await trivet.start("up", *trivet.flags, "--max-model-len", "4096", "--decode.max-num-seqs=8")
    await until(lambda: (s := trivet.last_state()) is not None and s.phase is Phase.READY, "ready", 60)
    state = trivet.state
    for one in state.components:
        assert sessions.alive(one.pid, one.ticks), one
    assert state.owns_redis
    process.send_signal(signal.SIGTERM)
    answer = await answer_of(process)
    assert answer.code == 0, answer
    for name in ("redis", "prefill@cpu0", "decode@cpu0", "api", "flower"):
        assert f"{name}: ready" in answer.out
        assert f"{name}: stopped" in answer.out
    for shown in (f"http://127.0.0.1:{trivet.api_port}", f"redis-cli -u {trivet.redis_url}", "trivet down", "curl"):
        assert shown in answer.out
    assert trivet.state.phase is Phase.STOPPED
    assert left_of(state) == []
    assert not any(listens(port) for port in (trivet.redis_port, trivet.api_port, trivet.flower_port))
    log = (state.logs / "decode@cpu0.log").read_text()
    assert "decode@cpu0 serves some/model with --max-model-len 4096" in log


async def test_detached_it_returns_when_ready_and_down_ends_it(trivet: Trivet) -> None:
    async with trivet.up("--replicas", "prefill=2") as answer:
        assert "Ready in" in answer.out
        assert listens(trivet.api_port)
        second = await trivet.run("up", *trivet.flags)
        assert second.code == 1
        assert "'default' is already running" in second.err
        state = trivet.state
        down = await trivet.run("down")
        assert (down.code, down.out.splitlines()[-1]) == (0, "stopped")
        assert left_of(state) == []
    again = await trivet.run("down")
    assert (again.code, again.out) == (0, "nothing runs under the name 'default'\n")


async def test_status_tells_workers_queues_load_and_processes(trivet: Trivet) -> None:
    async with trivet.up("--enable-multimodal"):
        client = connect(trivet.redis_url, 2.0, name="test")
        (record,) = [one for one in await Registry(client, 2.0).workers() if one.id == "decode@cpu0"]
        await client.hset(keys.load(record.id, record.incarnation), "requests", 2)
        await client.lpush("decode.decode@cpu0", "1")
        await client.lpush("decode.decode@cpu0|5", "2", "3")
        await client.lpush("prefill|5", "4")
        await client.set(keys.api("x"), json.dumps({"id": "x", "in_flight": 7, "pid": 1}))
        await client.aclose()
        told = json.loads((await trivet.run("status", "--json")).out)
        decode, prefill = told["workers"]
        assert (decode["id"], decode["roles"], decode["in_flight"]) == ("decode@cpu0", ["decode"], 2)
        assert (decode["running"], decode["waiting"], decode["kv_usage"]) == (3, 4, 0.25)
        assert decode["queued"] == {"decode": 3}
        assert prefill["roles"] == ["encode", "prefill"]
        assert told["queues"] == {"encode": 0, "prefill": 1, "decode": 0}
        assert [one["id"] for one in told["apis"]] == ["x"]
        assert {one["name"] for one in told["up"]["processes"]} == {
            "redis",
            "decode@cpu0",
            "prefill@cpu0",
            "api",
            "flower",
        }
        text = (await trivet.run("status")).out
        assert "decode@cpu0" in text
        assert "25.0%" in text
        assert "API x: 7 in flight" in text


async def test_status_without_a_redis_says_so(trivet: Trivet) -> None:
    trivet.environment["TRIVET_REDIS__BROKER_URL"] = f"redis://:secret@127.0.0.1:{trivet.redis_port}/0"
    answer = await trivet.run("status")
    assert answer.code == 1
    assert f"Redis at redis://:***@127.0.0.1:{trivet.redis_port}/0 does not answer" in answer.err


async def test_chat_streams_and_reports_errors(trivet: Trivet, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"not looked at")
    async with trivet.up("--no-flower"):
        assert not listens(trivet.flower_port)
        answer = await trivet.run("chat", "--image", str(picture), "what is it?")
        assert answer.code == 0, answer
        assert "data:image/png;base64,bm90IGxvb2tlZCBhdA==" in answer.out
        assert "what is it?" in answer.out
        refused = await trivet.run("chat", "refuse")
        assert (refused.code, refused.err) == (1, "trivet: 400: refused, as asked\n")
        broken = await trivet.run("chat", "break")
        assert (broken.code, broken.err) == (1, "trivet: broken, as asked\n")
        assert 'you said "break"' in broken.out
        missing = await trivet.run("chat", "--image", "/no/such.png", "hm")
        assert (missing.code, missing.err) == (1, "trivet: /no/such.png: No such file or directory\n")


def seen_in(file: str, pids: dict[str, int], text: bytes) -> list[str]:
    """The processes whose /proc/<pid>/<file> has the text."""
    return [name for name, pid in pids.items() if text in Path(f"/proc/{pid}/{file}").read_bytes()]


async def test_keys_are_for_the_api_and_its_clients_alone(trivet: Trivet, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-in-f1le  # for tests\n")
    trivet.environment |= {"TRIVET_API__API_KEYS": "sk-5ecret,sk-5ecret-2"}
    async with trivet.up("--api-keys-file", str(tmp_path / "keys")) as answer:
        assert 'Authorization: Bearer $OPENAI_API_KEY"' in answer.out
        assert (await trivet.run("chat", "hi")).code == 0
        trivet.environment["TRIVET_API__API_KEYS"] = "sk-another"
        assert (await trivet.run("chat", "hi")).code == 0, "the file is that of the running one"
        trivet.environment["OPENAI_API_KEY"] = "sk-another"
        assert (await trivet.run("chat", "--url", trivet.state.api_url, "hi")).err == "trivet: 401: no key\n"
        status = await trivet.run("status", "--json")
        pids = {one.name: one.pid for one in trivet.state.components}
        assert seen_in("cmdline", pids | {"supervisor": trivet.state.pid}, b"5ecret") == []
        assert seen_in("environ", pids, b"5ecret") == ["api"]
    written = [path.read_text() for path in trivet.home.rglob("*") if path.is_file()]
    assert len(written) > 5, "states and logs"
    assert not any("5ecret" in text or "f1le" in text for text in (*written, answer.out, answer.err, status.out))


async def test_a_killed_worker_is_taken_out_and_started_again_without_remains(trivet: Trivet) -> None:
    async with trivet.up():
        worker = trivet.pid("decode@cpu0")
        engine = await engine_of(worker)
        remains = await until(lambda: trivet.part("decode@cpu0").shared_memory, "its shared memory is known", 15)
        client = connect(trivet.redis_url, 2.0, name="test")
        os.kill(worker, signal.SIGKILL)

        async def removed() -> bool:
            return not await client.exists(keys.worker("decode@cpu0"))

        await until(removed, "taken out of the registry", 1.5)  # sooner than its lease of 2 s
        await until(lambda: sessions.start_ticks(engine) is None, "its engine ended", 5)
        assert (await trivet.ready_again("decode@cpu0", worker)).restarts == 1
        assert still_there(remains) == []
        await client.aclose()


@pytest.mark.parametrize("part", ["redis", "api", "flower"])
async def test_other_parts_are_started_again_too(trivet: Trivet, part: str) -> None:
    async with trivet.up():
        killed = trivet.pid(part)
        os.kill(killed, signal.SIGKILL)
        await trivet.ready_again(part, killed)
        assert listens({"redis": trivet.redis_port, "api": trivet.api_port, "flower": trivet.flower_port}[part])


@pytest.mark.parametrize("detach", [True, False])
async def test_a_part_that_ends_before_it_is_ready_fails_the_whole(trivet: Trivet, detach: bool) -> None:
    trivet.environment["FAKE_FAULT"] = "worker:exit"
    answer = await trivet.run("up", *trivet.flags, *(["--detach"] if detach else []))
    assert answer.code == 1
    assert "exited with code 3 before it was ready" in answer.err
    assert "    this worker does not want to\n" in answer.err
    assert str(trivet.home / "default" / "logs") in answer.err
    assert trivet.state.phase is Phase.FAILED
    assert left_of(trivet.state) == []
    assert not listens(trivet.redis_port)


async def test_what_is_not_up_in_time_fails(trivet: Trivet) -> None:
    trivet.environment["FAKE_FAULT"] = "worker:mute"
    answer = await trivet.run("up", *trivet.flags, "--timeout", "3")
    assert answer.code == 1
    assert "not up after 3 s (--timeout), waiting for prefill@cpu0, decode@cpu0" in answer.err
    assert left_of(trivet.state) == []


async def test_a_signal_during_the_start_stops_it(trivet: Trivet) -> None:
    trivet.environment["FAKE_FAULT"] = "worker:mute"
    process = await trivet.start("up", "--detach", *trivet.flags)
    await until(lambda: (s := trivet.last_state()) is not None and len(s.components) == 5, "all were started", 20)
    process.send_signal(signal.SIGINT)
    answer = await answer_of(process)
    assert (answer.code, answer.err) == (1, "trivet: stopped before it was ready\n")
    assert not trivet.state.running
    assert left_of(trivet.state) == []


async def test_a_stubborn_worker_is_killed_with_its_descendants(trivet: Trivet) -> None:
    trivet.environment["FAKE_FAULT"] = "worker:stubborn"
    process = await trivet.start("up", *trivet.flags)
    await until(lambda: (s := trivet.last_state()) is not None and s.phase is Phase.READY, "ready", 60)
    state = trivet.state
    process.send_signal(signal.SIGINT)
    await until(lambda: trivet.part("decode@cpu0").phase is Phase.STOPPING, "stopping")
    process.send_signal(signal.SIGINT)  # does not wait for requests in flight
    answer = await answer_of(process)
    assert "decode@cpu0: stopped (did not end in time and was killed)" in answer.out
    assert left_of(state) == []


async def test_without_its_supervisor_nothing_lingers_and_down_clears_up(trivet: Trivet) -> None:
    async with trivet.up():
        state = trivet.state
        remains = await until(lambda: trivet.part("prefill@cpu0").shared_memory, "its shared memory is known", 15)
        await engine_of(trivet.pid("prefill@cpu0"))
        os.kill(trivet.pid("prefill@cpu0"), signal.SIGSTOP)  # one that cannot end by itself
        os.kill(state.pid, signal.SIGKILL)
        leaders = [one for one in state.components if one.name != "prefill@cpu0"]
        await until(
            lambda: not any(sessions.alive(one.pid, one.ticks) for one in leaders), "they end by themselves", 10
        )
        answer = await trivet.run("down")
        assert answer.code == 0, answer
        assert "killed prefill@cpu0" in answer.out
        assert left_of(state) == []
        assert still_there(remains) == []


async def test_the_next_up_clears_up_after_a_killed_supervisor(trivet: Trivet) -> None:
    async with trivet.up():
        first = trivet.state
        os.kill(trivet.pid("prefill@cpu0"), signal.SIGSTOP)
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: not listens(trivet.api_port) and not listens(trivet.redis_port), "ports are free", 10)
        async with trivet.up():
            assert trivet.state.pid != first.pid
            assert left_of(first) == []


async def test_in_a_redis_of_others_only_our_own_is_removed(trivet: Trivet, redis: Any, redis_url: str) -> None:
    trivet.redis_url = redis_url
    await redis.sadd("_kombu.binding.unrouted", "prefill.prefill@gpu7||prefill.prefill@gpu7")
    await redis.rpush("prefill.prefill@gpu7", "theirs")
    await redis.set(keys.api("theirs"), "{}")
    async with trivet.up():
        assert not trivet.state.owns_redis
        ours = keys.worker("prefill@cpu0")
        assert await redis.exists(ours)
        await redis.rpush("prefill.prefill@cpu0|5", "ours")
        await redis.rpush("prefill", "anybody's")
        await redis.sadd("_kombu.binding.unrouted", "prefill.prefill@cpu0||prefill.prefill@cpu0")
        host = socket.gethostname()
        await redis.set(keys.api(f"{host}-{trivet.pid('api')}-abc"), "{}")
        fleet = Fleet(tuple(await Registry(redis, 2.0).workers()))
        await router(redis).plan(fleet, ask(owner=f"{host}-{trivet.pid('api')}-abc"))
        await trivet.run("down")
    assert {key.decode() for key in await redis.keys() if not key.startswith(b"trivet:predicted:")} == {
        "_kombu.binding.unrouted",
        "prefill.prefill@gpu7",
        keys.api("theirs"),
        "prefill",
    }
    assert await redis.smembers("_kombu.binding.unrouted") == {b"prefill.prefill@gpu7||prefill.prefill@gpu7"}


async def test_a_name_that_a_live_worker_has_is_refused(
    trivet: Trivet, redis_url: str, redis: Any, tmp_path: Path
) -> None:
    trivet.redis_url = redis_url
    async with trivet.up():
        second = Trivet(tmp_path / "second")
        second.redis_url = redis_url
        answer = await second.run("up", *second.flags)
        assert answer.code == 1
        assert "a worker named" in answer.err
        assert "--name" in answer.err
        assert trivet.part("decode@cpu0").phase is Phase.READY
