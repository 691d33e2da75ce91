"""mlx-lm as it is installed: no BLAS is put in front of MLX's own. A process for `evals/bench/child.py`."""

from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np

from posttrainllm.evals.bench.child_loop import ChildError, Decode, First, answer
from posttrainllm.evals.bench.contenders import MlxLm, synchronize
from posttrainllm.evals.bench.simulated import Script

__all__ = ["main", "mapped_blas"]


class _Told(Script):
    """A script whose coins were thrown by whoever asks."""

    def __init__(self, wanted: list[int]) -> None:
        super().__init__(1.0, 1)
        self._current = np.array(wanted, dtype=np.int32)

    def turn_to(self, prompt: Any) -> None:
        """There is one prompt."""


def _start(model: str, draft_model: str | None, dtype: str) -> tuple[dict[str, Any], Decode]:
    from mlx_lm.utils import load_model

    modules = []
    for path in (model, draft_model):
        if path is not None:
            module = load_model(Path(path))[0]
            if dtype != "auto":
                module.set_dtype(getattr(mx, dtype))
            mx.eval(module.parameters())
            modules.append(module)

    def decode(request: dict[str, Any], first: First) -> tuple[list[int], list[tuple[int, int]]]:
        k, wanted = request["draft_k"], request["wanted"]
        if k and len(modules) < 2:
            raise ChildError("no draft was loaded")
        script = None if wanted is None else _Told(wanted)
        contender = MlxLm(modules[0], modules[1] if k else None, draft_k=k, script=script if k else None)
        contender.begin(request["prompt"], request["count"])
        first(contender.ids)
        contender.finish()
        synchronize()
        return contender.ids, contender.steps

    return {"libraries": mapped_blas()}, decode


def mapped_blas() -> list[str]:
    """Names of the libraries in this process that multiply matrices.

    Returns:
        File names, sorted; none off Linux, where nothing tells.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    names = {Path(line.split(maxsplit=5)[5]).name for line in lines if line.count("/") > 1}
    return sorted(name for name in names if any(part in name.lower() for part in ("blas", "cblas_shim", "mkl")))


@click.command()
@click.argument("model")
@click.option("--draft-model")
@click.option("--dtype", default="auto")
def main(*, model: str, draft_model: str | None, dtype: str) -> None:
    """Answer on standard output until standard input ends."""
    answer(lambda: _start(model, draft_model, dtype))


if __name__ == "__main__":
    main()
