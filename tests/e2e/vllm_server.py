"""vLLM's own server, with the tests' model and engine flags and no part of Trivet but the embedding cache."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app import ports
from tests.e2e.stack import ENGINE, MODEL, TOOL_PARSER

START_S = 400.0
STOP_S = 60.0
CAPACITY_GB = 0.02
CONNECTOR = {
    "ec_connector": "TrivetECConnector",
    "ec_connector_module_path": "workers.ec_connector",
    "ec_role": "ec_both",
}


@dataclass
class Server:
    """`root` is where its embedding cache has its files."""

    url: str
    root: Path
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_S)


@contextmanager
def serve(model: Path, root: Path) -> Iterator[Server]:
    """One engine, until the end of the block if nobody stops it before."""
    port = ports.reserve()
    url, log = f"http://127.0.0.1:{port}", root.with_name("vllm.log")
    with log.open("wb") as output:
        process = subprocess.Popen(_command(model, root, port), env=_environment(), stdout=output, stderr=output)
    try:
        _wait_until_healthy(process, url, log)
        yield Server(url, root, process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(model: Path, root: Path, port: int) -> list[str]:
    extra = {"capacity_gb": CAPACITY_GB, "directory": str(root)}
    # What `vllm serve` runs; that command itself does not start with the CPU build.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += [*shlex.split(ENGINE), '{"image":4,"video":1}', "--no-enable-prefix-caching"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER, "--enable-prompt-tokens-details"]
    return [*command, "--ec-transfer-config", json.dumps({**CONNECTOR, "ec_connector_extra_config": extra})]


def _environment() -> dict[str, str]:
    return os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
