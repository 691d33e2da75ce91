"""A gate run for people: the summary, the block for a bug report, the row of a table."""

from typing import Any

from posttrainllm.adapters.gate.findings import FALSE_ALARM, Divergence, GateResult, Law, PathResult

__all__ = ["bug_report", "summary", "table_row"]

_SHOWN = 10  # differences from width 1 in the summary; --json and --report have all


def summary(result: GateResult, key: dict[str, Any], *, cached: bool) -> list[str]:
    """What the command prints.

    Args:
        result: of the run.
        key: what it holds for.
        cached: whether it was reached by an earlier run.

    Returns:
        Lines; the last one is the verdict, with the count of prompts equal to width 1 beside it.
    """
    lines = [f"{result.model} + {result.draft_model}"]
    for path in result.paths:
        lines += _path_lines(path, key, most=_SHOWN)
    lines += _forward_lines(result, key)
    time = "from the cache, --fresh runs it again" if cached else f"{result.seconds:.0f} s"
    lines.append(_environment(key) + f" | {time}")
    return [*lines, *(_verdict_line(path) for path in result.paths)]


def bug_report(result: GateResult, key: dict[str, Any]) -> list[str]:
    """A block in Markdown that says all there is to say.

    Args:
        result: of the run.
        key: what it holds for.

    Returns:
        Lines.
    """
    lines = ["```", f"posttrainllm gate: {result.model} + {result.draft_model}"]
    for path in result.paths:
        lines += [*_path_lines(path, key, most=None), _verdict_line(path)]
    lines += _forward_lines(result, key)
    lines += [f"{name}: {value}" for name, value in key.items()]
    return [*lines, f"seconds: {result.seconds:.1f}", "```"]


def table_row(path: PathResult, key: dict[str, Any], command: str) -> str:
    """One row of the table in docs/techniques/precision.md.

    Args:
        path: its result.
        key: what it holds for.
        command: what printed it.

    Returns:
        A row in Markdown.
    """
    found, versions = path.findings, key["versions"]
    law = max((law for law in found.laws if law.place is None), key=lambda law: law.kl)
    cells = [
        path.title,
        f"{key['device'][0]} ({key['device'][1]}), {key['dtype']['target']}",
        f"**{path.verdict}**",
        f"{found.prompts - len(found.reference_differences)} of {found.prompts}",
        f"{path.equal_width_1} of {found.prompts}",
        f"{_probe(path, 'width'):.3g}",
        f"{found.coupled_prompts - len(found.coupled_differences)} of {found.coupled_prompts}",
        f"{law.kl:.4f} (at most {law.epsilon:.4f})",
        f"mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}, BLAS {key['blas'] or 'none'}",
        f"`{command}`",
    ]
    return f"| {' | '.join(cells)} |"


def _path_lines(path: PathResult, key: dict[str, Any], *, most: int | None) -> list[str]:
    found, width = path.findings, key["draft_k"] + 1
    equal = found.prompts - len(found.reference_differences)
    coupled = found.coupled_prompts - len(found.coupled_differences)
    accepted = f"{found.accepted / found.proposed:.3f}" if found.proposed else "nothing proposed"
    lines = [
        f"{path.title}, K={key['draft_k']}, {found.prompts} prompts x {key['max_tokens']} tokens, "
        f"B={key['rows']}, C={key['capacity']}, accept rate {accepted}",
        f"  T=0             equal to plain at width {width}: {equal} of {found.prompts} prompts; "
        f"at width 1: {path.equal_width_1} of {found.prompts}",
        f"  T=1, coupled    equal to plain at width {width} with the same seeds: {coupled} of {found.coupled_prompts}",
    ]
    totals = [law for law in found.laws if law.place is None]
    lines += [f"  {'T=1, leviathan' if law is totals[0] else '':16}{_law_line(law)}" for law in totals]
    places = [law for law in found.laws if law.place is not None]
    if places:
        nearest = max(places, key=lambda law: law.kl / law.epsilon)
        lines.append(f"{'':18}nearest its bound by place: {_law_line(nearest)}")
    lines.append(f"{'':18}false alarm {FALSE_ALARM:.0e} over all {len(found.laws)} tests")
    lines.append("  logits change by at most")
    for probe in found.probes:
        mark = "" if probe.difference == 0 or not probe.must_be_zero else "  <- must be 0: shapes are the same"
        lines.append(f"    {probe.difference:<9.3g} with {probe.change}{mark}")
    if found.usual_differences:
        lines.append(
            f"  differences from width 1 (near-ties have a margin of at most {found.margin_limit:.3g}, "
            "four times the first number above)"
        )
        lines += [f"    {_difference_line(difference)}" for difference in found.usual_differences[:most]]
        left = 0 if most is None else len(found.usual_differences) - most
        if left > 0:
            lines.append(f"    and {left} more, see --report or --json")
    return lines


def _forward_lines(result: GateResult, key: dict[str, Any]) -> list[str]:
    """Whether the target's forward computes what mlx-lm's module computes; nothing where it is the module."""
    check, variant = result.forward, key["variant"]["target"]
    if variant == "module":
        return []
    if check is None:
        return [f"the target's forward ({variant}) was not compared with mlx-lm's module"]
    sign, advice = ("<=", "") if check.holds else ("> ", "  <- broken: decode with --forward module")
    return [
        f"the target's forward ({variant}) against mlx-lm's module: logits differ by {check.difference:.2g} "
        f"{sign} {check.limit:g} of the largest{advice}"
    ]


def _verdict_line(path: PathResult) -> str:
    line = f"{path.verdict}: {path.equal_width_1} of {path.findings.prompts} prompts equal to width 1"
    if path.verdict != "identical":
        line += f"; {path.reason}"
    return line if path.trace is None else f"{line} (posttrainllm replay {path.trace})"


def _law_line(law: Law) -> str:
    sign = "<=" if law.holds else "> "
    place = "" if law.place is None else f", id {law.place} of a step"
    return f"KL {law.kl:.4f} {sign} {law.epsilon:.4f} over {law.draws} draws, by {law.order}{place}"


def _difference_line(difference: Divergence) -> str:
    margin = "unknown" if difference.margin is None else f"{difference.margin:.3g}"
    return (
        f"{difference.prompt}, position {difference.position}: {difference.got} {difference.got_text!r}, "
        f"at width 1 {difference.expected} {difference.expected_text!r}, margin {margin}"
    )


def _environment(key: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in key["versions"].items())
    device = f"{key['device'][0]} ({key['device'][1]}), {key['dtype']['target']}"
    return f"{device}, {versions}" + (f", BLAS {key['blas']}" if key["blas"] else "")


def _probe(path: PathResult, name: str) -> float:
    return next(probe.difference for probe in path.findings.probes if probe.name == name)
