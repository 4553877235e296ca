"""The dashboard shows requests, and nothing of what they say."""

from __future__ import annotations

import time

import httpx

from tests.e2e.prompts import user
from tests.e2e.stack import Stack


def test_tasks_are_shown_without_their_prompts(pd: Stack) -> None:
    secret = "garden of the old friend"
    answer = pd.post(
        {"model": "tiny", "messages": user(secret), "max_tokens": 3}, headers={"X-Request-Id": "flower-test"}
    )
    assert answer.status_code == 200
    shown = _tasks(pd, "chatcmpl-flower-test")
    assert {task["name"] for task in shown} == {"prefill", "decode"}
    for task in shown:
        assert task["state"] == "SUCCESS"
        assert "prompt=" in task["kwargs"] and "max=3" in task["kwargs"]
        assert secret not in str(task) and "token_ids" not in str(task)
        assert len(task["kwargs"]) < 200


def _tasks(stack: Stack, request: str) -> list[dict[str, str]]:
    """The rows of the dashboard's task table that name the request, as the page itself asks for them."""
    query = {"draw": 1, "start": 0, "length": 200, "search[value]": "", "order[0][column]": 0, "order[0][dir]": "desc"}
    query |= {"columns[0][data]": "received"}
    until = time.monotonic() + 20
    found: list[dict[str, str]] = []
    while time.monotonic() < until:
        table = httpx.post(f"{stack.flower_url}/tasks/datatable", data=query, timeout=10)
        table.raise_for_status()
        found = [task for task in table.json()["data"] if request in (task["kwargs"] or "")]
        if len(found) == 2 and all(task["state"] == "SUCCESS" for task in found):
            return found
        time.sleep(0.3)
    return found
