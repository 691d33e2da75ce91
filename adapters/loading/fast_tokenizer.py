"""A tokenizer on `tokenizers` alone, where transformers would load tokenizer.json as it stands.

transformers takes over a second to import. tokenizer_files.py says when it is not needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tokenizers

from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.adapters.loading.tokenizer_files import read_tokenizer_files

__all__ = ["FastBackend", "fast_backend"]

# mlx-lm's marks of a model that thinks; its template is told so
_THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
    ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
)


@attrs.frozen(eq=False, kw_only=True)
class FastBackend:
    """What `Tokenizer` asks of a backend, answered as mlx-lm's wrapper around a transformers tokenizer does."""

    core: tokenizers.Tokenizer = attrs.field(repr=False)
    special_tokens: Mapping[str, str]
    """By the names that chat templates know them by, such as "bos_token"."""
    chat_template: str | Mapping[str, str] | None = attrs.field(repr=False)
    """One text, or several by name."""

    @property
    def eos_token_ids(self) -> set[int]:
        """The id of the eos token, where one is named."""
        found = self.core.token_to_id(self.special_tokens.get("eos_token", ""))
        return set() if found is None else {found}

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Tokens added to the trained vocabulary, by id."""
        return dict(self.core.get_added_tokens_decoder())

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings one."""
        return self.chat_template is not None

    def get_vocab(self) -> dict[str, int]:
        """Every piece with its id, added tokens included."""
        return dict(self.core.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """Ids of a text; nothing is cut, and nothing is said of its length."""
        # of a batch, since that alone lets other threads run meanwhile: a server encodes beside its event loop
        (encoding,) = self.core.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        return str(self.core.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **variables: Any) -> str:
        """Text of a conversation that the model is to continue.

        Args:
            messages: each with "role" and "content".
            **variables: for the template; `tokenize` is not one of them.

        Returns:
            The text.

        Raises:
            Exception: whatever the template raises.
        """
        from posttrainllm.adapters.loading.chat_template import render_chat  # jinja: only a conversation needs it

        template = (
            self.chat_template if isinstance(self.chat_template, str) else (self.chat_template or {}).get("default")
        )
        if template is None or not messages:
            raise ValueError("got no chat template of the name 'default', or no message, expected both")
        thinks = any(all(self.core.token_to_id(mark) is not None for mark in marks) for marks in _THINKING)
        variables = {"enable_thinking": thinks, **self.special_tokens, **variables}
        variables.pop("tokenize", None)
        return render_chat(template, messages, variables)


def fast_backend(checkpoint: Checkpoint) -> FastBackend | None:
    """Load a tokenizer without transformers.

    Args:
        checkpoint: a checked directory.

    Returns:
        The backend; None where transformers could do anything else with the directory.

    Raises:
        CheckpointError: a file beside tokenizer.json cannot be read.
        Exception: tokenizer.json cannot be read.
    """
    found = read_tokenizer_files(checkpoint)
    if found is None:
        return None
    return FastBackend(core=found.core, special_tokens=found.special_tokens, chat_template=found.chat_template)
