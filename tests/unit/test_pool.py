"""The worker pool under Celery's real tracer, with a stand-in for the hub: no broker, no worker process."""

import asyncio
import gc
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from celery import Celery, Task, signals
from celery.app.trace import trace_task_ret
from celery.exceptions import ImproperlyConfigured, SoftTimeLimitExceeded, Terminated
from celery.platforms import EX_FAILURE
from celery.utils import threads
from celery.worker import state as worker_state

from workers import job_runner, loop_thread
from workers import pool as pool_module
from workers.pool import AioTask, Job, TaskPool, engine_loop

LIMIT_S = 10.0


class Hub:
    """As much of kombu's hub as the pool uses; the test's thread is the hub's."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def call_soon(self, function: Callable[[], object]) -> None:
        self._calls.put(function)

    def fire_timers(self) -> None:
        pass

    def _pop_ready(self) -> set[Any]:
        return set()

    def run_until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            try:
                self._calls.get(timeout=end - time.monotonic())()
            except queue.Empty:
                pytest.fail("the pool reported nothing more")


class Gate:
    """Where a body waits for the test, and says that it does."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = asyncio.Event()

    async def wait(self) -> None:
        self.entered.set()
        await self._open.wait()

    def reached(self) -> None:
        assert self.entered.wait(LIMIT_S)

    def open(self) -> None:
        engine_loop().call_soon_threadsafe(self._open.set)


@dataclass
class Call:
    """A task given to the pool, and what the pool told Celery about it."""

    accepted: int = 0
    outcomes: list[tuple[int, Any, float]] = field(default_factory=list)
    timeouts: list[tuple[bool, float]] = field(default_factory=list)
    job: "weakref.ref[Job] | None" = None

    def exception(self) -> BaseException:
        ((failed, info, _),) = self.outcomes
        assert failed
        exc: BaseException = getattr(info.exception, "exc", info.exception)
        return exc

    def terminate(self) -> None:
        assert self.job is not None
        job = self.job()
        assert job is not None, "the pool let go of a job"
        job.terminate()

    def on_accept(self, pid: int, when: float) -> None:
        self.accepted += 1


class Pool:
    """A started pool of `limit` slots, with its hub and application."""

    def __init__(self, limit: int, app: Celery) -> None:
        self.app, self.hub = app, Hub()
        self.pool = TaskPool(limit, app=app, initargs=(app, "unit@test"))

    def apply(self, task: Task, *args: Any, callback: Callable[..., Any] | None = None, **limits: float) -> Call:
        call = Call()
        job = self.pool.apply_async(
            trace_task_ret,
            args=(task.name, f"id-{id(call)}", {}, (args, {}, {}), None, None),
            kwargs={"app": self.app},
            accept_callback=call.on_accept,
            callback=callback or call.outcomes.append,
            timeout_callback=lambda soft, limit: call.timeouts.append((soft, limit)),
            **limits,
        )
        call.job = weakref.ref(job)
        return call

    def finish(self, *calls: Call) -> None:
        self.hub.run_until(lambda: all(call.outcomes for call in calls))

    def idle(self) -> None:
        self.hub.run_until(lambda: self.pool.info["running"] == 0)


@pytest.fixture
def app() -> Celery:
    app = Celery("pool_unit", broker="memory://", set_as_current=False)
    app.conf.task_ignore_result = True
    return app


@pytest.fixture
def start(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Pool]]:
    started: list[Pool] = []

    def start(limit: int) -> Pool:
        one = Pool(limit, app)
        monkeypatch.setattr(pool_module, "get_event_loop", lambda: one.hub)
        started.append(one)
        one.pool.start()
        return one

    yield start
    for one in started:
        one.pool.terminate()


Start = Callable[[int], Pool]


def passing(app: Celery, gate: Gate, name: str = "passing") -> Task:
    @app.task(shared=False, base=AioTask, name=name)
    async def body() -> str:
        await gate.wait()
        return "through"

    return body


def test_the_loop_is_there_while_the_pool_is(start: Start) -> None:
    with pytest.raises(RuntimeError, match=r"worker_pool='workers\.pool:TaskPool'"):
        engine_loop()
    one = start(1)

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loop = engine_loop()
    assert asyncio.run_coroutine_threadsafe(where(), loop).result(LIMIT_S) is loop
    assert isinstance(loop, uvloop.Loop)
    one.pool.stop()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="no task loop"):
        engine_loop()


def test_asyncios_own_loop_without_uvloop(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = loop_thread.new_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)
    assert "uvloop is not installed" in caplog.text


