"""Chat templates, rendered as transformers renders them.

A template comes with a checkpoint and is code that nobody here has read, so it runs in jinja's sandbox, sees plain
values alone, and can change none of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["render_chat"]


def render_chat(template: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str:
    """Render a conversation that the model is to continue.

    Args:
        template: jinja's source.
        messages: each with "role" and "content".
        variables: what the template is given besides, the names of special tokens among them; values of JSON.

    Returns:
        The text.

    Raises:
        jinja2.TemplateError: the template cannot be read, or refuses the conversation.
        Exception: whatever its code raises.
    """
    given = {"tools": None, "documents": None, **variables, "add_generation_prompt": True}
    return _compiled(template).render(messages=[dict(message) for message in messages], **given)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _GuardedNamespace}
    )
    return environment.from_string(template)


class _Generation(Extension):
    """The block that marks a reply for training; it renders what is in it."""

    tags = {"generation"}  # noqa: RUF012 # as jinja declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes by which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _GuardedNamespace(Namespace):
    """A namespace that takes no name by which Python's internals could be reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` has to work
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name with an underscore in front, got {name!r}")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # the user's own time, as in transformers


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja's own escapes what is HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
