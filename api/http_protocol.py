"""uvicorn's HTTP protocol, less its readiness to read heads without an end.

uvicorn --http api.http_protocol:BoundedHttp api.main:app
"""

from __future__ import annotations

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.errors.base import Failure

#: As much as uvicorn's other protocol, h11, takes.
MAX_HEAD_BYTES = 64 << 10

TOO_LARGE = Failure(431, "headers_too_large", f"the request's headers are larger than {MAX_HEAD_BYTES >> 10} KB")


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request whose head goes on after 64 KiB, and one whose trailers or chunk headers do.

    They are counted by what brings the parser no further; one read, of a few hundred KB, may pass uncounted.
    """

    _unfinished = 0
    _got_on = False

    def data_received(self, data: bytes) -> None:
        self._got_on = False
        super().data_received(data)
        self._unfinished = 0 if self._got_on else self._unfinished + len(data)
        if self._unfinished > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._got_on = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._got_on = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        super().on_message_complete()

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_ANSWER)
        self.transport.close()


def _answer() -> bytes:
    error = {"message": TOO_LARGE.message, "type": "invalid_request_error", "param": None, "code": TOO_LARGE.code}
    content = orjson.dumps({"error": error})
    head = (
        f"HTTP/1.1 {TOO_LARGE.status} Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


_ANSWER = _answer()
