"""Which tokenizers are all in tokenizer.json, so that transformers is not needed to load them.

All of this has to hold, or transformers is asked:

- the model is a Llama, Mistral, Qwen2 or Qwen3, and no Python code comes with its tokenizer;
- tokenizer_config.json names a class that transformers loads from tokenizer.json as it stands
  (`PreTrainedTokenizerFast`, `TokenizersBackend`; `LlamaTokenizer` for Mistral, and elsewhere where its pieces are
  bytes), or one that builds what tokenizer.json describes anyway (`Qwen2Tokenizer`);
- every other setting is one known to change no id and no text here;
- every token that is named or added beside tokenizer.json is in it, too, with the same id and flags, and special;
- tokenizer.json neither cuts nor pads, and puts a bos or eos token where the settings say so;
- the chat template is one text, or several with names.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs
import tokenizers

from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_json

__all__ = ["TokenizerFiles", "read_tokenizer_files"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_AS_IT_STANDS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_LLAMA, _QWEN = ("LlamaTokenizer", "LlamaTokenizerFast"), ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# of padding, of other libraries' classes, or looked at below
_KNOWN_SETTINGS = {
    *("tokenizer_class", "model_max_length", "padding_side", "truncation_side", "model_input_names", "legacy"),
    *("sp_model_kwargs", "spaces_between_special_tokens", "use_default_system_prompt", "errors", "processor_class"),
    *("return_token_type_ids", "pad_token_type_id", "name_or_path", "special_tokens_map_file", "backend", "is_local"),
    *("local_files_only", "from_slow", "tool_parser_type", "chat_template", "clean_up_tokenization_spaces"),
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
}
_ONLY_OFF = ("add_prefix_space", "auto_map", "split_special_tokens")
_OTHER_FILES = ("additional_chat_templates", "tekken.json", "added_tokens.json")
_QWEN_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


@attrs.frozen(eq=False, kw_only=True)
class TokenizerFiles:
    """What stands in the files of a tokenizer."""

    core: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """By name, such as "bos_token"."""
    chat_template: str | dict[str, str] | None


class _OtherError(Exception):
    """transformers would do more than load tokenizer.json."""


def read_tokenizer_files(checkpoint: Checkpoint) -> TokenizerFiles | None:
    """Read a tokenizer that is all in tokenizer.json.

    Args:
        checkpoint: a checked directory.

    Returns:
        What was read; None where transformers could do anything else with the directory.

    Raises:
        CheckpointError: a file beside tokenizer.json cannot be read.
        Exception: tokenizer.json cannot be read.
    """
    path, family = checkpoint.path, checkpoint.config.get("model_type")
    if family not in _FAMILIES or not (path / "tokenizer_config.json").is_file():
        return None
    if any((path / name).exists() for name in _OTHER_FILES):
        return None
    config = read_json(path / "tokenizer_config.json")
    # transformers refuses a token with flags that does not say what it is
    tokens = [value for name, value in config.items() if name.endswith("_token")]
    if any(isinstance(token, dict) and "__type" not in token for token in tokens):
        return None
    legacy = path / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.is_file():  # it has the last word then
        config |= read_json(legacy)
    try:
        _check_settings(config)
        core = _parsed((path / "tokenizer.json").read_text(encoding="utf-8"))
        built = _check_class(str(config.get("tokenizer_class")), str(family), core)
        special = _special_tokens(config, _QWEN_TOKENS if built else {})
        _check_added(config, core, special, complete=built)
        _check_frame(config, core, special)
        file = path / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else _template_of(config.get("chat_template"))
    except _OtherError:
        return None
    return TokenizerFiles(core=core, special_tokens=special, chat_template=template)


@lru_cache(maxsize=2)  # a draft's is mostly its target's, and large ones take half a second
def _parsed(text: str) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json; nothing changes it, so that two models may share it."""
    return tokenizers.Tokenizer.from_str(text)


