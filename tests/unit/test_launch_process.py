"""app.launch: processes and their sessions, components, their end, shared memory, and what is shown of them."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing import shared_memory as segments
from pathlib import Path

import pytest
from rich.console import Console

from app.launch import cleanup, component, sessions, shared_memory, shutdown, view
from app.launch.component import Component
from app.launch.errors import LaunchError, StartFailed
from app.launch.process import Process, ProcessSpec, describe, tail
from app.launch.shared_memory import Ledger
from app.launch.state import ComponentState, Phase, State, StateDirectory
from app.roles import Does
from app.tensors import folder
from tests.polling import until

SLEEP = "import time; time.sleep(600)"
#: Starts a descendant in a process group of its own, as some engines do, and says its pid.
WITH_DESCENDANT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {SLEEP!r}], process_group=0)
print(child.pid, flush=True)
time.sleep(600)
"""
DEAF = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
print("deaf", flush=True)
{SLEEP}
"""


def spec(tmp_path: Path, code: str, name: str = "part") -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-I", "-S", "-c", code), dict(os.environ), tmp_path / f"{name}.log")


async def yes(_pid: int) -> bool:
    return True


async def no(_pid: int) -> bool:
    return False


def part(
    tmp_path: Path,
    code: str,
    probe: Callable[[int], Awaitable[bool]] = yes,
    buried: Callable[[], Awaitable[None]] | None = None,
    kind: str = "worker",
) -> Component:
    return Component(kind, spec(tmp_path, code, kind), probe, lambda: None, buried)


async def said(log: Path) -> str:
    return await until(lambda: log.exists() and log.read_text().strip(), "a line in the log", 10)


# Processes.


async def test_output_and_exit_code(tmp_path: Path) -> None:
    process = Process(spec(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"))
    await process.start()
    assert await process.wait() == 7
    assert sorted(tail(process.spec.log, 5)) == ["err", "out"]
    assert not process.running


async def test_kill_takes_descendants_along_also_after_the_leader_was_killed(tmp_path: Path) -> None:
    process = Process(spec(tmp_path, WITH_DESCENDANT))
    await process.start()
    descendant = int(await said(process.spec.log))
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    assert sessions.leftovers(process.pid, process.ticks) == [descendant]
    assert await process.kill() == []
    assert sessions.start_ticks(descendant) is None


async def test_a_process_of_the_same_number_is_not_taken_for_ours(tmp_path: Path) -> None:
    process = Process(spec(tmp_path, SLEEP))
    await process.start()
    assert not sessions.alive(process.pid, process.ticks - 1)
    assert await sessions.kill(process.pid, process.ticks - 1) == []
    assert process.running
    await process.kill()
    assert not process.running


async def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, sys
sys.path[:0] = {[path for path in sys.path if path]!r}
from pathlib import Path
from app.launch.process import Process, ProcessSpec
async def main():
    process = Process(ProcessSpec("child", (sys.executable, "-c", {SLEEP!r}), os.environ, Path("child.log")))
    await process.start()
    print(process.pid, process.ticks, flush=True)
    await process.wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    assert parent.stdout is not None
    pid, ticks = map(int, (await parent.stdout.readline()).split())
    assert sessions.alive(pid, ticks)
    parent.kill()
    await parent.wait()
    await until(lambda: not sessions.alive(pid, ticks), "the child ends too")


def test_exit_codes_in_words() -> None:
    assert describe(3) == "exited with code 3"
    assert describe(-9) == "was killed by SIGKILL"
    assert describe(-62) == "was killed by signal 62"


def test_the_tail_of_a_log_is_plain_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log, 3) == []
    log.write_bytes(b"a\n\nb\n\x1b[31mred\x1b[0m\ttab \xff\n\n")
    assert tail(log, 2) == ["b", "red tab \ufffd"]
    log.write_bytes(b"x" * 100_000 + b"\nlast\n")
    assert tail(log, 1) == ["last"]


# Components.


async def test_a_component_that_ends_before_it_is_ready_is_an_error(tmp_path: Path) -> None:
    one = part(tmp_path, "raise SystemExit(4)", no)
    with pytest.raises(StartFailed, match="worker: exited with code 4 before it was ready"):
        await one.keep()
    assert one.state.phase is Phase.FAILED


async def test_starting_is_told_from_loading_and_ready(tmp_path: Path) -> None:
    ready = False

    async def probe(_pid: int) -> bool:
        return ready

    phases: list[Phase] = []
    log = "import time; time.sleep(0.5); print('loading', flush=True); time.sleep(600)"
    one = Component("worker", spec(tmp_path, log), probe, lambda: phases.append(one.state.phase))
    keeping = asyncio.create_task(one.keep())
    await until(lambda: one.state.phase is Phase.LOADING, "loading")
    ready = True
    await one.ready_once.wait()
    assert phases == [Phase.STARTING, Phase.LOADING, Phase.READY]
    keeping.cancel()
    assert one.process.running
    await one.clear()


async def test_a_dead_component_is_buried_and_started_again(tmp_path: Path) -> None:
    buried: list[bool] = []

    async def bury() -> None:
        buried.append(one.process.running)

    one = part(tmp_path, SLEEP, buried=bury)
    keeping = asyncio.create_task(one.keep())
    await one.ready_once.wait()
    first = one.process.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: one.state.phase is Phase.RESTARTING, "restarting")
    assert buried == [False]
    assert one.state.detail == "was killed by SIGKILL; again in 1 s"
    await until(lambda: one.state.phase is Phase.READY and one.process.pid != first, "ready again")
    keeping.cancel()
    await one.clear()


async def test_waits_double_until_it_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(component, "MAX_DELAY_S", 0.03)
    monkeypatch.setattr(component, "POLL_S", 0.01)
    details: list[str] = []
    one = Component(
        "worker",
        spec(tmp_path, "import time; time.sleep(0.2); raise SystemExit(5)"),
        yes,
        lambda: details.append(one.state.detail) if one.state.phase is Phase.RESTARTING else None,
    )
    delays: list[float] = []
    real = asyncio.sleep

    async def sleep(delay: float) -> None:
        if delay in (0.01, 0.02, 0.03):
            delays.append(delay)
        await real(delay)

    monkeypatch.setattr(component.asyncio, "sleep", sleep)
    await asyncio.wait_for(one.keep(), 30)
    assert delays == [0.01, 0.02, 0.03, 0.03, 0.03]
    assert len(details) == component.MAX_FAILURES
    assert one.state.phase is Phase.FAILED
    assert one.state.detail == "exited with code 5; given up after 5 starts in a row"


async def test_failures_long_ago_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(component, "POLL_S", 0.01)
    monkeypatch.setattr(component, "STABLE_S", 0.05)
    one = part(tmp_path, "import time; time.sleep(0.4)")
    keeping = asyncio.create_task(one.keep())
    await until(lambda: one.state.restarts > component.MAX_FAILURES, "more restarts than failures allowed", 30)
    assert one.state.phase is not Phase.FAILED
    keeping.cancel()
    await one.clear()


# The end.


async def started(one: Component) -> Component:
    await one.process.start()
    await said(one.state.log)
    return one


async def test_what_ignores_signals_is_killed_in_the_end(tmp_path: Path) -> None:
    one = await started(part(tmp_path, DEAF))
    began = time.monotonic()
    steps = ((signal.SIGTERM, 0.2), (signal.SIGQUIT, 0.2))
    assert await shutdown.stop(one, steps, shutdown.Hurry()) == []
    assert 0.4 <= time.monotonic() - began < 3
    assert (one.state.phase, one.state.detail) == (Phase.STOPPED, "did not end in time and was killed")
    assert not one.process.running


async def test_a_second_press_ends_the_wait_for_requests_in_flight(tmp_path: Path) -> None:
    one = await started(
        part(tmp_path, "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)")
    )
    hurry = shutdown.Hurry()
    hurry.press()
    stopping = asyncio.create_task(shutdown.stop(one, ((signal.SIGTERM, 60.0), (signal.SIGQUIT, 5.0)), hurry))
    await until(lambda: one.state.phase is Phase.STOPPING, "stopping")
    hurry.press()
    await asyncio.wait_for(stopping, 10)
    assert one.state.detail == "was killed by SIGQUIT"


async def test_workers_end_before_servers_and_redis_last(tmp_path: Path) -> None:
    order: list[str] = []

    def note(kind: str) -> Callable[[], None]:
        return lambda: order.append(kind) if made[kind].state.phase is Phase.STOPPED else None

    made: dict[str, Component] = {}
    for kind in ("redis", "worker", "api"):
        made[kind] = Component(kind, spec(tmp_path, "print(1, flush=True); " + SLEEP, kind), yes, note(kind))
        await started(made[kind])
    assert await shutdown.stop_all(list(made.values()), shutdown.Hurry()) == []
    assert order == ["worker", "api", "redis"]


# Shared memory.


def test_only_files_seen_in_use_are_removed_and_only_when_nobody_uses_them() -> None:
    before = segments.SharedMemory(create=True, size=16)
    ledger = Ledger()
    ours, theirs = (segments.SharedMemory(create=True, size=16) for _ in range(2))
    try:
        ledger.note([os.getpid()])
        assert {ours.name, theirs.name} <= ledger.names
        assert before.name not in ledger.names
        ledger.names = {ours.name}
        assert ledger.remove() == []  # this process has it mapped
        ours.close()
        assert ledger.remove() == [ours.name]
        assert not (shared_memory.DIRECTORY / ours.name).exists()
        assert (shared_memory.DIRECTORY / theirs.name).exists()
        segments.resource_tracker.unregister(f"/{ours.name}", "shared_memory")
    finally:
        for one in (before, theirs):
            one.close()
            one.unlink()


def test_a_semaphore_is_known_by_its_final_name() -> None:
    """The C library makes it under another name, which the list of mappings goes on telling."""
    first = shared_memory.DIRECTORY / f"sem.first-{os.getpid()}"
    final = shared_memory.DIRECTORY / f"sem.final-{os.getpid()}"
    ledger = Ledger()
    with open(first, "wb") as held:
        held.write(b"x")
        first.rename(final)
        ledger.note([os.getpid()])
        assert final.name in ledger.names
        assert ledger.remove() == []
    assert ledger.remove() == [final.name]


def test_embeddings_and_media_are_in_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file is in the folders of several components: the death of one would take it from the others."""
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    ledger = Ledger()
    encoder, prefiller = (folder.make_folder(tmp_path, name) for name in ("encode", "prefill"))
    deeper = folder.make_folder(made_folder(tmp_path / "mine"), "encode")
    for one in (encoder, deeper):
        (one.path / "embedding").write_bytes(b"x")
    os.link(encoder.path / "embedding", prefiller.path / "embedding")
    (tmp_path / "psm_1").write_bytes(b"x")
    with (encoder.path / "embedding").open(), (deeper.path / "embedding").open(), (tmp_path / "psm_1").open():
        ledger.note([os.getpid()])
    assert ledger.names == {"psm_1"}
    assert ledger.remove() == ["psm_1"]
    assert (prefiller.path / "embedding").read_bytes() == b"x"
    for own in (encoder, prefiller, deeper):
        own.remove()


