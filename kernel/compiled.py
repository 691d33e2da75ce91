"""The only `mx.compile` of the decoding path: every pure function bound to its models, in the form that is run."""

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import mlx.core as mx

from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.draft import Draft, catch_up
from posttrainllm.kernel.forward import Forward, bounded
from posttrainllm.kernel.logprobs import token_logprobs
from posttrainllm.kernel.pure_step import plain_step, speculative_step
from posttrainllm.kernel.refill import refill_step
from posttrainllm.kernel.state import DecodeState, KVCache, Sampling, StepOutput, assert_dtypes

__all__ = [
    "CatchUp",
    "Prefill",
    "Refill",
    "Score",
    "Step",
    "compile_catch_up",
    "compile_forward",
    "compile_prefill",
    "compile_refill",
    "compile_score",
    "compile_step",
]

Step: TypeAlias = Callable[[DecodeState, Sampling], tuple[DecodeState, StepOutput]]
CatchUp: TypeAlias = Callable[[DecodeState, mx.array], DecodeState]
Prefill: TypeAlias = Callable[[mx.array, KVCache, mx.array], KVCache]
Refill: TypeAlias = Callable[[DecodeState, mx.array, mx.array, mx.array], DecodeState]
Score: TypeAlias = Callable[[mx.array, KVCache, mx.array, mx.array], tuple[KVCache, mx.array, mx.array, mx.array]]


def compile_step(config: StepConfig, target: Forward, draft: Draft | None = None, *, compiled: bool = True) -> Step:
    """Bind a step to its models and compile it.

    One trace per (config, shapes): values that change from step to step are arrays. A dtype other than the declared
    one would retrace silently, so the boundary asserts them. Hold no reference to the old state while the new one is
    evaluated: its buffers are then reused and not copied.

    Args:
        config: static shape of the step.
        target: the model whose output this is; its weights are frozen into the trace.
        draft: the model that proposes; None for the plain step, which one that draws no id is, too.
        compiled: False runs the same Python operation by operation.

    Returns:
        A function from (state, sampling) to (state, output).
    """

    target = bounded(target, config.live)
    draft = None if draft is None else attrs.evolve(draft, forward=bounded(draft.forward, config.live))

    def on_trees(state_tree: tuple[Any, ...], sampling_tree: tuple[Any, ...]) -> tuple[Any, ...]:
        state, sampling = DecodeState.from_tree(state_tree), Sampling.from_tree(sampling_tree)
        if draft is None or config.proposals == 0:
            state, output = plain_step(config, target, state, sampling)
        else:
            state, output = speculative_step(config, target, draft, state, sampling)
        return state.to_tree(), output.to_tree()

    run = mx.compile(on_trees) if compiled else on_trees

    def step(state: DecodeState, sampling: Sampling) -> tuple[DecodeState, StepOutput]:
        assert_dtypes(state, sampling)
        state_tree, output_tree = run(state.to_tree(), sampling.to_tree())
        return DecodeState.from_tree(state_tree), StepOutput.from_tree(output_tree)

    return step


def compile_prefill(forward: Forward, *, compiled: bool = True) -> Prefill:
    """Compile the forward of one prompt chunk, for its cache alone; the unused logits leave the graph.

    Args:
        forward: the model.
        compiled: False runs it operation by operation.

    Returns:
        A function from (tokens int32 [B, P], kv, position int32 [B]) to the kv with the chunk written.
    """

    def chunk(tokens: mx.array, kv: KVCache, position: mx.array) -> KVCache:
        return forward(tokens, kv, position)[1]

    return mx.compile(chunk) if compiled else chunk


def compile_score(forward: Forward, vocab_size: int, *, compiled: bool = True) -> Score:
    """Compile the forward of one prompt chunk that also says how likely each id is that follows.

    Args:
        forward: the target.
        vocab_size: ids that may be emitted; log probabilities are over these.
        compiled: False runs it operation by operation.

    Returns:
        A function from (tokens int32 [B, P], kv, position int32 [B], following ids int32 [B, P]) to the kv with the
        chunk written, and what `token_logprobs` says about the following ids.
    """

    def score(
        tokens: mx.array, kv: KVCache, position: mx.array, following: mx.array
    ) -> tuple[KVCache, mx.array, mx.array, mx.array]:
        logits, kv = forward(tokens, kv, position)
        return kv, *token_logprobs(logits[..., :vocab_size].astype(mx.float32), following)

    return mx.compile(score) if compiled else score


def compile_catch_up(draft: Draft, *, compiled: bool = True) -> CatchUp:
    """Bind `catch_up` to a draft and compile it.

    Args:
        draft: the model that proposes.
        compiled: False runs it operation by operation.

    Returns:
        A function from (state, behind int32 [B]) to the state with a window of the draft's cache written.
    """

    def on_trees(state_tree: tuple[Any, ...], behind: mx.array) -> tuple[Any, ...]:
        return catch_up(draft, DecodeState.from_tree(state_tree), behind).to_tree()

    run = mx.compile(on_trees) if compiled else on_trees

    def caught_up(state: DecodeState, behind: mx.array) -> DecodeState:
        moved: DecodeState = DecodeState.from_tree(run(state.to_tree(), behind))
        return moved

    return caught_up


def compile_refill(config: StepConfig, target: Forward, draft: Draft | None = None, *, compiled: bool = True) -> Refill:
    """Bind `refill_step` to its models and compile it, as `compile_step` does the step.

    Args:
        config: static shape of the step that is repeated.
        target: the model whose output was recorded.
        draft: the model that proposed; None for a plain run.
        compiled: False runs it operation by operation.

    Returns:
        A function from (state, window, tokens, emitted) to the next state.
    """

    def on_trees(state_tree: tuple[Any, ...], *recorded: mx.array) -> tuple[Any, ...]:
        return refill_step(config, target, draft, DecodeState.from_tree(state_tree), *recorded).to_tree()

    run = mx.compile(on_trees) if compiled else on_trees

    def refill(state: DecodeState, window: mx.array, tokens: mx.array, emitted: mx.array) -> DecodeState:
        refilled: DecodeState = DecodeState.from_tree(run(state.to_tree(), window, tokens, emitted))
        return refilled

    return refill


def compile_forward(forward: Forward, *, compiled: bool = True) -> Forward:
    """Compile a forward alone, as measurements and probes need it; decoding compiles it as a part of its step.

    Args:
        forward: the model.
        compiled: False runs it operation by operation.

    Returns:
        The same function, compiled.
    """

    def run(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        return forward(tokens, kv, position)

    fused: Forward = mx.compile(run) if compiled else run
    return fused
