from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI


@pytest.fixture(scope="session")
def client(server_url: str) -> Iterator[OpenAI]:
    """Without retries: a failure must show."""
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