def test_signals_are_sent_while_the_loop_runs(start: Start) -> None:
    seen: list[tuple[str, bool]] = []

    def on_init(sender: str, **_: Any) -> None:
        seen.append((f"init {sender}", engine_loop().is_running()))

    def on_shutdown(sender: str, **_: Any) -> None:
        seen.append((f"shutdown {sender}", engine_loop().is_running()))

    signals.worker_process_init.connect(on_init)
    signals.worker_process_shutdown.connect(on_shutdown)
    try:
        one = start(1)
        one.pool.stop()
        one.pool.terminate()
    finally:
        signals.worker_process_init.disconnect(on_init)
        signals.worker_process_shutdown.disconnect(on_shutdown)
    assert seen == [("init unit@test", True), ("shutdown unit@test", True)]


def test_more_than_the_limit_wait_in_order(start: Start, app: Celery) -> None:
    one, gates = start(2), [Gate() for _ in range(4)]
    calls = [one.apply(passing(app, gate, f"t{n}")) for n, gate in enumerate(gates)]
    gates[1].reached()
    assert [call.accepted for call in calls] == [1, 1, 0, 0]
    assert one.pool.info["running"] == one.pool.info["waiting"] == 2
    for gate in gates[1:3]:
        gate.open()
    one.finish(*calls[1:3])
    gates[3].reached()
    assert [call.accepted for call in calls] == [1, 1, 1, 1] and not gates[0]._open.is_set()
    assert calls[2].outcomes[0][:2] == (0, "'through'")


def test_grow_starts_what_waits_and_shrink_stops_at_one(start: Start, app: Celery) -> None:
    one, gates = start(1), [Gate(), Gate()]
    for n, gate in enumerate(gates):
        one.apply(passing(app, gate, f"t{n}"))
    one.pool.grow(2)
    gates[1].reached()
    one.pool.shrink(9)
    assert one.pool.num_processes == one.pool.info["max-concurrency"] == 1


def test_pool_holds_its_jobs(start: Start, app: Celery) -> None:
    one, gates = start(1), [Gate(), Gate()]
    running, waiting = (one.apply(passing(app, gate, f"t{n}")) for n, gate in enumerate(gates))
    gates[0].reached()
    gc.collect()
    running.terminate()
    gates[1].open()
    one.finish(waiting)
    assert running.outcomes == [], "who terminates a job knows that it ended"


def test_job_cancelled_in_the_tick_of_its_launch_frees_its_slot(start: Start, app: Celery) -> None:
    one, gate, hold = start(1), Gate(), threading.Event()
    engine_loop().call_soon_threadsafe(hold.wait, LIMIT_S)
    call = one.apply(passing(app, gate))
    call.terminate()
    hold.set()
    one.idle()
    assert not gate.entered.is_set() and call.outcomes == []


def test_job_cancelled_before_its_first_step_frees_its_slot(start: Start, app: Celery) -> None:
    one, gate = start(1), Gate()
    job_task: list[asyncio.Task[Any]] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> "asyncio.Task[Any]":
        job_task.append(asyncio.Task(coro, loop=loop, **kwargs))
        job_task[0].cancel()
        return job_task[0]

    engine_loop().call_soon_threadsafe(engine_loop().set_task_factory, factory)
    call = one.apply(passing(app, gate))
    one.idle()
    assert not gate.entered.is_set()
    assert isinstance(call.exception(), Terminated)


def test_waiting_job_that_is_terminated_is_accepted_but_never_runs(start: Start, app: Celery) -> None:
    one, gates = start(1), [Gate(), Gate()]
    running, waiting = (one.apply(passing(app, gate, f"t{n}")) for n, gate in enumerate(gates))
    waiting.terminate()
    assert waiting.accepted == 1, "Celery announces the revocation when the job is accepted"
    gates[0].open()
    one.finish(running)
    assert one.pool.info["running"] == one.pool.info["waiting"] == 0
    assert not gates[1].entered.is_set() and waiting.outcomes == []


def test_cancelled_error_of_a_body_that_nobody_cancelled_is_a_failure(start: Start, app: Celery) -> None:
    @app.task(shared=False, base=AioTask, name="leaks")
    async def leaks() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    one = start(1)
    call = one.apply(leaks)
    one.finish(call)
    assert "nobody cancelled the task" in str(call.exception())
    assert "in leaks" in call.outcomes[0][1].traceback


def test_task_that_its_own_process_cancels_is_revoked(start: Start, app: Celery) -> None:
    one, gate = start(1), Gate()
    call = one.apply(passing(app, gate))
    gate.reached()
    assert call.job is not None
    job = call.job()
    assert job is not None and job.task is not None
    engine_loop().call_soon_threadsafe(job.task.cancel)
    one.finish(call)
    assert isinstance(call.exception(), Terminated)


def test_soft_limit_is_a_failure_with_the_bodys_frames(start: Start, app: Celery) -> None:
    one = start(1)
    call = one.apply(passing(app, Gate()), soft_timeout=0.05)
    one.finish(call)
    assert call.timeouts == [(True, 0.05)]
    assert isinstance(call.exception(), SoftTimeLimitExceeded)
    assert "in body" in call.outcomes[0][1].traceback


def test_hard_limit_is_told_at_once_though_the_body_ignores_it(
    start: Start, app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_runner, "CANCEL_GRACE_S", 0.05)
    cancelled: list[int] = []

    @app.task(shared=False, base=AioTask, name="stubborn")
    async def stubborn() -> None:
        while len(cancelled) < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(1)

    one = start(1)
    call = one.apply(stubborn, timeout=0.05)
    one.hub.run_until(lambda: call.timeouts)
    assert call.timeouts == [(False, 0.05)] and one.pool.info["running"] == 1
    one.idle()
    assert len(cancelled) == 3 and call.outcomes == []
    assert "task stubborn[id-" in caplog.text and "still holds its slot: cancelled again" in caplog.text


def test_callback_that_fails_costs_no_slot(start: Start, app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    def fail(outcome: Any) -> None:
        raise OSError("the broker is gone")

    one, gates = start(1), [Gate(), Gate()]
    one.apply(passing(app, gates[0], "t0"), callback=fail)
    second = one.apply(passing(app, gates[1], "t1"))
    for gate in gates:
        gate.open()
    one.finish(second)
    assert "OSError: the broker is gone" in caplog.text


def test_sys_exit_in_a_body_reaches_the_hub(start: Start, app: Celery) -> None:
    @app.task(shared=False, base=AioTask, name="exits")
    async def exits() -> None:
        sys.exit(7)

    def as_celery_does(outcome: tuple[int, Any, float]) -> None:
        raise outcome[1].exception.exc

    one = start(1)
    one.apply(exits, callback=as_celery_does)
    with pytest.raises(SystemExit, match="7"):
        one.idle()


def test_background_coroutine_survives_the_task_that_it_failed(start: Start, app: Celery) -> None:
    """Celery's tracer clears the frames of a failure's traceback, which closes coroutines that are suspended."""
    rounds: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def serve(waiter: "asyncio.Future[None]") -> None:
        try:
            raise ValueError("told to fail")
        except ValueError as exc:
            waiter.set_exception(exc)
        for n in range(3):
            await asyncio.sleep(0.01)
            rounds.put(n)

    @app.task(shared=False, base=AioTask, name="waits")
    async def waits() -> None:
        waiter = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(waiter))
        server.add_done_callback(lambda task: task.cancelled() or task.exception())
        await waiter

    one = start(1)
    call = one.apply(waits)
    one.finish(call)
    assert "in serve" in call.outcomes[0][1].traceback, "its frames are shown all the same"
    assert [rounds.get(timeout=LIMIT_S) for _ in range(3)] == [0, 1, 2]


def test_each_body_sees_its_own_request(start: Start, app: Celery) -> None:
    gate, seen = Gate(), []

    @app.task(shared=False, base=AioTask, bind=True, name="asks")
    async def asks(self: Task, n: int) -> None:
        await gate.wait()
        seen.append((n, self.request.args, self.request.called_directly))
        assert other.request.args is None, "the request of another task is none of ours"

    other = passing(app, gate)
    one = start(8)
    calls = [one.apply(asks, n) for n in range(8)]
    gate.open()
    one.finish(*calls)
    assert sorted(seen) == [(n, (n,), False) for n in range(8)]
    assert [call.outcomes[0][0] for call in calls] == [0] * 8


def test_other_tasks_run_in_threads(start: Start, app: Celery) -> None:
    entered, leave = threading.Event(), threading.Event()

    @app.task(shared=False, name="blocks")
    def blocks() -> str:
        entered.set()
        assert leave.wait(LIMIT_S)
        return threading.current_thread().name

    one, gate = start(2), Gate()
    blocking = one.apply(blocks, soft_timeout=0.01)
    assert entered.wait(LIMIT_S)
    quick = one.apply(passing(app, gate))
    gate.open()
    one.finish(quick)
    assert blocking.outcomes == []
    leave.set()
    one.finish(blocking)
    failed, thread, _ = blocking.outcomes[0]
    assert not failed and thread != "'tasks'" and blocking.timeouts == []


