"""What a server counts, for Prometheus: written by the engine's thread and by HTTP's, read by whoever scrapes.

A registry of its own for every server; nothing is global. Counters go up as things happen, not when a reply ends, so
what a client gave up is counted, too. The state at the moment of a scrape is in gauges.py.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from posttrainllm.adapters.serve.errors import ApiError

__all__ = ["ENDPOINTS", "OUTCOMES", "Ending", "Metrics", "ending_of"]

Ending: TypeAlias = Literal["ok", "cancelled", "refused", "busy", "timed_out", "failed"]
OUTCOMES: tuple[Ending, ...] = ("ok", "cancelled", "refused", "busy", "timed_out", "failed")
ENDPOINTS = ("chat", "completions", "ollama_chat", "ollama_generate")
_BUSY, _TIMED_OUT, _FAULT = 429, 504, 500
_STEP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_WAIT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def ending_of(error: ApiError) -> Ending:
    """How a request ended that got an error.

    Args:
        error: what its client was told.

    Returns:
        One of OUTCOMES.
    """
    if error.status == _BUSY:
        return "busy"
    if error.status == _TIMED_OUT:
        return "timed_out"
    return "failed" if error.status >= _FAULT else "refused"


class _ByPosition(Collector):
    """What was proposed and accepted at each place of a step. Plain numbers: counters with a label, two a place and a
    row, would cost more than all the rest. Written by the engine's thread alone.

    Args:
        draft_k: places.
    """

    def __init__(self, draft_k: int) -> None:
        self._proposed, self._accepted = [0] * draft_k, [0] * draft_k

    def add(self, proposed: int, accepted: int) -> None:
        """Count one row's step: its first places, in order."""
        for place in range(proposed):
            self._proposed[place] += 1
        for place in range(accepted):
            self._accepted[place] += 1

    def collect(self) -> Iterator[Metric]:
        """Both counters."""
        for name, text, counts in (
            ("proposed", "Proposals at each place of a step, from 1 on.", self._proposed),
            ("accepted", "Those of them that were accepted.", self._accepted),
        ):
            family = CounterMetricFamily(f"posttrainllm_draft_{name}_by_position", text, labels=["position"])
            for place, count in enumerate(counts, start=1):
                family.add_metric([str(place)], count)
            yield family


class Metrics:
    """Counters and histograms of one server. `ended` and `exposition` are for any thread, the rest for the engine's.

    Args:
        draft_k: the most tokens that the draft may propose a step; 0 without one.
    """

    def __init__(self, *, draft_k: int) -> None:
        self.registry = registry = CollectorRegistry()
        if ProcessCollector(registry=None).collect():  # nothing off Linux
            ProcessCollector(registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"posttrainllm_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"posttrainllm_{name}", text, labels, registry=registry, buckets=buckets)

        requests = counter("requests", "Requests that have ended, by how.", ("endpoint", "outcome"))
        self._requests = {(one, other): requests.labels(one, other) for one in ENDPOINTS for other in OUTCOMES}
        self._prompt = counter("prompt_tokens", "Prompt tokens of the choices that got a row, kept ones included.")
        self._cached = counter("cached_prompt_tokens", "Those of them that were kept and not computed again.")
        self._generated = counter("generated_tokens", "Tokens of replies.")
        self._proposed = counter("draft_proposed_tokens", "Tokens that the draft proposed, as `usage` counts them.")
        self._accepted = counter("draft_accepted_tokens", "Those of them that were accepted.")
        self._by_position = _ByPosition(draft_k)
        registry.register(self._by_position)
        self._queued = histogram("queue_seconds", "From a request's arrival to a row, a choice.", _WAIT_S)
        self._first = histogram(
            "time_to_first_token_seconds", "From a request's arrival to a choice's first token.", _WAIT_S
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between two steps of a row by the tokens of the later one.", _STEP_S
        )
        steps = histogram("step_seconds", "One step of all rows: launching, and waiting for it.", _STEP_S, ("drafted",))
        self._steps = {drafted: steps.labels(str(drafted).lower()) for drafted in (False, True)}

    def ended(self, endpoint: str, ending: Ending) -> None:
        """Count a request at its end.

        Args:
            endpoint: one of ENDPOINTS.
            ending: how.
        """
        self._requests[endpoint, ending].inc()

    def entered(self, *, queue_s: float) -> None:
        """Count a choice that has got a row.

        Args:
            queue_s: from the arrival of its request on, in seconds.
        """
        self._queued.observe(queue_s)

    def prompted(self, *, tokens: int, cached: int) -> None:
        """Count a choice's prompt once it has been read.

        Args:
            tokens: of it.
            cached: those that were kept from an earlier one.
        """
        self._prompt.inc(tokens)
        self._cached.inc(cached)

    def stepped(self, seconds: float, *, drafted: bool) -> None:
        """Count a step of all rows.

        Args:
            seconds: for launching and reading it.
            drafted: whether the draft drew anything.
        """
        self._steps[drafted].observe(seconds)

    def advanced(self, *, tokens: int, proposed: int, accepted: int, first: bool, seconds: float) -> None:
        """Count what a step gave one choice.

        Args:
            tokens: that its reply grew by.
            proposed: by the draft, as `usage` counts them.
            accepted: of those.
            first: whether this was the choice's first step.
            seconds: since the arrival of its request where it was, else since the step before.
        """
        self._generated.inc(tokens)
        self._proposed.inc(proposed)
        self._accepted.inc(accepted)
        self._by_position.add(proposed, accepted)
        if first:
            self._first.observe(seconds)
        elif tokens:
            self._between.observe(seconds / tokens)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Everything, as a scraper reads it.

        Args:
            accept: the header that it sent.

        Returns:
            The body and its content type.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
