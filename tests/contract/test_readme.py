"""vLLM takes the engine arguments that README.md shows."""

import shlex
from typing import Any

from app import vllm_args
from app.cli import engine_flags
from tests import readme
from tests.command_lines import check


def test_vllm_takes_the_flags_that_pass_through(vllm: Any) -> None:
    passed: list[str] = []
    for words in readme.command_lines():
        if words[:2] == ["trivet", "up"]:
            passed += engine_flags.split(check(words).args).values()
    assert len(passed) >= 2
    for flags in passed:
        vllm_args.parse("a/b", shlex.split(flags))
