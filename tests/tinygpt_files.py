"""`.tinygpt` files built byte by byte from docs/tinygpt.md, and their model in numpy; nothing here is the reader's."""

import json
import math
import struct
from pathlib import Path

import numpy as np

SIZES = {"layers": 2, "dModel": 32, "ctx": 64, "heads": 4, "dMlp": 80}
LAYOUTS = ("training", "inference", "fp16", "no optimizer state")


def tensor_names(sizes: dict) -> dict[str, list[int]]:
    """Names in the order of the files, with shapes as a manifest states them."""
    width, rows = sizes["dModel"], sizes["dMlp"]
    shapes = {
        "token_embedding.weight": [sizes.get("vocabSize", 256), width],
        "position_embedding.weight": [sizes["ctx"], width],
    }
    for block in range(sizes["layers"]):
        prefix = f"blocks.{block}"
        shapes[f"{prefix}.ln1.weight"] = shapes[f"{prefix}.ln1.bias"] = [width]
        for name in ("q", "k", "v", "o"):
            shapes[f"{prefix}.attn.{name}_proj.weight"] = [width, width]
            shapes[f"{prefix}.attn.{name}_proj.bias"] = [width]
        shapes[f"{prefix}.ln2.weight"] = shapes[f"{prefix}.ln2.bias"] = [width]
        shapes[f"{prefix}.mlp.fc_in.weight"], shapes[f"{prefix}.mlp.fc_in.bias"] = [rows, width], [rows]
        shapes[f"{prefix}.mlp.fc_out.weight"], shapes[f"{prefix}.mlp.fc_out.bias"] = [width, rows], [width]
    shapes["ln_final.weight"] = shapes["ln_final.bias"] = [width]
    return shapes


def random_weights(sizes: dict, *, seed: int) -> dict[str, np.ndarray]:
    """float32 arrays in the shapes of a manifest, each value one that float16 holds, as both layouts need it."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_names(sizes).items():
        scale = 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else 0.3
        values = generator.standard_normal(shape) * scale
        if ".weight" in name and len(shape) == 1:  # of a norm
            values += 1
        weights[name] = values.astype(np.float16).astype(np.float32)
    return weights


def stored(name: str, array: np.ndarray) -> np.ndarray:
    """An array as the body has it: linear layers lie as [in, out], embeddings and vectors as stated."""
    linear = "_proj.weight" in name or "fc_in.weight" in name or "fc_out.weight" in name
    return np.ascontiguousarray(array.T) if linear else array


def header_of(sizes: dict, layout: str, **changes) -> dict:
    """The JSON header of a layout; the offsets of the inference ones go from the last tensor to the first."""
    shapes = tensor_names(sizes)
    manifest = [{"name": name, "shape": shape} for name, shape in shapes.items()]
    header = {"config": dict(sizes), "manifest": manifest, "savedAt": "2026-11-30", "finalLoss": {"train": 1.5}}
    if layout != "training":
        offset = 0
        for entry in manifest[::-1]:
            entry["floatOffset"] = offset
            offset += math.prod(entry["shape"])
    if layout == "inference":
        header |= {"weightDtype": "fp16", "includesOptimizerState": False}
    elif layout == "fp16":
        header["weightDtype"] = "fp16"
    elif layout == "no optimizer state":  # float16 all the same
        header |= {"weightDtype": "fp32", "includesOptimizerState": False}
    header["config"] |= changes
    return header


def body_of(weights: dict[str, np.ndarray], layout: str) -> bytes:
    """All tensors; Adam's moments are noise that would show if they were taken for weights."""
    if layout != "training":
        return b"".join(stored(name, array).astype("<f2").tobytes() for name, array in [*weights.items()][::-1])
    noise = np.random.default_rng(99)
    blocks = []
    for name, array in weights.items():
        moments = [noise.standard_normal(array.size).astype("<f4").tobytes() for _ in range(2)]
        blocks += [stored(name, array).astype("<f4").tobytes(), *moments]
    return b"".join(blocks)


def file_bytes(
    header: dict | bytes, body: bytes, *, magic: bytes = b"TGPT", version: int = 2, step: int = 1234
) -> bytes:
    """Header and body behind each other; the header's length is odd, so that no tensor is aligned."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    return magic + struct.pack("<II", version, len(text)) + text + struct.pack("<i", step) + body


def save_tinygpt(path: Path, *, seed: int = 1, layout: str = "training", weights=None, sizes=None, **changes) -> Path:
    """Write a random model; `changes` go over the config, sizes among them over SIZES."""
    named = {name: changes.pop(name) for name in (*SIZES, "vocabSize") if name in changes}
    sizes = (sizes or SIZES) | named
    weights = random_weights(sizes, seed=seed) if weights is None else weights
    path.write_bytes(file_bytes(header_of(sizes, layout, **changes), body_of(weights, layout)))
    return path


def reference_logits(weights: dict[str, np.ndarray], sizes: dict, ids: list[int]) -> np.ndarray:
    """The model of the format page in float64, one position after another and without a cache, [len(ids), V]."""
    heads, width = sizes["heads"], sizes["dModel"]
    size = width // heads
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    erf = np.vectorize(math.erf)

    def norm(x, name):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["token_embedding.weight"][ids] + w["position_embedding.weight"][: len(ids)]
    for block in range(sizes["layers"]):
        prefix = f"blocks.{block}"
        y = norm(x, f"{prefix}.ln1")
        q, k, v = (linear(y, f"{prefix}.attn.{name}_proj") for name in ("q", "k", "v"))
        attended = np.zeros_like(x)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            for place in range(len(ids)):
                scores = k[: place + 1, part] @ q[place, part] / math.sqrt(size)
                shares = np.exp(scores - scores.max())
                attended[place, part] = shares / shares.sum() @ v[: place + 1, part]
        x = x + linear(attended, f"{prefix}.attn.o_proj")
        y = linear(norm(x, f"{prefix}.ln2"), f"{prefix}.mlp.fc_in")
        x = x + linear(y * (1 + erf(y / math.sqrt(2))) / 2, f"{prefix}.mlp.fc_out")
    return norm(x, "ln_final") @ w["token_embedding.weight"].T
