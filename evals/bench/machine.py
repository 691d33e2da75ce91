"""What the machine did meanwhile: a number measured while others worked is worth little."""

import os
from pathlib import Path

__all__ = ["CpuWatch", "cpu_count"]


class CpuWatch:
    """Counts, from its making on, what others than this process and its children use of the CPUs."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def others(self) -> float | None:
        """Share of the CPUs that others have used since, 0 to 1; None off Linux. Children are ours once they end."""
        after = _cpu_times()
        if self._before is None or after is None or after[0] == self._before[0]:
            return None
        share = (after[1] - self._before[1]) / (after[0] - self._before[0])
        return round(max(share, 0.0), 3)  # the machine counts in ticks and our time exactly: a little below 0 is 0


def cpu_count() -> int | None:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu_times() -> tuple[float, float] | None:
    """CPU seconds of the machine since it started, all of them and those that others than us used; None off Linux."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    except OSError:
        return None
    times = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
    idle, own = times[3] + times[4], os.times()
    return sum(times), sum(times) - idle - sum(own[:4])  # user, system, and both of the children
