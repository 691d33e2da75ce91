"""What a client is told about speculation."""

from typing import Any

from posttrainllm.adapters.gate.standing import Standing
from posttrainllm.adapters.serve.jobs import Job

__all__ = ["speculation"]


def speculation(standing: Standing, width: int, job: Job | None = None, *, auto: bool = False) -> dict[str, Any]:
    """The state of the server, or what a choice got of it.

    Args:
        standing: what the gate has said.
        width: W of the engine.
        job: the choice; None for the server itself.
        auto: whether K is chosen from step to step.

    Returns:
        `enabled`, `reason` (why it is off, or what is still to come), `draft_k` (K, or the most that may be chosen),
        `policy` ("fixed" or "auto"), `accept_rule` (where one decides) and the gate's `verdict`.
    """
    wanted = job is None or job.speculate
    enabled = standing.enabled and wanted
    drawn = job is not None and enabled and job.params.temperature > 0
    return {
        "enabled": enabled,
        "reason": standing.reason if wanted or not standing.enabled else "the request asked for none",
        "draft_k": width - 1 if enabled else None,
        "policy": ("auto" if auto else "fixed") if enabled else None,
        "accept_rule": job.params.accept_rule if job is not None and drawn else None,
        "verdict": standing.verdict,
    }
