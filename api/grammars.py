"""Schemas, regexes and grammars are tried before any engine sees them, within a time limit."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from api import metrics
from app.errors.requests import InvalidRequest
from app.errors.serving import GrammarsUnavailable
from app.settings import SECRETS, Settings, environment, variable

log = logging.getLogger(__name__)

#: Largest structured output of a request, as JSON. That of a hundred tools is smaller.
MAX_BYTES = 512 * 1024
#: Trials at once; others wait their turn.
AT_ONCE = 2
#: Specs of which is remembered that they can be compiled.
REMEMBERED = 512
#: Longest start of the process that tries them.
START_S = 120.0
#: How much longer than a trial may take its answer is waited for.
ANSWER_S = 10.0
ROOT = Path(__file__).resolve().parents[1]

#: What answers as `Grammars.known` does.
Known = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

ADVICE = "use a simpler one: fewer alternatives, fewer and smaller repetitions, less nesting"


class Grammars:
    """Tries each spec once, in a process that is started for the first one and anew when it died."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tried: OrderedDict[bytes, asyncio.Task[dict[str, Any]]] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._started: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    async def known(self, spec: dict[str, Any]) -> dict[str, Any]:
        """What vLLM chooses for the spec, its StructuredOutputsParams as builtins.

        Raises InvalidRequest if it cannot be compiled, in time or at all, and GrammarsUnavailable.
        """
        text = orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)
        if len(text) > MAX_BYTES:
            raise InvalidRequest(f"the schema or grammar is larger than {MAX_BYTES // 1024} KB: {ADVICE}")
        name = hashlib.sha256(text).digest()
        if (trial := self._tried.get(name)) is not None:
            self._tried.move_to_end(name)
            metrics.GRAMMARS.labels("known").inc()
        else:
            trial = self._tried[name] = asyncio.create_task(self._try(spec))
            trial.add_done_callback(lambda ended: self._remember(name, ended))
        # Others may wait for the same, and the answer is of use to those who come later.
        return await asyncio.shield(trial)

    async def close(self) -> None:
        if self._started is None:
            return
        if self._started.done() and self._started.exception() is None:
            _kill(self._started.result())
        self._started.cancel()
        tasks = [self._started] if self._reading is None else [self._started, self._reading]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try(self, spec: dict[str, Any]) -> dict[str, Any]:
        async with self._turns:
            answer = await self._ask(spec)
        return self._read(answer)

    def _remember(self, name: bytes, trial: asyncio.Task[dict[str, Any]]) -> None:
        """Only what can be compiled: the host may have been busy."""
        if trial.cancelled() or trial.exception() is not None:
            self._tried.pop(name, None)
        while len(self._tried) > REMEMBERED and next(iter(self._tried.values())).done():
            self._tried.popitem(last=False)

    def _read(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "known" in answer:
            metrics.GRAMMARS.labels("compiled").inc()
            found: dict[str, Any] = answer["known"]
            return found
        if "refused" in answer:
            metrics.GRAMMARS.labels("refused").inc()
            raise InvalidRequest(f"the schema or grammar cannot be compiled: {answer['refused']}")
        seconds = self._settings.api.grammar_timeout_s
        in_time = answer["died"] != signal.SIGALRM
        metrics.GRAMMARS.labels("too_large" if in_time else "too_slow").inc()
        what = "takes too much memory" if in_time else f"takes longer than api.grammar_timeout_s ({seconds:g} s)"
        log.warning("a schema or grammar %s to compile, and was refused (signal %d)", what, answer["died"])
        raise InvalidRequest(f"the schema or grammar {what} to compile: {ADVICE}")

    async def _ask(self, spec: dict[str, Any]) -> dict[str, Any]:
        process = await self._running()
        assert process.stdin is not None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._settings.api.grammar_timeout_s + ANSWER_S):
                process.stdin.write(orjson.dumps({"id": number, "spec": spec}) + b"\n")
                await process.stdin.drain()
                found: dict[str, Any] = await answer
                return found
        except TimeoutError:
            _kill(process)
            raise GrammarsUnavailable("the process that tries grammars hangs and is started anew") from None
        except (OSError, RuntimeError) as error:
            raise GrammarsUnavailable("the process that tries grammars ended and is started anew") from error
        finally:
            del self._waiting[number]

    async def _running(self) -> asyncio.subprocess.Process:
        if self._started is None or _is_over(self._started):
            self._started = asyncio.create_task(self._start())
        # Whoever asked first may leave before it is there: it is for the others, too.
        return await asyncio.shield(self._started)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "api.grammar_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(self._settings),
            start_new_session=True,  # its children end with it, and Ctrl-C is for the API alone
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                ready = await process.stdout.readline()
        except BaseException as error:
            _kill(process)
            if isinstance(error, TimeoutError):
                raise GrammarsUnavailable(f"the process that tries grammars did not start in {START_S:g} s") from None
            raise
        if not ready:
            raise GrammarsUnavailable("the process that tries grammars cannot start (see the API's log)")
        self._reading = asyncio.create_task(self._read_answers(process))
        return process

    async def _read_answers(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                answer = orjson.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            await process.wait()
            log.info("the process that tries grammars ended (%s)", process.returncode)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(OSError("it ended"))


def _environment(settings: Settings) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name not in map(variable, SECRETS)}
    return inherited | environment(settings, everything=True) | {"PYTHONPATH": path}


def _is_over(started: asyncio.Task[asyncio.subprocess.Process]) -> bool:
    if not started.done():
        return False
    return started.cancelled() or started.exception() is not None or started.result().returncode is not None


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
