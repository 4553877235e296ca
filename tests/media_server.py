"""A media host on loopback that counts what it is asked for, and misbehaves on demand.

    with media_server() as host:
        host.put("/cat.png", data, "image/png")
        ... host.url("/cat.png") ...
        assert host.gets("/cat.png") == 1

It runs on an event loop in a thread of its own, so tests of any kind can use it. Beside what was put there it knows:

| path | answer |
| --- | --- |
| `/status/<code>` | that status, with a short text |
| `/redirect/<code>?<location>` | a redirect to the location, as it stands there |
| `/chain/<n>/<path>` | n redirects, and then the path |
| `/loop` | a redirect to itself |
| `/endless`, `/endless-chunks` | a body without an end, without a length or in chunks |
| `/crumbs/<path>` | the body in chunks of two bytes, all sent at once |
| `/short/<path>`, `/long/<path>` | a Content-Length that is a byte less than the body, or a byte more |
| `/huge` | a Content-Length of a terabyte, and nothing more |
| `/slow/<path>` | the body, a byte every 20 ms |
| `/stall/<path>` | half of the body, and then nothing |
| `/silent` | nothing |
| `/bomb` | 64 MB of zeros, gzipped, whatever was asked for |
| `/html` | a page |
| `/empty` | 200 and no body |
| `/garbage` | something other than HTTP |
| `/untyped/<path>` | the body without a Content-Type |
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace

HOST = "127.0.0.1"
START_S = STOP_S = 10.0
DRIP_S = 0.02
BOMB_BYTES = 64 << 20


@dataclass(frozen=True)
class File:
    """What lies under a path. With `etag` or `last_modified` (an HTTP date) the host answers conditional GETs."""

    data: bytes
    media_type: str
    etag: str | None = None
    last_modified: str | None = None
    date: str | None = None

    def headers(self) -> dict[str, str]:
        named = {
            "Content-Type": self.media_type,
            "ETag": self.etag,
            "Last-Modified": self.last_modified,
            "Date": self.date,
        }
        return {name: value for name, value in named.items() if value}

    def is_known(self, headers: dict[str, str]) -> bool:
        if self.etag and "if-none-match" in headers:
            return headers["if-none-match"] == self.etag
        return self.last_modified is not None and headers.get("if-modified-since") == self.last_modified


@dataclass(frozen=True)
class Request:
    """`status` is what was answered, 0 where no status was."""

    method: str
    path: str
    headers: dict[str, str]
    status: int


@dataclass
class MediaHost:
    """`requests` are in order of arrival. `connections` counts those opened so far, `open` those that are, `peak` the
    most that were at once."""

    scheme: str
    port: int = 0
    files: dict[str, File] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    peak: int = 0

    def put(
        self,
        path: str,
        data: bytes,
        media_type: str,
        *,
        etag: bool = False,
        last_modified: str | None = None,
        date: str | None = None,
    ) -> str:
        """Lay a file there, in place of what was; its URL. Its `etag` is one of the content."""
        named = f'"{hashlib.sha256(data).hexdigest()[:16]}"' if etag else None
        self.files[path] = File(data, media_type, named, last_modified, date)
        return self.url(path)

    def url(self, path: str, host: str = HOST) -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def gets(self, path: str | None = None, status: int | None = None) -> int:
        """Requests so far: of a path, with a status, or all."""
        return sum(path in (None, one.path) and status in (None, one.status) for one in [*self.requests])


@contextmanager
def media_server(tls: ssl.SSLContext | None = None) -> Iterator[MediaHost]:
    host = MediaHost("https" if tls else "http")
    ready, end = threading.Event(), SimpleNamespace()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(host, tls, ready, end)), name="media-server")
    thread.start()
    try:
        assert ready.wait(START_S), "the media server did not start"
        yield host
    finally:
        end.loop.call_soon_threadsafe(end.event.set)
        thread.join(STOP_S)


async def _serve(host: MediaHost, tls: ssl.SSLContext | None, ready: threading.Event, end: SimpleNamespace) -> None:
    end.loop, end.event = asyncio.get_running_loop(), asyncio.Event()
    open_now: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host.connections += 1
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        host.open += 1
        host.peak = max(host.peak, host.open)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await _Exchange(host, reader, writer).run():
                    pass
        finally:
            open_now.discard(task)
            host.open -= 1
            writer.transport.abort()

    server = await asyncio.start_server(connected, HOST, 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    ready.set()
    await end.event.wait()
    server.close()
    for task in [*open_now]:
        task.cancel()
    await asyncio.gather(*open_now)


class _Exchange:
    """One request and its answer."""

    def __init__(self, host: MediaHost, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host, self._reader, self._writer = host, reader, writer
        self._headers: dict[str, str] = {}
        self._at = 0

    async def run(self) -> bool:
        """Whether the connection can take another one."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        self._headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        self._at = len(self._host.requests)
        self._host.requests.append(Request(method, path, self._headers, 0))
        if (found := self._host.files.get(path)) is not None:
            await self._file(found)
            return True
        name, _, rest = path.removeprefix("/").partition("/")
        odd = self._odd(name.partition("?")[0], rest)
        if odd is None:
            await self._whole(404, b"nothing here", "text/plain")
            return True
        await odd
        return False

    async def _file(self, file: File) -> None:
        if file.is_known(self._headers):
            await self._head(304, file.headers())
        else:
            await self._head(200, file.headers() | {"Content-Length": str(len(file.data))})
            await self._send(file.data)

    def _odd(self, name: str, rest: str) -> Awaitable[None] | None:
        file = self._host.files.get(f"/{rest}", File(b"", "image/png"))
        code, _, location = rest.partition("?")
        steps, _, target = rest.partition("/")
        answers: dict[str, Callable[[], Awaitable[None]]] = {
            "status": lambda: self._whole(int(rest), b"as you wish", "text/plain"),
            "redirect": lambda: self._redirect(int(code), location),
            "chain": lambda: self._redirect(
                302, f"/chain/{int(steps) - 1}/{target}" if int(steps) > 1 else f"/{target}"
            ),
            "loop": lambda: self._redirect(302, "/loop"),
            "endless": lambda: self._endless(chunked=False),
            "endless-chunks": lambda: self._endless(chunked=True),
            "crumbs": lambda: self._crumbs(file),
            "short": lambda: self._lying(file, -1),
            "long": lambda: self._lying(file, 1),
            "huge": lambda: self._head(200, {"Content-Type": "image/png", "Content-Length": str(10**12)}),
            "slow": lambda: self._slow(file),
            "stall": lambda: self._stall(file),
            "silent": self._silent,
            "bomb": self._bomb,
            "html": lambda: self._whole(200, b"<html><body>no picture</body></html>", "text/html; charset=utf-8"),
            "empty": lambda: self._whole(200, b"", "image/png"),
            "garbage": lambda: self._send(b"220 not HTTP at all\r\n\r\n"),
            "untyped": lambda: self._whole(200, file.data, ""),
        }
        return answers[name]() if name in answers else None

    async def _whole(self, status: int, data: bytes, media_type: str) -> None:
        kind = {"Content-Type": media_type} if media_type else {}
        await self._head(status, kind | {"Content-Length": str(len(data)), "Connection": "close"})
        await self._send(data)

    async def _redirect(self, status: int, location: str) -> None:
        await self._head(status, {"Location": location, "Content-Length": "0", "Connection": "close"})

    async def _lying(self, file: File, by: int) -> None:
        await self._head(200, file.headers() | {"Content-Length": str(len(file.data) + by), "Connection": "close"})
        await self._send(file.data)

    async def _endless(self, *, chunked: bool) -> None:
        kind = {"Transfer-Encoding": "chunked"} if chunked else {"Connection": "close"}
        await self._head(200, {"Content-Type": "image/png"} | kind)
        block = bytes(1 << 16)
        while True:
            await self._send(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)

    async def _crumbs(self, file: File) -> None:
        await self._head(200, file.headers() | {"Transfer-Encoding": "chunked"})
        pieces = (file.data[at : at + 2] for at in range(0, len(file.data), 2))
        await self._send(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")

    async def _slow(self, file: File) -> None:
        await self._head(200, file.headers() | {"Content-Length": str(len(file.data))})
        for at in range(len(file.data)):
            await self._send(file.data[at : at + 1])
            await asyncio.sleep(DRIP_S)

    async def _stall(self, file: File) -> None:
        await self._head(200, file.headers() | {"Content-Length": str(len(file.data))})
        await self._send(file.data[: len(file.data) // 2])
        await self._silent()

    async def _silent(self) -> None:
        await self._reader.read()  # until the client leaves

    async def _bomb(self) -> None:
        data = await asyncio.to_thread(gzip.compress, bytes(BOMB_BYTES))
        coding = {"Content-Type": "image/png", "Content-Encoding": "gzip", "Content-Length": str(len(data))}
        await self._head(200, coding)
        await self._send(data)

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        asked = self._host.requests[self._at]
        self._host.requests[self._at] = Request(asked.method, asked.path, asked.headers, status)
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {one}" for name, one in headers.items())]
        await self._send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        # Which does not wait where the other side has gone, and so nobody would hear that it has.
        await asyncio.sleep(0)
