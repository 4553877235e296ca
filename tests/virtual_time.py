"""An event loop whose clock jumps to the next timer as soon as nothing else is to be done."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._real_select = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None) -> Any:
        if timeout is None:
            raise AssertionError("everything waits, and no timer is set")
        self._now += max(timeout, 0.0)
        return self._real_select(0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
