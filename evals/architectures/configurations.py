"""The tiny configurations in configs.toml, written out as config.json has them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import attrs

__all__ = ["Configuration", "configurations", "features", "helpers", "stateful"]

_GROUPS, _WITHOUT = "use", "without"
_FEATURES = {"experts": "experts", "latent": "latent attention", "sliding": "sliding windows"}


@attrs.frozen(kw_only=True)
class Configuration:
    """A module of mlx-lm and a config.json for it."""

    module: str
    config: dict[str, Any]
    groups: tuple[str, ...]
    """Of settings that it uses."""
    why: str | None = None
    """Why it is no part of the count; None where it is."""
    more_slots: int = 0
    """What mlx-lm's rotating cache lacks of the window that the module masks by."""


def configurations() -> tuple[Configuration, ...]:
    """One of every module that counts."""
    return _all("models")


def stateful() -> tuple[Configuration, ...]:
    """One of every module whose layers keep a state that cannot be rewound by length."""
    return _all("stateful")


def features(configuration: Configuration) -> str:
    """What its layers are made of, by the groups that it uses."""
    return ", ".join(name for group, name in _FEATURES.items() if group in configuration.groups)


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
    ours = {"why", "more_slots"}
    outer = {key: value for key, value in own.items() if key not in ours}
    scope = outer.get("text_config", outer)  # the base and the groups belong inside
    config = _written_out(scope)
    if scope is not outer:
        config = outer | {"text_config": config}
    return Configuration(
        module=name,
        config=config | {"model_type": name},
        groups=tuple(scope.get(_GROUPS, ())),
        **{key: value for key, value in own.items() if key in ours},
    )


def _written_out(own: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(_data()["base"])
    for group in own.get(_GROUPS, ()):
        config |= _data()["groups"][group]
    config |= {key: value for key, value in own.items() if key not in (_GROUPS, _WITHOUT)}
    return {key: value for key, value in config.items() if key not in own.get(_WITHOUT, ())}
