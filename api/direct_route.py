"""Routes whose functions read the request themselves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute


class DirectRoute(APIRoute):
    """One whose function takes the request and gives a Response, as Starlette's do, and is documented as FastAPI's are.

    It has no dependencies, no parameters and no response model: to look for them would take more than to find the way
    to it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler
