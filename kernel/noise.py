"""Randomness as a function of (request key, absolute position, purpose).

Nothing here depends on how many steps it took to reach a position, so plain and speculative decoding of one request
see the same noise, and a step replays from its key alone. Noise of different purposes must never share a key: the law
of `leviathan` needs the draft's draw, the accept uniform and the target's draw to be independent.
"""

import mlx.core as mx

from posttrainllm.kernel.errors import UsageError

__all__ = ["ACCEPT", "DRAFT", "TARGET", "gumbel", "gumbel_from_uniform", "position_keys", "root_key", "uniform"]

TARGET, DRAFT, ACCEPT = 0x7A67_0001, 0xD4AF_0002, 0xACCE_0003
"""Purposes: the target's draw, the draft's own draw (`leviathan` only), the accept uniform."""


def root_key(seed: int) -> mx.array:
    """Root key of a request.

    The seed is hashed first: xor-ing a position into a raw seed would make seed 8 at position 1 collide with seed 9 at
    position 0.

    Args:
        seed: 0 <= seed < 2**64.

    Returns:
        uint32 [2].

    Raises:
        UsageError: the seed is out of range.
    """
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed: got {seed}, expected 0 to 2**64 - 1")
    return mx.random.split(mx.random.key(seed), 1)[0]


def position_keys(root: mx.array, position: mx.array, purpose: int | mx.array) -> mx.array:
    """Keys for drawing at absolute positions.

    Args:
        root: uint32 [B, 2], one root key a row.
        position: int32 [B, N], absolute positions.
        purpose: TARGET, DRAFT or ACCEPT, or uint32 [B] with one of them for each row.

    Returns:
        uint32 [B, N, 2].
    """
    batch, count = position.shape
    tag = mx.broadcast_to(mx.array(purpose, dtype=mx.uint32), (batch,))
    high = mx.bitwise_xor(root[:, :1], position.astype(mx.uint32))  # [B, N]
    low = mx.broadcast_to(mx.bitwise_xor(root[:, 1], tag)[:, None], (batch, count))  # [B, N]
    mixed = mx.stack([high, low], axis=-1).reshape(-1, 2)  # [B, N, 2] -> [B*N, 2]
    keys = mx.vmap(lambda key: mx.random.split(key, 1)[0])(mixed)
    return keys.reshape(batch, count, 2)  # [B*N, 2] -> [B, N, 2]


def gumbel(keys: mx.array, width: int) -> mx.array:
    """Standard Gumbel noise that is always finite, between -2.82 and 22.88.

    The values of a key depend on the width drawn: its first 4096 of 4160 have nothing in common with 4096 alone.

    Args:
        keys: uint32 [B, N, 2].
        width: values a key, V.

    Returns:
        float32 [B, N, V].
    """
    return gumbel_from_uniform(_uniform(keys, width))


def gumbel_from_uniform(values: mx.array) -> mx.array:
    """Turn uniform values v into -log(-log(1 - v)).

    Not -log(-log(v)): the large values decide every argmax, and they must come from v near 0, where float32 is
    fine-grained. Near 1 its steps of 2**-24 would cut the tail off at 16.6. The inner logarithm is Kahan's log1p:
    that of the rounded 1 - v, corrected by what the rounding lost. MLX's own takes three times as long on a CPU.

    Args:
        values: float32, in [0, 1 - 2**-24].

    Returns:
        float32 of the same shape, finite.
    """
    shifted = values + 2**-33  # half a step of the generator: at 0 the noise would be infinite
    rest = 1 - shifted
    lost = shifted / mx.maximum(1 - rest, 2**-25)  # 1 - rest is exact, and 0 where rest is 1
    exponential = mx.where(rest < 1, -mx.log(rest) * lost, shifted)
    return -mx.log(exponential)


def uniform(keys: mx.array) -> mx.array:
    """One uniform value in [0, 1) a key.

    Args:
        keys: uint32 [B, N, 2].

    Returns:
        float32 [B, N].
    """
    return _uniform(keys, 1).squeeze(-1)  # [B, N, 1] -> [B, N]


def _uniform(keys: mx.array, width: int) -> mx.array:
    batch, count, _ = keys.shape
    flat = keys.reshape(-1, 2)  # [B, N, 2] -> [B*N, 2]
    values = mx.vmap(lambda key: mx.random.uniform(shape=(width,), key=key))(flat)
    return values.reshape(batch, count, width)  # [B*N, V] -> [B, N, V]
