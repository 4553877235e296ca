"""The plain text stream, written without a model object for each token.

vLLM's serving code spends about 100 microseconds of CPU on every streamed chunk, most of it in pydantic. A stream
that asks for nothing but text needs one string put between two others. Frames are equal, byte for byte, to those of
vLLM's own generator; a contract test compares them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from app.messages.deltas import Delta

_FALSY = ("logprobs", "return_token_ids", "return_prompt_text", "echo", "use_beam_search")


def takes(request: Any, *, parsers: bool) -> bool:
    """Whether vLLM's chat request asks for a plain stream. `parsers`: a tool or reasoning parser reads the text."""
    if parsers or (request.n or 1) != 1 or any(getattr(request, name, None) for name in _FALSY):
        return False
    options = request.stream_options
    return options is None or not options.continuous_usage_stats


class Writer:
    """Frames of one stream, as `bytes` of server-sent events."""

    def __init__(self, request_id: str, model: str, role: str, fingerprint: str | None, *, usage: bool) -> None:
        head = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._role = role
        self._fingerprint = b"" if fingerprint is None else b',"system_fingerprint":' + orjson.dumps(fingerprint)
        self._usage = usage
        self._before = self._head + b',"choices":[{"index":0,"delta":{"content":'

    def first(self) -> bytes:
        delta = orjson.dumps({"role": self._role, "content": ""})
        choice = b'{"index":0,"delta":' + delta + b',"logprobs":null,"finish_reason":null}'
        return self._head + b',"choices":[' + choice + b'],"prompt_token_ids":null,"prompt_text":null}\n\n'

    def text(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'

    def last(self, text: str, finish_reason: str, stop_reason: int | str | None) -> bytes:
        fields = b'},"logprobs":null,"finish_reason":%b,"stop_reason":%b,"token_ids":null}]' % (
            orjson.dumps(finish_reason),
            orjson.dumps(stop_reason),
        )
        fingerprint = b"" if self._usage else self._fingerprint
        return self._before + orjson.dumps(text) + fields + fingerprint + b"}\n\n"

    def usage(self, prompt: int, completion: int, details: dict[str, Any] | None) -> bytes:
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        if details is not None:
            usage["prompt_tokens_details"] = details
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage) + self._fingerprint + b"}\n\n"


DONE = b"data: [DONE]\n\n"


async def frames(
    steps: AsyncGenerator[list[Delta], None], writer: Writer, prompt_tokens: int, *, usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream's events, those that are ready together in one piece: every piece costs a way through the HTTP stack.

    Raises what `steps` raises: the caller knows how to say it.
    """
    completion, details = 0, None
    ready = writer.first()
    async for deltas in steps:
        if not completion and details is None:
            prompt_tokens = len(deltas[0].prompt_token_ids or ()) or prompt_tokens
            details = _details(deltas[0])
        text, last = "".join(delta.text for delta in deltas), deltas[-1]
        completion += sum(len(delta.token_ids) for delta in deltas)
        if last.finish_reason is not None:
            ready += writer.last(text, last.finish_reason, last.stop_reason)
            continue
        if text or completion:
            ready += writer.text(text)
        yield ready
        ready = b""
    if usage:
        ready += writer.usage(prompt_tokens, completion, details)
    yield ready + DONE


def _details(delta: Delta) -> dict[str, Any] | None:
    """`prompt_tokens_details`: what came from a cache, and what media took."""
    details: dict[str, Any] = {}
    if delta.cached_tokens is not None:
        details["cached_tokens"] = delta.cached_tokens
    if delta.created_cache_tokens is not None:
        details["created_cache_tokens"] = delta.created_cache_tokens
    if delta.media_tokens:
        details["multimodal_tokens"] = delta.media_tokens
    return details or None
