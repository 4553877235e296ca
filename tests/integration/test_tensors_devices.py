"""NIXL's agent listens where `tensors.host` is, and nowhere else."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from app.tensors import devices

LISTENING = """
import asyncio, sys, psutil
from app.tensors.nixl_agent import NixlAgent

async def main():
    agent = NixlAgent(sys.argv[1], 100, 10.0)
    await agent.start()
    found = psutil.Process().net_connections(kind="inet")
    print(*sorted({one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}))
    await agent.close()

asyncio.run(main())
"""


def listening(host: str, **env: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", LISTENING, host],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | env,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_listening_addresses() -> None:
    found = psutil.net_if_addrs()
    outside = [one.address for name in found if name != "lo" for one in found[name] if one.family is socket.AF_INET]
    if not outside or devices._has_rdma():
        pytest.skip("needs an interface other than loopback, and no RDMA devices")
    assert listening("127.0.0.1") == ["127.0.0.1"]
    assert listening(outside[0]) == [outside[0]]
    assert listening(outside[0], UCX_NET_DEVICES="lo") == ["127.0.0.1"]
