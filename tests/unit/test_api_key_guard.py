"""api.middleware.api_key_guard: who passes, who does not, and that time does not tell why."""

import hmac
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.testclient import TestClient

from api.middleware import api_key_guard
from api.middleware.api_key_guard import ApiKeyGuard, lock, opened, route_path
from app.settings_sections import ApiSettings
from tests.served_app import create

KEYS = ("sk-first", "sk-second", "sk-third")


def client(keys: tuple[str, ...] = KEYS, **changes: Any) -> TestClient:
    made = ApiSettings(api_keys=tuple(map(SecretStr, keys)), **changes)
    return TestClient(create(made), raise_server_exceptions=False)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["Authorization", "authorization", "x-api-key", "X-Api-Key"])
def test_each_key_opens_in_either_header(key: str, header: str) -> None:
    value = f"Bearer {key}" if header.lower() == "authorization" else key
    assert client().get("/v1/who", headers={header: value}).status_code == 200


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
def test_the_schemes_name_has_no_case(scheme: str) -> None:
    assert client().get("/v1/who", headers={"Authorization": f"{scheme} sk-first"}).status_code == 200


def test_a_proxys_own_credentials_do_not_hide_the_key() -> None:
    headers = {"Authorization": "Basic dXNlcjpwYXNz", "x-api-key": "sk-second"}
    assert client().get("/v1/who", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, api_key_guard.NO_KEY),
        ({"Authorization": "Bearer"}, api_key_guard.NO_KEY),
        ({"Authorization": "Bearer "}, api_key_guard.NO_KEY),
        ({"Authorization": "sk-first"}, api_key_guard.NO_KEY),
        ({"Authorization": "Basic sk-first"}, api_key_guard.NO_KEY),
        ({"x-api-key": ""}, api_key_guard.NO_KEY),
        (bearer("sk-firs"), api_key_guard.WRONG_KEY),
        (bearer("sk-firstt"), api_key_guard.WRONG_KEY),
        (bearer("SK-FIRST"), api_key_guard.WRONG_KEY),
        (bearer("sk-first,sk-second"), api_key_guard.WRONG_KEY),
        ({"Authorization": b"Bearer \xff\xfe"}, api_key_guard.WRONG_KEY),
        ({"x-api-key": "Bearer sk-first"}, api_key_guard.WRONG_KEY),
        (bearer("k" * 20_000), api_key_guard.WRONG_KEY),
    ],
    ids=str,
)
def test_anything_else_gets_openais_401(headers: Any, reason: str) -> None:
    answer = client().get("/v1/who", headers=headers)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    assert answer.json() == {"error": error}


def test_anthropics_endpoint_answers_in_anthropics_words() -> None:
    answer = client().post("/v1/messages", json={})
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    error = {"type": "authentication_error", "message": api_key_guard.NO_KEY}
    assert answer.json() == {"type": "error", "error": error}
    assert client().post("/v1/messages", json={}, headers={"x-api-key": "sk-first"}).status_code == 503


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/docs", "/openapi.json"])
def test_what_is_open(path: str) -> None:
    assert client().get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/who", "/v1/who/", "/nowhere", "/", "", "/health", "/healthy", "/docs/x", "/docs/", "/openapi.json/x"),
        *("/v1/who?x=/health/live", "//health/live", "/V1/who", "/metrics", "/metrics/"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "DELETE", "PUT", "PROPFIND"])
def test_what_is_not(path: str, method: str) -> None:
    assert client().request(method, path, follow_redirects=False).status_code == 401


@pytest.mark.parametrize("path", ["/health/../v1/who", "/health/live/../../v1/who", "/health//v1/who", "/health/"])
def test_an_open_path_is_no_way_to_another(path: str) -> None:
    """The guard and the routes both take a path as it is written."""
    from starlette.routing import Match

    scope: Any = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
    assert ApiKeyGuard(_unused, KEYS, open_metrics=False)._refusal(scope) is None
    app: FastAPI = create(ApiSettings())
    assert not any(route.matches(scope)[0] is Match.FULL for route in app.routes)


async def _unused(*_: Any) -> None:
    raise AssertionError


