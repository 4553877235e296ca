"""One Redis client per kombu channel instead of one per command."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from kombu.transport.redis import Channel

_KEPT = "_kept_client"


@contextmanager
def _conn_or_acquire(channel: Channel, client: Any = None) -> Iterator[Any]:
    if client is None:
        pool: redis.ConnectionPool = channel.pool
        kept_pool, client = channel.__dict__.get(_KEPT, (None, None))
        # kombu replaces the pool when it reconnects; a client of the old one would hold dead connections.
        if kept_pool is not pool:
            client = channel._create_client()
            channel.__dict__[_KEPT] = (pool, client)
    yield client


def install() -> None:
    """Make kombu's Redis channels keep their client. Call it before the first connection; calling again is harmless.

    kombu 5.7 builds a ``redis.Redis`` for every publish, received message and ack, and redis-py 8 fills a table of 169
    response callbacks each time: about 0.3 ms, the larger part of sending a task (redis-py#3624). A client over a
    connection pool is safe to share between threads, so one per channel and pool is enough.
    """
    Channel.conn_or_acquire = _conn_or_acquire
