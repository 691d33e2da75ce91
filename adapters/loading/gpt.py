"""Weights of a GPT with learned positions, laid out for our forward.

Decoder only, LayerNorm before attention and before the MLP, as many key heads as query heads, exact GELU, biases
everywhere, and logits by the token embedding.
"""

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.llama import Linear

__all__ = ["GptLayer", "GptShape", "GptWeights", "Norm"]


@attrs.frozen(kw_only=True)
class GptShape:
    """Sizes, checked."""

    layers: int
    hidden: int
    """N: size of the residual stream."""
    heads: int
    """H."""
    mlp: int
    context: int
    """Rows of the position embedding."""
    vocab_size: int
    """V: rows of the token embedding."""
    norm_eps: float = 1e-5
    family: str = "tinygpt"

    @property
    def head_size(self) -> int:
        """D."""
        return self.hidden // self.heads


@attrs.frozen(eq=False, kw_only=True)
class Norm:
    """LayerNorm of the last axis."""

    weight: mx.array
    """[N]."""
    bias: mx.array
    """[N]."""

    def __call__(self, x: mx.array, eps: float) -> mx.array:
        """[..., N] to [..., N]."""
        normed: mx.array = mx.fast.layer_norm(x, self.weight, self.bias, eps)
        return normed


@attrs.frozen(eq=False, kw_only=True)
class GptLayer:
    """One block."""

    attention_norm: Norm
    qkv: Linear
    """[3 N, N]: queries, keys, values."""
    output: Linear
    """[N, N]."""
    mlp_norm: Norm
    rise: Linear
    """[mlp, N]."""
    fall: Linear
    """[N, mlp]."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that it holds."""
        norms = (self.attention_norm, self.mlp_norm)
        products = (self.qkv, self.output, self.rise, self.fall)
        return (
            *(array for norm in norms for array in (norm.weight, norm.bias)),
            *(array for product in products for array in product.arrays),
        )


@attrs.frozen(eq=False, kw_only=True)
class GptWeights:
    """A whole model."""

    shape: GptShape
    tokens: mx.array
    """[V, N]: rows are looked up, and make the logits."""
    positions: mx.array
    """[context, N]."""
    layers: tuple[GptLayer, ...]
    norm: Norm

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that it holds."""
        layers = (array for layer in self.layers for array in layer.arrays)
        return (self.tokens, self.positions, *layers, self.norm.weight, self.norm.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)