DEAD = """
import os, sys
from pathlib import Path
from app.tensors import folder
print(folder.make_folder(Path(sys.argv[1]), "encode").path)
"""


def dead_folder(root: Path) -> Path:
    made = subprocess.run([sys.executable, "-c", DEAD, str(root)], capture_output=True, text=True, check=True)
    return Path(made.stdout.strip())


async def test_the_folders_swept_are_those_of_the_deployment(tmp_path: Path) -> None:
    """Whoever runs `trivet down`, or looks at a dead component, may have other settings."""
    root = made_folder(tmp_path / "memory")
    left = dead_folder(root)
    dead = state(tmp_path).model_copy(update={"tensors": root, "phase": Phase.READY, "redis_url": ""})
    dead.sockets = tmp_path / "sockets"
    assert await cleanup.clear(dead) == [f"removed folders of dead processes: {left.name}"]
    assert not left.exists()
    left = dead_folder(root)
    one = Component(
        "worker", spec(tmp_path, "print(1, flush=True); " + SLEEP, "worker"), yes, lambda: None, tensors=root
    )
    await started(one)
    await shutdown.stop(one, ((signal.SIGTERM, 5.0),), shutdown.Hurry())
    assert not left.exists()


def test_states_of_older_versions_can_be_read(tmp_path: Path) -> None:
    older = state(tmp_path).model_dump(mode="json", exclude={"tensors"})
    assert State.model_validate(older).tensors == Path("/dev/shm")


