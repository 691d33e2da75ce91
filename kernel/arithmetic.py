"""Powers of two in plain arithmetic.

MLX's `exp` on x86 is a call an element. This is fused into loops that the C++ compiler vectorises. A GPU has the
function in hardware, and would only launch more.
"""

import mlx.core as mx

__all__ = ["LOG2_E", "exp2"]

LOG2_E = 1.4426950408889634
"""exp(x) is exp2(x, LOG2_E)."""

_ROUND = 1.5 * 2.0**23  # adding it rounds to an integer
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
        float32 of the same shape: exactly 0 where scale * x is below -126.5, -inf included, and where it is NaN; 2**126
        where it is above 126.
    """
    power = mx.minimum(x * scale, 126.0)
    f = power - ((power + _ROUND) - _ROUND)
    f2 = f * f
    # pairs and not Horner's rule: MLX fuses expressions that are up to 11 operations deep
    series = ((_C0 + _C1 * f) + f2 * (_C2 + _C3 * f)) + (f2 * f2) * ((_C4 + _C5 * f) + f2 * _C6)
    # the same integer in other words: a shared expression would be a kernel of its own
    again = mx.minimum(x * (2 * scale), 252.0) * 0.5
    whole = (again + (_ROUND + 128)) - (_ROUND + 128)
    # a float's exponent begins at its 23rd bit; the integer 0 is the float 0
    bits = mx.where(whole >= -126, mx.view(series, mx.int32) + mx.left_shift(whole.astype(mx.int32), 23), 0)
    return mx.view(bits, mx.float32)
