"""Powers of two and logarithms in plain arithmetic.

MLX's `exp` and `log` on x86 are a call an element. These are fused into loops that the C++ compiler vectorises. A GPU
has the functions in hardware, and would only launch more.
"""

import mlx.core as mx

__all__ = ["LOG2_E", "exp2", "log", "minus_log1p_minus"]

LOG2_E = 1.4426950408889634
"""exp(x) is exp2(x, LOG2_E)."""

_ROUND = 1.5 * 2.0**23  # adding it rounds to an integer, which the lowest bits of the sum then are
# 2**f on [-1/2, 1/2], degree 6, the first as in the series; the others fitted for the least relative error (2e-9), by
# least squares with Lawson's weights
_C0, _C1, _C2, _C3 = 1.0, 0.6931472, 0.24022648, 0.055503325
_C4, _C5, _C6 = 0.0096184374, 0.0013398874, 0.00015353362


def exp2(x: mx.array, scale: float = 1.0) -> mx.array:
    """2**(scale * x) in plain arithmetic, off by 2e-7 of the value at most beside the rounding of scale * x.

    Args:
        x: float32 of any shape.
        scale: a factor.

    Returns:
        float32 of the same shape: exactly 0 where scale * x is below -126, -inf included, and where it is NaN; 2**126
        where it is above 126.
    """
    given = x * scale
    # not mx.minimum, which looks for NaN: a branch an element, and nothing is vectorised
    power = mx.where(given < 126.0, given, 126.0)
    rounded = power + _ROUND
    f = power - (rounded - _ROUND)
    f2 = f * f
    # pairs and not Horner's rule: MLX fuses expressions that are up to 11 operations deep
    series = ((_C0 + _C1 * f) + f2 * (_C2 + _C3 * f)) + (f2 * f2) * ((_C4 + _C5 * f) + f2 * _C6)
    # a float's exponent begins at its 23rd bit; the integer 0 is the float 0
    whole = mx.left_shift(mx.view(rounded, mx.int32), 23)
    bits = mx.where(given >= -126.0, mx.view(series, mx.int32) + whole, 0)
    return mx.view(bits, mx.float32)


# (log(1 + f) - f) / f**2 on [-1/3, 1/3], degree 7, fitted like the above for the relative error of the logarithm (3e-8)
_L0, _L1, _L2, _L3 = -0.49999937, 0.33333197, -0.2500782, 0.20011167
_L4, _L5, _L6, _L7 = -0.16415955, 0.13995825, -0.15388574, 0.14026265
_LN_2 = 0.6931471805599453
_TWO_THIRDS = 0x3F2AAAAB  # the bits of 0.6666667


def log(x: mx.array) -> mx.array:
    """The natural logarithm in plain arithmetic, off by 2e-7 of the value at most.

    Args:
        x: float32 of any shape, from 2**-126, the least normal float, to 3e38; others give no logarithm.

    Returns:
        float32 of the same shape.
    """
    exponent, mantissa = _parts(x)
    return _log1p(mantissa - 1) + exponent * _LN_2


def minus_log1p_minus(x: mx.array) -> mx.array:
    """-log(1 - x) in plain arithmetic, off by 3e-7 of the value at most, the rounding of 1 - x near x = 1 beside it.

    Args:
        x: float32 of any shape, from 0 to 1 - 2**-24.

    Returns:
        float32 of the same shape.
    """
    exponent, mantissa = _parts(1 - x)
    # what 1 - x lost to rounding; where the exponent is not 0 it is too small to count
    again = -(x - 1)  # the same in other words: what two kernels share is an array more
    lost = x - (1 - again)
    return -(_log1p((mantissa - 1) - lost) + exponent * _LN_2)


def _parts(x: mx.array) -> tuple[mx.array, mx.array]:
    """The exponent and the mantissa in [2/3, 4/3), float32 each, whose product in the sense of 2**e * m is x."""
    bits = mx.view(x, mx.int32)
    exponent = mx.right_shift(bits - _TWO_THIRDS, 23)
    again = mx.right_shift(bits + (-_TWO_THIRDS), 23)  # in other words, as above
    return again.astype(mx.float32), mx.view(bits - mx.left_shift(exponent, 23), mx.float32)


def _log1p(f: mx.array) -> mx.array:
    f2 = f * f
    tail = ((_L0 + _L1 * f) + f2 * (_L2 + _L3 * f)) + (f2 * f2) * ((_L4 + _L5 * f) + f2 * (_L6 + _L7 * f))
    return f + f2 * tail
