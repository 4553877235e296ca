"""Real clients against real engines: the suites of tests/clients, each in its client's own virtual environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest

from tests.e2e.client_venvs import CLIENTS, SUITES, made
from tests.e2e.second_api import second_api
from tests.e2e.stack import Stack

#: They ask agg, too, which runs beside any other.
pytestmark = pytest.mark.topology("pd")
#: Of one suite, beside another.
LIMIT_S = 300
#: Suites at once: one of them waits for its answers most of the time.
AT_ONCE = 2
RETRIES = "test_openai_retries.py"
#: Where a client does no more than send OpenAI's requests, one topology is enough: others answer the same. The suite
#: that needs servers of its own comes last: they start while the others run.
RUNS = [*((client, "agg") for client in CLIENTS if client != "openai"), ("openai", "pd"), ("openai", "agg")]
#: litellm would fetch its table of prices from the web.
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}

#: A client and a topology.
Suite = tuple[str, str]
Tests = list[ElementTree.Element]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, stacks: Mapping[str, Stack], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Suite, Future[Tests]]]:
    """What the suites that are wanted found, or will."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = [cast(Suite, item.callspec.params["suite"]) for item in items if item.module is request.module]
    servers = {topology: stacks[topology].base_url for _, topology in wanted}
    folder = tmp_path_factory.mktemp("clients")
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(AT_ONCE)
        stack.callback(pool.shutdown, cancel_futures=True)
        found = {}
        for client, topology in wanted:
            urls = {"SERVER_URL": servers[topology]}
            if (client, topology) == RUNS[-1]:
                urls |= _refusing(stack, stacks[topology].redis_url, model)
            found[client, topology] = pool.submit(run, client, folder / f"{client}-{topology}.xml", urls)
        yield found


def _refusing(stack: ExitStack, redis: str, model: Path) -> dict[str, str]:
    """Servers that are busy, or have nobody to do the work: by the variables that name them."""
    tools = {"TRIVET_API__TOOL_CALL_PARSER": "hermes"}
    full = second_api(redis, model, TRIVET_API__MAX_IN_FLIGHT="1", **tools)
    empty = second_api(redis.removesuffix("/0") + "/1", model, "/health/live", **tools)
    return {"FULL_URL": stack.enter_context(full), "NO_WORKER_URL": stack.enter_context(empty)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", RUNS, ids="-".join)
def test_client(suite: Suite, outcomes: dict[Suite, Future[Tests]], subtests: pytest.Subtests) -> None:
    for test in outcomes[suite].result():
        with subtests.test(f"{test.get('classname')}::{test.get('name')}"):
            repeat(test)


def run(client: str, report: Path, urls: dict[str, str]) -> Tests:
    """Run the suite."""
    ini = next(path for path in (SUITES / client / "pytest.ini", SUITES / "pytest.ini") if path.exists())
    venv = made(SUITES / client / "requirements.lock")
    command: list[str | Path] = [venv / "bin" / "pytest", SUITES / client, "-c", ini]
    command += ["--confcutdir", SUITES, f"--junit-xml={report}"]
    if client == "openai" and "FULL_URL" not in urls:
        command += ["--ignore", SUITES / client / RETRIES]
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
    tests = list(ElementTree.parse(report).iter("testcase"))
    assert tests, output
    return tests


def repeat(test: ElementTree.Element) -> None:
    """The outcome of a suite's test, once more."""
    for bad in (*test.iter("failure"), *test.iter("error")):
        pytest.fail(bad.text or bad.get("message") or "", pytrace=False)
    for skipped in test.iter("skipped"):
        pytest.skip(skipped.get("message") or "")
