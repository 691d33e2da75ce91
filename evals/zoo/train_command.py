"""`posttrainllm zoo train`: a preset from a corpus, alone or after a target."""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import click

from posttrainllm.evals.zoo.data import held_out_ids, read_corpus, training_ids
from posttrainllm.evals.zoo.presets import PRESETS
from posttrainllm.evals.zoo.schedule import Budget
from posttrainllm.evals.zoo.settings import Settings

__all__ = ["train"]

_FOLDER = click.Path(path_type=Path)
_SHARE = click.FloatRange(0, 1)
_MOST_LOGITS = 2**30  # of a batch: beyond, arrays of them have more elements than an int32 counts


@click.command()
@click.argument("preset", type=click.Choice(list(PRESETS)), metavar="PRESET")
@click.option("--corpus", type=_FOLDER, required=True, help="Folder that `zoo corpus` wrote.")
@click.option("--out", type=_FOLDER, required=True, help="Model directory to write; checkpoints go there, too.")
@click.option("--tokenizer", type=_FOLDER, help="Of `zoo tokenizer`; tokenizer.json in the corpus's folder by default.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Of training: compilation, evaluations, checkpoints left out.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Updates, in place of --minutes.")
@click.option("--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Sequences at once.")
@click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True, help="Batches of an update.")
@click.option("--sequence", type=click.IntRange(min=8), default=512, show_default=True, help="Tokens; best x 128.")
@click.option("--prose", type=_SHARE, help="Share of the windows that are prose; the corpus's own by default.")
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), default=2e-3, show_default=True)
@click.option("--optimizer", type=click.Choice(["adamw", "muon"]), default="adamw", show_default=True)
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.1, show_default=True, help="Of matrices.")
@click.option("--warm-up", type=_SHARE, default=0.03, show_default=True, help="Share of the budget.")
@click.option("--z-loss", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--init", type=_FOLDER, help="Model directory of this preset to start from.")
@click.option("--distill-from", type=_FOLDER, help="Target's directory: learn its distribution.")
@click.option(
    "--distill-weight", type=_SHARE, default=1.0, show_default=True, help="The rest is the next token's loss."
)
@click.option(
    "--distill-choice",
    type=_SHARE,
    default=0.0,
    show_default=True,
    help="Share of the loss of the target's likeliest token in place of the divergence.",
)
@click.option("--on-policy", type=_SHARE, default=0.0, show_default=True, help="Share of batches the target wrote.")
@click.option(
    "--on-policy-rows", type=click.IntRange(min=1), default=4096, show_default=True, help="Texts that are written."
)
@click.option(
    "--on-policy-batch", type=click.IntRange(min=1), default=256, show_default=True, help="Of them written at once."
)
@click.option("--on-policy-greedy", type=_SHARE, default=0.5, show_default=True, help="Share of them at T=0.")
@click.option(
    "--on-policy-prompt",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Tokens of the corpus that each begins with, half of --sequence at most.",
)
@click.option(
    "--unlikelihood", type=_SHARE, default=0.0, show_default=True, help="Share of batches that unlearn its own loops."
)
@click.option(
    "--rewrite-every", type=click.IntRange(min=1), default=8, show_default=True, help="Steps with the same loops."
)
@click.option("--until-repeated", type=_SHARE, default=0.0, show_default=True, help="End where no more of it is loops.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --out, if there is one.")
@click.option(
    "--checkpoint-every", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Minutes; 0: none."
)
@click.option(
    "--evaluate-every", type=click.IntRange(min=0), default=0, show_default=True, help="Steps; 0: at the end."
)
@click.option("--evaluate-characters", type=click.IntRange(min=1), default=400_000, show_default=True, help="A source.")
@click.option("--log-every", type=click.IntRange(min=1), default=20, show_default=True, help="Steps.")
@click.option("--stop-after", type=click.FloatRange(min=0), help="Minutes of the process: a checkpoint, then exit 3.")
def train(minutes: float | None, steps: int | None, tokenizer: Path | None, **options: Any) -> None:
    """Train PRESET, one of `zoo list`. Without --resume, checkpoints in --out are not looked at, and replaced."""
    began = time.monotonic()
    if (minutes is None) == (steps is None):
        got = "neither --minutes nor" if steps is None else "both --minutes and"
        raise click.UsageError(f"got {got} --steps, expected one of the two")
    file = tokenizer if tokenizer is not None else options["corpus"] / "tokenizer.json"
    settings = Settings(budget=Budget(steps=steps, minutes=minutes), tokenizer=file, **options)
    _check(settings)
    from posttrainllm.adapters.runtime import start

    runtime = start()  # MLX's BLAS comes before its import
    finished = _train(settings, began, f"{runtime.device_name} ({runtime.device}), mlx {runtime.mlx_version}")
    if not finished:
        click.echo("stopped before the end; --resume goes on")
        sys.exit(3)


def _check(settings: Settings) -> None:
    vocabulary = PRESETS[settings.preset].shape.vocab_size
    logits = settings.batch * settings.sequence * vocabulary
    if logits > _MOST_LOGITS:
        most = _MOST_LOGITS // (settings.sequence * vocabulary)
        raise click.UsageError(
            f"--batch: got {settings.batch}, expected at most {most} here; --accumulate adds batches up"
        )
    if settings.on_policy and settings.distill_from is None:
        raise click.UsageError("--on-policy: got it without --distill-from, expected both")
    if settings.distill_choice and settings.distill_from is None:
        raise click.UsageError("--distill-choice: got it without --distill-from, expected both")
    if settings.unlikelihood and (settings.init is None or settings.on_policy):
        got = "without --init" if settings.init is None else "with --on-policy"
        raise click.UsageError(f"--unlikelihood: got it {got}, expected it with --init and without --on-policy")


def _train(settings: Settings, began: float, device: str) -> bool:
    import mlx.core as mx

    from posttrainllm.adapters.loading.fingerprint import fingerprint
    from posttrainllm.evals.zoo.batches import Batches
    from posttrainllm.evals.zoo.model import build_module, load_any, read_parameters, same_vocabulary, start_parameters
    from posttrainllm.evals.zoo.on_policy import Writing, target_texts
    from posttrainllm.evals.zoo.output import write_model
    from posttrainllm.evals.zoo.step import compile_step
    from posttrainllm.evals.zoo.tokenizer import digest, read_tokenizer
    from posttrainllm.evals.zoo.trainer import Trainer
    from posttrainllm.evals.zoo.unlearn import Loops

    preset, dtype = PRESETS[settings.preset], getattr(mx, settings.dtype)
    corpus = read_corpus(settings.corpus)
    text, tokenizer = read_tokenizer(settings.tokenizer, preset.shape.vocab_size)
    if settings.distill_from is not None:
        same_vocabulary(settings.distill_from, text, preset.shape.vocab_size)
    settings.out.mkdir(parents=True, exist_ok=True)
    kinds = (None,) if settings.prose is None else ("code", "prose")
    ids, *prose = [training_ids(corpus, tokenizer, digest(text), kind) for kind in kinds]
    held_out = held_out_ids(corpus, tokenizer, settings.evaluate_characters)
    for kind, part in zip(kinds, (ids, *prose), strict=True):
        if len(part) < 2 * settings.sequence + 2:
            got = f"{len(part):,} tokens of {kind or 'text'}"
            raise click.ClickException(f"{corpus.folder}: got {got}, expected two sequences at least")
    _say(f"{settings.preset}: {preset.parameters:,} parameters; {len(ids) + sum(map(len, prose)):,} tokens; {device}")
    origin = {"corpus_sha256": corpus.sha256, "tokenizer": digest(text)}
    for name, folder in (("init", settings.init), ("distill_from", settings.distill_from)):
        origin |= {} if folder is None else {name: fingerprint(folder)}
    target = None if settings.distill_from is None else load_any(settings.distill_from, dtype)
    generated = None
    if settings.on_policy and target is not None:
        wanted = Writing(
            rows=settings.on_policy_rows,
            batch=settings.on_policy_batch,
            sequence=settings.sequence,
            seed=settings.seed,
            greedy_share=settings.on_policy_greedy,
            prompt=settings.prompt_tokens,
        )
        generated = target_texts(target, ids, wanted, origin=" ".join(origin.values()), folder=settings.out)
        _say(f"the target wrote {generated.size:,} tokens, {time.monotonic() - began:.1f} s after the start")
    functions = compile_step(
        build_module(preset),
        target,
        dtype=dtype,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        accumulate=settings.accumulate,
        distill_weight=settings.distill_weight,
        distill_choice=settings.distill_choice,
        z_loss=settings.z_loss,
    )
    trainer = Trainer(
        settings=settings,
        functions=functions,
        batches=Batches(
            ids=ids,
            prose=prose[0] if prose else None,
            prose_share=settings.prose or 0.0,
            rows=settings.batch,
            sequence=settings.sequence,
            seed=settings.seed,
            generated=generated,
            generated_share=settings.on_policy or settings.unlikelihood,
        ),
        held_out=held_out,
        parameters=(
            start_parameters(preset, settings.seed) if settings.init is None else read_parameters(settings.init, preset)
        ),
        fingerprint=origin,
        say=_say,
        loops=Loops(settings, ids, _say) if settings.unlikelihood else None,
    )
    if settings.resume:
        trainer.resume()
    if not trainer.run(began):
        return False
    if settings.checkpoint_every:  # what follows may fail, and --resume then goes on from here
        trainer.save()
    scores = trainer.evaluate()
    record = {
        "preset": settings.preset,
        "settings": attrs.asdict(settings, value_serializer=lambda _, __, value: _plain(value)),
        "command": "posttrainllm " + shlex.join(sys.argv[1:]),
        "corpus_sha256": corpus.sha256,
        "device": device,
        "target": None if settings.distill_from is None else settings.distill_from.name,
        "steps": trainer.step,
        "tokens": trainer.step * settings.accumulate * settings.batch * settings.sequence,
        "seconds": trainer.seconds,
        "loss": trainer.loss if trainer.step else None,
        "held_out": scores,
        "curve": trainer.curve,
    }
    write_model(settings.out, preset, trainer.parameters, text, record)
    _say(f"{settings.out}: written, {time.monotonic() - began:.1f} s after the start")
    return True


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _say(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()
