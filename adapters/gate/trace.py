"""A trace of the request that broke, to replay."""

from pathlib import Path

from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.rows import RowRequest

__all__ = ["write_trace"]


def write_trace(pair: Pair, shape: Shape, request: RowRequest, file: Path) -> str | None:
    """x"""
    return None
