"""An event loop in a thread of its own."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

log = logging.getLogger(__name__)


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        log.warning("uvloop is not installed: tasks run on asyncio's own, slower loop")
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """Runs an event loop (uvloop where installed) in a daemon thread until `stop`.

    `on_death` is called, in that thread, with the reason if the loop ends without having been told to.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, name: str, on_death: Callable[[BaseException], None]) -> None:
        #: Only what is cancelled or cleans up still runs.
        self.ending = False
        self._on_death = on_death
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, timeout: float = 10) -> None:
        """Start the thread and wait until its loop runs; raises what kept it from running."""
        self._thread.start()
        self.loop = self._ready.result(timeout)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call the function on the loop, from any thread; never, if the loop has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *args)

    def stop(self, timeout: float) -> None:
        """Cancel what still runs on the loop and end the thread; gives up after `timeout` seconds, with a warning."""
        self.call_soon(self._stop.set)
        self._thread.join(timeout)
        if self.alive:
            log.warning("the loop of the %s did not end within %.0f s of being told to", self._thread.name, timeout)

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                try:
                    runner.run(self._until_stopped())
                finally:
                    self.ending = True
        except BaseException as exc:
            if self._ready.done():
                self._on_death(exc)
            else:
                self._ready.set_exception(exc)

    async def _until_stopped(self) -> None:
        self._ready.set_result(asyncio.get_running_loop())
        await self._stop.wait()
