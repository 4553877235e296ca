"""vLLM takes the engine arguments that README.md shows, and counts what it says."""

import importlib
import re
import shlex
from typing import Any

from app import vllm_args
from app.cli import engine_flags
from tests import readme
from tests.command_lines import check


def test_vllm_takes_the_flags_that_pass_through(vllm: Any) -> None:
    passed: list[str] = []
    for words in readme.command_lines():
        if words[:2] == ["trivet", "up"]:
            passed += engine_flags.split(check(words).args).values()
    assert len(passed) >= 2
    for flags in passed:
        vllm_args.parse("a/b", shlex.split(flags))


def test_vllm_takes_the_connector_of_its_own_server(vllm: Any) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    (words,) = [words for words in readme.command_lines() if words[0] == "vllm"]
    assert words[1] == "serve"
    chosen = vllm_args.parse(words[2], words[3:]).ec_transfer_config
    connector = getattr(importlib.import_module(chosen.ec_connector_module_path), chosen.ec_connector)
    assert issubclass(connector, ECConnectorBase)
    assert chosen.ec_connector_extra_config == {"capacity_gb": 4} and chosen.ec_role == "ec_both"


def test_the_counters_of_the_connector_are_all_there(vllm: Any) -> None:
    from workers.embeddings.ec_stats import MEANINGS, PREFIX

    named = {span for span in readme.spans() if re.fullmatch(rf"{PREFIX}\w+", span)}
    assert named == {f"{PREFIX}{name}_total" for name in MEANINGS}
