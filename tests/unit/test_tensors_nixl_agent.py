from typing import Any

import pytest

from app.errors import TensorError
from app.tensors import nixl_agent, nixl_progress
from app.tensors.nixl_agent import NixlAgent


async def test_a_nixl_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise ImportError("no NIXL backend found")

    monkeypatch.setattr(nixl_progress, "apply", fail)
    agent = NixlAgent("127.0.0.1", 100)
    early = agent.call(lambda _: None)
    with pytest.raises(TensorError, match="NIXL cannot start: no NIXL backend found"):
        await agent.start()
    for call in (early, agent.call(lambda _: None)):
        with pytest.raises(TensorError, match="closed"):
            await call
    await agent.close()


async def test_an_agent_that_was_never_started() -> None:
    agent = NixlAgent("127.0.0.1", 100)
    await agent.close()
    otherwise: list[Any] = []
    agent.submit(lambda _: None, lambda: otherwise.append(1))
    assert otherwise == [1]


def test_names_differ() -> None:
    assert len({NixlAgent("127.0.0.1", 100).name for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("gpu1", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert nixl_agent._loopback(host) is loopback
