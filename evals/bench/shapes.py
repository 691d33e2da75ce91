"""Shapes of models that can be measured with random weights: a step's cost does not depend on the weights' values."""

import contextlib
import tempfile
from pathlib import Path

import attrs

from posttrainllm.adapters.runtime import start
from posttrainllm.kernel.errors import UsageError

__all__ = ["SHAPES", "Shape", "parse_shapes", "shapes_on_disk"]


@attrs.frozen(kw_only=True)
class Shape:
    """A Llama model with a tied head."""

    layers: int
    """L."""
    hidden: int
    """N: size of the residual stream."""
    heads: int
    """Of queries."""
    kv_heads: int
    """H: of keys and values."""
    head_size: int
    """D."""
    mlp: int
    """Rows of the gate."""
    vocab_size: int
    """V."""
    context: int
    """Positions it is said to be made for."""
    dtype: str = "bfloat16"
    """Of the weights."""

    @property
    def config(self) -> dict[str, object]:
        """Of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "rms_norm_eps": 1e-5,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": self.dtype,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by its name."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden)}
        for layer in range(self.layers):
            of_layer: dict[str, tuple[int, ...]] = {
                "input_layernorm": (self.hidden,),
                "self_attn.q_proj": (queries, self.hidden),
                "self_attn.k_proj": (keys, self.hidden),
                "self_attn.v_proj": (keys, self.hidden),
                "self_attn.o_proj": (self.hidden, queries),
                "post_attention_layernorm": (self.hidden,),
                "mlp.gate_proj": (self.mlp, self.hidden),
                "mlp.up_proj": (self.mlp, self.hidden),
                "mlp.down_proj": (self.hidden, self.mlp),
            }
            found |= {f"model.layers.{layer}.{name}.weight": size for name, size in of_layer.items()}
        return found | {"model.norm.weight": (self.hidden,)}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, head_size: int, mlp: int, *, small: bool) -> Shape:
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp=mlp,
        vocab_size=4096 if small else 16384,
        context=1024 if small else 2048,
    )


SHAPES = {
    "mega": _llama(24, 2048, 16, 4, 128, 4608, small=False),  # 0.96B parameters
    "tiny": _llama(4, 256, 4, 2, 64, 1024, small=False),  # 8M
    "tiny-shallow": _llama(2, 384, 6, 2, 64, 1536, small=False),  # 11M, half as many layers
    "toy": _llama(2, 64, 4, 2, 16, 128, small=True),  # for trying things out
}


def parse_shapes(text: str) -> tuple[str, str | None]:
    """Read --shapes.

    Args:
        text: "target+draft", or "target" alone.

    Returns:
        The two names; None without a draft.

    Raises:
        UsageError: a name is unknown, or the two have different vocabularies.
    """
    names = text.split("+")
    unknown = [name for name in names if name not in SHAPES]
    if unknown or len(names) > 2:
        raise UsageError(f"--shapes: got {text!r}, expected one or two of {', '.join(SHAPES)} with a + between them")
    sizes = [SHAPES[name].vocab_size for name in names]
    if sizes[0] != sizes[-1]:
        raise UsageError(f"--shapes: got vocabularies of {sizes[0]} and {sizes[1]}, expected the same")
    return names[0], names[1] if len(names) == 2 else None


def shapes_on_disk(
    text: str, model: str | None, draft_model: str | None, stack: contextlib.ExitStack
) -> tuple[str, str | None]:
    """Write random models.

    Args:
        text: of --shapes.
        model: what was given as MODEL: nothing.
        draft_model: the same of --draft-model.
        stack: what removes them.

    Returns:
        Directories of the target and the draft, None without one.

    Raises:
        UsageError: a shape is unknown, or a model was given, too.
    """
    if model is not None or draft_model is not None:
        raise UsageError("--shapes: got it beside a model, expected one of the two")
    target, draft = parse_shapes(text)
    start()  # MLX's BLAS comes before its import
    from posttrainllm.evals.bench.shape_writer import write_shape

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrainllm-shapes-")))
    paths = [
        str(write_shape(SHAPES[name], folder / f"{place}-{name}", seed=seed))
        for seed, (place, name) in enumerate((("target", target), ("draft", draft)))
        if name is not None
    ]
    return paths[0], paths[1] if draft is not None else None
