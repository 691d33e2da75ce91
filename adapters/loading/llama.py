"""Weights of a Llama-shaped model, laid out for the forwards of our own.

Products that read the same input are one matrix: queries, keys and values; gate and up. Each forward takes these
records and nothing of mlx-lm's.
"""

import attrs
import mlx.core as mx

__all__ = ["Linear", "LlamaLayer", "LlamaShape", "LlamaWeights"]


@attrs.frozen(kw_only=True)
class LlamaShape:
    """What config.json says of the model, checked."""

    layers: int
    hidden: int
    """N: size of the residual stream."""
    heads: int
    kv_heads: int
    """H."""
    head_size: int
    """D."""
    mlp: int
    """Rows of the gate."""
    vocab_size: int
    """V: rows of the embedding, padding included."""
    norm_eps: float
    rope_frequencies: tuple[float, ...] = attrs.field(repr=False)
    """Radians a position for each of the D / 2 pairs (i, i + D / 2), any scaling applied."""
    rope_base: float | None = None
    """Where the frequencies are those of one base, rope_scale * rope_base**(-2 i / D); None of any other scaling."""
    rope_scale: float = 1.0
    family: str = "llama"
    """mlx-lm's name of the architecture."""


@attrs.frozen(eq=False, kw_only=True)
class Linear:
    """y = x @ weight.T + bias, dense or quantised in groups along the input."""

    weight: mx.array
    """[out, in]; packed uint32 where quantised."""
    bias: mx.array | None = None
    """[out]."""
    scales: mx.array | None = None
    """[out, in / group_size]; None where the weight is dense."""
    biases: mx.array | None = None
    """The same shape; None in modes that have none."""
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] to [..., out]."""
        if self.scales is None:
            y = x @ self.weight.T
        else:
            y = mx.quantized_matmul(
                x,
                self.weight,
                scales=self.scales,
                biases=self.biases,
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
        return y if self.bias is None else y + self.bias

    def rows(self, index: mx.array) -> mx.array:
        """Rows of the matrix, as an embedding: int32 [...] to [..., in]; ids are checked by the caller."""
        if self.scales is None:
            return self.weight[index]
        return mx.dequantize(
            self.weight[index],
            scales=self.scales[index],
            biases=None if self.biases is None else self.biases[index],
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    def part(self, start: int, stop: int) -> "Linear":
        """The product with some rows of the matrix, which are not copied.

        Args:
            start: the first row.
            stop: the row behind the last.

        Returns:
            [..., in] to [..., stop - start].
        """

        def rows(array: mx.array | None) -> mx.array | None:
            return None if array is None else array[start:stop]

        part = attrs.evolve(
            self,
            weight=self.weight[start:stop],
            bias=rows(self.bias),
            scales=rows(self.scales),
            biases=rows(self.biases),
        )
        mx.eval(part.arrays)
        return part

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that it holds."""
        found = (self.weight, self.bias, self.scales, self.biases)
        return tuple(array for array in found if array is not None)


@attrs.frozen(eq=False, kw_only=True)
class LlamaLayer:
    """One block."""

    input_norm: mx.array
    """[N]."""
    qkv: Linear
    """[(heads + 2 H) D, N]: queries, keys, values."""
    query_norm: mx.array | None
    """[D]: RMS norm of every query head before it is rotated; None where the family has none."""
    key_norm: mx.array | None
    """[D]."""
    output: Linear
    """[N, heads D]."""
    mlp_norm: mx.array
    """[N]."""
    gate_up: Linear
    """[2 mlp, N]: gate, up."""
    down: Linear
    """[N, mlp]."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that it holds."""
        norms = (self.input_norm, self.query_norm, self.key_norm, self.mlp_norm)
        products = (self.qkv, self.output, self.gate_up, self.down)
        return (
            *(norm for norm in norms if norm is not None),
            *(array for product in products for array in product.arrays),
        )


@attrs.frozen(eq=False, kw_only=True)
class LlamaWeights:
    """A whole model."""

    shape: LlamaShape
    embedding: Linear
    """[V, N]: its rows are looked up; dense or quantised."""
    layers: tuple[LlamaLayer, ...]
    norm: mx.array
    """[N]."""
    head: Linear
    """[V, N]; the embedding itself where the model ties them."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that it holds, a tied head once."""
        head = () if self.head is self.embedding else self.head.arrays
        layers = (array for layer in self.layers for array in layer.arrays)
        return (*self.embedding.arrays, *layers, self.norm, *head)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)
