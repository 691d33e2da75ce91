"""The loop of a training run."""

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import mlx.core as mx
import numpy as np

from posttrainllm.evals.zoo.batches import Batch, Batches, Prefetch
from posttrainllm.evals.zoo.checkpoint import last_checkpoint, load_checkpoint, save_checkpoint
from posttrainllm.evals.zoo.data import HeldOut
from posttrainllm.evals.zoo.evaluate import held_out_scores
from posttrainllm.evals.zoo.optimizer import first_moments, step_scalars
from posttrainllm.evals.zoo.schedule import rate_at
from posttrainllm.evals.zoo.settings import Settings
from posttrainllm.evals.zoo.step import StepFunctions
from posttrainllm.evals.zoo.unlearn import Loops

__all__ = ["Trainer"]

_IN_FLIGHT = 2  # steps that the host is ahead of the device


class Trainer:
    """State of a run and its loop; all of MLX on the thread that calls it."""

    def __init__(
        self,
        *,
        settings: Settings,
        functions: StepFunctions,
        batches: Batches,
        held_out: list[HeldOut],
        parameters: dict[str, mx.array],
        fingerprint: dict[str, str],
        say: Callable[[str], None],
        loops: Loops | None,
    ) -> None:
        self._settings, self._functions, self._batches, self._held_out = settings, functions, batches, held_out
        self._fingerprint, self._say, self._loops = fingerprint, say, loops
        self.parameters = parameters
        self.moments = first_moments(parameters, settings.optimizer)
        self.step, self.seconds, self.loss = 0, 0.0, float("nan")
        self.curve: list[dict[str, Any]] = []
        self._signalled, self._saved = False, time.monotonic()
        self._compiled: set[bool] = set()  # kinds of batches
        self._pending: list[tuple[int, mx.array, mx.array, float]] = []
        self._unread: list[tuple[int, mx.array, mx.array, float]] = []

    def resume(self) -> bool:
        """Go on from the last checkpoint of the run's folder; whether there was one."""
        folder = last_checkpoint(self._settings.out)
        if folder is None:
            return False
        parameters, moments, state, texts = load_checkpoint(folder)
        own, its = self._identity, state["identity"]
        for name in sorted(own.keys() | its.keys()):
            if own.get(name) != its.get(name):
                raise click.ClickException(f"{folder}: {name}: got {own.get(name)!r}, expected {its.get(name)!r}")
        self.parameters, self.moments = parameters, moments
        if self._loops is not None:
            self._loops.texts = texts
        self.step, self.seconds = state["step"], state["seconds"]
        self.loss = float("nan") if state["loss"] is None else state["loss"]
        self.curve = state["curve"]
        self._say(f"resumed at step {self.step:,}, {self.seconds:.1f} s of training")
        return True

    def save(self) -> None:
        """Write a checkpoint."""
        began = time.monotonic()
        line = self._collect()  # said behind the checkpoint: whoever reads it may be gone
        state = {
            "identity": self._identity,
            "step": self.step,
            "seconds": self.seconds,
            "loss": None if self.loss != self.loss else self.loss,
            "curve": self.curve,
        }
        texts = None if self._loops is None else self._loops.texts
        save_checkpoint(self._settings.out, self.step, self.parameters, self.moments, state, texts)
        if line:
            self._say(line)
        self._say(f"checkpoint at step {self.step:,}, written in {time.monotonic() - began:.1f} s")

    def run(self, began: float) -> bool:
        """Train until the budget is used, or until nothing is left to unlearn.

        Args:
            began: of the process, on the monotonic clock.

        Returns:
            Whether it has come to that; False after a signal or --stop-after, with a checkpoint written.

        Raises:
            click.ClickException: no loss since the last one that was said is finite.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self._share() < 1 and self._write_anew():
                if not self._round(began):
                    return False
            self._read()
            return True
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _write_anew(self) -> bool:
        """Have texts written where that is due; False where nothing is left to unlearn."""
        if self._loops is None:
            return True
        batches = self._loops.put_into(self._batches, self.parameters, self.step)
        self._batches = self._batches if batches is None else batches
        return batches is not None

    def _round(self, began: float) -> bool:
        """Train until the budget is used or texts are to be written anew; False where it has to stop before."""
        last = None if self._loops is None else self._loops.last_step(self.step)
        with Prefetch(self._batches, self.step * self._settings.accumulate) as prefetch:
            return self._loop(prefetch, began, last)

    def _loop(self, prefetch: Prefetch, began: float, last: int | None) -> bool:
        settings = self._settings
        origin, done_before = time.monotonic(), self.seconds  # of the schedule's clock
        while self._share() < 1 and self.step != last:
            kinds = len(self._compiled)
            self._one_step(prefetch)
            if kinds < len(self._compiled):  # its compilation is not on the clock
                mx.eval(self.parameters)
                origin = time.monotonic() - (self.seconds - done_before)
                if kinds == 0:
                    self._say(f"first step: {time.monotonic() - began:.1f} s after the start")
            while len(self._pending) > _IN_FLIGHT:
                mx.eval(self._pending.pop(0)[1])
            self.seconds = done_before + time.monotonic() - origin
            if self.step % settings.log_every == 0:
                self._read()
            if settings.evaluate_every and self.step % settings.evaluate_every == 0 and self._share() < 1:
                origin += self._aside(self.evaluate)
            now = time.monotonic()
            stop = settings.stop_after is not None and now - began >= 60 * settings.stop_after
            if (self._signalled or stop) and self._share() < 1:
                self.save()
                return False
            if settings.checkpoint_every and now - self._saved >= 60 * settings.checkpoint_every:
                origin += self._aside(self.save)
                self._saved = time.monotonic()
            if self.step == last:  # what is in flight belongs to this round's time, and what follows does not
                mx.eval(self.parameters)
            self.seconds = done_before + time.monotonic() - origin
        return True

    def _aside(self, work: Callable[[], object]) -> float:
        """Do what is not training once the steps in flight are done; the seconds that it takes."""
        mx.eval(self.parameters)
        began = time.monotonic()
        work()
        return time.monotonic() - began

    def _one_step(self, prefetch: Prefetch) -> None:
        settings, functions = self._settings, self._functions
        rate = rate_at(self._share(), peak=settings.learning_rate, warm_up=settings.warm_up)
        gradients, loss = self._gradient(prefetch.take())
        for _ in range(settings.accumulate - 1):
            mx.async_eval(gradients, loss)  # one batch's activations at a time
            more, its_loss = self._gradient(prefetch.take())
            gradients, loss = functions.add(gradients, more), loss + its_loss
            del more  # the sum may take its memory
        self.step += 1
        self.parameters, self.moments, norm = functions.update(
            self.parameters, gradients, self.moments, step_scalars(rate, self.step)
        )
        del gradients  # the update may take their memory
        mx.async_eval(self.parameters, self.moments, loss, norm)
        entry = (self.step, loss, norm, rate)
        self._pending.append(entry)
        self._unread.append(entry)

    def _gradient(self, batch: Batch) -> tuple[dict[str, mx.array], mx.array]:
        tokens = mx.array(batch.tokens)
        self._compiled.add(batch.repeated is None)
        if batch.repeated is None:
            return self._functions.gradient(self.parameters, tokens)
        return self._functions.unlearn(self.parameters, tokens, mx.array(batch.repeated))

    def _read(self) -> None:
        """Wait for the steps in flight, and say how they went."""
        if line := self._collect():
            self._say(line)

    def _collect(self) -> str:
        """Wait for the steps in flight and note how they went; the line that says so, empty where there were none."""
        if not self._unread:
            return ""
        values = [float(entry[1].item()) / self._settings.accumulate for entry in self._unread]
        step, _, norm, rate = self._unread[-1]
        size = float(norm.item())
        self._unread, self._pending = [], []
        finite = [value for value in values if np.isfinite(value)]
        if not finite:
            raise click.ClickException(
                f"step {step:,}: got no finite loss in {len(values)} steps, expected one at least; "
                f"try a lower --learning-rate than {self._settings.learning_rate:g}, with --resume or anew"
            )
        self.loss = float(np.mean(finite))
        tokens = step * self._settings.accumulate * self._settings.batch * self._settings.sequence
        last = self.curve[-1] if self.curve else {"tokens": 0, "seconds": 0.0}
        elapsed = self.seconds - last["seconds"]
        speed = (tokens - last["tokens"]) / elapsed if elapsed > 0.1 else 0.0  # the first step is not on the clock
        self.curve.append(
            {"step": step, "loss": self.loss, "tokens": tokens, "seconds": self.seconds, "rate": rate, "norm": size}
        )
        rates = f"{speed:,.0f} tokens/s  lr {rate:.2e}  norm {size:.2f}"
        lost = f"  {len(values) - len(finite)} of {len(values)} losses not finite" if len(finite) < len(values) else ""
        return f"step {step:,}  loss {self.loss:.4f}  {rates}  {self.seconds:.1f} s  {self._share():.1%}{lost}"

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Held-out loss by source, said and returned."""

        def nats(tokens: mx.array, counted: mx.array) -> mx.array:
            return self._functions.nats(self.parameters, tokens, counted)

        self._read()  # the scores belong to this step
        rows = min(self._settings.batch, 32)
        scores = held_out_scores(nats, self._held_out, rows=rows, sequence=self._settings.sequence)
        found = {
            score.name: {
                "nats_per_token": score.nats_per_token,
                "bits_per_character": score.bits_per_character,
                "characters": score.characters,
            }
            for score in scores
        }
        for name, score in found.items():
            self._say(
                f"held out  {name:20} {score['nats_per_token']:.4f} nats a token  "
                f"{score['bits_per_character']:.4f} bits a character"
            )
        if self.curve:
            self.curve[-1]["held_out"] = found
        return found

    @property
    def _identity(self) -> dict[str, object]:
        return {**self._settings.identity, **self._fingerprint}

    def _share(self) -> float:
        return self._settings.budget.share(steps_done=self.step, seconds=self.seconds)

    def _on_signal(self, number: int, _: object) -> None:
        if self._signalled:
            sys.exit(128 + number)  # asked twice
        self._signalled = True
