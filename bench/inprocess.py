"""A Celery task that calls the worker's engine in process: the other side of the comparison, on the very same engine.

Loaded into a worker with `celery -A app.celery worker --include bench.inprocess`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import orjson

from app.celery import app
from app.messages.plans import Assignment, Plan
from app.messages.prompts import Prompt
from app.messages.tasks import StageTask
from bench import load
from workers.aiotask import AioTask
from workers.host import current

TASK = "bench.inprocess"


@app.task(base=AioTask, name=TASK)  # type: ignore[untyped-decorator]
async def inprocess(answer: str, prompts: list[list[int]], params: dict[str, Any], shape: dict[str, Any]) -> None:
    """Run the load and leave the result under the Redis key `answer`."""
    host = current()
    here = Assignment(worker=host.id, incarnation=host.incarnation)

    async def request(number: int, tokens: int, first_token: Callable[[], None]) -> None:
        task = StageTask(
            request_id=f"bench-{number}",
            attempt=0,
            api="none",
            model="bench",
            plan=Plan(prefill=here, decode=here),
            deadline=time.time() + 600,
            params={**params, "max_tokens": tokens},
        )
        engine_input = host.engine.renderer.text(Prompt(token_ids=prompts[number % len(prompts)]))
        seen = False
        async for _ in host.engine.generate(engine_input, task, None):
            if not seen:
                seen = True
                first_token()

    result = await load.run(request, load.Shape(**shape))
    await host.cache.set(answer, orjson.dumps(asdict(result)), ex=600)
