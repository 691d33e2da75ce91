"""The whole gate in idle time; whoever asks meanwhile is answered between its steps, in its callback."""

from collections.abc import Callable
from typing import Protocol

from posttrainllm.adapters.gate.heed import AGAIN
from posttrainllm.adapters.gate.standing import Standing
from posttrainllm.adapters.runtime import LOGGER

__all__ = ["FaultError", "FullGate", "StopError", "run_in_idle_time", "tell"]


class FullGate(Protocol):
    """The whole gate."""

    def __call__(self, *, progress: Callable[..., None]) -> Standing:
        """Run it to its end, calling back after every step."""
        ...


class StopError(Exception):
    """The server stops while the gate, or a measurement, is under way."""


class FaultError(Exception):
    """The serving engine failed inside a callback: no failure of the gate, or of the measurement, that called.

    Args:
        error: the engine's.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def run_in_idle_time(gate: FullGate, *, progress: Callable[..., None]) -> Standing | None:
    """Run it.

    Args:
        gate: the whole one.
        progress: called after every step, where the server takes its turns.

    Returns:
        What it found; None where it did not run to its end, which the log says.

    Raises:
        StopError: out of `progress`.
        FaultError: out of `progress`.
    """
    LOGGER.info("gate: all prompts are compared while nobody asks, which takes minutes and a busy processor")
    try:
        return gate(progress=progress)
    except (StopError, FaultError):
        raise
    except Exception as error:  # whatever stops the gate, the engine that serves goes on
        LOGGER.warning("the full gate did not run to its end: %s", error)
        return None


def tell(standing: Standing, *, seconds: float) -> None:
    """Lines of the log.

    Args:
        standing: what the gate has found.
        seconds: that it took.
    """
    if standing.unkept is not None:
        LOGGER.warning("the verdict is not kept: %s", standing.unkept)
    if standing.enabled:
        LOGGER.info("gate: %s, %.0f s after it began", standing.verdict, seconds)
    else:
        LOGGER.warning("speculation is switched off: %s %s", standing.reason, AGAIN)
