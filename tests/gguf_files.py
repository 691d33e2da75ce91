"""GGUF files built byte by byte from the format's page, and their models in numpy; nothing here is the reader's.

Weights of packed types are drawn as blocks, so that the floats they stand for follow from the format alone.
"""

import math
import struct
from pathlib import Path

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q6_K": 14, "BF16": 30}
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 96, "context": 128, "theta": 10000.0, "eps": 1e-5}
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "i n", "Ġ Ġ"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, found, of: int = TEXT) -> bytes:
    """A value without its type; of an array, that of its entries."""
    if kind == TEXT:
        return text(found)
    if kind == ARRAY:
        return struct.pack("<IQ", of, len(found)) + b"".join(value(of, entry) for entry in found)
    return struct.pack(f"<{CODES[kind]}", found)


def entry(key: str, kind: int, found, of: int = TEXT) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, found, of)


def byte_pieces() -> list[str]:
    """GPT-2's characters for the bytes 0 to 255."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printed else next(spare)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int]]:
    """Special tokens, bytes, merges; with ggml's kinds (3 is control, 1 normal)."""
    tokens = [*SPECIAL, *byte_pieces(), *(merge.replace(" ", "") for merge in MERGES)]
    return tokens, [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))


ROWS = len(vocabulary()[0])


def metadata(family: str = "llama", sizes: dict | None = None) -> dict[str, bytes]:
    """Entries by key, each as the file has it behind the key."""
    sizes = SIZES | (sizes or {})
    tokens, kinds = vocabulary()
    given = [
        ("general.architecture", TEXT, family),
        ("general.name", TEXT, "a tiny one"),
        (f"{family}.block_count", U32, sizes["layers"]),
        (f"{family}.context_length", U32, sizes["context"]),
        (f"{family}.embedding_length", U32, sizes["hidden"]),
        (f"{family}.feed_forward_length", U32, sizes["mlp"]),
        (f"{family}.attention.head_count", U32, sizes["heads"]),
        (f"{family}.attention.head_count_kv", U32, sizes["kv_heads"]),
        (f"{family}.attention.layer_norm_rms_epsilon", F32, sizes["eps"]),
        (f"{family}.rope.freq_base", F32, sizes["theta"]),
        ("tokenizer.ggml.model", TEXT, "gpt2"),
        ("tokenizer.ggml.pre", TEXT, "smollm"),
        ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.unknown_token_id", U32, 0),
        ("tokenizer.ggml.padding_token_id", U32, 2),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", TEXT, TEMPLATE),
    ]
    found = {key: struct.pack("<I", kind) + value(kind, content) for key, kind, content in given}
    for key, of, content in (("tokens", TEXT, tokens), ("token_type", I32, kinds), ("merges", TEXT, MERGES)):
        found[f"tokenizer.ggml.{key}"] = struct.pack("<I", ARRAY) + value(ARRAY, content, of)
    return found


