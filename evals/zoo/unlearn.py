"""Loops that a model writes greedily: texts in which what is repeated is to be unlearnt, anew every few steps."""

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from posttrainllm.evals.zoo.batches import Batches
from posttrainllm.evals.zoo.model import build_module, with_parameters
from posttrainllm.evals.zoo.on_policy import Writing, write_texts
from posttrainllm.evals.zoo.presets import PRESETS
from posttrainllm.evals.zoo.settings import Settings

__all__ = ["Loops", "repeats"]

_RUN = 4  # tokens


class Loops:
    """The texts of a run that unlearns its own loops.

    Args:
        settings: of the run.
        ids: uint16[N], the training text, whose windows are continued.
        say: takes a line for people.
    """

    def __init__(self, settings: Settings, ids: "np.ndarray[Any, Any]", say: Callable[[str], None]) -> None:
        self._settings, self._ids, self._say = settings, ids, say
        self.texts: mx.array | None = None
        """uint16[rows, sequence + 1]: what was written last; a checkpoint holds it."""

    def last_step(self, step: int) -> int:
        """The step at which texts are written anew.

        Args:
            step: updates done.
        """
        every = self._settings.rewrite_every
        return (step // every + 1) * every

    def put_into(self, batches: Batches, parameters: dict[str, mx.array], step: int) -> Batches | None:
        """Have texts written where that is due.

        Args:
            batches: of the run.
            parameters: float32, by name, of the model that writes.
            step: updates done; between two writings, as behind a resume, the texts stay.

        Returns:
            Batches with these texts; None where few enough of their tokens are repeated.
        """
        settings = self._settings
        if self.texts is None or step % settings.rewrite_every == 0:
            module = with_parameters(build_module(PRESETS[settings.preset]), parameters, getattr(mx, settings.dtype))
            wanted = Writing(
                rows=settings.on_policy_rows,
                batch=settings.on_policy_batch,
                sequence=settings.sequence,
                prompt=settings.prompt_tokens,
                seed=settings.seed + step // settings.rewrite_every,
                greedy_share=1.0,
            )
            self.texts = mx.array(write_texts(module, self._ids, wanted))
        texts = np.array(self.texts)
        repeated = repeats(texts)
        own = settings.prompt_tokens - 1
        repeated[:, :own] = False  # the prompts are not its own
        share = float(repeated[:, own:].mean())
        self._say(f"it wrote {len(texts):,} texts; {share:.1%} of the tokens end a run of {_RUN} that was there before")
        few = share <= settings.until_repeated
        return None if few else attrs.evolve(batches, generated=texts, repeated=repeated)


def repeats(texts: "np.ndarray[Any, Any]", n: int = _RUN) -> "np.ndarray[Any, Any]":
    """Which tokens end a run of n that was there before.

    Args:
        texts: ids[M, T + 1].
        n: tokens of a run.

    Returns:
        bool[M, T], of all tokens but the first.
    """
    found = np.zeros((len(texts), texts.shape[1] - 1), dtype=bool)
    for row, text in enumerate(texts.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(n, len(text) + 1):
            run = tuple(text[end - n : end])
            found[row, end - 2] = run in seen
            seen.add(run)
    return found
