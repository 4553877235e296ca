"""Adapter to vLLM: where its engines publish their KV events."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from app.settings import SettingsError
from workers.kv_events.subscription import Source

log = logging.getLogger(__name__)

#: Longest path of a Unix socket, with what data-parallel ranks append.
LONGEST = 107 - len("_dp9999")


def config(folder: Path) -> Any:
    """vLLM's KVEventsConfig for an engine that publishes over sockets in a folder, which is for its user alone: events
    hold the tokens of prompts.

    vLLM gives each data-parallel rank an address of its own only if the word `inproc` or `tcp` is in it.
    """
    from vllm.config import KVEventsConfig

    events, replay = folder / "inproc-events", folder / "inproc-replay"
    if len(str(events)) > LONGEST:
        raise SettingsError(f"tensors.directory: the path of a socket in {folder} is longer than {LONGEST} characters")
    return KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{events}", replay_endpoint=f"ipc://{replay}"
    )


def of(llm: Any) -> dict[int, Source]:
    """Where the data-parallel ranks of an AsyncLLM publish. Empty where they do not, or to somebody else's address."""
    sources = {}
    for rank, one in llm.get_kv_event_sources().items():
        if _is_bound(one.endpoint):
            sources[rank] = Source(_here(one.endpoint), one.replay_endpoint and _here(one.replay_endpoint), one.topic)
        else:
            log.warning(
                "KV events go to %s, where this worker does not hear them: no KV blocks published", one.endpoint
            )
    return sources


def _is_bound(endpoint: str) -> bool:
    """Whether the engine waits there for subscribers (`ZmqEventPublisher._is_bind_endpoint`)."""
    return endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint


def _here(endpoint: str) -> str:
    """The address for who is on the engine's host."""
    return endpoint.replace("//*:", "//127.0.0.1:").replace("//[::]:", "//127.0.0.1:")
