"""The topologies, each started once for the whole session, and its tests one after the other.

Idle engines poll: all topologies side by side would take half of two cores from the one that is tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from app import ports, tiny_model
from app.launch import shared_memory
from app.roles import TOPOLOGIES
from tests.e2e import adapters
from tests.e2e.stack import LORA, Stack, close_clients, up
from tests.e2e.vllm_server import Server, serve
from tests.s3_server import S3_ENVIRONMENT


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    close_clients()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory of the tests' own, and no setting from outside."""
    folder = tmp_path_factory.mktemp("trivet")
    saved = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("TRIVET_")]:
        del os.environ[name]
    os.environ |= _of_adapters(folder) | {
        "TRIVET_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        # A tiny model's step is too short to share, and a second thread without a core makes it many times as long.
        "OMP_NUM_THREADS": "1",
        # The tests' media host.
        "TRIVET_MEDIA_URLS__ALLOW_PRIVATE": "127.0.0.0/8",
        "TRIVET_MEDIA_URLS__ALLOWED_PORTS": "any",
        # The tiny model's longest prompt is far below the default.
        "TRIVET_STREAM__MAX_PROMPT_LOGPROBS": "10000",
    }
    yield folder
    os.environ.clear()
    os.environ.update(saved)


def _of_adapters(folder: Path) -> dict[str, str]:
    """Where adapters come from: tests/e2e/adapters.py has the rest. The cache keeps some ten of them."""
    root = folder / "adapters"
    root.mkdir()
    return S3_ENVIRONMENT | {
        "TRIVET_ADAPTERS__ALLOWED_ROOT": str(root),
        "TRIVET_ADAPTERS__CACHE_DIRECTORY": str(folder / "adapter-cache"),
        "TRIVET_ADAPTERS__CACHE_GB": "0.004",
        "TRIVET_ADAPTERS__S3_ENDPOINT_URL": f"http://127.0.0.1:{ports.reserve()}",
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")


#: Of a test, the start of the topology that it is the first to ask for included.
LIMIT_S = 600
#: Last is what kills workers: the modules whose names begin like this.
FAULTS = "test_z_"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that start their own engines, then each topology's; the order of all else stays."""
    here = Path(__file__).parent
    mine = [item for item in items if item.path.parent == here]
    others = [item for item in items if item.path.parent != here]
    items[:] = others + sorted(mine, key=_turn)
    for item in mine:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def _turn(item: pytest.Item) -> tuple[int, bool]:
    used = _topology(item)
    return (0 if used is None else 1 + list(TOPOLOGIES).index(used), item.path.stem.startswith(FAULTS))


def _topology(item: pytest.Item) -> str | None:
    """That of a test's marker or parameter, or of the fixture that it asks for; None: it uses no shared one."""
    if (marker := item.get_closest_marker("topology")) is not None:
        return str(marker.args[0])
    fixtures = getattr(item, "fixturenames", ())
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if not {"stacks", *TOPOLOGIES} & set(fixtures):
        return None
    for name in (*parameters.values(), *fixtures):
        if isinstance(name, str) and name in TOPOLOGIES:
            return name
    raise pytest.UsageError(f"{item.nodeid} does not say which topology it uses: mark it")


class Stacks(Mapping[str, Stack]):
    """A topology by its name, started when a test first asks for it.

    `agg` stays, since others are compared with it; of them, one runs at a time.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._running: dict[str, tuple[Stack, ExitStack]] = {}

    def __getitem__(self, topology: str) -> Stack:
        if topology not in self._running:
            for other in self._running.keys() - {"agg"}:
                self._stop(other)
            self._running[topology] = self._start(topology)
        return self._running[topology][0]

    def _start(self, topology: str) -> tuple[Stack, ExitStack]:
        # On one host embeddings are shared by name; here one topology takes the way between hosts.
        os.environ["TRIVET_TENSORS__TRANSPORT"] = "nixl" if topology == "e_pd" else "auto"
        more = [*LORA, "--replicas", "encode=2"] if topology == "e_pd" else [*LORA]
        end = ExitStack()
        try:
            return end.enter_context(up(f"e2e-{topology}", topology, self._model, *more)), end
        finally:
            del os.environ["TRIVET_TENSORS__TRANSPORT"]

    def _stop(self, topology: str) -> None:
        _, end = self._running.pop(topology)
        end.close()

    def close(self) -> None:
        for topology in list(self._running):
            self._stop(topology)

    def __iter__(self) -> Iterator[str]:
        return iter(TOPOLOGIES)

    def __len__(self) -> int:
        return len(TOPOLOGIES)


@pytest.fixture(scope="session")
def stacks(home: Path, model: Path) -> Iterator[Stacks]:
    """The topologies. Nothing of them may be left at the end."""
    before = set(shared_memory.listing())
    with closing(Stacks(model)) as stacks:
        yield stacks
    left = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or ())]
    assert left == [], "processes left behind"
    # What a live process uses belongs to somebody else on this host.
    used = {inode for process in psutil.process_iter() for inode in shared_memory.used_by(process.pid)}
    files = {name for name, inode in shared_memory.listing().items() if name not in before and inode not in used}
    assert files == set(), "shared memory left behind"


@pytest.fixture(scope="session")
def merged(home: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> adapters.Expected:
    """What answers with and without adapters have to be; the adapters are in the root from then on."""
    return adapters.answers(model, tmp_path_factory.mktemp("merged"))


@pytest.fixture(scope="session")
def vllm_server(home: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What the pipeline is compared with. `test_vllm_serve`, the last that uses it, stops it."""
    with serve(model, tmp_path_factory.mktemp("shm")) as server:
        yield server


@pytest.fixture
def agg(stacks: Stacks) -> Stack:
    return stacks["agg"]


@pytest.fixture
def pd(stacks: Stacks) -> Stack:
    return stacks["pd"]


@pytest.fixture
def e_pd(stacks: Stacks) -> Stack:
    return stacks["e_pd"]


@pytest.fixture
def e_p_d(stacks: Stacks) -> Stack:
    return stacks["e_p_d"]


@pytest.fixture(params=["agg", "pd"])
def stack(request: pytest.FixtureRequest, stacks: Stacks) -> Stack:
    """Each topology in turn."""
    return stacks[request.param]