def _check_settings(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        known = name in _KNOWN_SETTINGS or name.endswith("_token") or (name in _ONLY_OFF and not value)
        if not known:
            raise _OtherError


def _check_class(name: str, family: str, core: tokenizers.Tokenizer) -> bool:
    """Whether transformers builds the tokenizer anew, in which case it builds this one."""
    if family == "qwen2" or name in _QWEN:  # it takes that class for every Qwen2, whatever the config names
        if name not in (*_QWEN, *_AS_IT_STANDS) or family not in ("qwen2", "qwen3") or not _is_qwen(core):
            raise _OtherError
        return True
    as_bytes = any(_state(part).get("type") == "ByteLevel" for part in (core.pre_tokenizer, core.decoder))
    if name in _AS_IT_STANDS or (name in _LLAMA and (family == "mistral" or as_bytes)):
        return False
    raise _OtherError


def _is_qwen(core: tokenizers.Tokenizer) -> bool:
    """Whether tokenizer.json describes what `Qwen2Tokenizer` makes of its vocabulary."""
    model = core.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.ignore_merges:
        return False
    if model.unk_token or model.fuse_unk or model.byte_fallback:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    parts = _state(core.pre_tokenizer).get("pretokenizers", [])
    split = {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    if len(parts) != 2 or parts[0] != split or parts[1]["type"] != "ByteLevel":
        return False
    if parts[1]["add_prefix_space"] or parts[1]["use_regex"]:
        return False
    return _state(core.normalizer) == {"type": "NFC"} and _state(core.decoder).get("type") == "ByteLevel"


def _state(part: Any) -> dict[str, Any]:
    """A part of the pipeline as tokenizer.json has it; empty where there is none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _special_tokens(config: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, str]:
    """Special tokens by name."""
    more = config.get("extra_special_tokens")
    found = dict(defaults)
    for name, value in {**config, **(more if isinstance(more, dict) else {})}.items():
        if not name.endswith("_token") or isinstance(value, bool):  # add_bos_token is no token
            continue
        if value is None:
            found.pop(name, None)
        else:
            found[name] = _content(value)
    return found


def _content(token: Any) -> str:
    """Text of a token that is given as such, or with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or not text:
        raise _OtherError
    return text


def _check_added(
    config: Mapping[str, Any], core: tokenizers.Tokenizer, special: Mapping[str, str], *, complete: bool
) -> None:
    """Refuse tokens that would be added to those of tokenizer.json, or, where complete, some that would be left out."""
    added = core.get_added_tokens_decoder()
    lists = [config.get("additional_special_tokens") or [], config.get("extra_special_tokens") or []]
    if isinstance(lists[1], dict):  # by name, whatever the names
        lists[1] = list(lists[1].values())
    if not all(isinstance(tokens, list) for tokens in lists):
        raise _OtherError
    named = {*special.values(), *(_content(token) for tokens in lists for token in tokens)}
    if not named <= {token.content for token in added.values() if token.special}:
        raise _OtherError
    listed = config.get("added_tokens_decoder")
    if listed is None:
        return
    try:
        given = {int(index): tokenizers.AddedToken(**token).__getstate__() for index, token in listed.items()}
    except (TypeError, ValueError, AttributeError):
        raise _OtherError from None
    states = {index: token.__getstate__() for index, token in added.items()}
    if any(states.get(index) != state for index, state in given.items()) or (complete and given != states):
        raise _OtherError


def _check_frame(config: Mapping[str, Any], core: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
    """Refuse a tokenizer that cuts, pads or tidies up, and one that does not do as the settings say."""
    if core.truncation is not None or core.padding is not None:
        raise _OtherError
    # transformers heeds this for other kinds of pieces alone
    if config.get("clean_up_tokenization_spaces") and not isinstance(core.model, tokenizers.models.BPE):
        raise _OtherError
    around = core.encode("", add_special_tokens=True).ids
    for name, place in (("bos_token", around[:1]), ("eos_token", around[-1:])):
        asked = config.get(f"add_{name}")
        if asked is not None and bool(asked) != (place == [core.token_to_id(special.get(name, ""))]):
            raise _OtherError


def _template_of(value: Any) -> str | dict[str, str] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value
    ):
        value = {entry["name"]: entry["template"] for entry in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in (*value, *value.values())):
        raise _OtherError
    return value
