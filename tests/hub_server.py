"""A Hugging Face hub on loopback, as far as files of models are read from one.

with hub_server() as hub:
    hub.repos["org/sql"] = {"adapter_config.json": b"{}"}
    ... hub.url as HF_ENDPOINT ...
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STOP_S = 10.0
#: Longest time that a file does not come.
GATE_S = 60.0


@dataclass
class Hub:
    """`repos` are files by name, by `org/name`, or by `org/name@revision` for another revision than main. `errors` are
    (status, X-Error-Code) by repository. Files whose names are in `moved` are on another host. `requests` are (path,
    has a token).

    The commit of a revision is a hash of its name. `cut` bytes are missing at the end of each file. With `drip_s` each
    byte of a file that is asked for then comes so long after the one before; without `gate` none comes at all.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, bool]] = field(default_factory=list)
    url: str = ""
    cut: int = 0
    drip_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def asked_for(self, name: str) -> int:
        """How often for files of that name."""
        return sum(path.endswith(f"/{name}") for path, _ in [*self.requests])

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._info("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else None)
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        if parts[2:3] != ["resolve"]:
            return 404, {}, b""
        if name in self.moved:
            return 302, {"Location": self.moved[name]}, b""
        found = next((files for key, files in self.repos.items() if (repo, parts[3]) == commit_of(key)), {})
        return (200, {}, found[name]) if name in found else (404, {"X-Error-Code": "EntryNotFound"}, b"")

    def _info(self, repo: str, revision: str | None) -> tuple[int, dict[str, str], bytes]:
        if repo in self.errors:
            status, code = self.errors[repo]
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        key = repo if revision in (None, "main") else f"{repo}@{revision}"
        if key not in self.repos:
            return 404, {"X-Error-Code": "RevisionNotFound" if repo in self.repos else "RepoNotFound"}, b"{}"
        names = [{"rfilename": one} for one in self.repos[key]]
        return 200, {}, json.dumps({"id": repo, "sha": commit_of(key)[1], "siblings": names}).encode()


def commit_of(key: str) -> tuple[str, str]:
    """(repository, commit) of a key of `repos`."""
    return key.partition("@")[0], hashlib.sha1(key.encode()).hexdigest()


@contextmanager
def hub_server(port: int = 0) -> Iterator[Hub]:
    """On a free port without one."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append((self.path, "Authorization" in self.headers))
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if "/resolve/" not in self.path:
                self.wfile.write(body)
            else:
                with suppress(OSError):  # nobody reads any more
                    self._send(body)

        def _send(self, body: bytes) -> None:
            hub.gate.wait(GATE_S)
            pause_s = hub.drip_s
            if not pause_s:
                self.wfile.write(body[: len(body) - hub.cut])
                return
            for at in range(len(body)):
                self.wfile.write(body[at : at + 1])
                if hub.ended.wait(pause_s):
                    return

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="hub")
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(STOP_S)
