"""What decoding with a draft shows: how many of its proposals stand, and what a step costs.

Both are of T=0. Proposals are counted on eight prompts of the package, few enough for a start to wait for them, and
only as far as the target judged them: the rate is then that of Leviathan's formula at every K.
"""

from collections.abc import Callable

import attrs

from posttrainllm.adapters.adaptive import choices_up_to
from posttrainllm.adapters.batch import decode
from posttrainllm.adapters.costs import CostShape, curves_for
from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.prompts import prompts_hash, read_prompts
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.match.findings import Measured, StepTime
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.shapes import capacity_for

__all__ = ["MAX_TOKENS", "PROMPTS", "Setting", "measure"]

PROMPTS, MAX_TOKENS = 8, 48
"""Texts that are continued, and tokens of each."""
_PROMPT_TOKENS = 64  # longer ones are cut
_DRAFT_K = 4  # of the steps whose proposals are counted
_DRAFT_KS = (1, 2, 4, 8)  # those that are tried where nobody asks for one


@attrs.frozen(kw_only=True)
class Setting:
    """What the draft is wanted for."""

    rows: int = 1
    """B."""
    context: int | None = None
    """Most tokens of a row; None is that of a short request."""
    draft_k: DraftLength | None = None
    """K; None, or one that nobody asked for, looks at a few."""

    def shapes(self, pair: Pair) -> tuple[CostShape, ...]:
        """The shapes of the steps that are to be clocked.

        Args:
            pair: whose target bounds the context.

        Returns:
            One a width.
        """
        limit = min(self.context or _PROMPT_TOKENS + MAX_TOKENS, pair.target.context)

        def shape(most: int, draft_ks: tuple[int, ...]) -> CostShape:
            width = most + 1
            return CostShape(rows=self.rows, capacity=capacity_for(limit, width), width=width, draft_ks=draft_ks)

        if self.draft_k is None or not self.draft_k.given:
            return tuple(shape(draft_k, (draft_k,)) for draft_k in _DRAFT_KS)
        most = self.draft_k.on(pair.runtime.device)
        return (shape(most, choices_up_to(most) if self.draft_k.auto else (most,)),)

    def described(self, pair: Pair) -> dict[str, object]:
        """Plain values, for a key."""
        shapes = [attrs.asdict(shape) | {"draft_ks": list(shape.draft_ks)} for shape in self.shapes(pair)]
        texts = prompts_hash(read_prompts(None, PROMPTS))
        return {"shapes": shapes, "prompts": texts, "max_tokens": MAX_TOKENS, "draft_k": _DRAFT_K}


def measure(
    pair: Pair, setting: Setting, *, fresh: bool = False, progress: Callable[[str], None] = lambda _: None
) -> Measured:
    """Decode with a draft, and clock its steps.

    Args:
        pair: with a draft.
        setting: what it is wanted for.
        fresh: whether to clock steps whose costs are on file, too.
        progress: told how far it is, in a few words, after each step that is decoded and before steps are clocked.

    Returns:
        What was found.

    Raises:
        CapacityError: a prompt has an id that the target lacks.
        MemoryLimitError: the caches cannot fit.
        NonFiniteError: the target's logits are not finite.
    """
    accepted, proposed, judged = _count(pair, progress)
    steps = []
    for shape in setting.shapes(pair):
        progress(f"clocking steps of width {shape.width}")
        curve = curves_for(pair, shape, ["greedy"], fresh=fresh)["greedy"]
        steps += [
            StepTime(draft_k=draft_k, seconds=curve.of(draft_k), plain_seconds=curve.plain_seconds)
            for draft_k in curve.draft_ks
            if draft_k
        ]
    return Measured(accepted=accepted, proposed=proposed, judged=judged, steps=tuple(steps))


def _count(pair: Pair, progress: Callable[[str], None]) -> tuple[int, int, int]:
    """Proposals that stood, all of them, and those that were judged."""
    room = min(_PROMPT_TOKENS + MAX_TOKENS, pair.target.context)
    tokens = min(MAX_TOKENS, room // 2)
    prompts = [pair.tokenizer.encode(prompt.text)[: room - tokens] for prompt in read_prompts(None, PROMPTS)]
    requests = [RowRequest(prompt=ids, limit=len(ids) + tokens, draft_k=_DRAFT_K) for ids in prompts if ids]
    engine = Engine(pair, rows=len(requests), capacity=capacity_for(room, _DRAFT_K + 1), width=_DRAFT_K + 1)
    done, total = 0, sum(request.limit - len(request.prompt) for request in requests)

    def advance(emitted: int) -> None:
        nonlocal done
        done += emitted
        progress(f"{done} of {total} tokens")

    steps = [step for run in decode(engine, requests, advance=advance) for step in run]
    accepted = sum(step.accepted for step in steps)
    proposed = sum(step.proposed for step in steps)
    return accepted, proposed, accepted + sum(step.accepted < step.proposed for step in steps)
