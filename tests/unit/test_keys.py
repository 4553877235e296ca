"""app.keys: the catalogue in its docstring and its functions are the same thing."""

import inspect

from app import keys
from app.roles import Role


def catalogue() -> dict[str, tuple[str, str]]:
    """Name -> (kind, lifetime) of every row of the table, the head left out."""
    lines = [line for line in (keys.__doc__ or "").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["name", "kind", "lifetime", "meaning"]
    return {name: (kind, lifetime) for name, kind, lifetime, _ in rows[2:]}


def functions() -> dict[str, str]:
    """What each function and constant of the module is called in the table."""
    names = {name: value for name, value in vars(keys).items() if name.isupper() and isinstance(value, str)}
    for part in ("PREFIX", "SEPARATOR"):
        names.pop(part)
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if name.endswith("_queue") or name in ("lists", "stepped"):
            continue
        parameters = [parameter.removesuffix("_id") for parameter in inspect.signature(function).parameters]
        names[name] = function("<id>") if name in ("worker", "api") else function(*(f"<{one}>" for one in parameters))
    return names


def test_every_key_is_in_the_table_and_the_other_way_round() -> None:
    written = {name.strip("`") for name in catalogue() if name.startswith("`trivet:")}
    assert sorted(functions().values()) == sorted(written)


def test_the_queues_are_in_the_table() -> None:
    names = [name for name in catalogue() if not name.startswith("`trivet:")]
    assert names == [", ".join(f"`{keys.role_queue(role)}`" for role in Role), "`encode.<worker>`, ..."]
    assert keys.worker_queue(Role.ENCODE, "<worker>") == "encode.<worker>"


def test_a_queue_has_a_list_for_each_priority() -> None:
    from app.celery import configuration

    options = configuration("")["broker_transport_options"]
    assert (options["sep"], options["priority_steps"]) == (keys.SEPARATOR, list(keys.PRIORITY_STEPS))
    assert keys.lists("decode.a@b") == ["decode.a@b", "decode.a@b|5"]


def test_everything_but_channels_and_the_registry_ends() -> None:
    for name, (kind, lifetime) in catalogue().items():
        assert kind == "channel" or lifetime, name
    assert catalogue()["`trivet:cancelled:<request>`"][1] == f"{keys.CANCELLED_TTL_S} s or more"
    assert catalogue()["`trivet:replay:<api>`"][1].startswith(f"{keys.REPLAY_TTL_S} s ")
