"""Real clients against real engines: the suites of tests/clients, each in its client's own virtual environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.e2e.client_venvs import CLIENTS, SUITES, made
from tests.e2e.second_api import second_api
from tests.e2e.stack import Stack

LIMIT_S = 300
#: Where a client does no more than send OpenAI's requests, one topology is enough: others answer the same.
RUNS = [(client, "agg") for client in CLIENTS] + [("openai", "pd")]
#: litellm would fetch its table of prices from the web.
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


@pytest.fixture(scope="module")
def refusing(stacks: Mapping[str, Stack], model: Path) -> Iterator[dict[str, str]]:
    """Servers that are busy, or have nobody to do the work: by the variables that name them."""
    redis = stacks["agg"].redis_url
    tools = {"TRIVET_API__TOOL_CALL_PARSER": "hermes"}
    with (
        second_api(redis, model, TRIVET_API__MAX_IN_FLIGHT="1", **tools) as full,
        second_api(redis.removesuffix("/0") + "/1", model, "/health/live", **tools) as empty,
    ):
        yield {"FULL_URL": full, "NO_WORKER_URL": empty}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("client", "topology"), RUNS)
def test_client(
    client: str,
    topology: str,
    stacks: Mapping[str, Stack],
    request: pytest.FixtureRequest,
    subtests: pytest.Subtests,
    tmp_path: Path,
) -> None:
    urls = {"SERVER_URL": stacks[topology].base_url}
    if client == "openai":
        urls |= request.getfixturevalue("refusing")
    report = tmp_path / "report.xml"
    output = run(client, report, urls)
    tests = list(ElementTree.parse(report).iter("testcase"))
    assert tests, output
    for test in tests:
        with subtests.test(f"{test.get('classname')}::{test.get('name')}"):
            repeat(test)


def run(client: str, report: Path, urls: dict[str, str]) -> str:
    """Run the suite, and give what it printed."""
    ini = next(path for path in (SUITES / client / "pytest.ini", SUITES / "pytest.ini") if path.exists())
    command: list[str | Path] = [made(client) / "bin" / "pytest", SUITES / client, "-c", ini]
    command += ["--confcutdir", SUITES, f"--junit-xml={report}"]
    try:
        done = subprocess.run(
            command,
            cwd=report.parent,
            env=os.environ | ENVIRONMENT | urls,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"more than {LIMIT_S} s\n{(error.stdout or b'').decode()}", pytrace=False)
    output = done.stdout.decode()
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), output
    return output


def repeat(test: ElementTree.Element) -> None:
    """The outcome of a suite's test, once more."""
    for bad in (*test.iter("failure"), *test.iter("error")):
        pytest.fail(bad.text or bad.get("message") or "", pytrace=False)
    for skipped in test.iter("skipped"):
        pytest.skip(skipped.get("message") or "")
