"""The tiny configurations in configs.toml, written out as config.json has them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import attrs

__all__ = ["Configuration", "configurations", "helpers", "stateful"]

_GROUPS = "use"


@attrs.frozen(kw_only=True)
class Configuration:
    """A module of mlx-lm and a config.json for it."""

    module: str
    config: dict[str, Any]
    why: str | None = None
    """Why it is no part of the count; None where it is."""


def configurations() -> tuple[Configuration, ...]:
    """One of every module that counts."""
    return _all("models")


def stateful() -> tuple[Configuration, ...]:
    """One of every module whose layers keep a state that cannot be rewound by length."""
    return _all("stateful")


def helpers() -> dict[str, str]:
    """Modules that are no models, and what they are."""
    found: dict[str, str] = _data()["helpers"]
    return found


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("configs.toml").read_text(encoding="utf-8"))


def _all(table: str) -> tuple[Configuration, ...]:
    return tuple(_configuration(name, own) for name, own in sorted(_data()[table].items()))


def _configuration(name: str, own: Mapping[str, Any]) -> Configuration:
    outer = {key: value for key, value in own.items() if key != "why"}
    if "text_config" in outer:  # the base and the groups belong inside
        config = outer | {"text_config": _written_out(outer["text_config"])}
    else:
        config = _written_out(outer)
    return Configuration(module=name, config=config | {"model_type": name}, why=own.get("why"))


def _written_out(own: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(_data()["base"])
    for group in own.get(_GROUPS, ()):
        config |= _data()["groups"][group]
    return config | {key: value for key, value in own.items() if key != _GROUPS}
