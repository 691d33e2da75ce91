"""What a training run was asked to do."""

from pathlib import Path

import attrs

from posttrainllm.evals.zoo.schedule import Budget

__all__ = ["Settings"]


@attrs.frozen(kw_only=True)
class Settings:
    """Options of `posttrainllm zoo train`."""

    preset: str
    corpus: Path
    out: Path
    tokenizer: Path
    budget: Budget
    batch: int
    accumulate: int
    sequence: int
    learning_rate: float
    optimizer: str
    weight_decay: float
    warm_up: float
    prose: float | None
    z_loss: float
    seed: int
    dtype: str
    init: Path | None
    distill_from: Path | None
    distill_weight: float
    distill_choice: float
    """Share of the target's choice in what is learnt of it."""
    on_policy: float
    on_policy_rows: int
    on_policy_batch: int
    """Rows written at once."""
    on_policy_greedy: float
    on_policy_prompt: int
    """Tokens of the training text that each begins with, half of a text at most."""
    unlikelihood: float
    """Share of the batches."""
    rewrite_every: int
    """Steps."""
    until_repeated: float
    """Share of the tokens."""
    resume: bool
    checkpoint_every: float
    """Minutes; 0 for none but the one at a stop."""
    evaluate_every: int
    """Steps; 0 for the end alone."""
    evaluate_characters: int
    log_every: int
    """Steps."""
    stop_after: float | None
    """Minutes of the process."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the training text that a text which a model writes begins with."""
        return min(self.on_policy_prompt, self.sequence // 2)

    @property
    def identity(self) -> dict[str, object]:
        """What a resumed run must share with the one it goes on with."""
        names = ("preset", "batch", "accumulate", "sequence", "learning_rate", "optimizer", "weight_decay", "warm_up")
        more = (
            "prose",
            "z_loss",
            "seed",
            "dtype",
            "distill_weight",
            "distill_choice",
            "on_policy",
            "on_policy_rows",
            "on_policy_batch",
            "on_policy_greedy",
            "on_policy_prompt",
        )
        last = ("unlikelihood", "rewrite_every", "until_repeated") if self.unlikelihood else ()
        found: dict[str, object] = {name: getattr(self, name) for name in (*names, *more, *last)}
        return found | {"steps": self.budget.steps, "minutes": self.budget.minutes}
