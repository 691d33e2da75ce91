"""`posttrainllm doctor`: parse, call, print."""

import json
import logging
import sys

import click

from posttrainllm.adapters.runtime import LOGGER

__all__ = ["doctor"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(*, as_json: bool) -> None:
    """Say what is here to decode with, what would be slow and why, and what to do about it.

    Decodes a few tokens with the embedded pair. Exit status: 0, or 1 where decoding could not run.
    """
    from posttrainllm.adapters.doctor.examine import examine

    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)  # what it would warn of is in the findings
    try:
        findings = examine()
    finally:
        LOGGER.setLevel(level)
    runs = not any(finding.status == "broken" for finding in findings)
    if as_json:
        click.echo(json.dumps({"runs": runs, "findings": [finding.to_dict() for finding in findings]}))
    else:
        for finding in findings:
            click.echo(f"{finding.status:6}  {finding.name}: {finding.found}")
            if finding.why is not None:
                click.echo(f"        why: {finding.why}")
                click.echo(f"        remedy: {finding.remedy}")
    if not runs:
        sys.exit(1)
