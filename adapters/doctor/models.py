"""Which models are here, what they are, and which of them would be slow."""

from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.doctor.findings import Finding
from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_checkpoint
from posttrainllm.adapters.loading.found import embedded_models, hub_models
from posttrainllm.adapters.loading.llama_config import read_config
from posttrainllm.adapters.loading.memory import cast_bytes
from posttrainllm.adapters.loading.pair import resolve_dtype
from posttrainllm.adapters.runtime import Runtime
from posttrainllm.kernel.errors import CheckpointError, LoadError

__all__ = ["embedded_findings", "hub_findings", "model_finding"]

_REINSTALL = "pip install --force-reinstall posttrainllm"


def embedded_findings(runtime: Runtime, free: int | None) -> list[Finding]:
    """The two models of the package; decoding without a model of one's own needs them.

    Args:
        runtime: of this process.
        free: bytes that the device can still take; None where nothing says.

    Returns:
        A finding each.
    """
    findings = []
    for model in embedded_models():
        finding = model_finding(f"embedded {model.name}", model.path, runtime, free)
        if finding.status == "note":  # of another model: of these it is the installation that is torn
            finding = attrs.evolve(finding, status="broken", remedy=_REINSTALL)
        findings.append(finding)
    return findings


def hub_findings(runtime: Runtime, free: int | None) -> list[Finding]:
    """The models in the hub's cache on this machine; the hub itself is not asked.

    Args:
        runtime: of this process.
        free: bytes that the device can still take; None where nothing says.

    Returns:
        A finding each; one that says so where there is none.
    """
    try:
        found = hub_models()
    except CheckpointError as error:
        return [
            Finding(
                name="hub's cache",
                status="note",
                found="unreadable",
                why=str(error),
                remedy="set HF_HOME to a directory that can be read",
            )
        ]
    findings = [model_finding(model.name, model.path, runtime, free) for model in found]
    return findings or [Finding(name="hub's cache", status="ok", found="no model")]


def model_finding(name: str, path: Path, runtime: Runtime, free: int | None) -> Finding:
    """One model; no weight is read.

    Args:
        name: for people.
        path: its directory.
        runtime: of this process.
        free: bytes that the device can still take; None where nothing says.

    Returns:
        The finding.
    """
    try:
        checkpoint = read_checkpoint(path)
    except LoadError as error:
        return Finding(
            name=name,
            status="note",
            found="cannot be used",
            why=str(error),
            remedy="download it again; of a repository of GGUF files name the file, else take one with safetensors",
            facts={"path": str(path)},
        )
    dtype = resolve_dtype("auto", checkpoint, runtime)
    need, vocabulary = cast_bytes(checkpoint, dtype), _vocabulary(checkpoint)
    packed = ", quantised" if checkpoint.quantized else ""
    found = (
        f"{checkpoint.config.get('model_type')}{packed}, context {checkpoint.context or 'unknown'}, vocabulary "
        f"{vocabulary or 'unknown'}, {checkpoint.dtype} on disk, {need / 1e6:.0f} MB in memory as {dtype}"
    )
    facts: dict[str, Any] = {
        "path": str(path),
        "context": checkpoint.context,
        "vocabulary": vocabulary,
        "dtype": dtype,
        "quantized": checkpoint.quantized,
        "bytes": int(need),
    }
    if free is not None and need > free:
        return Finding(
            name=name,
            status="note",
            found=found,
            why=f"it does not fit: {free / 1e9:.2f} GB are free",
            remedy="a smaller or a quantised model, or --dtype bfloat16 where it is cast to float32",
            facts=facts,
        )
    why, remedy = _slow(checkpoint, runtime)
    return Finding(name=name, status="slow" if why else "ok", found=found, why=why, remedy=remedy, facts=facts)


def _slow(checkpoint: Checkpoint, runtime: Runtime) -> tuple[str | None, str | None]:
    """Why a model decodes slower than it might, and what to do."""
    if checkpoint.quantized and runtime.device == "cpu":
        return (
            "quantised products on a CPU cost in proportion to their rows: a draft hardly pays",
            "take the checkpoint that is not quantised, or --no-draft",
        )
    if checkpoint.native is None and read_config(checkpoint.config) is None:
        return (
            "its family has no forward of ours: mlx-lm's module, where it has one, takes more operations a step, and "
            "transformers is loaded at the start",
            "a Llama, Mistral, Qwen2 or Qwen3 of that size",
        )
    return None, None


def _vocabulary(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding, by the config."""
    if checkpoint.native is not None:
        return checkpoint.native.vocab_size
    nested = checkpoint.config.get("text_config")
    for scope in (checkpoint.config, nested if isinstance(nested, dict) else {}):
        if type(scope.get("vocab_size")) is int:
            return int(scope["vocab_size"])
    return None
