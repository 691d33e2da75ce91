"""What a server is started with."""

import attrs

from posttrainllm.adapters.params import AcceptRule
from posttrainllm.adapters.serve.doors import BODY_S

__all__ = ["ServeSettings"]


@attrs.frozen(kw_only=True)
class ServeSettings:
    """The options that requests are held against."""

    name: str
    """What clients call the model."""
    other_names: tuple[str, ...]
    """Names that are taken as well: the path or id it was loaded by."""
    context: int
    """Most tokens of a prompt and its reply together."""
    longest_text: int
    """Characters that can fit the context, if every token were the longest one."""
    max_body_bytes: int
    max_tokens: int
    """Most tokens of a reply."""
    accept_rule: AcceptRule
    """Where a request names none."""
    vocab_size: int
    """Ids that may be emitted."""
    prompt_vocab_size: int
    """Ids that the target can be fed."""
    api_key: str | None = attrs.field(repr=False)
    request_timeout_s: float | None
    created: int
    """When the server started, in seconds since 1970."""
    fingerprint: str
    """Short hash of what bits depend on beside the width; with it, OpenAI's `system_fingerprint`."""
    body_timeout_s: float = BODY_S
    """How long a body may take to arrive."""