def made_folder(path: Path) -> Path:
    path.mkdir()
    return path


# The state, and what is shown.


def state(tmp_path: Path, *components: ComponentState) -> State:
    return State(
        name="default",
        pid=os.getpid(),
        ticks=sessions.start_ticks(os.getpid()) or 0,
        started=time.time(),
        topology="agg",
        model="tiny",
        api_url="http://127.0.0.1:8000",
        redis_url="redis://:secret@127.0.0.1/0",
        logs=tmp_path,
        sockets=tmp_path,
        components=list(components),
    )


def test_one_supervisor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_HOME", str(tmp_path))
    directory = StateDirectory("blue")
    assert directory.running() is None
    with directory.lock():
        directory.write(state(tmp_path))
        with pytest.raises(LaunchError, match=r"'blue' is already running.*trivet down --name blue"), directory.lock():
            pass
    with directory.lock():
        pass
    assert directory.running() == directory.read()
    directory.write(state(tmp_path).model_copy(update={"ticks": 1}))
    assert directory.running() is None
    directory.forget()
    assert directory.read() is None


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-a", "x" * 50, "a.b", "a@b"])
def test_names_that_no_path_or_worker_could_have(name: str) -> None:
    with pytest.raises(LaunchError, match="--name"):
        StateDirectory(name)


