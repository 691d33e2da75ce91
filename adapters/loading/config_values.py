"""What a config.json says of a model's sizes, held against what can be before anything is built by it."""

from itertools import product
from pathlib import Path
from typing import Any

from posttrainllm.kernel.errors import CheckpointError

__all__ = ["check_sizes", "context_of"]

_MOST_POSITIONS = 2**30  # lengths are int32, and sums of two of them must be, too
# newest name first; the others are those of GPT-2 and its time
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
# of single families, looked for where no part of the config has one of the above
_RARE_FIELDS = ("max_seq_len", "max_sequence_length", "max_context_length", "model_max_length", "block_size")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def check_sizes(path: Path, config: dict[str, Any], tensors: int) -> None:
    """Refuse sizes that are none, and more layers than tensors: building them would take the machine's memory first.

    Args:
        path: of the directory, for the message.
        config: its config.json.
        tensors: how many it has.

    Raises:
        CheckpointError: with got and expected.
    """
    for scope, name in product(_scopes(config), _SIZES):
        value = scope.get(name)
        if value is None or isinstance(value, list):  # absent in some, a list with an entry a layer in others
            continue
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}/config.json: {name}: got {value!r:.100}, expected a whole number from 1 up")
        if name == "num_hidden_layers" and value > tensors:
            raise CheckpointError(
                f"{path}/config.json: {name}: got {value!r:.100}, expected at most {tensors}, one a tensor"
            )


def context_of(path: Path, config: dict[str, Any]) -> int | None:
    """Find how many positions a model was made for.

    Args:
        path: of the directory.
        config: its config.json.

    Returns:
        The number, cut to what lengths can be; None where the config does not say.

    Raises:
        CheckpointError: what it says is no such number.
    """
    for scope, name in (*product(_scopes(config), _CONTEXT_FIELDS), *product(_scopes(config), _RARE_FIELDS)):
        if scope.get(name) is not None:
            return _checked_context(path, name, scope[name])
    if isinstance(config.get("text_config"), dict):  # such leave out what transformers' own classes have as default
        from transformers import AutoConfig

        inner = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        value = getattr(inner, _CONTEXT_FIELDS[0], None)
        return None if value is None else _checked_context(path, _CONTEXT_FIELDS[0], value)
    return None


def _scopes(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The config itself, and that of the text model inside it."""
    nested = config.get("text_config")
    return (config, nested) if isinstance(nested, dict) else (config,)


def _checked_context(path: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 2:
        raise CheckpointError(f"{path}/config.json: {name}: got {value!r:.100}, expected a whole number from 2 up")
    return min(value, _MOST_POSITIONS)
