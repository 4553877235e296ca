"""What would fail half a minute later, said at once: taken ports and taken names."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable

from redis.exceptions import RedisError

from app.launch.errors import LaunchError
from app.registry import Registry, WorkerRecord
from app.settings import Settings, variable


def refuse_taken_ports(settings: Settings) -> None:
    """Raise LaunchError when the API or Flower could not listen."""
    api, flower = settings.api, settings.flower
    wanted = [("api.port", "--api-port", api.host, api.port)]
    if flower.enabled:
        wanted.append(("flower.port", "--flower-port", flower.host, flower.port))
        if api.port == flower.port:
            raise LaunchError(f"API and Flower cannot both listen on port {api.port}: see --api-port and --flower-port")
    for path, flag, host, port in wanted:
        if reason := _cannot_listen(host, port):
            raise LaunchError(f"port {port} on {host}: {reason}; choose another with {flag} ({variable(path)})")


async def refuse_taken_names(registry: Registry, names: Iterable[str], lease_s: float) -> None:
    """Raise LaunchError when a live worker has one of the names; entries of dead ones are waited for, a lease long."""
    wanted = set(names)
    until = time.monotonic() + lease_s + 1.0
    while True:
        try:
            taken = [one for one in await registry.workers() if one.id in wanted]
        except (RedisError, OSError) as error:
            raise LaunchError(f"the registry cannot be read: {error}") from error
        if not taken:
            return
        if time.monotonic() > until:
            raise LaunchError(_taken(taken[0]))
        await asyncio.sleep(0.3)


def _taken(record: WorkerRecord) -> str:
    return (
        f"a worker named {record.id} is already registered (process {record.pid} on {record.host}); stop it, or use "
        "another --name, or another Redis with --redis-url"
    )


def _cannot_listen(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""
