"""The shapes of what a server says of itself, for /openapi.json: what reports.py writes as plain JSON."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from posttrainllm.adapters.serve.answer_types import ErrorDetails, Speculative

__all__ = [
    "Health",
    "ModelCard",
    "ModelList",
    "PrefixCacheState",
    "Queue",
    "Slots",
    "SpeculativeState",
]


class SpeculativeState(Speculative):
    """Of the server: with whether the draft has paid lately."""

    pays: bool | None


class ModelCard(TypedDict):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    dtype: str
    device: str
    speculative: SpeculativeState


class ModelList(TypedDict):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Slots(TypedDict):
    """Rows."""

    total: int
    busy: int


class Queue(TypedDict):
    """The line."""

    waiting: int


class PrefixCacheState(TypedDict):
    """Prompts that are kept."""

    bytes: int
    most_bytes: int
    chunks: int


class Health(TypedDict):
    """Whether the engine works, and how busy it is."""

    status: Literal["ok", "error"]
    error: NotRequired[ErrorDetails]
    model: str
    speculative: SpeculativeState
    slots: Slots
    queue: Queue
    prefix_cache: PrefixCacheState | None
