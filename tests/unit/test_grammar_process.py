"""api.grammar_process: each trial in a child that the kernel ends, here with trials that are no grammars."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

import pytest

from tests.command_lines import ROOT

#: What hangs does so in native code, as a compiler does: no handler of Python's would run.
PROGRAM = """
import os, sys, time
from api.grammar_process import Trials

def trial(spec):
    if spec["do"] == "hang":
        pow(7, 10**9, 10**100000 + 1)
    if spec["do"] == "grow":
        bytearray(3 << 30)
    if spec["do"] == "crash":
        os.abort()
    if spec["do"] == "refuse":
        raise ValueError("no " + "x" * 5000)
    return {"pid": os.getpid()}

Trials(trial, str, 1.0, 1).serve(0)
"""


class Helper:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        assert process.stdin is not None and process.stdout is not None
        self._requests: IO[bytes] = process.stdin
        self._answers: IO[bytes] = process.stdout

    def ask(self, number: int, do: str) -> None:
        self._requests.write(json.dumps({"id": number, "spec": {"do": do}}).encode() + b"\n")
        self._requests.flush()

    def answer(self) -> Any:
        return json.loads(self._answers.readline())

    def end(self) -> int:
        self._requests.close()
        return self.process.wait(10)


@pytest.fixture
def helper() -> Iterator[Helper]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    with process:
        yield Helper(process)
        process.kill()


def test_a_trial_is_a_process_of_its_own(helper: Helper) -> None:
    for number in (1, 2):
        helper.ask(number, "work")
    answers = [helper.answer(), helper.answer()]
    assert {one["id"] for one in answers} == {1, 2}
    assert len({one["known"]["pid"] for one in answers} | {helper.process.pid}) == 3
    assert helper.end() == 0


def test_what_is_refused_is_said_in_few_words(helper: Helper) -> None:
    helper.ask(1, "refuse")
    answer = helper.answer()
    assert answer["refused"].startswith("no x") and len(answer["refused"]) == 500


@pytest.mark.parametrize(
    ("do", "died"), [("hang", signal.SIGALRM), ("grow", signal.SIGKILL), ("crash", signal.SIGABRT)]
)
def test_what_goes_too_far_ends_alone(helper: Helper, do: str, died: int) -> None:
    helper.ask(1, do)
    began = time.monotonic()
    helper.ask(2, "work")
    first = helper.answer()
    if do == "hang":
        assert first["id"] == 2 and time.monotonic() - began < 1.0, "others do not wait for it"
        first = helper.answer()
    elif first["id"] == 2:
        first = helper.answer()
    assert first == {"id": 1, "died": died}
    helper.ask(3, "work")
    assert {helper.answer()["id"]} <= {2, 3}


def test_nothing_is_left_of_it(helper: Helper) -> None:
    helper.ask(1, "hang")
    helper.ask(2, "work")
    child = helper.answer()["known"]["pid"]
    assert helper.end() == 0
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < until
        time.sleep(0.05)
