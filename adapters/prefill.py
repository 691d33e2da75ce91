"""A prompt on its way into a row: one chunk at a time, so that other rows can be stepped in between."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from posttrainllm.adapters.checks import check_ids
from posttrainllm.adapters.loading.module import Model
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.prefix_cache import Prefix, PrefixCache
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel.chunks import cut_chunk, join_chunks
from posttrainllm.kernel.compiled import Prefill
from posttrainllm.kernel.errors import CapacityError
from posttrainllm.kernel.noise import root_key
from posttrainllm.kernel.state import DecodeState, KVCache

__all__ = ["PromptPrefill", "check_request", "prefill_chunk"]


def prefill_chunk(device: str) -> int:
    """Tokens a prompt chunk: large ones keep a GPU busy, small ones waste less of a CPU on padding."""
    return 512 if device == "gpu" else 64


def check_request(request: RowRequest, pair: Pair, capacity: int) -> None:
    """Refuse a request that a row cannot hold.

    Args:
        request: the prompt and how to sample.
        pair: the models.
        capacity: C.

    Raises:
        CapacityError: an id, the prompt or the limit does not fit.
    """
    if not request.prompt:
        raise CapacityError("prompt: got no token, expected 1 or more")
    check_ids("prompt", request.prompt, pair.target.vocab_size)
    check_ids("logit-bias", [index for index, _ in request.logit_bias], pair.vocab_size)
    most = min(capacity - 1, pair.target.context)
    if not len(request.prompt) < request.limit <= most:
        raise CapacityError(
            f"limit: got {request.limit} for a prompt of {len(request.prompt)} tokens, "
            f"expected {len(request.prompt) + 1} to {most}"
        )


class PromptPrefill:
    """The caches of one row, written in chunks at absolute multiples of P; no other row has a part in them.

    Args:
        request: checked by whoever asks.
        models: the target and, where there is one, the draft.
        prefill_for: the compiled prefill of the model with that index, for a chunk that ends at that length.
        capacity: C.
        chunk: P.
        prefixes: whole chunks are taken from there where their ids and all before them are the same, and left there
            once every model's are written; None keeps nothing.
    """

    def __init__(
        self,
        request: RowRequest,
        models: Sequence[Model],
        prefill_for: Callable[[int, int], Prefill],
        *,
        capacity: int,
        chunk: int,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.request, self._models, self._prefill_for, self._chunk = request, models, prefill_for, chunk
        self._prefixes = prefixes
        self._tokens = np.zeros((1, capacity), dtype=np.int32)
        self._tokens[0, : len(request.prompt)] = request.prompt
        self._prefix, kept = (Prefix(), []) if prefixes is None else prefixes.find(request.prompt)
        self.cached = chunk * len(kept)
        """Tokens of the prompt that need not be computed."""
        self._caches: list[KVCache] = [
            join_chunks([caches[index] for caches in kept], model.make_kv(1, capacity))
            for index, model in enumerate(models)
        ]
        if kept:  # the kept chunks are copied now: what is dropped later is free at once
            mx.eval(self._caches)
        self._cut: list[KVCache] = []  # the chunk under way, of the models that have written it
        # the last prompt token is fed by the first step
        starts = range(self.cached, len(request.prompt) - 1, chunk)
        self._left = [(index, start) for start in starts for index in range(len(models))][::-1]

    @property
    def done(self) -> bool:
        """Whether every chunk is written."""
        return not self._left

    def advance(self) -> None:
        """Write the next chunk, of one model; nothing where all are written."""
        if self._left:
            self._write(*self._left.pop())

    def state(self) -> DecodeState:
        """The row, to be put in a batch; this object is used up.

        Returns:
            The state of B = 1.
        """
        assert self.done, "every chunk is written first"
        caches, self._caches = self._caches, []
        request = self.request
        return DecodeState(
            tokens=mx.array(self._tokens),
            length=mx.array([len(request.prompt)], dtype=mx.int32),
            limit=mx.array([request.limit], dtype=mx.int32),
            target_kv=caches[0],
            draft_kv=caches[1] if len(caches) > 1 else (),
            key=root_key(request.seed)[None],
        )

    def _write(self, index: int, start: int) -> None:
        last_id = self._models[index].vocab_size - 1  # a draft may know fewer ids than the target
        known = self._tokens[:, start : min(start + self._chunk, len(self.request.prompt) - 1)]
        chunk = np.zeros((1, self._chunk), dtype=np.int32)
        chunk[:, : known.shape[1]] = np.minimum(known, last_id)
        # nothing may hold the old cache while the new one is evaluated, or its buffers are copied
        kv, self._caches[index] = self._caches[index], ()
        prefill = self._prefill_for(index, start + self._chunk)
        kv = prefill(mx.array(chunk), kv, mx.array([start], dtype=mx.int32))
        mx.eval(kv)
        self._caches[index] = kv
        if self._prefixes is not None and self._prefix.last is not None and known.shape[1] == self._chunk:
            self._keep(self._prefixes, start)

    def _keep(self, prefixes: PrefixCache, start: int) -> None:
        """Cut out what was just written; it is kept once every model's is there, so that no entry is half of one."""
        cut = cut_chunk(self._caches[len(self._cut)], start, self._chunk)
        mx.eval(cut)
        self._cut.append(cut)
        if len(self._cut) == len(self._models):
            ids = self.request.prompt[start : start + self._chunk]
            self._prefix = prefixes.keep(self._prefix, ids, tuple(self._cut))
            self._cut = []
