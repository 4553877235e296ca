"""workers.model_kind: what a worker of a model that makes embeddings refuses to start with."""

from __future__ import annotations

import pytest

from app.roles import ALL, TOPOLOGIES, Does, Role
from app.settings import Settings
from app.settings_sections import WorkerSettings
from workers import model_kind
from workers.preflight import MisconfiguredWorker

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE


def settings(roles: frozenset[Role] | None, *, media: bool = False) -> Settings:
    return Settings(model="m", enable_multimodal=media, worker=WorkerSettings(roles=roles))


@pytest.mark.parametrize("roles", [None, ALL - {E}, ALL])
def test_a_worker_that_does_it_all_embeds(roles: frozenset[Role] | None) -> None:
    model_kind.check(settings(roles), Does.EMBED)


@pytest.mark.parametrize("roles", [{P}, {D}, {E}, {E, P}])
def test_half_a_worker_does_not(roles: set[Role]) -> None:
    with pytest.raises(MisconfiguredWorker, match="prefill and decode, as topology agg does"):
        model_kind.check(settings(frozenset(roles)), Does.EMBED)


@pytest.mark.parametrize("topology", TOPOLOGIES.keys() - {"agg"})
def test_every_other_topology_has_one_that_refuses(topology: str) -> None:
    refused = 0
    for roles in TOPOLOGIES[topology].values():
        try:
            model_kind.check(settings(roles), Does.EMBED)
        except MisconfiguredWorker:
            refused += 1
    assert refused


def test_media_are_not_embedded() -> None:
    with pytest.raises(MisconfiguredWorker, match="without --enable-multimodal"):
        model_kind.check(settings(ALL, media=True), Does.EMBED)


@pytest.mark.parametrize("roles", [{E}, {P}, {D}, {E, P}, {P, D}])
def test_a_model_that_writes_text_has_any_roles(roles: set[Role]) -> None:
    model_kind.check(settings(frozenset(roles), media=True), Does.GENERATE)
