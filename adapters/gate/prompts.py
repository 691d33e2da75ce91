"""The prompts of a gate run."""

import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path

import attrs

from posttrainllm.adapters.params import is_text
from posttrainllm.kernel.errors import UsageError

__all__ = ["Prompt", "prompts_hash", "read_prompts"]


@attrs.frozen(kw_only=True)
class Prompt:
    """One text to continue."""

    id: str
    """Names it in a verdict."""
    kind: str
    """"code", "prose", "script", ...: for people."""
    text: str


def read_prompts(file: str | Path | None, count: int | None) -> list[Prompt]:
    """Read JSON lines with a `text` and, where given, an `id` and a `kind`.

    Args:
        file: UTF-8; None reads the set that comes with the package.
        count: take the first so many; None takes all of a file, and 100 of the package's set.

    Returns:
        One or more prompts.

    Raises:
        UsageError: the file cannot be read, a line is no such object, or there are fewer than `count`.
    """
    name = "the package's prompts" if file is None else str(file)
    try:
        # data alone: no code of evals/ is called from here
        source = (
            importlib.resources.files("posttrainllm.evals") / "prompts" / "gate.jsonl" if file is None else Path(file)
        )
        text = source.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts-file: {name}: byte {error.start} is no UTF-8, expected UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts-file: {name}: {getattr(error, 'strerror', None) or error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    prompts = [_prompt(line, number, name) for number, line in lines]
    if not prompts:
        raise UsageError(f"--prompts-file: {name}: got no prompt, expected a JSON object a line with a `text`")
    if count is not None and not 1 <= count <= len(prompts):
        raise UsageError(f"--prompts: got {count}, expected 1 to {len(prompts)}, all of {name}")
    _check_ids(prompts, name)
    return prompts[:count]


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Hash of the texts and their order.

    Args:
        prompts: those of a run.

    Returns:
        "sha256:" and 64 hex digits.
    """
    texts = json.dumps([prompt.text for prompt in prompts], ensure_ascii=True)
    return f"sha256:{hashlib.sha256(texts.encode('ascii')).hexdigest()}"


def _prompt(line: str, number: int, name: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--prompts-file: {name}, line {number}: got no JSON: {error}") from None
    if not isinstance(record, dict) or not is_text(record.get("text")):
        raise UsageError(f"--prompts-file: {name}, line {number}: expected an object with a `text` that is not empty")
    values = {"id": record.get("id", f"line-{number}"), "kind": record.get("kind", "")}
    for field, value in values.items():
        # an id stands in verdicts of one line
        if not isinstance(value, str) or not (value == "" or (is_text(value) and value.isprintable())):
            shown = repr(value)[:60]
            raise UsageError(f"--prompts-file: {name}, line {number}: `{field}`: got {shown}, expected printable text")
    return Prompt(text=record["text"], **values)


def _check_ids(prompts: Sequence[Prompt], name: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UsageError(f"--prompts-file: {name}: got the id {prompt.id!r} twice, expected distinct ids")
        seen.add(prompt.id)
