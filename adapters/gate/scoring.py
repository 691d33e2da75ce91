"""A model's logits over histories that are given, in the shapes of a run."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.loading.module import Model
from posttrainllm.kernel.compiled import compile_forward
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["Ids", "Scorer"]

Ids = npt.NDArray[np.int32]


class Scorer:
    """One model's compiled forward, fed on the host's ids.

    Args:
        model: target or draft; ids that it lacks are fed as its last one, as in decoding.
        capacity: C.
        compiled: as the engine's steps are.
        advance: called after each forward.
    """

    def __init__(
        self, model: Model, *, capacity: int, compiled: bool, advance: Callable[[], None] = lambda: None
    ) -> None:
        self._model, self._capacity, self._advance = model, capacity, advance
        self._forward: Forward = compile_forward(model.forward, compiled=compiled)

    def window(self, ids: Ids, kv: KVCache, start: Ids) -> tuple[mx.array, KVCache]:
        """Logits of a window, each row at its own position.

        Args:
            ids: [B, W].
            kv: valid for positions [0, start).
            start: [B].

        Returns:
            logits float32 [B, W, V], and the cache with the window written.
        """
        known = mx.array(np.minimum(ids, self._model.vocab_size - 1))
        logits, kv = self._forward(known, kv, mx.array(start))
        logits = logits.astype(mx.float32)
        mx.eval(logits, kv)
        self._advance()
        return logits, kv

    def filled(self, ids: Ids, count: int, chunk: int, *, capacity: int | None = None) -> KVCache:
        """The cache of histories, in chunks at absolute multiples, the last one padded.

        Args:
            ids: [B, N].
            count: positions to fill, N at most.
            chunk: width of a chunk.
            capacity: C of the cache; None is that of the run.

        Returns:
            A cache that is valid for positions [0, count).
        """
        rows = ids.shape[0]
        kv = self._model.make_kv(rows, capacity or self._capacity)
        for first in range(0, count, chunk):
            padded = np.zeros((rows, chunk), dtype=np.int32)
            part = ids[:, first : min(first + chunk, count)]
            padded[:, : part.shape[1]] = part
            _, kv = self.window(padded, kv, np.full((rows,), first, dtype=np.int32))
        return kv

    def forced(self, ids: Ids, width: int, *, kv: KVCache | None = None, start: int = 0) -> Iterator[mx.array]:
        """Feed histories window by window, as plain decoding of that width would see them.

        Args:
            ids: [B, N], N - start a multiple of the width.
            width: W.
            kv: valid for positions [0, start); None starts from an empty one.
            start: first position to feed.

        Yields:
            Logits float32 [B, W, V] of each window: the law of the id that follows each fed one.
        """
        rows, count = ids.shape
        kv = self._model.make_kv(rows, self._capacity) if kv is None else kv
        for first in range(start, count, width):
            logits, kv = self.window(ids[:, first : first + width], kv, np.full((rows,), first, dtype=np.int32))
            yield logits
