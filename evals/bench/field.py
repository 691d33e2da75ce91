"""Who takes part in a measurement, and what each speculative contender has to emit."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrainllm.adapters.loading.gguf_header import is_gguf
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.loading.tinygpt_header import is_tinygpt
from posttrainllm.evals.bench.child import ChildContender, running_child
from posttrainllm.evals.bench.contenders import Contender, Engines, contenders_for
from posttrainllm.evals.bench.extras import Extras
from posttrainllm.evals.bench.measure import outputs, references
from posttrainllm.evals.bench.simulated import Script
from posttrainllm.kernel.errors import UsageError

__all__ = ["all_contenders", "expected_outputs"]


def all_contenders(
    pair: Pair, draft_ks: Sequence[int], extras: Extras, *, capacity: int, mlx_lm: bool, stack: contextlib.ExitStack
) -> list[Contender]:
    """Ours and mlx-lm's in this process, then those in processes of their own.

    Args:
        pair: the models; processes load them again from their directories.
        draft_ks: K of each speculative one; none without a draft.
        extras: which others take part.
        capacity: C of our engines.
        mlx_lm: whether mlx-lm's loops take part in this process.
        stack: what ends the processes.

    Returns:
        The contenders; of every engine the plain one before its speculative ones.

    Raises:
        PosttrainllmError: a process cannot take part.
    """

    # an id that the draft lacks cannot be raised
    known = pair.vocab_size if pair.draft is None else min(pair.vocab_size, pair.draft.vocab_size)

    def script() -> Script | None:
        return None if extras.accept_rate is None else Script(extras.accept_rate, known)

    def scripts() -> Mapping[int, Script]:
        return {k: found for k in draft_ks if (found := script()) is not None}

    by_engine: dict[Engines, Mapping[int, Script]] = {"posttrainllm": scripts(), "mlx-lm": scripts()}
    contenders = contenders_for(pair, draft_ks, capacity=capacity, mlx_lm=mlx_lm, scripts=by_engine)
    paths = [str(locate(model.name)) for model in (pair.target, pair.draft) if model is not None]
    native = [path for path in paths if is_tinygpt(Path(path)) or is_gguf(Path(path))]
    if native and (extras.as_installed or extras.transformers):
        raise UsageError(
            f"--as-installed, --transformers: got {native[0]}, expected a directory; export-mlx or convert write one"
        )
    for dtype in extras.as_installed:
        arguments = [paths[0], "--dtype", dtype] + (["--draft-model", paths[1]] if draft_ks else [])
        child = stack.enter_context(running_child("mlx-lm as installed", "child_mlx_lm", arguments))
        name = f"mlx-lm installed, {dtype}"
        contenders.append(ChildContender(child, name=f"{name}, plain", engine="mlx-lm as installed"))
        contenders += [
            ChildContender(child, name=f"{name}, K={k}", engine="mlx-lm as installed", draft_k=k, script=script())
            for k in draft_ks
        ]
    for kind in extras.transformers:
        arguments = [paths[0], "--dtype", pair.target.dtype, "--device", "cuda"]
        arguments += ["--eager"] if kind == "eager" else []
        python = extras.transformers_python
        child = stack.enter_context(running_child("transformers", "child_transformers", arguments, python=python))
        contenders.append(ChildContender(child, name=f"transformers, {kind}", engine="transformers"))
    return contenders


def expected_outputs(
    pair: Pair, contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], count: int, capacity: int
) -> dict[str, list[list[int]]]:
    """What the speculative ones have to emit; those that follow a script learn it from this.

    Args:
        pair: the models.
        contenders: of `all_contenders`.
        prompts: ids of each.
        count: tokens to generate.
        capacity: C of our engines.

    Returns:
        The ids for each prompt by the contender's name: ours as plain decoding at that width, the others' as the plain
        loop of the same engine.
    """
    expected: dict[str, list[list[int]]] = {}
    plain: Contender | None = None
    of_plain: dict[str, list[list[int]]] = {}
    for one in contenders:
        if not one.draft_k:
            plain = one
            continue
        if one.engine == "posttrainllm":
            expected[one.name] = references(pair, one.draft_k, prompts, count, capacity)
        else:
            assert plain is not None
            if plain.name not in of_plain:
                of_plain[plain.name] = outputs(plain, prompts, count)
            expected[one.name] = of_plain[plain.name]
        script: Script | None = getattr(one, "script", None)
        if script is not None:
            script.learn(prompts, expected[one.name])
    return expected
