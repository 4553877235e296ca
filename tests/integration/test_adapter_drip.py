"""Sources that give a byte now and then: the fetch ends at its time, and its thread with it."""

import asyncio
from pathlib import Path

import pytest

from app import tiny_model
from app.adapters import Adapter, AdapterUnreachable, fetch, release
from app.adapters.fetch import THREADS
from app.adapters.intake import CONFIG, WEIGHTS
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaUrlSettings
from tests.adapters import make_adapter
from tests.hub_server import commit_of, hub_server
from tests.s3_server import S3_ENVIRONMENT

DRIP_S = 0.05
#: One path on the server, by either protocol.
SOURCES = {"hub": "hf://org/sql", "s3": f"s3://org/sql/resolve/{commit_of('org/sql')[1]}"}


@pytest.mark.parametrize("kind", SOURCES)
async def test_the_threads_are_free_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    adapter = make_adapter(tmp_path / "sql", tiny_model.build(tmp_path / "tiny"), targets=["q_proj"])
    with hub_server() as server:
        server.repos["org/sql"] = {name: (adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)}
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

        def fetching(cache: str, timeout_s: float) -> "asyncio.Task[Adapter]":
            settings = AdapterSettings(
                cache_directory=str(tmp_path / cache), s3_endpoint_url=server.url, fetch_timeout_s=timeout_s
            )
            return asyncio.create_task(fetch("sql", SOURCES[kind], settings, max_rank=16, urls=MediaUrlSettings()))

        release(await fetching("whole", 60))
        server.drip_s = DRIP_S
        slow = await asyncio.gather(*(fetching(f"slow{n}", 3) for n in range(THREADS)), return_exceptions=True)
        assert [type(one) for one in slow] == [AdapterUnreachable] * THREADS
        server.drip_s = 0.0
        release(await fetching("after", 15))
