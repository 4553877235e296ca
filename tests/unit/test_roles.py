"""app.roles."""

import itertools

import pytest

from app.roles import ALL, TOPOLOGIES, KVRole, Role, kv_role

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE
SETS = [frozenset(roles) for size in range(1, 4) for roles in itertools.combinations(Role, size)]


@pytest.mark.parametrize("roles", SETS, ids=lambda roles: "+".join(sorted(roles)))
def test_kv_moves_only_between_engines_that_have_one_half(roles: frozenset[Role]) -> None:
    if P in roles and D not in roles:
        assert kv_role(roles) is KVRole.PRODUCER
    elif D in roles and P not in roles:
        assert kv_role(roles) is KVRole.CONSUMER
    else:
        assert kv_role(roles) is KVRole.NONE


def test_every_topology_has_every_role() -> None:
    for kinds in TOPOLOGIES.values():
        assert frozenset().union(*kinds.values()) == ALL
