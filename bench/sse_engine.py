"""An OpenAI server without an engine, as cheap as can be: what a router in front of it costs, and what it bears.

python -m bench.sse_engine --port N --step-ms 50

Its frames are vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import Any

import orjson
import uvloop

from api import fast_lane
from bench.deployment import MODEL
from bench.steps import Steps

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection(asyncio.Protocol):
    """One request at a time, as a router sends them."""

    def __init__(self, steps: Steps, group: asyncio.TaskGroup) -> None:
        self._steps, self._group = steps, group
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not end or len(body) < (int(length[1]) if length else 0):
            return
        self._received = b""
        if head.startswith(b"POST"):
            self._group.create_task(self._answer(orjson.loads(body)))
        else:
            answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            self._transport.write(answer % (len(MODELS), MODELS))

    async def _answer(self, asked: dict[str, Any]) -> None:
        count, usage = asked["max_tokens"], bool(asked.get("stream_options"))
        writer = fast_lane.Writer("chatcmpl-bench", MODEL, "assistant", None, usage=usage)
        ready = HEAD + _chunk(writer.first())
        async for new in self._steps.tokens(count):
            text = "".join(f"{number} " for number in new)
            done = new.stop == count
            ready += _chunk(writer.last(text, "length", None) if done else writer.text(text))
            if done and usage:
                ready += _chunk(writer.usage(1, count, None))
            if done:
                ready += _chunk(fast_lane.DONE) + b"0\r\n\r\n"
            self._transport.write(ready)
            ready = b""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def main(port: int, step_s: float) -> None:
    steps = Steps(step_s)
    async with asyncio.TaskGroup() as group:
        await asyncio.get_running_loop().create_server(
            lambda: Connection(steps, group), "127.0.0.1", port, backlog=1024
        )
        await steps.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    args = parser.parse_args()
    uvloop.run(main(args.port, args.step_ms / 1e3))
