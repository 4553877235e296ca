"""Roles of a worker, the topologies, which are nothing but sets of roles, and what a model does."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """A stage that a worker can run. A worker's roles are any set of these."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Does(StrEnum):
    """What a model makes of a prompt: text, or one vector (vLLM's pooling task `embed`)."""

    GENERATE = "generate"
    EMBED = "embed"


ALL = frozenset(Role)

#: Worker kinds of each topology: kind (the name before the `@`) -> roles.
TOPOLOGIES: Mapping[str, Mapping[str, frozenset[Role]]] = {
    "agg": {"agg": ALL},
    "pd": {"prefill": frozenset({Role.ENCODE, Role.PREFILL}), "decode": frozenset({Role.DECODE})},
    "e_pd": {"encode": frozenset({Role.ENCODE}), "pd": frozenset({Role.PREFILL, Role.DECODE})},
    "e_p_d": {
        "encode": frozenset({Role.ENCODE}),
        "prefill": frozenset({Role.PREFILL}),
        "decode": frozenset({Role.DECODE}),
    },
}


class KVRole(StrEnum):
    """How an engine takes part in KV block transfer, as vLLM's `kv_role` names it."""

    NONE = "none"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"


def kv_role(roles: frozenset[Role]) -> KVRole:
    """A worker that prefills but does not decode gives KV blocks away; one that only decodes takes them."""
    if Role.PREFILL in roles:
        return KVRole.NONE if Role.DECODE in roles else KVRole.PRODUCER
    return KVRole.CONSUMER if Role.DECODE in roles else KVRole.NONE
