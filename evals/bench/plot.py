"""A picture of speed and acceptance against K."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrainllm.kernel.errors import UsageError

__all__ = ["check_plot", "draw"]


def check_plot(path: str) -> Path:
    """Say before anything is measured that the plot cannot be drawn.

    Args:
        path: the file to write, a .png.

    Returns:
        The path.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        raise UsageError("--plot: got no matplotlib, expected it: pip install matplotlib") from None
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise UsageError(f"--plot: got {path!r}, expected a file name that ends in .png")
    there = target.exists()
    try:
        target.open("ab").close()
        if not there:
            target.unlink()
    except OSError as error:
        raise UsageError(f"--plot: {path}: {error.strerror or error}") from None
    return target


def draw(path: Path, table: Sequence[dict[str, Any]], title: str) -> None:
    """Draw tokens a second and acceptance against K.

    Args:
        path: the PNG to write.
        table: from `summary.summarize`; rows that failed are left out.
        title: pair, device and dtype.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    speed, acceptance = figure.subplots(2, 1, sharex=True)
    good = [row for row in table if not row["failed"]]
    for label, color in (("posttrainllm", "C0"), ("mlx-lm", "C1")):
        plain = next((row for row in good if row["engine"] == label and not row["draft_k"]), None)
        if plain is not None:
            speed.axhline(plain["tok_s"], color=color, linestyle="--", label=f"{label}, plain")
        drafted = [row for row in good if row["engine"] == label and row["draft_k"]]
        if drafted:
            ks, rates = [row["draft_k"] for row in drafted], [row["tok_s"] for row in drafted]
            low_high = [[abs(row["tok_s"] - row["tok_s_range"][end]) for row in drafted] for end in (0, 1)]
            speed.errorbar(ks, rates, yerr=low_high, color=color, marker="o", capsize=3, label=f"{label}, speculative")
            if label == "posttrainllm":
                acceptance.plot(
                    ks, [row["accept_rate"] for row in drafted], color=color, marker="o", label="accept rate"
                )
    longest = max((row for row in good if "predicted" in row), key=lambda row: row["draft_k"], default=None)
    if longest is not None:
        shares = longest["acceptance_by_position"]
        acceptance.plot(
            range(1, len(shares) + 1), shares, color="C2", marker="s", linestyle=":",
            label=f"accepted at that position, K={longest['draft_k']}",
        )  # fmt: skip
    speed.set(ylabel="tokens a second", title=title, ylim=(0, None))
    acceptance.set(xlabel="K, tokens proposed a step (dotted: place among them)", ylabel="share accepted", ylim=(0, 1))
    acceptance.xaxis.get_major_locator().set_params(integer=True)
    for axes in (speed, acceptance):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"--plot: {path}: {error.strerror or error}") from None
