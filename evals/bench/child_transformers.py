"""Hugging Face transformers, greedy, with a static cache and torch.compile or eagerly.

A process for `evals/bench/child.py`. It decodes through `generate`, which compiles its forward by itself where the
cache is static; the warm-up that every contender gets is the one that compiles.
"""

from collections.abc import Callable, Sequence
from typing import Any

import click

from posttrainllm.evals.bench.child_loop import ChildError, Decode, First, answer

__all__ = ["main"]


class _FirstToken:
    """A streamer that tells when the first token is there."""

    def __init__(self, tell: Callable[[Sequence[int]], None]) -> None:
        self._tell, self._seen = tell, 0

    def put(self, ids: Any) -> None:
        """The prompt, then every token."""
        self._seen += 1
        if self._seen == 2:
            self._tell(ids.reshape(-1).tolist())

    def end(self) -> None:
        """Nothing is held back."""


def _start(model: str, dtype: str, device: str, *, eager: bool) -> tuple[dict[str, Any], Decode]:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore] # this process alone needs it
        import transformers
    except ImportError as error:
        raise ChildError(f"got no {error.name}, expected torch and transformers to be installed") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise ChildError(f"got torch {torch.__version__} without CUDA, expected a build that sees the device")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype="auto" if dtype == "auto" else getattr(torch, dtype)
    )
    loaded = loaded.to(device).eval()
    loaded.generation_config.eos_token_id = None  # end of text is an id like any other
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if not eager:
        compiling: Any = transformers.CompileConfig()
        compiling._compile_all_devices = device != "cuda"
        options |= {"cache_implementation": "static", "compile_config": compiling}

    def decode(request: dict[str, Any], first: First) -> tuple[list[int], list[tuple[int, int]]]:
        prompt, count = torch.tensor([request["prompt"]], device=device), request["count"]
        with torch.inference_mode():
            found = loaded.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                streamer=_FirstToken(first),
                **options,
            )
        ids = found[0, prompt.shape[1] :].tolist()
        return ids, [(0, 0)] * len(ids)

    return {"torch": torch.__version__, "transformers": transformers.__version__, "eager": eager}, decode


@click.command()
@click.argument("model")
@click.option("--dtype", default="auto")
@click.option("--device", default="cuda")
@click.option("--eager", is_flag=True)
def main(*, model: str, dtype: str, device: str, eager: bool) -> None:
    """Answer on standard output until standard input ends."""
    answer(lambda: _start(model, dtype, device, eager=eager))


if __name__ == "__main__":
    main()
