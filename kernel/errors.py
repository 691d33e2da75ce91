"""Every error this project raises on purpose.

::

    PosttrainllmError            one line: what was got, what was expected
    ├── UsageError               an option or an argument has a bad value
    ├── LoadError                something on disk cannot be used
    │   ├── CheckpointError      a model directory is missing, torn or inconsistent
    │   ├── UnsupportedModelError  the architecture cannot be rewound by length
    │   └── PairError            draft and target do not fit each other
    ├── CapacityError            a prompt or a request does not fit the context
    ├── MemoryLimitError         the run would need more memory than there is
    ├── BackendError             MLX itself cannot be used here, or an address cannot be listened on
    ├── GateError                the gate's verdict is not the one that was asked for
    ├── TraceError               a trace cannot be written, read, or replayed here
    └── NonFiniteError           a step computed logits that are not finite
"""

__all__ = [
    "BackendError",
    "CapacityError",
    "CheckpointError",
    "GateError",
    "LoadError",
    "MemoryLimitError",
    "NonFiniteError",
    "PairError",
    "PosttrainllmError",
    "TraceError",
    "UnsupportedModelError",
    "UsageError",
]


class PosttrainllmError(Exception):
    """Base of every error raised on purpose. Its text is one line."""


class UsageError(PosttrainllmError):
    """An option or an argument has a value that can never work."""


class LoadError(PosttrainllmError):
    """Something on disk cannot be used."""


class CheckpointError(LoadError):
    """A model directory is missing, incomplete, torn or inconsistent."""


class UnsupportedModelError(LoadError):
    """The model keeps state that rewinding by length cannot undo."""


class PairError(LoadError):
    """Draft and target do not agree on what a token is."""


class CapacityError(PosttrainllmError):
    """A prompt, a request or a token id does not fit the model or the engine."""


class MemoryLimitError(PosttrainllmError):
    """The run would need more memory than the machine has free."""


class BackendError(PosttrainllmError):
    """MLX cannot be imported, its device cannot be used, or an address cannot be listened on."""


class GateError(PosttrainllmError):
    """The gate's verdict is not the one that was asked for."""


class TraceError(PosttrainllmError):
    """A trace cannot be written, is no trace, or was recorded on something else."""


class NonFiniteError(PosttrainllmError):
    """The target computed logits that are not finite; nothing was sampled from them."""
