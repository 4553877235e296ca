"""A request as the pipeline runs it, whichever endpoint it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.messages.plans import Assignment, Plan
from app.messages.prompts import Prompt
from app.roles import Does
from app.routing import Decision


@dataclass(frozen=True)
class Job:
    """A request to run. `params` is vLLM's SamplingParams as builtins (of an embedding those of `EmbedTask`);
    `deadline` is in unix seconds.

    `session` names the talk that the request belongs to, `tenant` whose it is, and `adapter` is the id of the one to
    run with. `on_decision` hears where it goes. `lost` are workers that failed it, which the pipeline fills.
    `on_plan` is told who runs it, once more when the decode worker is known, and asks the stages for timings.
    """

    request_id: str
    prompt: Prompt
    params: dict[str, Any]
    deadline: float
    does: Does = Does.GENERATE
    priority: int = 0
    session: str = ""
    tenant: str = ""
    adapter: str = ""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    lost: set[Assignment] = field(default_factory=set)
    on_decision: Callable[[Decision], None] | None = None
    on_plan: Callable[[Plan], None] | None = None
