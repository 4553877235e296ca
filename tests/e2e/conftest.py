"""The topologies, each started once for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from app import tiny_model
from app.launch import shared_memory
from tests.e2e.stack import Stack, up


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory of the tests' own, and no setting from outside."""
    folder = tmp_path_factory.mktemp("trivet")
    saved = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("TRIVET_")]:
        del os.environ[name]
    os.environ |= {"TRIVET_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    yield folder
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def stacks(home: Path, model: Path) -> Iterator[dict[str, Stack]]:
    """Both topologies side by side: three engines, two APIs. Nothing of them may be left at the end."""
    before = set(shared_memory.listing())
    with ExitStack() as stack:
        running = {topology: stack.enter_context(up(f"e2e-{topology}", topology, model)) for topology in ("agg", "pd")}
        yield running
    left = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or ())]
    assert left == [], "processes left behind"
    # What a live process uses belongs to somebody else on this host.
    used = {inode for process in psutil.process_iter() for inode in shared_memory.used_by(process.pid)}
    files = {name for name, inode in shared_memory.listing().items() if name not in before and inode not in used}
    assert files == set(), "shared memory left behind"


@pytest.fixture
def agg(stacks: dict[str, Stack]) -> Stack:
    return stacks["agg"]


@pytest.fixture
def pd(stacks: dict[str, Stack]) -> Stack:
    return stacks["pd"]


@pytest.fixture(params=["agg", "pd"])
def stack(request: pytest.FixtureRequest, stacks: dict[str, Stack]) -> Stack:
    """Each topology in turn."""
    return stacks[request.param]
