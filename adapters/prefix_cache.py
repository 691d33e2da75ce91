"""Prompt chunks whose keys and values are kept, so that a prompt which begins alike need not compute them again.

Only what prefill wrote is kept, whole chunks at absolute multiples of P: the keys and values of a token depend on the
shapes that computed them, and a reply was decoded in others. So what is put back has the bits of what is left out.

A chunk is found by its own ids and by the chunk before it. The ids are compared themselves, so two that hash alike are
two. One cache belongs to one engine, so nothing of other models, dtypes or shapes can be found in it.
"""

from collections import OrderedDict
from collections.abc import Sequence

import attrs
import numpy as np

from posttrainllm.kernel.state import KVCache

__all__ = ["Prefix", "PrefixCache"]

_BESIDE_BYTES = 512  # of an entry, beside arrays and ids: models that keep nothing would else be kept for ever
_ROOT = 0


@attrs.frozen
class _Key:
    """What an entry is found by. Equality is of the ids and of the entry before, never of a hash alone."""

    parent: int
    """Serial of the chunk before, which names its whole prefix; no serial is given twice."""
    ids: bytes
    """int32 [P]."""


@attrs.frozen(eq=False)
class _Entry:
    serial: int
    kv: tuple[KVCache, ...]
    """Of each model, [1, H, P, D] for every layer."""
    size: int
    """Bytes."""


@attrs.frozen(eq=False)
class Prefix:
    """How far a prompt is in the cache: the chunks from its beginning on, each known by what it was found by."""

    keys: tuple[_Key, ...] = ()
    last: int | None = _ROOT
    """Serial of the last chunk; None where one was not kept: nothing behind it could be found."""
    size: int = 0
    """Bytes of its chunks."""


class PrefixCache:
    """Chunks of prompts by what stands before them; the least recently used are dropped. For one thread.

    Args:
        limit: bytes that it may hold.
        chunk: P.
    """

    def __init__(self, *, limit: int, chunk: int) -> None:
        self.limit, self._chunk = limit, chunk
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # the least recently used first
        self._serial = _ROOT
        self.used = 0
        """Bytes that it holds."""
        self.evicted = 0
        """Chunks dropped to make room, ever."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: Sequence[int]) -> tuple[Prefix, list[tuple[KVCache, ...]]]:
        """The chunks that a prompt begins with.

        Args:
            prompt: token ids.

        Returns:
            How far it is known, and what is kept of each such chunk, a cache a model. The last id is never part of it:
            a step feeds it.
        """
        keys: list[_Key] = []
        kept: list[tuple[KVCache, ...]] = []
        last, size = _ROOT, 0
        for start in range(0, len(prompt) - self._chunk, self._chunk):
            key = self._key(last, prompt[start : start + self._chunk])
            entry = self._entries.get(key)
            if entry is None:
                break
            keys.append(key)
            kept.append(entry.kv)
            last, size = entry.serial, size + entry.size
        self._touch(keys)
        return Prefix(tuple(keys), last, size), kept

    def keep(self, prefix: Prefix, ids: Sequence[int], kv: tuple[KVCache, ...]) -> Prefix:
        """Keep a whole chunk as prefill wrote it, where there is room for it beside the chunks before it.

        Args:
            prefix: all that stands before it.
            ids: its P ids.
            kv: of each model, evaluated, in buffers of its own: [1, H, P, D] for every layer.

        Returns:
            The prefix with this chunk at its end.
        """
        last = self._entries.get(prefix.keys[-1]) if prefix.keys else None
        if prefix.last is None or (_ROOT if last is None else last.serial) != prefix.last:  # dropped meanwhile
            return attrs.evolve(prefix, last=None)
        key = self._key(prefix.last, ids)
        entry = self._entries.get(key) or self._new_entry(ids, kv)
        if prefix.size + entry.size > self.limit:  # others would be dropped for it in vain
            return attrs.evolve(prefix, last=None)
        if key not in self._entries:
            self._entries[key] = entry
            self.used += entry.size
        keys = (*prefix.keys, key)
        self._touch(keys)
        while self.used > self.limit:
            self._drop()
        return Prefix(keys, entry.serial, prefix.size + entry.size)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.used = 0

    def _key(self, parent: int, ids: Sequence[int]) -> _Key:
        return _Key(parent, np.array(ids, dtype=np.int32).tobytes())

    def _new_entry(self, ids: Sequence[int], kv: tuple[KVCache, ...]) -> _Entry:
        self._serial += 1
        arrays = sum(part.nbytes for model in kv for layer in model for part in layer)
        return _Entry(self._serial, kv, arrays + 4 * len(ids) + _BESIDE_BYTES)

    def _touch(self, keys: Sequence[_Key]) -> None:
        """Note a use: the first chunk is the last to be dropped, since those behind it cannot be found without it."""
        for key in reversed(keys):
            self._entries.move_to_end(key)

    def _drop(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.used -= entry.size
        self.evicted += 1
