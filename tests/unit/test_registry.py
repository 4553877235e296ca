"""app.registry: what a fleet can serve. tests/integration has the entries in Redis."""

import itertools

import pytest

from app.registry import EngineState, Fleet, WorkerRecord
from app.roles import Does, Role

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE
ENGINE = EngineState(vllm="0", max_model_len=10, block_size=16, kv_tokens=160)


def record(
    worker_id: str, *roles: Role, draining: bool = False, incarnation: str = "1", media: bool = True
) -> WorkerRecord:
    return WorkerRecord(
        id=worker_id,
        incarnation=incarnation,
        roles=frozenset(roles),
        model="m",
        multimodal=media,
        pid=1,
        host="h",
        concurrency=1,
        metrics="",
        fingerprint="f",
        spliceable=True,
        engine=ENGINE,
        started=0.0,
        draining=draining,
    )


def fleet(*workers: tuple[Role, ...], media: bool = True) -> Fleet:
    return Fleet(tuple(record(f"w{n}", *roles, media=media) for n, roles in enumerate(workers)))


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([], [D, P]),
        ([(P,)], [D]),
        ([(D,)], [P]),
        ([(E,)], [D, P]),
        ([(E, P)], [D]),
        ([(E, D)], [P]),
        ([(P, D)], []),
        ([(E, P, D)], []),
        ([(P,), (D,)], []),
        ([(E,), (P,), (D,)], []),
        ([(E, P), (E, D)], []),
        ([(E,), (P,)], [D]),
        ([(E,), (P, D)], []),
    ],
)
def test_missing_roles(workers: list[tuple[Role, ...]], missing: list[Role]) -> None:
    """An encode worker is never missing: whoever prefills media can encode them."""
    seen = fleet(*workers)
    assert (seen.missing(media=False), seen.missing(media=True)) == (missing, missing)


@pytest.mark.parametrize(("workers", "missing"), [([(P, D)], [D, P]), ([(P,), (D,)], [D, P]), ([(P,)], [D])])
def test_workers_that_take_no_media(workers: list[tuple[Role, ...]], missing: list[Role]) -> None:
    assert fleet(*workers, media=False).missing(media=True) == missing


SETS = [roles for size in range(1, 4) for roles in itertools.combinations(Role, size)]


@pytest.mark.parametrize("takes_media", [False, True])
@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("workers", list(itertools.combinations_with_replacement(SETS, 2)), ids=str)
def test_nothing_is_missing_exactly_when_there_is_a_route(
    workers: tuple[tuple[Role, ...], ...], media: bool, takes_media: bool
) -> None:
    seen = fleet(*workers, media=takes_media)
    whole = any({P, D} <= set(roles) for roles in workers)
    gives = any(P in roles and D not in roles for roles in workers)
    takes = any(D in roles and P not in roles for roles in workers)
    route = (whole or (gives and takes)) and (takes_media or not media)
    assert (seen.missing(media) == []) == route


def test_a_draining_worker_takes_nothing_new_but_is_still_known() -> None:
    seen = Fleet((record("a", E, P, D, draining=True), record("p", E, P), record("d", D)))
    assert [w.id for w in seen.aggregated(media=False)] == []
    assert seen.missing(media=True) == []
    assert seen.find("a", "1") is not None
    drained = Fleet((record("p", E, P), record("d", D, draining=True)))
    assert drained.missing(media=False) == [D]


def test_candidates_by_role() -> None:
    seen = fleet((E, P, D), (P, D), (E, P), (P,), (D,), (E, D), (E,))
    names = {w.id: w.roles for w in seen.workers}

    def kinds(workers: list[WorkerRecord]) -> list[frozenset[Role]]:
        return [names[w.id] for w in workers]

    for media in (False, True):
        assert kinds(seen.aggregated(media)) == [{E, P, D}, {P, D}]
        assert kinds(seen.prefillers(media)) == [{E, P}, {P}]
    assert kinds(seen.decoders()) == [{D}, {E, D}]
    assert kinds(seen.encoders("f")) == [{E, D}, {E}]


def test_encode_workers_have_to_fit() -> None:
    """The same model and processor settings, and prompts that can be put together from items."""
    other, whole = (record("w", E).model_copy(update=one) for one in ({"fingerprint": "g"}, {"spliceable": False}))
    assert Fleet((other, whole, record("w", E, draining=True))).encoders("f") == []


def test_a_fleet_is_of_one_model() -> None:
    other = record("other", P, D).model_copy(update={"model": "n"})
    assert [w.id for w in Fleet.of([other, record("mine", P, D)], "m").workers] == ["mine"]


def test_a_restarted_worker_is_another() -> None:
    seen = Fleet((record("w", P, D, incarnation="2"),))
    assert seen.find("w", "1") is None and seen.find("w", "2") is not None


def test_a_record_survives_json() -> None:
    one = record("w", E, P)
    assert WorkerRecord.model_validate_json(one.model_dump_json()) == one


def test_workers_by_what_their_model_does() -> None:
    text, vectors = record("w0", P, D), record("w1", P, D).model_copy(update={"does": Does.EMBED})
    seen = Fleet((text, vectors))
    assert seen.doing(Does.GENERATE).workers == (text,)
    assert seen.doing(Does.EMBED).workers == (vectors,)
    assert WorkerRecord.model_validate_json(vectors.model_dump_json()).does is Does.EMBED