def drawn(kind: str, shape: tuple[int, ...], generator, scale: float) -> tuple[bytes, np.ndarray]:
    """Bytes of a random tensor, and the floats that they stand for, in the order of the file."""
    count = math.prod(shape)
    if kind in ("F32", "F16", "BF16"):
        floats = (generator.standard_normal(shape) * scale).astype(np.float32)
        if kind == "F32":
            return floats.tobytes(), floats
        if kind == "F16":
            return floats.astype("<f2").tobytes(), floats.astype(np.float16).astype(np.float32)
        words = (floats.view(np.uint32) >> 16).astype(np.uint32)
        return words.astype("<u2").tobytes(), (words << 16).view(np.float32)
    if kind == "Q6_K":
        return drawn_q6_k(shape, generator, scale)
    raw, floats = bytearray(), []
    for _ in range(count // 32):
        d = np.float16(scale * (generator.random() + 0.5) * generator.choice([-1, 1]))
        raw += d.astype("<f2").tobytes()
        if kind == "Q8_0":
            d = np.float16(d / 60)
            raw[-2:] = d.astype("<f2").tobytes()
            numbers = generator.integers(-128, 128, 32)
            raw += numbers.astype("i1").tobytes()
            floats += [float(d) * number for number in numbers]
            continue
        d = np.float16(d / 4)
        raw[-2:] = d.astype("<f2").tobytes()
        numbers = generator.integers(0, 16, 32)
        added = -8 * float(d)
        if kind == "Q4_1":
            m = np.float16(-8 * d + generator.random() * scale / 4)
            raw += m.astype("<f2").tobytes()
            added = float(m)
        raw += bytes(int(numbers[i]) | int(numbers[i + 16]) << 4 for i in range(16))
        floats += [float(d) * number + added for number in numbers]
    return bytes(raw), np.array(floats, dtype=np.float32).reshape(shape)


def drawn_q6_k(shape, generator, scale) -> tuple[bytes, np.ndarray]:
    """Six bits: four in `ql`, two in `qh`, a signed scale for 16 weights and one float for 256."""
    raw, floats = bytearray(), np.zeros(math.prod(shape), dtype=np.float32)
    for block in range(len(floats) // 256):
        ql, qh = generator.integers(0, 256, 128), generator.integers(0, 256, 64)
        scales, d = generator.integers(-64, 64, 16), np.float16(scale / 600)
        raw += ql.astype("u1").tobytes() + qh.astype("u1").tobytes() + scales.astype("i1").tobytes()
        raw += d.astype("<f2").tobytes()
        for place in range(256):
            half, quarter, low = place // 128, place % 128 // 32, place % 32
            four = int(ql[half * 64 + low + 32 * (quarter % 2)]) >> (4 if quarter > 1 else 0) & 15
            two = int(qh[half * 32 + low]) >> 2 * quarter & 3
            number = (four | two << 4) - 32
            floats[block * 256 + place] = float(d) * int(scales[place // 16]) * number
    return bytes(raw), floats.reshape(shape)


def tensors(
    family: str = "llama",
    sizes: dict | None = None,
    *,
    kind: str = "F32",
    kinds: dict | None = None,
    seed: int = 1,
    tied: bool = True,
) -> dict[str, tuple[str, tuple[int, ...], bytes, np.ndarray]]:
    """Kind, shape, bytes and floats by name; `kinds` are those of single names or of what a name ends with."""
    sizes = SIZES | (sizes or {})
    generator = np.random.default_rng(seed)
    hidden, mlp = sizes["hidden"], sizes["mlp"]
    size = sizes.get("head_size", hidden // sizes["heads"])
    rows = {"attn_q": sizes["heads"] * size, "attn_k": sizes["kv_heads"] * size, "attn_v": sizes["kv_heads"] * size}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (ROWS, hidden)}
    for index in range(sizes["layers"]):
        prefix = f"blk.{index}."
        shapes |= {f"{prefix}{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes[f"{prefix}attn_output.weight"] = (hidden, sizes["heads"] * size)
        shapes |= {f"{prefix}ffn_{name}.weight": (mlp, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}ffn_down.weight"] = (hidden, mlp)
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("attn_norm", "ffn_norm")}
        if family == "qwen2":
            shapes |= {f"{prefix}{name}.bias": (count,) for name, count in rows.items()}
        if family == "qwen3":
            shapes |= {f"{prefix}attn_{name}_norm.weight": (size,) for name in "qk"}
    shapes["output_norm.weight"] = (hidden,)
    if not tied:
        shapes["output.weight"] = (ROWS, hidden)
    found = {}
    for name, shape in shapes.items():
        own = next((of for end, of in (kinds or {}).items() if name.endswith(end)), kind)
        if len(shape) == 1:
            raw, floats = drawn("F32", shape, generator, 0.1)
            if name.endswith(".weight"):  # of a norm
                floats = floats + np.float32(1)
                raw = floats.tobytes()
            found[name] = ("F32", shape, raw, floats)
        else:
            found[name] = (own, shape, *drawn(own, shape, generator, 1 / shape[-1] ** 0.5))
    return found


def file_bytes(
    entries: dict[str, bytes],
    stored: dict[str, tuple],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
    offsets: dict[str, int] | None = None,
) -> bytes:
    """Header and tensors, each tensor at a multiple of the alignment."""
    tensor_count, entry_count = counts or (len(stored), len(entries))
    header = magic + struct.pack("<IQQ", version, tensor_count, entry_count)
    header += b"".join(text(key) + content for key, content in entries.items())
    body = b""
    for name, (kind, shape, raw, _) in stored.items():
        body += b"\0" * (-len(body) % alignment)
        header += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        header += struct.pack("<IQ", TYPES.get(kind, kind), (offsets or {}).get(name, len(body)))
        body += raw
    header += b"\0" * (-len(header) % alignment)
    return header + body + b"\0" * (-len(body) % alignment)


def save_gguf(path: Path, family: str = "llama", *, extra: dict[str, bytes] | None = None, **options) -> dict:
    """Write a random model; what it holds comes back. `extra` goes over the metadata, None takes an entry out."""
    stored = tensors(family, **options)
    entries = {k: v for k, v in (metadata(family, options.get("sizes")) | (extra or {})).items() if v is not None}
    path.write_bytes(file_bytes(entries, stored))
    return stored


def item(kind: int, found, of: int = TEXT) -> bytes:
    """A value with its type, as `extra` takes it."""
    return struct.pack("<I", kind) + value(kind, found, of)


def reference_logits(
    stored: dict, ids: list[int], family: str = "llama", sizes: dict | None = None, *, turns=None
) -> np.ndarray:
    """The model in float64, [len(ids), V]. `turns` are radians a position of every pair of a head.

    llama.cpp rotates neighbours of a `llama` head, and entries of its two halves in the other families.
    """
    sizes = SIZES | (sizes or {})
    w = {name: floats.astype(np.float64) for name, (_, _, _, floats) in stored.items()}
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    size = sizes.get("head_size", sizes["hidden"] // heads)
    places = np.arange(len(ids))
    turns = sizes["theta"] ** (-2 * np.arange(size // 2) / size) if turns is None else turns
    angles = places[:, None] * turns

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(sizes["eps"])) * weight

    def rotated(x):  # [T, heads, D]
        one, other = (x[..., 0::2], x[..., 1::2]) if family == "llama" else np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = one * cos - other * sin, one * sin + other * cos
        # in which order they lie does not matter to a product of queries and keys
        return np.concatenate([first, second], axis=-1)

    x = w["token_embd.weight"][ids]
    for index in range(sizes["layers"]):
        prefix = f"blk.{index}."
        y = norm(x, w[f"{prefix}attn_norm.weight"])
        parts = []
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            made = y @ w[f"{prefix}attn_{name}.weight"].T + w.get(f"{prefix}attn_{name}.bias", 0)
            made = made.reshape(len(ids), count, size)
            if family == "qwen3" and name in "qk":
                made = norm(made, w[f"{prefix}attn_{name}_norm.weight"])
            parts.append(made if name == "v" else rotated(made))
        q, k, v = parts
        attended = np.zeros((len(ids), heads, size))
        for head in range(heads):
            shared = head * kv_heads // heads
            for place in places:
                scores = k[: place + 1, shared] @ q[place, head] / math.sqrt(size)
                shares = np.exp(scores - scores.max())
                attended[place, head] = shares / shares.sum() @ v[: place + 1, shared]
        x = x + attended.reshape(len(ids), -1) @ w[f"{prefix}attn_output.weight"].T
        y = norm(x, w[f"{prefix}ffn_norm.weight"])
        gate = y @ w[f"{prefix}ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{prefix}ffn_up.weight"].T)) @ w[f"{prefix}ffn_down.weight"].T
    head = w.get("output.weight", w["token_embd.weight"])
    return norm(x, w["output_norm.weight"]) @ head.T
