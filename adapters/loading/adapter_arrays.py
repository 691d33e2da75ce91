"""An adapter's tensors, and what they make of a dense matrix."""

from collections.abc import MutableMapping

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.adapter import Adapter
from posttrainllm.adapters.loading.llama_config import LlamaConfig

__all__ = ["Factors", "fuse_adapter", "read_arrays", "read_factors"]


@attrs.frozen(eq=False, kw_only=True)
class Factors:
    """Of one matrix [out, in]."""

    a: mx.array
    """[in, R]."""
    b: mx.array
    """[R, out]."""
    scale: float
    magnitude: mx.array | None
    """[out]; None but for DoRA."""

    def fused(self, weight: mx.array) -> mx.array:
        """The matrix with the update in it, summed in float32.

        LoRA: Hu et al. 2021 (arXiv:2106.09685), equation 3. DoRA: Liu et al. 2024 (arXiv:2402.09353), equation 5.

        Args:
            weight: [out, in].

        Returns:
            [out, in], of the weight's dtype.
        """
        update = (self.b.T.astype(mx.float32) @ self.a.T.astype(mx.float32)) * self.scale  # [out, R] @ [R, in]
        summed = weight.astype(mx.float32) + update
        if self.magnitude is not None:
            norms = mx.linalg.norm(summed, axis=1)  # [out]
            summed = summed * (self.magnitude.astype(mx.float32) / norms)[:, None]
        return summed.astype(weight.dtype)


def read_arrays(adapter: Adapter, dtype: str) -> dict[str, mx.array]:
    """Read the tensors.

    Args:
        adapter: checked.
        dtype: of the model. In float32 all are cast to it, which loses nothing; in 16 bits each keeps its own, as in
            mlx-lm.

    Returns:
        The arrays by name.

    Raises:
        CheckpointError: the file is not what it was when it was checked.
    """
    arrays = mx.load(str(adapter.file))
    if not isinstance(arrays, dict) or arrays.keys() != adapter.entries.keys():
        adapter.refuse("changed while it was read")
    return {name: array.astype(mx.float32) if dtype == "float32" else array for name, array in arrays.items()}


def read_factors(adapter: Adapter, dtype: str) -> dict[str, Factors]:
    """Read the tensors of LoRA or DoRA.

    Args:
        adapter: not a full fine-tune.
        dtype: see `read_arrays`.

    Returns:
        The factors by the module's name.

    Raises:
        CheckpointError: see `read_arrays`.
    """
    arrays = read_arrays(adapter, dtype)

    def factor(name: str) -> mx.array:
        return mx.contiguous(arrays[name].T) if adapter.turned else arrays[name]

    return {
        module: Factors(
            a=factor(update.a),
            b=factor(update.b),
            scale=update.scale,
            magnitude=None if update.magnitude is None else arrays[update.magnitude],
        )
        for module, update in adapter.updates.items()
    }


def fuse_adapter(arrays: MutableMapping[str, mx.array], adapter: Adapter, config: LlamaConfig, dtype: str) -> None:
    """Put an adapter into the dense tensors of a model of the Llama shape.

    Args:
        arrays: of the checkpoint, by the names of mlx-lm's modules; those that it changes are replaced.
        adapter: what changes them.
        config: of the model.
        dtype: what the model's tensors are cast to, before the update is added.

    Raises:
        CheckpointError: a module or a shape is not the model's.
    """
    if adapter.kind == "full":
        for name, array in read_arrays(adapter, dtype).items():
            if name not in arrays:
                adapter.refuse(f"got the tensor {name!r:.200}, expected one that the model has")
            adapter.check_shape(name, arrays[name].shape)
            arrays[name] = array
        return
    for module in adapter.updates:
        weight = arrays.get(f"{module}.weight")
        linear = weight is not None and weight.ndim == 2 and (module != "lm_head" or not config.tied)
        if weight is None or not linear or module == "model.embed_tokens":
            adapter.refuse(f"got an update of {module!r:.200}, expected a linear layer of the model")
        adapter.check_place(module, config.shape.layers)
        adapter.check_shapes(module, *weight.shape)
    for module, factors in read_factors(adapter, dtype).items():
        weight = arrays[f"{module}.weight"].astype(getattr(mx, dtype))
        arrays[f"{module}.weight"] = factors.fused(weight)
