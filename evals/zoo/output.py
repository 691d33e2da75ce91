"""A trained model as a directory in Hugging Face / mlx-lm layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from posttrainllm.evals.zoo.presets import Preset
from posttrainllm.evals.zoo.tokenizer import tokenizer_config

__all__ = ["write_model"]

_SHARD_BYTES = 15_000_000
_HEADER_BYTES = 64_000  # names and offsets, more than any shard's


def write_model(
    out: Path, preset: Preset, parameters: Mapping[str, mx.array], tokenizer_text: str, record: Mapping[str, Any]
) -> None:
    """Write weights in bfloat16, in files of 15 MB at most unless one tensor is larger, and all that goes with them.

    Args:
        out: the directory; weights of an earlier run in it are removed.
        preset: the shape.
        parameters: by name.
        tokenizer_text: tokenizer.json.
        record: numbers of the run, for TRAINING.json and the card.

    Raises:
        OSError: the disk is full or not to be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model*.safetensors"):
        old.unlink()
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name in preset.shape.tensors():
        array = parameters[name].astype(mx.bfloat16)
        if shards[-1] and size + array.nbytes > _SHARD_BYTES - _HEADER_BYTES:
            shards, size = [*shards, {}], 0
        shards[-1][name], size = array, size + array.nbytes
    where: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        try:
            mx.save_safetensors(str(out / file), shard, metadata={"format": "pt"})
        except RuntimeError as error:  # MLX's word for what the file system refused
            raise OSError(None, f"{out / file}: {error}") from None
        where |= dict.fromkeys(shard, file)
        shard.clear()  # written: the arrays need not wait for the others
    index_content = {"metadata": {"total_size": preset.parameters * 2}, "weight_map": where}
    _write_json(out / "model.safetensors.index.json", index_content)
    _write_json(out / "config.json", preset.config)
    _write_json(out / "tokenizer_config.json", tokenizer_config(preset.shape.context))
    (out / "tokenizer.json").write_text(tokenizer_text, encoding="utf-8")
    _write_json(out / "TRAINING.json", record)
    (out / "MODEL_CARD.md").write_text(_card(out.name, preset, record), encoding="utf-8")


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _card(name: str, preset: Preset, record: Mapping[str, Any]) -> str:
    shape, losses = preset.shape, record["held_out"]
    loss = "none" if record["loss"] is None else f"{record['loss']:.4f}"
    rows = "\n".join(
        f"| {source} | {score['nats_per_token']:.4f} | {score['bits_per_character']:.4f} | {score['characters']:,} |"
        for source, score in losses.items()
    )
    distilled = f", distilled from {record['target']}" if record["target"] else ""
    return f"""# {name}

A small causal language model of Python code and English prose, preset `{record["preset"]}`{distilled}.

| | |
|---|---|
| shape | Llama: {shape.hidden} wide, {shape.layers} layers, {shape.heads} heads of {shape.head_size}, \
{shape.kv_heads} of keys and values, feed-forward {shape.mlp}, tied embeddings |
| parameters | {preset.parameters:,}, in bfloat16: {preset.parameters * 2 / 1e6:.1f} MB |
| tokenizer | byte-level BPE of {shape.vocab_size:,} ids; id 0, `<\\|endoftext\\|>`, ends a text |
| context | {shape.context} positions, trained on sequences of {record["settings"]["sequence"]} |
| layout | Hugging Face / mlx-lm |

## Training

{record["tokens"]:,} tokens in {record["steps"]:,} steps and {record["seconds"]:.0f} seconds on {record["device"]};
last training loss {loss}. Seed {record["settings"]["seed"]}, \
{record["settings"]["optimizer"]}, peak learning rate {record["settings"]["learning_rate"]:g}. The command:

    {record["command"]}

Data: the corpus of `posttrainllm zoo corpus` with the hash `{record["corpus_sha256"]}`. Its packages and their
licences are listed in its LICENCES.md.

| held out | nats a token | bits a character | characters |
|---|---|---|---|
{rows}

## What it is not good for

It does not know what the code it writes does; it follows no instruction and holds no conversation. Use it to try, test
and measure decoding; name your own pair for anything else.
"""
