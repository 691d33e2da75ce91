"""The compiled functions that an engine of one shape runs, each made the first time that it is asked for."""

from collections.abc import Sequence

import mlx.core as mx

from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.shapes import draft_width, live_slots
from posttrainllm.kernel.compiled import CatchUp, Prefill, Step, compile_catch_up, compile_prefill, compile_step
from posttrainllm.kernel.config import Mode, Rules, StepConfig
from posttrainllm.kernel.draft import CATCH_UP_WIDTH, Draft
from posttrainllm.kernel.forward import BoundedForward, Forward, bounded
from posttrainllm.kernel.state import DecodeState

__all__ = ["CompiledPair"]


class CompiledPair:
    """A pair's functions in the shapes of an engine; the pair keeps them, for every engine that it is given to.

    Args:
        pair: the models.
        capacity: C.
        width: W.
        diagnostics: whether steps report logit margins.
    """

    def __init__(self, pair: Pair, *, capacity: int, width: int, diagnostics: bool) -> None:
        self._pair, self._capacity, self._width, self._diagnostics = pair, capacity, width, diagnostics
        self._compiled = pair.runtime.compiled
        self._bounded = isinstance(pair.target.forward, BoundedForward)

    def live(self, length: int) -> int | None:
        """Slots that a step of rows of this length has to look at; None for all C of them."""
        return live_slots(length, self._capacity) if self._bounded else None

    def usual_config(self, mode: Mode, length: int, *, coupled: bool = False, draft_k: int | None = None) -> StepConfig:
        """What most steps of a mode are: rows of one accept rule, which have grown to a length."""
        rules: Rules = "coupled" if coupled else "leviathan"
        return self.config_for(
            mode,
            rules="both" if mode == "greedy" else rules,
            live=self.live(length),
            draft_k=draft_k,
        )

    def config_for(
        self,
        mode: Mode,
        *,
        adjusted: bool = False,
        logprobs: bool = False,
        rules: Rules = "both",
        live: int | None = None,
        draft_k: int | None = None,
    ) -> StepConfig:
        """Static shape of a step in a mode; `draft_k` is None, or how many ids the draft draws."""
        return StepConfig(
            draft_k=None if draft_k == self._width - 1 else draft_k,
            width=self._width,
            vocab_size=self._pair.vocab_size,
            mode=mode,
            rules=rules,
            live=live,
            narrow_draft=draft_width(self._pair.runtime.device) == 1,
            arithmetic=self._pair.runtime.scalar_exp,
            diagnostics=self._diagnostics,
            adjusted=adjusted,
            logprobs=logprobs,
        )

    def step_for(self, config: StepConfig, *, plain: bool = False) -> Step:
        """The compiled step of a configuration, on the pair's models, or on its target alone."""
        target, draft = self.models
        draft = None if plain else draft
        return self._pair.once(
            ("step", config, draft is None, self._compiled),
            lambda: compile_step(config, target, draft, compiled=self._compiled),
        )

    def prefill_for(self, index: int, length: int) -> Prefill:
        """The compiled prefill of the target (0) or the draft (1), for a chunk that ends at a length."""
        model = self._pair.draft if index else self._pair.target
        assert model is not None, "without a draft there is one model"
        live = live_slots(length, self._capacity)
        forward = bounded(model.forward, live)
        live = live if forward is not model.forward else None
        return self._pair.once(
            ("prefill", index, live, self._compiled), lambda: compile_prefill(forward, compiled=self._compiled)
        )

    def caught_up(self, state: DecodeState, behind: Sequence[int]) -> DecodeState:
        """The state with the draft's cache of every row as far as a step that drafts needs it.

        Args:
            state: B rows.
            behind: how many ids each row's draft has not been fed, 0 for a row that is to stay as it is.

        Returns:
            The same state where none is behind.
        """
        catch_up: CatchUp | None = None
        for done in range(0, max(behind), CATCH_UP_WIDTH):
            if catch_up is None:
                catch_up = self._catch_up_for()
            left = mx.array([max(count - done, 0) for count in behind], dtype=mx.int32)
            state = catch_up(state, left)
        return state

    @property
    def models(self) -> tuple[Forward, Draft | None]:
        """The target's forward and the draft, as the kernel takes them."""
        model = self._pair.draft
        if model is None:
            return self._pair.target.forward, None
        draft = Draft(forward=model.forward, vocab_size=model.vocab_size, context=model.context)
        return self._pair.target.forward, draft

    def _catch_up_for(self) -> CatchUp:
        draft = self.models[1]
        assert draft is not None, "without a draft nothing is paced"
        return self._pair.once(("catch up", self._compiled), lambda: compile_catch_up(draft, compiled=self._compiled))
