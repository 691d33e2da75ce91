"""The state of a server at the moment of a scrape: read from it then, never kept."""

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING

import mlx.core as mx
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # which makes one of these
    from posttrainllm.adapters.serve.scheduler import Scheduler

__all__ = ["ConnectionsCollector", "StateCollector"]

_VERDICTS = ("identical", "width-identical", "provisional", "not gated", "broken")


class StateCollector(Collector):
    """Gauges of a scheduler; reads numbers that its thread and MLX's allocator write, and no arrays.

    Args:
        scheduler: whose state is shown.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """Every gauge, as it is now."""
        engine, standing = self._scheduler.engine, self._scheduler.standing
        in_rows, waiting = self._scheduler.admission.counts
        pair, closed = engine.pair, self._scheduler.admission.closed
        labels = {
            "version": pair.runtime.versions["posttrainllm"],
            "model": pair.target.label,
            "draft": pair.draft.label if pair.draft is not None else "",
            "device": pair.runtime.device,
            "dtype": pair.target.dtype,
        }
        info = GaugeMetricFamily("posttrainllm_info", "What is served; always 1.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info
        yield _gauge("up", "Whether the engine works.", closed is None)
        yield _gauge("rows", "Rows of the engine: choices that can decode together.", engine.rows)
        yield _gauge("active_rows", "Choices that have a row, one whose prompt is read included.", in_rows)
        yield _gauge("queue_depth", "Choices that wait for a row, or are being encoded.", waiting)
        yield from self._memory()
        yield from self._speculation()
        verdicts = GaugeMetricFamily("posttrainllm_gate_verdict", "1 for the gate's verdict.", labels=["verdict"])
        for verdict in _VERDICTS:
            verdicts.add_metric([verdict], standing.verdict == verdict)
        yield verdicts
        prefixes = engine.prefixes
        yield _gauge("prefix_cache_bytes", "Taken by prompts that are kept.", 0 if prefixes is None else prefixes.used)
        yield _gauge("prefix_cache_most_bytes", "That they may take.", 0 if prefixes is None else prefixes.limit)
        yield _gauge(
            "prefix_cache_chunks", "Chunks of prompts that are kept.", 0 if prefixes is None else len(prefixes)
        )

    def _memory(self) -> Iterator[Metric]:
        """MLX's own counts, which any thread may read."""
        yield _gauge(
            "memory_active_bytes", "MLX's arrays: weights, caches, prompts that are kept.", mx.get_active_memory()
        )
        yield _gauge("memory_cache_bytes", "Freed buffers that MLX keeps for later arrays.", mx.get_cache_memory())

    def _speculation(self) -> Iterator[Metric]:
        engine, payoff = self._scheduler.engine, self._scheduler.payoff
        enabled = self._scheduler.standing.enabled
        yield _gauge("speculation_enabled", "Whether the draft is used.", enabled)
        yield _gauge("speculation_draft_k", "The most tokens proposed a step.", engine.width - 1 if enabled else 0)
        yield _gauge(
            "speculation_slower",
            "1 where the last steps looked at would have been clearly faster without the draft, by measured costs.",
            payoff is not None and not payoff.pays,
        )
        ratio = GaugeMetricFamily(
            "posttrainllm_speculation_speed_ratio",
            "Rate of the last steps looked at against plain decoding, by measured costs; none while that is not known.",
        )
        if payoff is not None:
            ratio.add_metric([], payoff.ratio)
        yield ratio


class ConnectionsCollector(Collector):
    """A gauge of connections.

    Args:
        doors: through which they come.
    """

    def __init__(self, doors: Sized) -> None:
        self._doors = doors

    def collect(self) -> Iterator[Metric]:
        """How many there are."""
        yield _gauge("connections", "Connections of clients, idle ones included.", len(self._doors))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"posttrainllm_{name}", text, value=float(value))
