"""The errors of app.errors, whichever of its modules they are in."""

import importlib
import inspect
import pkgutil

from app import errors
from app.errors.base import TrivetError


def kinds() -> list[type[TrivetError]]:
    names = [found.name for found in pkgutil.iter_modules(errors.__path__, f"{errors.__name__}.")]
    return [
        kind
        for name in names
        for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if kind.__module__ == name and issubclass(kind, TrivetError)
    ]