def test_async_body_outside_the_pool_is_refused(start: Start, app: Celery) -> None:
    task = passing(app, Gate())
    for called in (task, lambda: task.apply(throw=True)):
        with pytest.raises(RuntimeError, match=r"task 'passing' .* worker_pool='workers\.pool:TaskPool'"):
            called()

    @app.task(shared=False, base=AioTask, name="calls")
    async def calls() -> None:
        task()

    one = start(1)
    call = one.apply(calls)
    one.finish(call)
    assert "await task.run(...)" in str(call.exception())


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_patched_process_is_refused(start: Start, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kombu.utils.compat._environment", library)
    with pytest.raises(ImproperlyConfigured, match=f"{library} has monkey-patched .* without {library}"):
        start(1)


def test_fast_locals_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "USE_FAST_LOCALS", "1")
    with pytest.raises(ImproperlyConfigured, match="USE_FAST_LOCALS"):
        start(1)


def test_transport_without_event_loop_is_refused(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "get_event_loop", lambda: None)
    with pytest.raises(ImproperlyConfigured, match="redis://"):
        TaskPool(1, app=app).start()


def test_async_bodies_that_would_never_run_are_refused(start: Start, app: Celery) -> None:
    @app.task(shared=False, name="plain")
    async def plain() -> None: ...

    @app.task(shared=False, base=AioTask, name="yields")
    async def yields() -> Any:
        yield

    with pytest.raises(ImproperlyConfigured, match="base=AioTask.*: plain, yields"):
        start(1)


@pytest.mark.parametrize(("emulation", "kept"), [(True, 0), (False, 1)])
def test_lost_connection_drops_what_the_broker_delivers_again(
    start: Start, app: Celery, emulation: bool, kept: int
) -> None:
    app.conf.broker_transport_options = {"ack_emulation": emulation}
    one = start(1)
    for n in range(2):
        one.apply(passing(app, Gate(), f"t{n}"))
    one.pool.flush()
    assert one.pool.info["waiting"] == kept and one.pool.info["running"] == 1


@pytest.fixture
def flags() -> Iterator[Any]:
    yield worker_state
    worker_state.should_stop = worker_state.should_terminate = None


def test_warm_stop_runs_what_waits_and_cold_stop_does_not(start: Start, app: Celery, flags: Any) -> None:
    warm, gates = start(1), [Gate(), Gate()]
    calls = [warm.apply(passing(app, gate, f"t{n}")) for n, gate in enumerate(gates)]
    for gate in gates:
        gate.open()
    warm.pool.stop()
    assert [len(call.outcomes) for call in calls] == [1, 1]

    cold, gates = start(1), [Gate(), Gate()]
    calls = [cold.apply(passing(app, gate, f"c{n}")) for n, gate in enumerate(gates)]
    flags.should_terminate = 0
    calls[0].terminate()
    cold.pool.stop()
    assert [call.accepted for call in calls] == [1, 0] and not gates[1].entered.is_set()
    assert engine_loop().is_running(), "what is stopped after the pool may still need the loop"
    cold.pool.terminate()
    with pytest.raises(RuntimeError):
        engine_loop()


def test_terminate_cancels_all(start: Start, app: Celery) -> None:
    cancelled = threading.Event()
    gate = Gate()

    @app.task(shared=False, base=AioTask, name="cancelled")
    async def body() -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    one = start(1)
    call = one.apply(body)
    gate.reached()
    one.pool.terminate()
    assert cancelled.is_set() and call.outcomes == [] and one.pool.info["running"] == 0


def test_death_of_the_loop_ends_the_worker(
    start: Start, app: Celery, flags: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, gate = start(1), Gate()
    call = one.apply(passing(app, gate))
    gate.reached()
    engine_loop().call_soon_threadsafe(engine_loop().stop)
    one.hub.run_until(lambda: flags.should_stop is not None)
    assert flags.should_stop == EX_FAILURE
    one.pool.stop()
    assert call.outcomes == [], "a lost worker acknowledges nothing"
    assert [record.levelno for record in caplog.records if "loop of the tasks died" in record.message] == [
        logging.CRITICAL
    ]
    with pytest.raises(RuntimeError, match="no task loop"):
        engine_loop()
