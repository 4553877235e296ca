"""Suites of real clients. Each runs in a virtual environment of its own, against the server that SERVER_URL names.

tests/e2e/test_clients.py makes the environments and runs the suites. They import their client and pytest, nothing of
this project. By hand, against a server that has the tiny model and a parser for tool calls:

    cd tests/clients
    SERVER_URL=http://127.0.0.1:8000 ../../.trivet/client-venvs/openai/bin/pytest --confcutdir . openai
"""

from __future__ import annotations

import base64
import json
import os
import struct
import urllib.request
import zlib
from typing import Any

import pytest


@pytest.fixture(scope="session")
def server_url() -> str:
    return os.environ["SERVER_URL"]


@pytest.fixture(scope="session")
def model_name() -> str:
    return "tiny"


@pytest.fixture(scope="session")
def red_png() -> str:
    """A red picture of 64 x 64, as base64."""
    size = 64

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xff\0\0" * size) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


@pytest.fixture(scope="session")
def weather_schema() -> dict[str, Any]:
    """Arguments of a tool. Every value is one of a few: a random model would make a free string as long as it may."""
    return {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Lima"]},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    }


#: What a random model is to say first where a grammar allows several of them. A string ends as soon as it has begun,
#: and blanks, of which it would write without end, come only where nothing else can.
ORDER = {
    **{'"': 100, "}": 95, "{": 90, ":": 85, "[": 85, "]": 80, ",": 70},
    **dict.fromkeys("0123456789tfn", 30),
    **{" ": 20, "\n": -100, "\r": -100, "\t": -100},
}


@pytest.fixture(scope="session")
def short_json(server_url: str) -> dict[str, int]:
    """A `logit_bias` that makes short JSON of what a schema allows."""
    return {str(_token(server_url, sign)): bias for sign, bias in ORDER.items()}


def _token(server_url: str, text: str) -> int:
    body = json.dumps({"prompt": text}).encode()
    request = urllib.request.Request(f"{server_url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        (token,) = json.load(answer)["tokens"]
    return int(token)
