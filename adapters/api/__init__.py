"""Speculative decoding for MLX with the target's own output: exact and deterministic.

>>> import posttrainllm
>>> pair = posttrainllm.load()  # the embedded pair
>>> result = posttrainllm.generate(pair=pair, prompt="def add(a, b):", max_tokens=16)
>>> result.usage.draft_accepted <= result.usage.draft_proposed
True
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrainllm.adapters.facade import generate, load, stream
    from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["PosttrainllmError", "__version__", "generate", "load", "stream"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # MLX is imported by the first call, not by the import: the BLAS has to come before it
    if name in ("generate", "load", "stream"):
        from posttrainllm.adapters import facade

        return getattr(facade, name)
    if name == "PosttrainllmError":
        from posttrainllm.kernel.errors import PosttrainllmError

        return PosttrainllmError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
