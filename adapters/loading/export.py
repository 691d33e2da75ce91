"""A `.tinygpt` file as a directory that mlx-lm loads, with the very weights."""

import shutil
from pathlib import Path

from posttrainllm.adapters.loading.checkpoint import readable
from posttrainllm.adapters.loading.gpt_reader import exported_arrays, exported_config
from posttrainllm.adapters.loading.native_tokenizer import byte_tokenizer, tokenizer_folder
from posttrainllm.adapters.loading.new_directory import new_directory, write_json, write_weights
from posttrainllm.adapters.loading.tinygpt_header import TinyGptHeader
from posttrainllm.adapters.loading.tinygpt_reader import read_tinygpt

__all__ = ["export_directory"]

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)


def export_directory(header: TinyGptHeader, out: Path, *, eos_ids: frozenset[int]) -> None:
    """Write a model's directory, whole or not at all.

    Args:
        header: of the file.
        out: does not exist, or is an empty directory.
        eos_ids: ids that end a text, for config.json.

    Raises:
        UsageError: `out` is taken.
        CheckpointError: the file cannot be read, or the directory cannot be written.
    """
    with new_directory(out) as made:
        with readable(header.path, "its weights cannot be read"):
            weights = read_tinygpt(header, header.dtype)
        config = exported_config(weights.shape, header.dtype) | {"eos_token_id": sorted(eos_ids) or None}
        write_weights(made, exported_arrays(weights).items())
        write_json(made / "config.json", config)
        _write_tokenizer(header, made)


def _write_tokenizer(header: TinyGptHeader, out: Path) -> None:
    source = tokenizer_folder(header)
    if source is None:
        byte_tokenizer().save(str(out / "tokenizer.json"))
    else:
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, out / name)
    if not (out / "tokenizer_config.json").exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": header.context}
        # transformers tidies up spaces otherwise where nothing says whether it should
        write_json(out / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
