"""Choose the held-out prompts: `python evals/prompts/build_heldout.py FOLDER`, FOLDER as README.md beside this says.

The rule, fixed before any accept rate was looked at:

1. Of each package take the .py files outside its tests (they repeat themselves, which would flatter a draft), sorted by
   path. Files with the words "copyright" or "license" in them are left out: they may come from somewhere else.
2. Put them in an order drawn from one numpy Generator with a fixed seed.
3. Of each file in turn draw one line that is not blank. From there on the first 64 ids are the prompt and the next 128
   its continuation. A file too short for that, or whose ids are not what their text encodes to again, is passed over.
4. Stop at 20 prompts a package. No file is used twice.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import numpy as np

from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.loading.tokenizer import Tokenizer, load_tokenizer
from posttrainllm.adapters.runtime import start

PACKAGES = {"networkx": "3.5", "dask": "2026.3.0"}
SEED = 0
PROMPTS_PER_PACKAGE = 20
PROMPT_IDS, CONTINUATION_IDS = 64, 128
_READ_CHARACTERS = 2500  # holds 192 ids of any source, and fewer than the 1024 that the tokenizer warns about


@attrs.frozen(kw_only=True)
class HeldOutPrompt:
    """One line of the data file."""

    package: str
    version: str
    file: str
    """Path below FOLDER."""
    line: int
    """Where the text starts, from 1."""
    text: str
    """64 ids."""
    continuation: str
    """What the file goes on with, 128 ids: how much real code repeats itself over that length."""


def choose_prompts(folder: Path, tokenizer: Tokenizer) -> list[HeldOutPrompt]:
    """Apply the rule.

    Args:
        folder: holds each package and its .dist-info.
        tokenizer: of the embedded pair.

    Returns:
        20 prompts of each package, in the order they were drawn.

    Raises:
        click.ClickException: a package is missing, of another version, or too small.
    """
    generator = np.random.default_rng(SEED)
    prompts: list[HeldOutPrompt] = []
    for package, version in PACKAGES.items():
        if not (folder / f"{package}-{version}.dist-info").is_dir():
            raise click.ClickException(f"{folder}: got no {package}-{version}.dist-info, expected {package} {version}")
        found = _draw(folder, package, tokenizer, generator)
        chosen = [prompt for _, prompt in zip(range(PROMPTS_PER_PACKAGE), found, strict=False)]
        if len(chosen) < PROMPTS_PER_PACKAGE:
            raise click.ClickException(f"{package}: got {len(chosen)} prompts, expected {PROMPTS_PER_PACKAGE}")
        prompts += chosen
    return prompts


def _draw(folder: Path, package: str, tokenizer: Tokenizer, generator: np.random.Generator) -> Iterator[HeldOutPrompt]:
    files = sorted(path.relative_to(folder).as_posix() for path in (folder / package).rglob("*.py"))
    files = [file for file in files if not _is_test(file)]
    for index in generator.permutation(len(files)):
        source = (folder / files[index]).read_text(encoding="utf-8")
        lines = source.split("\n")
        starts = [number for number, line in enumerate(lines) if line.strip()]
        if not starts or "copyright" in source.lower() or "license" in source.lower():
            continue
        number = starts[int(generator.integers(len(starts)))]
        texts = _cut("\n".join(lines[number:])[:_READ_CHARACTERS], tokenizer)
        if texts is not None:
            yield HeldOutPrompt(
                package=package,
                version=PACKAGES[package],
                file=files[index],
                line=number + 1,
                text=texts[0],
                continuation=texts[1],
            )


def _is_test(file: str) -> bool:
    parts = Path(file).parts
    return "tests" in parts or parts[-1].startswith("test_") or parts[-1] == "conftest.py"


def _cut(text: str, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Prompt and continuation, None unless both encode again to the ids they were decoded from."""
    ids = tokenizer.encode(text)[: PROMPT_IDS + CONTINUATION_IDS]
    prompt, whole = tokenizer.decode(ids[:PROMPT_IDS]), tokenizer.decode(ids)
    complete = len(ids) == PROMPT_IDS + CONTINUATION_IDS
    if not complete or tokenizer.encode(prompt) != ids[:PROMPT_IDS] or tokenizer.encode(whole) != ids:
        return None
    return prompt, whole[len(prompt) :]


@click.command(help="Write the held-out prompts chosen from the packages unpacked in FOLDER.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path(__file__).with_name("heldout.jsonl"),
    help="Default: heldout.jsonl beside this script.",
)
def main(folder: Path, output: Path) -> None:
    """Write the data file; the same bytes every time."""
    start()
    tokenizer = load_tokenizer(read_checkpoint(embedded_path("target-16m")))
    prompts = choose_prompts(folder, tokenizer)
    lines = [json.dumps(attrs.asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts]
    output.write_bytes("".join(lines).encode("utf-8"))
    click.echo(f"{len(prompts)} prompts written to {output.name}")


if __name__ == "__main__":
    main()
