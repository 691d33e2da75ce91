"""docs/architectures.md, written from what was found."""

from collections.abc import Mapping, Sequence
from importlib import resources

from posttrainllm.evals.architectures.comparing import CHUNK, PROMPTS, REWOUND, STEPS, WIDTH
from posttrainllm.evals.architectures.configurations import Configuration
from posttrainllm.evals.architectures.examine import TOLERANCE, Outcome

__all__ = ["MLX_LM", "render"]

MLX_LM = "0.32.2"
"""The version whose modules are listed."""


def render(
    outcomes: Sequence[Outcome],
    refusals: Sequence[tuple[Configuration, Outcome]],
    helpers: Mapping[str, str],
    *,
    versions: str,
) -> str:
    """The page.

    Args:
        outcomes: of the modules that count.
        refusals: of those whose layers keep a state, which do not.
        helpers: modules that are no models.
        versions: what it ran on.

    Returns:
        Markdown, with a line feed at its end.
    """
    count, supported = len(outcomes), sum(outcome.supported for outcome in outcomes)
    total = count + len(refusals)
    return (
        resources.files(__package__)
        .joinpath("page.md")
        .read_text(encoding="utf-8")
        .format(
            **{name: sum(each.verdict == name for each in outcomes) for name in ("exact", "within", "refused")},
            mlx_lm=MLX_LM,
            supported=supported,
            count=count,
            share=supported / count,
            stateful=len(refusals),
            total=total,
            share_of_all=supported / total,
            prompts=", ".join(str(length) for length in PROMPTS),
            rows=len(PROMPTS),
            chunk=CHUNK,
            steps=STEPS,
            width=WIDTH,
            rewound=REWOUND,
            tolerance=TOLERANCE,
            versions=versions,
            table="\n".join(_row(each) for each in sorted(outcomes, key=lambda each: each.module.lower())),
            stateful_table="\n".join(
                f"| {outcome.module} | {configuration.why} | {_result(outcome)} |"
                for configuration, outcome in refusals
            ),
            helpers=", ".join(f"`{name}` ({what})" for name, what in sorted(helpers.items())),
        )
    )


def _row(outcome: Outcome) -> str:
    star = " \\*" if outcome.own_forward else ""
    return f"| {outcome.module}{star} | {outcome.features} | {outcome.caches} | {_result(outcome)} |"


def _result(outcome: Outcome) -> str:
    return f"{outcome.verdict}: {outcome.reason}" if outcome.reason else outcome.verdict
