"""Adapters of a running topology, and what an answer through one has to be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from app.adapters.intake import CONFIG, WEIGHTS
from tests.adapters import make_adapter, merge
from tests.e2e.merged import Merged
from tests.e2e.prompts import PROMPTS, Greedy, greedy
from tests.e2e.stack import MODEL, Stack
from tests.hub_server import Hub, commit_of

#: Two of them, and of which random numbers they are made.
SEEDS = {"sql": 1, "other": 2}
ASKED = ("text", "image")
#: prompt -> answer, by adapter, or the model itself.
Expected = dict[str, dict[str, Greedy]]

#: A repository of tests.hub_server, which gives its files to clients of S3, too.
REPOSITORY = "org/late"


def root() -> Path:
    """Below it workers take folders."""
    return Path(os.environ["TRIVET_ADAPTERS__ALLOWED_ROOT"])


def cache() -> Path:
    return Path(os.environ["TRIVET_ADAPTERS__CACHE_DIRECTORY"])


def s3_port() -> int:
    """Of the server that workers take for S3; a test that needs one starts it there."""
    port = urlsplit(os.environ["TRIVET_ADAPTERS__S3_ENDPOINT_URL"]).port
    assert port is not None
    return port


def put(hub: Hub, folder: Path) -> str:
    """Lay an adapter's files on the server at `s3_port`; the source's name."""
    hub.repos[REPOSITORY] = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    return f"s3://{REPOSITORY}/resolve/{commit_of(REPOSITORY)[1]}"


def answers(model: Path, scratch: Path) -> Expected:
    """Make the adapters of SEEDS, and ask transformers, with a model that each was merged into."""
    folders = {MODEL: model}
    for name, seed in SEEDS.items():
        folders[name] = merge(model, make_adapter(root() / name, model, seed=seed), scratch / name)
    found: Expected = {}
    for name, folder in folders.items():
        one = Merged(folder)
        found[name] = {prompt: one.greedy(PROMPTS[prompt]) for prompt in ASKED}
    for prompt in ASKED:
        assert len({tuple(of[prompt].tokens) for of in found.values()}) == len(folders), "they say the same"
    return found


def call(stack: Stack, method: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.request(method, f"{stack.base_url}{path}", json=body, timeout=120)


def ask_to_load(stack: Stack, name: str, uri: str | Path) -> httpx.Response:
    return call(stack, "POST", "/v1/loras", {"lora_name": name, "source": {"uri": str(uri)}})


def load(stack: Stack, name: str, content: str = "") -> dict[str, Any]:
    """The adapter in the folder `content` of the root, or of the same name, under that name."""
    answer = ask_to_load(stack, name, root() / (content or name))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def unload(stack: Stack, name: str) -> None:
    answer = call(stack, "DELETE", f"/v1/loras/{name}")
    assert answer.status_code == 200, answer.text


def ask(stack: Stack, model: str, prompt: str, tokens: int = 24) -> Greedy:
    return greedy(stack.client, PROMPTS[prompt], tokens=tokens, model=model)


def listed(stack: Stack) -> list[str]:
    return sorted(call(stack, "GET", "/v1/loras").json()["loras"])


def clear(stack: Stack) -> None:
    """Leave the topology to the next test as it was: no adapter has a name, and no worker holds one."""
    for name in listed(stack):
        unload(stack, name)
    eventually(lambda: not any(one.adapters for one in stack.all_workers()), 30, "the workers let them go")


def eventually(condition: Callable[[], Any], limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)
