"""Adapters on mlx-lm's modules, by mlx-lm's own layers: nothing is fused, and the bits are mlx-lm's."""

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from posttrainllm.adapters.loading.adapter import Adapter
from posttrainllm.adapters.loading.adapter_arrays import Factors, read_arrays, read_factors
from posttrainllm.kernel.errors import UnsupportedModelError

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["adapt_module"]


class _NormedDoRALinear(DoRALinear):
    """DoRA whose norms, which do not change while it decodes, are computed once: the bits stay what they are."""

    def settle(self) -> None:
        """Compute them; weights and factors are in place."""
        adapted = self._weight() + (self.scale * self.lora_b.T) @ self.lora_a.T
        self._ratio = self.m / mx.linalg.norm(adapted, axis=1)  # [out]
        mx.eval(self._ratio)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = x @ self._weight().T
        out = out + (self.scale * ((x @ self.lora_a) @ self.lora_b)).astype(x.dtype)
        out = self._ratio.astype(x.dtype) * out
        return out + self.linear.bias if "bias" in self.linear else out

    def _weight(self) -> mx.array:
        weight: mx.array = self._dequantized_weight()  # type: ignore[no-untyped-call] # as mlx-lm declares it
        return weight


def adapt_module(module: "Module", adapter: Adapter, dtype: str) -> None:
    """Put an adapter on a loaded module.

    Args:
        module: of mlx-lm, dense or quantised, its weights cast.
        adapter: what it gets.
        dtype: of the module.

    Raises:
        CheckpointError: a layer or a shape is not the module's.
        UnsupportedModelError: a layer is of a kind that takes no adapter here.
    """
    if adapter.kind == "full":
        _replace(module, adapter, dtype)
    else:
        _add(module, adapter, dtype)
    module.eval()
    mx.eval(module.parameters())  # type: ignore[no-untyped-call] # as MLX declares it


def _replace(module: "Module", adapter: Adapter, dtype: str) -> None:
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))  # type: ignore[no-untyped-call] # as MLX declares it
    arrays = read_arrays(adapter, dtype)
    for name in arrays:
        if name not in parameters or not mx.issubdtype(parameters[name].dtype, mx.floating):
            adapter.refuse(f"got the tensor {name!r:.200}, expected one that the model has")
        adapter.check_shape(name, parameters[name].shape)
    module.load_weights([(name, array.astype(parameters[name].dtype)) for name, array in arrays.items()], strict=False)


def _add(module: "Module", adapter: Adapter, dtype: str) -> None:
    layers = dict(module.named_modules())  # type: ignore[no-untyped-call] # as MLX declares it
    for name in adapter.updates:
        if name not in layers:
            adapter.refuse(f"got an update of {name!r:.200}, expected a linear layer of the model")
        adapter.check_place(name, len(module.layers))
        _check(adapter, name, layers[name])
    adapted = [(name, _adapted(layers[name], factors)) for name, factors in read_factors(adapter, dtype).items()]
    module.update_modules(tree_unflatten(adapted))


def _check(adapter: Adapter, name: str, layer: Any) -> None:
    """Hold the tensors against the layer."""
    if isinstance(layer, (SwitchLinear, QuantizedSwitchLinear)) and adapter.kind == "lora" and not adapter.turned:
        update, experts = adapter.updates[name], layer.num_experts
        adapter.check_shape(update.a, (experts, update.rank, layer.input_dims))
        adapter.check_shape(update.b, (experts, layer.output_dims, update.rank))
    elif isinstance(layer, (Linear, QuantizedLinear)):
        outputs, inputs = layer.weight.shape
        if isinstance(layer, QuantizedLinear):
            inputs = layer.scales.shape[1] * layer.group_size
        adapter.check_shapes(name, outputs, inputs)
    else:
        raise UnsupportedModelError(
            f"{adapter.file}: {name:.200}: got {adapter.kind} of {type(layer).__name__}, expected a linear layer"
        )


def _adapted(layer: Any, factors: Factors) -> Any:
    rank = factors.a.shape[-2 if factors.a.ndim == 3 else -1]
    if factors.magnitude is not None:
        made = _NormedDoRALinear(1, 1, r=rank, scale=factors.scale)  # what it draws at random is replaced
        made.linear = layer
    elif isinstance(layer, (Linear, QuantizedLinear)):
        made = LoRALinear.from_base(layer, r=rank, scale=factors.scale)
    else:
        made = LoRASwitchLinear.from_base(layer, r=rank, scale=factors.scale)
    made.lora_a, made.lora_b = factors.a, factors.b
    if factors.magnitude is not None:
        made.m = factors.magnitude
        made.settle()
    return made
