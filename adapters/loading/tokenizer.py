"""Text to ids and back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_json, readable
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["Tokenizer", "load_tokenizer"]


@attrs.frozen(eq=False, kw_only=True)
class Tokenizer:
    """A checkpoint's tokenizer and the ids that end a reply."""

    path: Path
    backend: Any = attrs.field(repr=False)
    """A FastBackend, or mlx-lm's TokenizerWrapper around a transformers tokenizer."""
    vocabulary: dict[int, str] = attrs.field(repr=False)
    """Every id, added ones included, with its piece."""
    eos_ids: frozenset[int]
    """From config.json, generation_config.json and the tokenizer together."""
    added_ids: frozenset[int] = frozenset()
    """Tokens added to the trained vocabulary."""
    special_ids: frozenset[int] = frozenset()
    """Those of them that are no text."""
    anchor: int | None = None
    """An id of plain text, for the left context of another; None where there is none."""

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special ids the tokenizer puts in front."""
        return list(self.backend.encode(text, verbose=False))  # the length is checked, and said, by whoever asks

    def encode_chat(
        self, messages: Sequence[dict[str, str]], template_args: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        """Ids of a conversation that the model is to continue, by the checkpoint's chat template or a plain one.

        Args:
            messages: each with "role" and "content".
            template_args: what the template is given besides, as `enable_thinking`; the plain one takes none.

        Returns:
            The ids.

        Raises:
            CheckpointError: the template fails.
        """
        if self.has_chat_template:
            with readable(self.path, "its chat template cannot be used"):
                text = self.backend.apply_chat_template(
                    list(messages), **{**template_args, "add_generation_prompt": True, "tokenize": False}
                )
                return list(self.backend.encode(text, add_special_tokens=False, verbose=False))
        turns = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
        return self.encode("".join(turns) + "Assistant:")

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self.backend.has_chat_template)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a reply, special ids left out; bytes that are no UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def piece(self, index: int) -> str:
        """Text of one id inside a text, a special one's name included; a part of a character is U+FFFD."""
        if self.anchor is None:
            return str(self.backend.decode([index], skip_special_tokens=False))
        # some decoders strip the space that a text begins with
        before, both = (
            str(self.backend.decode(ids, skip_special_tokens=False)) for ids in ([self.anchor], [self.anchor, index])
        )
        return both.removeprefix(before)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Load the tokenizer of a checked model.

    Args:
        checkpoint: a directory, or a file that names one, has one, or whose tokens are bytes.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: its files cannot be used.
    """
    from posttrainllm.adapters.loading.fast_tokenizer import fast_backend
    from posttrainllm.adapters.loading.gguf_tokenizer import gguf_backend
    from posttrainllm.adapters.loading.native_tokenizer import native_tokenizer

    with readable(checkpoint.path, "its tokenizer cannot be read"):
        backend: Any = None
        if checkpoint.native is not None:
            checkpoint, backend = native_tokenizer(checkpoint)
        elif checkpoint.gguf is not None:
            backend = gguf_backend(checkpoint.gguf.header)
        if backend is None:
            backend = fast_backend(checkpoint)
        if backend is None:
            from mlx_lm.tokenizer_utils import load  # pulls in transformers: seconds

            backend = load(checkpoint.path, {"trust_remote_code": False})
        vocabulary = {index: piece for piece, index in backend.get_vocab().items()}
        added = dict(getattr(backend, "added_tokens_decoder", {}))
        plain = backend.encode("a", add_special_tokens=False)
    if not vocabulary:
        raise CheckpointError(f"{checkpoint.path}: its tokenizer has no vocabulary")
    eos_ids = set(backend.eos_token_ids) | _eos_ids(checkpoint.path / "config.json", checkpoint.config)
    generation = checkpoint.path / "generation_config.json"
    if generation.is_file():
        eos_ids |= _eos_ids(generation, read_json(generation))
    return Tokenizer(
        path=checkpoint.path,
        backend=backend,
        vocabulary=vocabulary,
        eos_ids=frozenset(eos_ids),
        added_ids=frozenset(added),
        special_ids=frozenset(index for index, token in added.items() if token.special),
        anchor=plain[-1] if plain else None,
    )


def _eos_ids(path: Path, config: dict[str, Any]) -> set[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(index) is int and index >= 0 for index in ids):  # a bool is an int, too
        raise CheckpointError(f"{path}: eos_token_id: got {value!r:.100}, expected an id or a list of ids")
    return set(ids)