def test_a_prefix_before_the_paths_is_taken_off_as_routing_does() -> None:
    made = create(ApiSettings(api_keys=(SecretStr("k"),)))
    one = TestClient(made, root_path="/trivet")
    assert one.get("/trivet/health/live").status_code == 200
    assert one.get("/trivet/v1/who").status_code == 401
    assert one.get("/trivet/v1/who", headers=bearer("k")).status_code == 200
    # A prefix that looks like an open path opens nothing.
    other = TestClient(made, root_path="/health")
    assert other.get("/health/v1/who").status_code == 401
    assert other.get("/health/v1/who", headers=bearer("k")).status_code == 200


def test_the_schema_asks_for_a_key_where_one_is_needed() -> None:
    schema = client().get("/openapi.json").json()
    assert schema["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert schema["security"][0].keys() | schema["security"][1].keys() == schema["components"]["securitySchemes"].keys()
    without = {path for path, one in schema["paths"].items() if one.get("get", {}).get("security") == []}
    assert without == {"/health/live", "/health/ready"}
    open_metrics = client(open_metrics=True).get("/openapi.json").json()
    assert open_metrics["paths"]["/metrics"]["get"]["security"] == []
    assert "security" not in client(keys=()).get("/openapi.json").json()


def test_metrics_are_open_when_a_setting_says_so() -> None:
    assert client().get("/metrics", headers=bearer("sk-first")).status_code == 200
    assert client(open_metrics=True).get("/metrics").status_code == 200
    assert client(open_metrics=True).get("/v1/who").status_code == 401


def test_without_keys_all_is_open() -> None:
    one = client(keys=())
    assert one.get("/v1/who").json()["tenant"] == ""
    assert one.get("/v1/who", headers=bearer("whatever")).status_code == 200


@pytest.mark.parametrize("keys", [(), KEYS])
def test_there_are_no_admin_endpoints(keys: tuple[str, ...]) -> None:
    for path in ("/admin/state", "/admin/"):
        answer = client(keys).get(path, headers=bearer("sk-first"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert client().get("/admin/state").status_code == 401


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/health/live", "", "/health/live"),
        ("/llm/health/live", "/llm", "/health/live"),
        ("/llm", "/llm", ""),
        ("/llmhealth/live", "/llm", "/llmhealth/live"),
        ("/v1/who", "/llm", "/v1/who"),
        ("/llm/v1/who", "/llm/", "/llm/v1/who"),
    ],
)
def test_a_path_is_read_as_routing_reads_it(path: str, root: str, expected: str) -> None:
    from starlette._utils import get_route_path

    scope = {"type": "http", "path": path, "root_path": root}
    assert route_path(scope) == get_route_path(scope) == expected


def test_tenants_are_the_keys_and_not_the_keys_themselves() -> None:
    one = client()
    tenants = [one.get("/v1/who", headers=bearer(key)).json()["tenant"] for key in KEYS]
    assert len(set(tenants)) == 3 and all(len(tenant) == 32 and int(tenant, 16) >= 0 for tenant in tenants)
    assert tenants[0] == client(KEYS[:1]).get("/v1/who", headers={"x-api-key": KEYS[0]}).json()["tenant"]
    for tenant, key in zip(tenants, KEYS, strict=True):
        assert not lock(key).digest.hex().startswith(tenant), (
            "a tenant is told to others, and must not help to find keys"
        )


@pytest.mark.parametrize("given", [*KEYS, "sk-none", ""])
def test_all_keys_are_compared_whichever_is_given(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac_compare(one, other)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", spy)
    locks = [lock(key) for key in KEYS]
    assert opened(locks, given.encode()) == (lock(given).tenant if given in KEYS else None)
    assert [other for _, other in compared] == [one.digest for one in locks]
    assert {len(one) for pair in compared for one in pair} == {32}, "of equal length, or the time would tell"


def test_the_guard_does_not_hold_the_keys() -> None:
    guard = ApiKeyGuard(_unused, KEYS, open_metrics=False)
    assert not any(key in repr(vars(guard)) for key in KEYS)


def test_a_preflight_needs_no_key() -> None:
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert client().options("/v1/who", headers=asking).status_code == 405, "and there is no other origin's page to ask"
    one = client(cors_origins=("https://a.example",))
    assert one.options("/v1/who", headers=asking).status_code == 200


async def test_a_websocket_is_no_way_around() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    guard = ApiKeyGuard(_unused, KEYS, open_metrics=False)
    await guard({"type": "websocket", "path": "/v1/who", "headers": []}, _unused, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
