"""A process of its own that tries grammars, each in a child that ends when its time or memory does.

Compiling is native code that nothing can interrupt: what some patterns take grows exponentially, and vLLM would let it
happen in an engine. Here a child does it that the kernel ends. The process has everything loaded and forks for each
grammar, so that a trial costs milliseconds more than its compiling.

Requests come on stdin, a JSON object a line: `id`, and the `spec`. Answers go to stdout in the same way: the `id` with
what became `known` of the spec, with `refused`, a text for the client, or with `died`, the signal that ended the child.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

import orjson

#: Memory that a trial may take, in bytes.
TRIAL_BYTES = 1 << 30
#: A trial yields to everything else on the host.
NICENESS = 10
#: Longest text of a refusal: a line is written at once, with others' lines around it, only if a pipe takes it whole.
MAX_TEXT = 500


class Trial(Protocol):
    def __call__(self, spec: dict[str, Any]) -> dict[str, Any]:
        """What is known after compiling the spec. Raises whatever compiling raises."""


class Trials:
    """Forks a child for each request. Runs in the main thread of a process without any other.

    `timeout_s` bounds a trial; `explain` puts an exception into words for the client.
    """

    def __init__(self, trial: Trial, explain: Callable[[Exception], str], timeout_s: float, answers: int) -> None:
        self._trial = trial
        self._explain = explain
        self._timeout_s = timeout_s
        self._answers = answers
        self._running: dict[int, int] = {}

    def serve(self, requests: int) -> None:
        """Answer until the file descriptor `requests` is at its end."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        pending = b""
        while chunk := os.read(requests, 1 << 16):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._start(orjson.loads(line))

    def _start(self, request: dict[str, Any]) -> None:
        # The child's end must not be told before it is known whose it was.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            self._child(request)
        self._running[pid] = request["id"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _child(self, request: dict[str, Any]) -> None:
        """Does not return."""
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            limit(self._timeout_s)
            os.write(self._answers, _line(request["id"], self._outcome(request["spec"])))
            os._exit(0)
        finally:
            os._exit(1)

    def _outcome(self, spec: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"known": self._trial(spec)}
        except MemoryError:
            return {"died": int(signal.SIGKILL)}
        except Exception as error:
            return {"refused": self._explain(error)[:MAX_TEXT]}

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            request = self._running.pop(pid, None)
            if request is not None and status != 0:
                died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                os.write(self._answers, _line(request, {"died": died}))


def limit(seconds: float) -> None:
    """End this process after so many seconds, or when it takes too much memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # no handler of Python's: native code would not let it run
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, used + TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)


def _line(request: int, answer: dict[str, Any]) -> bytes:
    return orjson.dumps({"id": request, **answer}) + b"\n"


def main() -> None:
    # Whatever libraries print is not for whoever reads the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    from api import vllm_grammars
    from app import logs, settings

    chosen = settings.current()
    logs.configure(chosen.log_level)
    compiler = vllm_grammars.Compiler(chosen)
    os.write(answers, b"\n")  # ready
    Trials(compiler.tried, vllm_grammars.explain, chosen.api.grammar_timeout_s, answers).serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
