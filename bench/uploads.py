"""Many large pictures at once, as data: URLs.

    python -m bench.uploads --port 8000 [--number 100] [--mb 10]

Prints a JSON object: how many answers of each status, how often an upload was told to come again (503) and did, and the
seconds that it took. A process of its own, with a thread for each upload and the lowest priority, so that it takes
nothing of what is measured meanwhile: clients have machines of their own.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from bench.deployment import MODEL

LIMIT_S = 300.0


class Picture:
    """A PNG of `size` bytes. What follows its last chunk is nobody's, and different in each copy."""

    def __init__(self, size: int) -> None:
        out = io.BytesIO()
        Image.new("RGB", (64, 64)).save(out, "PNG")
        self._same = out.getvalue() + os.urandom(size - size % 3 - out.tell())
        self._encoded = base64.b64encode(self._same)

    def copy(self) -> bytes:
        return self._same + os.urandom(9)

    def url(self) -> list[bytes]:
        """The data: URL of a copy, in pieces that others share."""
        return [b"data:image/png;base64,", self._encoded, base64.b64encode(os.urandom(9))]


def body(url: list[bytes] | None) -> list[bytes]:
    """A chat completion of one token, about the picture that the URL names, if one does: in pieces."""
    content: list[dict[str, object]] = [{"type": "text", "text": f"What is in picture {os.urandom(4).hex()}?"}]
    if url is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": "URL"}})
    written = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1})
    head, *tail = written.encode().split(b"URL")
    return [head, *(url or ()), *tail]


def post(port: int, pieces: list[bytes]) -> tuple[int, bytes]:
    """(status, answer) of one chat completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        length = {"Content-Length": str(sum(map(len, pieces))), "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", iter(pieces), length)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def upload(port: int, pieces: list[bytes], again: list[float]) -> tuple[int, bytes]:
    """As clients do, try again when the server is full. Notes in `again` when."""
    until = time.monotonic() + LIMIT_S
    while True:
        status, answer = post(port, pieces)
        if status != 503 or time.monotonic() > until:
            return status, answer
        again.append(time.monotonic())
        time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--mb", type=float, default=10.0)
    args = parser.parse_args()
    os.nice(19)
    picture = Picture(int(args.mb * 1e6))
    bodies = [body(picture.url()) for _ in range(args.number)]
    again: list[float] = []
    started = time.monotonic()
    with ThreadPoolExecutor(args.number) as threads:
        answers = list(threads.map(lambda one: upload(args.port, one, again), bodies))
    failed = [answer.decode(errors="replace")[:300] for status, answer in answers if status != 200]
    statuses = Counter(status for status, _ in answers)
    took = time.monotonic() - started
    print(json.dumps({"statuses": statuses, "again": len(again), "seconds": took, "failed": failed[:1]}))


if __name__ == "__main__":
    main()
