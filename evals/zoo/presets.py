"""The models that `posttrainllm zoo train` knows: Llama shapes with a tied head, and what each is for."""

import math

import attrs

from posttrainllm.evals.bench.shapes import SHAPES, Shape

__all__ = ["PRESETS", "Preset"]


@attrs.frozen(kw_only=True)
class Preset:
    """A shape and its purpose."""

    shape: Shape
    purpose: str
    """A few words, for people."""

    @property
    def parameters(self) -> int:
        """Weights in all; the head is the embedding and counts once."""
        return sum(map(math.prod, self.shape.tensors().values()))

    @property
    def config(self) -> dict[str, object]:
        """Of config.json."""
        return self.shape.config


def _shape(*, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab_size: int, context: int) -> Shape:
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=64,
        mlp=mlp,
        vocab_size=vocab_size,
        context=context,
    )


PRESETS = {
    "toy": Preset(shape=SHAPES["toy"], purpose="trying things out"),
    "nano": Preset(
        shape=_shape(layers=2, hidden=256, heads=4, kv_heads=4, mlp=768, vocab_size=4096, context=1024),
        purpose="the embedded draft",
    ),
    "small": Preset(
        shape=_shape(layers=8, hidden=384, heads=6, kv_heads=2, mlp=1280, vocab_size=4096, context=1024),
        purpose="the embedded target",
    ),
    "tiny": Preset(shape=SHAPES["tiny"], purpose="draft of the others"),
    "tiny-shallow": Preset(shape=SHAPES["tiny-shallow"], purpose="the same in half the layers"),
    "medium": Preset(
        shape=_shape(layers=8, hidden=512, heads=8, kv_heads=4, mlp=1280, vocab_size=16384, context=2048),
        purpose="a target for a laptop",
    ),
    "huge": Preset(
        shape=_shape(layers=12, hidden=768, heads=12, kv_heads=4, mlp=2304, vocab_size=16384, context=2048),
        purpose="a target in between",
    ),
    "mega": Preset(shape=SHAPES["mega"], purpose="the target for a GPU"),
}
