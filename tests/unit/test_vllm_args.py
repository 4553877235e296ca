"""app.vllm_args: vLLM's own parser, and its refusals as ours."""

from types import ModuleType

import pytest

from app import vllm_args
from app.settings import SettingsError


@pytest.mark.usefixtures("vllm")
def test_vllms_flags_mean_what_they_mean() -> None:
    args = vllm_args.parse("m", ["--max-model-len", "4k", "--dtype=float32", "--hf-overrides", '{"a": {"b": 1}}'])
    assert (args.model, args.max_model_len, args.dtype, args.hf_overrides) == ("m", 4000, "float32", {"a": {"b": 1}})


@pytest.mark.usefixtures("vllm")
def test_the_last_of_a_flag_wins() -> None:
    assert vllm_args.parse("m", ["--seed", "1", "--seed", "2"]).seed == 2


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-model-len", "long"], "invalid"),
        (["--max-model-len"], "expected one argument"),
        (["--dtype", "float7"], "invalid choice: 'float7'"),
        (["positional"], "unrecognized arguments: positional"),
    ],
)
def test_a_wrong_flag_is_one_line_and_no_page_of_usage(
    given: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        vllm_args.parse("m", given)
    said = str(caught.value)
    assert said.startswith("engine.args (TRIVET_ENGINE__ARGS): ") and given[0] in said and reason in said
    assert "usage:" not in "".join(capfd.readouterr())


def test_no_model_is_said_without_asking_vllm(vllm: ModuleType) -> None:
    with pytest.raises(SettingsError, match=r"TRIVET_MODEL"):
        vllm_args.parse("", [])
