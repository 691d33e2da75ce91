"""Every candidate looked at, as cheaply as tells: its files, its size, its tokenizer, and then by decoding with it."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from posttrainllm.adapters.gate.key import machine_of
from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_checkpoint, readable
from posttrainllm.adapters.loading.fingerprint import fingerprint, tokenizer_fingerprint
from posttrainllm.adapters.loading.found import FoundModel, parameter_count
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.memory import cast_bytes
from posttrainllm.adapters.loading.pair import Pair, resolve_dtype, with_draft
from posttrainllm.adapters.loading.pairing import check_pair
from posttrainllm.adapters.loading.tokenizer import load_tokenizer
from posttrainllm.adapters.match.findings import EQUAL, NOT_SMALLER, Candidate, Decision
from posttrainllm.adapters.match.kept import keep, measured_from, read
from posttrainllm.adapters.match.measure import Setting, measure
from posttrainllm.adapters.messages import collapsed
from posttrainllm.adapters.replay.describe import fingerprints_of
from posttrainllm.kernel.errors import CapacityError, LoadError, MemoryLimitError, PairError

__all__ = ["Search"]


@attrs.frozen(eq=False, kw_only=True)
class Search:
    """What the candidates are held against."""

    pair: Pair
    """The target; a draft in it plays no part."""
    setting: Setting
    dtype: str = "auto"
    """Of the candidates, one of DTYPES."""
    forward: str = "auto"
    """Of the candidates, one of FORWARDS."""
    changes: ModelChanges = UNCHANGED
    """Of the target; the candidates keep their keys and values likewise."""
    fresh: bool = False
    """Whether to measure what is on file, too."""
    most: int | None = None
    """How many to measure, the smallest first; None for all."""
    say: Callable[[str], None] = lambda _: None
    """Told once that something is measured."""
    progress: Callable[[str], None] = lambda _: None
    """Told what is being done, a line each time."""

    def decide(self, found: Sequence[FoundModel]) -> Decision:
        """Look at candidates.

        Args:
            found: the target itself among them is left out, and so is what stands there twice.

        Returns:
            The decision.

        Raises:
            CheckpointError: the target's files are gone.
            NonFiniteError: the target's logits are not finite.
        """
        own = locate(self.pair.target.name)
        apart: dict[Path, FoundModel] = {}
        for model in found:
            apart.setdefault(model.path.resolve(), model)
        apart.pop(own.resolve(), None)
        target_bytes = cast_bytes(read_checkpoint(own), self.pair.target.dtype)
        looked_at = [self._described(model, target_bytes) for model in apart.values()]
        looked_at.sort(key=lambda one: one.bytes or 0)
        looked_at = [one if one.problem else self._tokenized(one) for one in looked_at]
        fitting = [one for one in looked_at if one.problem is None and one.tokenizer == EQUAL]
        others = [one for one in looked_at if one not in fitting]
        chosen = fitting[: self.most]
        others = [_left_out(one, len(chosen)) for one in fitting[len(chosen) :]] + others
        judged, fresh = self._judged(chosen)
        judged.sort(key=lambda one: -1.0 if one.speed_up is None else one.speed_up, reverse=True)
        return Decision(candidates=(*judged, *others), fresh=fresh)

    def _described(self, model: FoundModel, target_bytes: float) -> Candidate:
        """What the files' headers tell."""
        candidate = Candidate(name=model.name, path=str(model.path.absolute()))
        try:
            checkpoint = read_checkpoint(model.path.absolute())
        except LoadError as error:
            return attrs.evolve(candidate, problem=_without(candidate.path, error))
        need = cast_bytes(checkpoint, self._dtype(checkpoint))
        candidate = attrs.evolve(candidate, parameters=parameter_count(checkpoint), bytes=int(need))
        if need < target_bytes:
            return candidate
        problem = f"{NOT_SMALLER}: {need / 1e6:.1f} MB in memory, expected below {target_bytes / 1e6:.1f}"
        return attrs.evolve(candidate, problem=problem)

    def _tokenized(self, candidate: Candidate) -> Candidate:
        """Whether the tokenizers agree; a verdict is kept, since large ones are slow to load."""
        self.progress(f"comparing the tokenizer of {candidate.name}")
        try:
            checkpoint = read_checkpoint(Path(candidate.path))
            key = {
                "target": tokenizer_fingerprint(self.pair.tokenizer.path),
                "draft": tokenizer_fingerprint(checkpoint.path),
                "model_type": str(checkpoint.config.get("model_type")),
                "source": machine_of(self.pair.runtime)["source"],
            }
            found = None if self.fresh else read(key)
            if found is None or not isinstance(found.get("tokenizer"), str):
                found = {"tokenizer": self._compared(checkpoint)}
                keep(key, found)
        except LoadError as error:
            return attrs.evolve(candidate, problem=_without(candidate.path, error))
        return attrs.evolve(candidate, tokenizer=found["tokenizer"])

    def _compared(self, checkpoint: Checkpoint) -> str:
        tokenizer = load_tokenizer(checkpoint)
        try:
            check_pair(self.pair.tokenizer, tokenizer, draft_rows=tokenizer.size)
        except PairError as error:
            return _without(tokenizer.path, error)
        return EQUAL

    def _judged(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], int]:
        """The same with what decoding shows, from the files where it is there; and how many it was not there of."""
        if not candidates:
            return [], 0
        shared = self._shared_key()
        judged, waiting = [], []
        for candidate in candidates:
            try:
                key = {**shared, **self._own_key(candidate)}
            except LoadError as error:  # it has just gone
                judged.append(attrs.evolve(candidate, problem=_without(candidate.path, error)))
                continue
            known = None if self.fresh else _from_kept(candidate, read(key))
            if known is None:
                waiting.append((candidate, key))
            else:
                judged.append(known)
        if waiting:
            plural = "" if len(waiting) == 1 else "s"
            self.say(f"measuring {len(waiting)} candidate{plural} for a draft, once on this machine")
        for number, (candidate, key) in enumerate(waiting, 1):
            judged.append(self._measured(candidate, key, f"measuring {candidate.name}, {number} of {len(waiting)}"))
            gc.collect()  # the next one needs its memory
            mx.clear_cache()
        return judged, len(waiting)

    def _measured(self, candidate: Candidate, key: dict[str, Any], line: str) -> Candidate:
        """Decode with it. What its files make impossible is kept, too; what the machine does is tried again."""
        path = Path(candidate.path)
        self.progress(line)
        try:
            with readable(path, "cannot be used as a draft"):
                pair = self._loaded(path, key)
                measured = measure(
                    pair, self.setting, fresh=self.fresh, progress=lambda part: self.progress(f"{line}: {part}")
                )
        except (CapacityError, LoadError, MemoryLimitError) as error:
            return attrs.evolve(candidate, problem=_without(path, error))
        keep(key, attrs.asdict(measured))
        return attrs.evolve(candidate, measured=measured)

    def _loaded(self, path: Path, key: dict[str, Any]) -> Pair:
        try:
            return with_draft(self.pair, path, dtype=self.dtype, forward=self.forward, changes=self.changes)
        except LoadError as error:
            keep(key, {"problem": _without(path, error)})
            raise

    def _shared_key(self) -> dict[str, Any]:
        """Everything that a measurement depends on beside the candidate."""
        return {
            **fingerprints_of(self.pair.plain("the target is the same for all")),
            "forward": [self.pair.target.variant, self.forward],
            "kv": [self.changes.kv_bits, self.changes.kv_group_size],
            "target_dtype": self.pair.target.dtype,
            **self.setting.described(self.pair),
            **machine_of(self.pair.runtime),
        }

    def _own_key(self, candidate: Candidate) -> dict[str, Any]:
        path = Path(candidate.path)
        own = {"draft": fingerprint(path), "draft_tokenizer": tokenizer_fingerprint(path)}
        return own | {"draft_dtype": self._dtype(read_checkpoint(path))}

    def _dtype(self, checkpoint: Checkpoint) -> str:
        return resolve_dtype(self.dtype, checkpoint, self.pair.runtime)


def _from_kept(candidate: Candidate, found: dict[str, Any] | None) -> Candidate | None:
    if found is None:
        return None
    if isinstance(found.get("problem"), str):
        return attrs.evolve(candidate, problem=found["problem"])
    measured = measured_from(found)
    return None if measured is None else attrs.evolve(candidate, measured=measured)


def _left_out(candidate: Candidate, most: int) -> Candidate:
    return attrs.evolve(candidate, problem=f"not measured: only the {most} smallest are")


def _without(path: object, error: Exception) -> str:
    """The text of an error; the path in front of it stands in the row anyway."""
    return collapsed(str(error).removeprefix(f"{path}: "))
