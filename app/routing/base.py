"""What the API and the prefill workers ask of a router, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from app.messages.base import Message
from app.messages.plans import Plan
from app.registry import Fleet


@dataclass(frozen=True)
class View:
    """What a router sees of a prompt. The default is a prompt that nobody looked at, which goes by load alone.

    `blocks` are the names of its full blocks as far as it is known (`app.routing.blocks.chain`), 16 hex digits each;
    `tokens` is its length, with an estimate for media that nobody has seen. Not `exact`: it ends before such an item.
    """

    blocks: tuple[str, ...] = ()
    tokens: int = 0
    exact: bool = True


@dataclass(frozen=True)
class Ask:
    """A request to place. `deadline` is in unix seconds.

    `owner` is the API process that answers it: with the end of its lease the reservation ends. `items` are the
    identities of the request's media, each once, and `fingerprint` is that of the model they were named for. Of
    `priority` the lower goes first, as in vLLM. `session` names a talk, for policy `sticky`. The router hashes neither
    `session` nor `tenant`: they become parts of keys, so whoever takes them from a client bounds their length. Workers
    without the `adapter` (an id) are none of the fleet that is given beside it; here it is for its place on the device.
    """

    request_id: str
    deadline: float
    owner: str
    items: tuple[str, ...] = ()
    fingerprint: str = ""
    view: View = View()
    max_tokens: int = 0
    session: str = ""
    tenant: str = ""
    priority: int = 0
    adapter: str = ""

    @property
    def media(self) -> bool:
        return bool(self.items)


class Candidate(Message):
    """A rank of a worker that could have run a stage, and what spoke for and against it at that moment.

    `stage` is `whole` where prefill and decode are one task. `held` are the prompt's leading blocks in its KV cache,
    `predicted` those that requests placed there lately have in common with it; the larger one is the overlap.
    `requests`, `prefilling`, `prefill_tokens` and `kv_blocks` are what is placed there, this request not counted;
    `embedding_bytes` would have to be fetched. `cost` is in blocks, None with a policy that does not ask for it.
    `overloaded` ones are taken only when all are.
    """

    stage: Literal["whole", "prefill", "decode"]
    worker: str
    incarnation: str
    rank: int
    held: int = 0
    predicted: int = 0
    requests: int = 0
    prefilling: int = 0
    prefill_tokens: int = 0
    kv_blocks: int = 0
    embedding_bytes: int = 0
    cost: float | None = None
    overloaded: bool = False
    chosen: bool = False


class Explanation(Message):
    """Why a request goes where it goes. `blocks` and `tokens` are those of the prompt's view.

    `policy` is the one that decided. `fallback` says why that was not the one of the settings; empty when it was.
    """

    policy: str
    fallback: str = ""
    blocks: int = 0
    tokens: int = 0
    exact: bool = True
    candidates: list[Candidate] = []
    encode: dict[str, str] = {}

    @property
    def chosen(self) -> Candidate:
        return next(one for one in self.candidates if one.chosen)


@dataclass(frozen=True)
class Decision:
    """`step` is the priority (one of `keys.PRIORITY_STEPS`) of the message to the stage that was just chosen."""

    plan: Plan
    reasons: Explanation
    step: int = 0


class Router(Protocol):
    """Chooses workers and reserves their load, each in one step of Redis. `app.routing.Reservations` does the rest:
    prefill has ended, the request has ended, who is placed on a dead worker.

    A plan without a decode worker is one of two tasks: the worker that prefills asks for the decode worker when it
    hands over. The API does not hear of that choice, so when a worker is lost it has to ask `Reservations.placed_on`
    which of its requests are there: an answer that comes after the worker's lease has run out is complete, since
    nothing is handed over to a worker without a lease.
    """

    async def plan(self, fleet: Fleet, ask: Ask) -> Decision:
        """Choose and reserve. A reservation of the same request that still stands is given back first.

        Raises NoWorker, at once, when a role is missing, and BrokerUnavailable.
        """

    async def hand_off(self, fleet: Fleet, ask: Ask, plan: Plan) -> Decision:
        """The plan with its decode worker; the reservation of the prefill worker moves there.

        For a request that was cancelled a worker is named all the same, without a reservation: it gets the blocks back.
        Raises NoWorker when no decode worker is alive, and BrokerUnavailable.
        """

    async def explain(self, fleet: Fleet, ask: Ask) -> Explanation:
        """What `plan` would do now, without doing it. Raises as `plan` does."""


def encode_place(request_id: str, identity: str) -> str:
    """The name of an encode task among the jobs of its worker: a request has one for each of its items."""
    return f"{request_id}/{identity}"
