"""Randomness as a function of (request key, absolute position, purpose).

Nothing here depends on how many steps it took to reach a position, so plain and speculative decoding of one request
see the same noise, and a step replays from its key alone. Noise of different purposes must never share a key: the law
of `leviathan` needs the draft's draw, the accept uniform and the target's draw to be independent.
"""

import attrs
import mlx.core as mx
import numpy as np

from posttrainllm.kernel.arithmetic import log, minus_log1p_minus
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.errors import UsageError

__all__ = [
    "ACCEPT",
    "DRAFT",
    "TARGET",
    "StepNoise",
    "gumbel",
    "gumbel_from_uniform",
    "position_keys",
    "root_key",
    "step_noise",
    "uniform",
]

TARGET, DRAFT, ACCEPT = 0x7A67_0001, 0xD4AF_0002, 0xACCE_0003
"""Purposes: the target's draw, the draft's own draw (`leviathan` only), the accept uniform."""

_BELOW_ONE = 1 - 2**-24  # the largest float32 that is


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


@attrs.frozen(eq=False, kw_only=True)
class StepNoise:
    """What a speculative step draws with; what it does not ask for is not computed."""

    draft: mx.array
    """float32 [B, K, V]: the draft's own noise, or for a row of the coupled rule the target's."""
    uniforms: mx.array
    """float32 [B, K]: what judges proposals by their ratio."""
    target_keys: mx.array
    """uint32 [B, K + 1, 2]."""
    target: mx.array
    """float32 [B, K + 1, V]."""
    one_position: bool
    """Whether `target_at` draws when it is asked: less noise, for more operations."""
    arithmetic: bool

    def target_at(self, index: mx.array) -> mx.array:
        """The target's noise at one position a row.

        Args:
            index: int32 [B, 1], 0 to K.

        Returns:
            float32 [B, 1, V].
        """
        rows = indices(index.shape[0])[:, None]
        if not self.one_position:
            return self.target[rows, index]
        return gumbel(self.target_keys[rows, index], self.target.shape[-1], arithmetic=self.arithmetic)


def step_noise(config: StepConfig, root: mx.array, length: mx.array, coupled: mx.array) -> StepNoise:
    """The noise of a speculative step.

    Args:
        config: K = config.proposals, 1 or more.
        root: uint32 [B, 2], one root key a row.
        length: int32 [B], the position of the first id that is drawn.
        coupled: bool [B], rows of the coupled rule.

    Returns:
        The noise of K proposals and of what follows each.
    """
    K = config.proposals
    kind = {"arithmetic": config.arithmetic}
    one_position = config.rules == "leviathan" and config.arithmetic
    if config.rules == "coupled":
        places = indices(K + 1)[:, None]
        keys = _keys(root, length[:, None, None] + places, mx.array(TARGET, dtype=mx.uint32))
        target = gumbel(keys, config.vocab_size, **kind)
        draft, uniforms = target[:, :K], mx.zeros((root.shape[0], K))
    else:
        # all at once: every operation costs, however small
        places = mx.array(np.concatenate([np.arange(K), np.arange(K), np.arange(K + 1)]).astype(np.int32)[:, None])
        purposes = mx.array(np.repeat([ACCEPT, DRAFT, TARGET], [K, K, K + 1]).astype(np.uint32)[:, None])
        if config.rules == "both":
            purposes = mx.where(coupled[:, None, None] & (purposes == DRAFT), TARGET, purposes).astype(mx.uint32)
        every = _keys(root, length[:, None, None] + places, purposes)  # [B, 3 K + 1, 2]
        uniforms, keys = uniform(every[:, :K]), every[:, 2 * K :]
        if one_position:
            draft, target = (gumbel(some, config.vocab_size, **kind) for some in (every[:, K : 2 * K], keys))
        else:
            drawn = gumbel(every[:, K:], config.vocab_size, **kind)  # [B, 2 K + 1, V]
            draft, target = drawn[:, :K], drawn[:, K:]
    return StepNoise(draft=draft, uniforms=uniforms, target_keys=keys, target=target, one_position=one_position, **kind)


def position_keys(root: mx.array, position: mx.array, purpose: int) -> mx.array:
    """Keys for drawing at absolute positions.

    Args:
        root: uint32 [B, 2], one root key a row.
        position: int32 [B, N], absolute positions.
        purpose: TARGET, DRAFT or ACCEPT.

    Returns:
        uint32 [B, N, 2].
    """
    return _keys(root, position[..., None], mx.array(purpose, dtype=mx.uint32))


def gumbel(keys: mx.array, width: int, *, arithmetic: bool) -> mx.array:
    """Standard Gumbel noise that is always finite, between -2.82 and 22.88.

    The values of a key depend on the width drawn: its first 4096 of 4160 have nothing in common with 4096 alone.

    Args:
        keys: uint32 [B, N, 2].
        width: values a key, V.
        arithmetic: False takes MLX's logarithm, True that of arithmetic.py: the last bits differ.

    Returns:
        float32 [B, N, V].
    """
    return gumbel_from_uniform(_uniform(keys, width), arithmetic=arithmetic)


def gumbel_from_uniform(values: mx.array, *, arithmetic: bool) -> mx.array:
    """Turn uniform values v into -log(-log(1 - v)).

    Not -log(-log(v)): the large values decide every argmax, and they must come from v near 0, where float32 is
    fine-grained. Near 1 its steps of 2**-24 would cut the tail off at 16.6.

    Args:
        values: float32, in [0, 1 - 2**-24].
        arithmetic: see `gumbel`.

    Returns:
        float32 of the same shape, finite.
    """
    shift = 2**-33  # half a step of the generator: at 0 the noise would be infinite
    if arithmetic:
        flat = values.reshape(-1)  # what is fused over one shape is vectorised
        return -log(minus_log1p_minus(flat + shift)).reshape(values.shape)
    return -mx.log(-mx.log1p(-shift - values))


def uniform(keys: mx.array) -> mx.array:
    """One uniform value in (0, 1) a key: a key that nothing else is drawn from is as random as what it would draw.

    Args:
        keys: uint32 [B, N, 2].

    Returns:
        float32 [B, N]: odd multiples of 2**-24, so a chance is met to 2**-24 and not always from above.
    """
    return (mx.right_shift(keys[..., 0], 9).astype(mx.float32) + 0.5) * 2**-23  # [B, N, 2] -> [B, N]


def _keys(root: mx.array, position: mx.array, purpose: mx.array) -> mx.array:
    """Keys uint32 [B, N, 2] at positions int32 [B, N, 1] for purposes uint32 [B, N, 1], [N, 1] or []."""
    # a choice and no stack, which a GPU makes of two copies
    salt = mx.where(indices(2) == 0, position.astype(mx.uint32), purpose)  # [B, N, 2]
    mixed = mx.bitwise_xor(root[:, None], salt)
    keys = mx.vmap(lambda key: mx.random.split(key, 1))(mixed.reshape(-1, 2))  # [B*N, 1, 2]
    return keys.reshape(mixed.shape)


def _uniform(keys: mx.array, width: int) -> mx.array:
    batch, count, _ = keys.shape
    flat = keys.reshape(-1, 2)  # [B, N, 2] -> [B*N, 2]
    # mx.random.uniform in fewer words, so that the noise is one fused operation: the same values where V is even
    bits = mx.vmap(lambda key: mx.random.split(key, (width + 1) // 2))(flat)  # [B*N, V / 2 rounded up, 2]
    bits = bits.reshape(batch, count, -1)[..., :width]
    return mx.minimum(bits.astype(mx.float32) * 2**-32, _BELOW_ONE)
