import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from app.tensors import devices

NAMES = {"gpu1": ["10.0.0.1"], "gpu2": ["127.0.1.1"], "gpu3": ["127.0.1.1", "fd00::2"], "nowhere": ["10.9.9.9"]}


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without RDMA devices; answers where they would be."""
    addresses = {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["10.0.0.1", "fe80::1%eth0", "02:00:00:00:00:01"],
        "eth0:1": ["10.0.0.2"],
        "eth1": ["10.1.0.1", "fd00::2"],
    }
    found = {name: [SimpleNamespace(address=one) for one in own] for name, own in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(devices, "_INFINIBAND", tmp_path / "infiniband")
    real = socket.getaddrinfo

    def look_up(name: str, *rest: Any, **options: Any) -> Any:
        if name not in NAMES:
            return real(name, *rest, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in NAMES[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return tmp_path / "infiniband"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("127.0.0.1", "lo"),
        ("127.1.2.3", "lo"),
        ("::1", "lo"),
        ("localhost", "lo"),
        ("10.0.0.1", "eth0"),
        ("10.0.0.2", "eth0"),
        ("fe80::1", "eth0"),
        ("fd00::2", "eth1"),
        ("gpu1", "eth0"),
        ("gpu3", "eth1"),
    ],
)
def test_an_address_stands_for_its_interface(name: str, found: str) -> None:
    assert devices.of(name) == found


@pytest.mark.parametrize("name", ["10.9.9.9", "nowhere", "gpu2"])
def test_an_address_of_no_interface_limits_nothing_and_that_is_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert devices.of(name) is None
    assert f"tensors.host={name} is no address of this host's interfaces" in caplog.text


def test_rdma_devices_are_not_lost(host: Path) -> None:
    host.mkdir()
    assert devices.of("10.0.0.1") == "eth0"
    (host / "mlx5_0").mkdir()
    assert devices.of("10.0.0.1") is None
    assert devices.of("127.0.0.1") == "lo"
