"""`adapter_config.json`, as PEFT writes it and as far as vLLM can do what it says.

What vLLM cannot do is what its `PEFTHelper` refuses. Here it is refused before an engine sees the adapter, and so is an
adapter with modules of its own (`modules_to_save`), which vLLM takes for classifiers alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.adapters.base import AdapterRefused
from app.adapters.intake import CONFIG

MAX_BYTES = 1 << 20
#: Fields that change what an adapter computes, and that vLLM has no support for.
UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
    "modules_to_save",
)
#: Named ways to begin a training that leave the base model's weights as they are. All others change them.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
MAX_ALPHA = 1e6

#: A pattern is matched with every module's name, here and in vLLM. With repeats in it that can take years: so it has to
#: be the end of a name, or with ^ a whole one.
_PATTERN = re.compile(r"\^?([\w.-]|\\\.){1,256}", re.ASCII)
#: Of ranks and alphas together: Python keeps 512 compiled ones, and vLLM would compile more anew for every module.
MAX_PATTERNS = 256


@dataclass(frozen=True)
class AdapterConfig:
    """`r` is the rank of all modules but those that a pattern in `rank_pattern` names; the first that fits counts.

    `patterns` is how many are matched with a module's name, those of alphas included.
    """

    r: int
    rank_pattern: dict[str, int] = field(default_factory=dict)
    patterns: int = 0

    @property
    def rank(self) -> int:
        """The largest."""
        return max([self.r, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int:
        """PEFT's rule: a pattern fits the end of the module's name, from a dot on."""
        return next((rank for key, rank in self.rank_pattern.items() if _fits(key, module)), self.r)


def read_config(folder: Path) -> AdapterConfig:
    """Raises AdapterRefused for what is no configuration of a LoRA adapter, or of one that vLLM cannot serve."""
    found = _json(folder / CONFIG)
    if found.get("peft_type") != "LORA":
        raise _wrong(f"peft_type is {_shown(found.get('peft_type'))}, and must be LORA")
    if not _is_rank(found.get("r")):
        raise _wrong(f"r is {_shown(found.get('r'))}, and must be a positive integer")
    if not _is_alpha(found.get("lora_alpha")):
        raise _wrong(f"lora_alpha is {_shown(found.get('lora_alpha'))}, and must be a number")
    _check_targets(found)
    _check_features(found)
    ranks, alphas = _patterns("rank_pattern", found), _patterns("alpha_pattern", found)
    if not all(map(_is_rank, ranks.values())):
        raise _wrong("rank_pattern must have positive integers")
    if not all(map(_is_alpha, alphas.values())):
        raise _wrong("alpha_pattern must have numbers")
    if len(ranks) + len(alphas) > MAX_PATTERNS:
        raise _wrong(
            f"rank_pattern and alpha_pattern have {len(ranks) + len(alphas)} patterns, and {MAX_PATTERNS} is most"
        )
    return AdapterConfig(found["r"], ranks, len(ranks) + len(alphas))


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_BYTES:
        raise _wrong(f"it has more than {MAX_BYTES} bytes")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise _wrong("it is no JSON") from None
    if not isinstance(found, dict):
        raise _wrong("it is no JSON object")
    return found


def _check_targets(found: dict[str, Any]) -> None:
    targets = found.get("target_modules")
    named = targets if isinstance(targets, list) else [targets]
    if not all(isinstance(one, str) for one in named) or not (any(named) or found.get("target_parameters")):
        raise _wrong("target_modules must be a list of modules' names, or one pattern")


def _check_features(found: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if found.get(name):
            raise _wrong(f"{name} is {_shown(found[name])}, which vLLM does not support")
    if found.get("bias", "none") != "none":
        raise _wrong(f"bias is {_shown(found['bias'])}, and vLLM supports none alone")
    init = found.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise _wrong(f"init_lora_weights is {_shown(init)}: it is for a base model with changed weights")


def _patterns(name: str, found: dict[str, Any]) -> dict[str, Any]:
    patterns = found.get(name) or {}
    if not isinstance(patterns, dict):
        raise _wrong(f"{name} must be an object")
    for key in patterns:
        if not _PATTERN.fullmatch(key):
            raise _wrong(f"{name} has {_shown(key)}, and patterns other than a module's name, or its end, are refused")
    return patterns


def _fits(pattern: str, module: str) -> bool:
    """Whether `(.*\\.)?(pattern)$` matches, without a search: all that fit the pattern are as long as it is."""
    begin = len(module) - len(pattern.removeprefix("^").replace("\\", ""))
    at_a_part = begin == 0 or (begin > 0 and module[begin - 1] == "." and not pattern.startswith("^"))
    return at_a_part and re.fullmatch(pattern, module[begin:]) is not None


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_ALPHA


def _wrong(what: str) -> AdapterRefused:
    return AdapterRefused(f"{CONFIG}: {what}")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
