"""All settings, one typed tree.

Sources, strongest first: flags (of `trivet` and of `celery worker`), environment (`TRIVET_API__PORT=9000`), a TOML file
(`trivet.toml`, or the one that `TRIVET_CONFIG` names), defaults. `trivet config` prints the values and where each came
from.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, TomlConfigSettingsSource
from pydantic_settings import PydanticBaseSettingsSource as Source

from app.roles import ALL, Role
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaSettings, MediaUrlSettings
from app.settings_sections import (
    ApiSettings,
    EngineSettings,
    FlowerSettings,
    ItemSettings,
    RedisSettings,
    RoutingSettings,
    Section,
    StreamSettings,
    TensorSettings,
    WorkerSettings,
)

ENV_PREFIX = "TRIVET_"
ENV_DELIMITER = "__"
CONFIG_VARIABLE = "TRIVET_CONFIG"
DEFAULT_CONFIG = "trivet.toml"

#: Settings whose values nobody but the API gets to see.
SECRETS = ("api.api_keys", "api.admin_key")


class SettingsError(ValueError):
    """A setting has a value that is not allowed. The message names it, its variable and what is allowed."""


class Settings(BaseSettings):
    """The whole tree. `model` is a local path or a hub name; prefill and decode workers need the identical string."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        env_ignore_empty=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    model: str = ""
    """Model to serve: a local path or a hub name. Prefill and decode workers need the identical string."""
    served_model_name: str | None = None
    """The name that clients use; the model's path or hub name when not given."""
    enable_multimodal: bool = False
    """Take media. Without it requests with media get 400, and a worker with the encode role refuses to start."""
    multimodal_embedding_cache_capacity_gb: float = Field(4.0, ge=0)
    """Embeddings that a worker keeps in shared memory, in GB; the least recently used go first. 0 keeps none."""
    log_level: str = Field("INFO", pattern=r"^(DEBUG|INFO|WARNING|ERROR)$")
    """DEBUG, INFO, WARNING or ERROR."""
    redis: RedisSettings = RedisSettings()
    engine: EngineSettings = EngineSettings()
    worker: WorkerSettings = WorkerSettings()
    api: ApiSettings = ApiSettings()
    media: MediaSettings = MediaSettings()
    media_urls: MediaUrlSettings = MediaUrlSettings()
    tensors: TensorSettings = TensorSettings()
    items: ItemSettings = ItemSettings()
    routing: RoutingSettings = RoutingSettings()
    adapters: AdapterSettings = AdapterSettings()
    stream: StreamSettings = StreamSettings()
    flower: FlowerSettings = FlowerSettings()

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model

    @property
    def roles(self) -> frozenset[Role]:
        """Stages of a worker with these settings."""
        if self.worker.roles is not None:
            return self.worker.roles
        return ALL if self.enable_multimodal else ALL - {Role.ENCODE}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Source,
        env_settings: Source,
        dotenv_settings: Source,
        file_secret_settings: Source,
    ) -> tuple[Source, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_file())


def config_file() -> Path:
    """The TOML file in force. One that `TRIVET_CONFIG` names must exist; `trivet.toml` may be absent."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named and not Path(named).is_file():
        raise SettingsError(f"{CONFIG_VARIABLE}={named}: no such file")
    return Path(named or DEFAULT_CONFIG)


def load(**flags: Any) -> Settings:
    """Read all sources. Raises SettingsError with one line per wrong setting."""
    _refuse_unknown_variables()
    try:
        return Settings(**flags)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{config_file()} is not TOML: {error}") from None
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(one) for one in error.errors())) from None


_current: list[Settings] = []


def current() -> Settings:
    """This process's settings, read once."""
    if not _current:
        _current.append(load())
    return _current[0]


def use(settings: Settings) -> None:
    """Make these the process's settings: for flags that come after the first reading."""
    _current[:] = [settings]


def environment(settings: Settings, *, everything: bool = False) -> dict[str, str]:
    """The variables that give a child process these settings: what differs from the defaults, or `everything`.

    With everything no settings file of the child's can differ; what is None has no variable. Nor has a secret: see
    `secrets`.
    """
    variables: dict[str, str] = {}
    for path, value in leaves(settings.model_dump(mode="json", exclude_defaults=not everything)).items():
        if value is None or path in SECRETS:
            continue
        variables[variable(path)] = ",".join(sorted(map(str, value))) if isinstance(value, list) else _text(value)
    return variables


def secrets(settings: Settings) -> dict[str, str]:
    """The variables that `environment` leaves out: for the API's process alone."""
    admin = settings.api.admin_key
    keys = ",".join(one.get_secret_value() for one in settings.api.api_keys)
    values = (keys, admin.get_secret_value() if admin is not None else "")
    return {variable(path): value for path, value in zip(SECRETS, values, strict=True) if value}


def variable(path: str) -> str:
    """`api.port` -> `TRIVET_API__PORT`."""
    return ENV_PREFIX + path.upper().replace(".", ENV_DELIMITER)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"api": {"port": 1}} -> {"api.port": 1}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def known() -> dict[str, str]:
    """Path of every setting -> its meaning, in the tree's order."""
    paths: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            paths |= {f"{name}.{key}": one.description or "" for key, one in section.model_fields.items()}
        else:
            paths[name] = field.description or ""
    return paths


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _explain(error: Any) -> str:
    path = ".".join(part for part in error["loc"] if isinstance(part, str))
    message = error["msg"].removeprefix("Value error, ")
    if path in SECRETS or error["type"] == "extra_forbidden":  # a key, or perhaps one under a name that is misspelt
        return f"{path} ({variable(path)}): {message}"
    # A URL's password is nobody's business.
    given = re.sub(r"://[^/@\s]*@", "://***@", repr(error.get("input")))
    return f"{path} ({variable(path)}): {message}; given: {given}"


def _refuse_unknown_variables() -> None:
    allowed = {variable(path) for path in known()} | {CONFIG_VARIABLE, f"{ENV_PREFIX}DEVICE", f"{ENV_PREFIX}HOME"}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in allowed)
    if unknown:
        raise SettingsError(f"unknown setting(s) in the environment: {', '.join(unknown)}; `trivet config` lists all")
