"""workers.jobs: stopping what runs."""

import asyncio

import pytest

from workers.jobs import Jobs


async def start(jobs: Jobs, request_id: str, api: str) -> asyncio.Task[None]:
    started = asyncio.Event()

    async def run() -> None:
        with jobs.running(request_id, api):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await started.wait()
    return task


async def ended(*tasks: asyncio.Task[None]) -> list[bool]:
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.cancelled() for task in tasks]


async def test_one_request_is_stopped_and_no_other() -> None:
    jobs = Jobs()
    first, second = await start(jobs, "a", "x"), await start(jobs, "b", "x")
    assert (len(jobs), jobs.ids()) == (2, ["a", "b"])
    jobs.cancel("a")
    assert await ended(first) == [True]
    assert (jobs.ids(), second.done()) == (["b"], False)
    jobs.interrupt()
    assert await ended(second) == [True] and len(jobs) == 0


async def test_all_requests_of_an_api_process_are_stopped() -> None:
    jobs = Jobs()
    mine, mine_too, others = await start(jobs, "a", "x"), await start(jobs, "b", "x"), await start(jobs, "c", "y")
    jobs.cancel_of("x")
    assert await ended(mine, mine_too) == [True, True]
    assert jobs.ids() == ["c"]
    jobs.interrupt()
    await ended(others)


async def test_a_cancelled_request_is_told_from_an_interrupted_one() -> None:
    jobs, seen = Jobs(), {}

    async def run(request_id: str) -> None:
        with jobs.running(request_id, "x"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen[request_id] = jobs.was_cancelled(request_id)

    tasks = [asyncio.create_task(run(name)) for name in ("asked", "not asked")]
    await asyncio.sleep(0)
    jobs.cancel("asked")
    jobs.interrupt()
    await ended(*tasks)
    assert seen == {"asked": True, "not asked": False}
    assert not jobs.was_cancelled("asked"), "an id that comes again must not be taken for cancelled"


async def test_cancelling_what_does_not_run_is_harmless() -> None:
    jobs = Jobs()
    jobs.cancel("nobody")
    assert not jobs.was_cancelled("nobody")
    with jobs.running("nobody", "x"):
        await asyncio.sleep(0)


async def test_a_failed_request_is_forgotten() -> None:
    jobs = Jobs()
    with pytest.raises(ValueError), jobs.running("a", "x"):
        raise ValueError
    assert len(jobs) == 0