def test_without_a_terminal_each_change_is_a_line(tmp_path: Path) -> None:
    out = io.StringIO()
    shown = view.View(Console(file=out))
    worker = ComponentState(name="agg@cpu0", kind="worker", log=tmp_path / "log")
    now = state(tmp_path, worker)
    for phase, detail in (
        (Phase.STARTING, ""),
        (Phase.STARTING, ""),
        (Phase.RESTARTING, "was killed by SIGKILL; [1 s]"),
    ):
        worker.phase, worker.detail = phase, detail
        shown.update(now)
    assert [line.partition("] ")[2] for line in out.getvalue().splitlines()] == [
        "agg@cpu0: starting",
        "agg@cpu0: restarting (was killed by SIGKILL; [1 s])",
    ]


def test_on_a_terminal_there_is_a_table_with_the_last_line_of_each_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\n[bold]two[/bold]\n")
    out = io.StringIO()
    shown = view.View(Console(file=out, force_terminal=True, width=100))
    worker = ComponentState(
        name="agg@cpu0", kind="worker", phase=Phase.LOADING, log=tmp_path / "log", since=time.time() - 5
    )
    shown.update(state(tmp_path, worker))
    shown.to_lines(state(tmp_path, worker))
    text = out.getvalue()
    assert "agg@cpu0" in text
    assert "loading" in text
    assert "[bold]two[/bold]" in text
    assert "one" not in text.replace("component", "")


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(50)))
    now = state(tmp_path, ComponentState(name="api", kind="api", log=tmp_path / "log"))
    now.failed_component, now.reason = "api", "exited with code 1 before it was ready"
    told = view.failure(now)
    assert "    line 30\n" in told
    assert "line 29\n" not in told
    assert told.endswith(f"api: exited with code 1 before it was ready; its whole log is {tmp_path / 'log'}")
    now.failed_component = ""
    assert view.failure(now) == "trivet: exited with code 1 before it was ready"


def test_what_to_try_is_what_the_model_does(tmp_path: Path) -> None:
    writes = view.ready(state(tmp_path), "trivet down")
    assert "/v1/chat/completions" in writes and "trivet chat" in writes and "/v1/embeddings" not in writes
    embeds = view.ready(state(tmp_path).model_copy(update={"does": Does.EMBED, "needs_key": True}), "trivet down")
    assert "/v1/embeddings" in embeds and "$OPENAI_API_KEY" in embeds and "chat" not in embeds


def test_the_address_of_redis_is_shown_without_its_password(tmp_path: Path) -> None:
    assert "Authorization: Bearer $OPENAI_API_KEY" in view.ready(
        state(tmp_path).model_copy(update={"needs_key": True}), "trivet down"
    )
    assert "Authorization" not in view.ready(state(tmp_path), "trivet down")
    told = view.ready(state(tmp_path), "trivet down")
    assert "redis-cli -u redis://:***@127.0.0.1/0" in told
    assert "secret" not in told
