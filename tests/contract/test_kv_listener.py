"""vLLM's listener for decode workers: without it there is no engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from app import ports
from workers import kv_listener

ROOT = Path(kv_listener.__file__).parents[1]
#: As vLLM's scheduler does it when the worker's blocks are known.
START = """
import sys
from types import SimpleNamespace
from workers import kv_listener
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler as Scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
import threading

kv_listener.install()
made = SimpleNamespace(
    _nixl_handshake_listener_t=None,
    _nixl_handshake_listener=Scheduler._nixl_handshake_listener,
    _stop_event=threading.Event(),
    side_channel_host="127.0.0.1",
    side_channel_port=int(sys.argv[1]),
)
payload = NixlHandshakePayload(compatibility_hash="", agent_metadata_bytes=b"")
Scheduler.set_xfer_handshake_metadata(made, {(0, 0): payload})
print("listening")
"""


def started(port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START, str(port)]
    env = {**os.environ, "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_an_engine_whose_port_is_taken_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = started(port)
    assert ended.returncode == 1 and "listening" not in ended.stdout
    assert f"nobody listens for decode workers on 127.0.0.1:{port} (Address already in use" in ended.stderr


def test_an_engine_whose_port_is_free_listens() -> None:
    ended = started(next(ports.free()))
    assert (ended.returncode, ended.stdout) == (0, "listening\n"), ended.stderr
