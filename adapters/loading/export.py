"""A `.tinygpt` file as a directory that mlx-lm loads, with the very weights."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from posttrainllm.adapters.loading.checkpoint import readable
from posttrainllm.adapters.loading.gpt_reader import exported_arrays, exported_config
from posttrainllm.adapters.loading.native_tokenizer import byte_tokenizer, tokenizer_folder
from posttrainllm.adapters.loading.tinygpt_header import TinyGptHeader
from posttrainllm.adapters.loading.tinygpt_reader import read_tinygpt
from posttrainllm.kernel.errors import CheckpointError, UsageError

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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out: got {out}, which is there already, expected a new or an empty directory")
    with readable(header.path, "its weights cannot be read"):
        weights = read_tinygpt(header, header.dtype)
    config = exported_config(weights.shape, header.dtype) | {"eos_token_id": sorted(eos_ids) or None}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            made = Path(folder) / "model"
            made.mkdir()
            mx.save_safetensors(str(made / "model.safetensors"), exported_arrays(weights), {"format": "mlx"})
            _write_json(made / "config.json", config)
            _write_tokenizer(header, made)
            made.replace(out)  # an empty directory may be replaced
    except (OSError, RuntimeError) as error:  # the second is MLX's, of a full disk
        raise CheckpointError(f"{out}: cannot be written: {error}") from None


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
        _write_json(out / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
