"""Everything that the doctor looks at, in order."""

from posttrainllm.adapters.doctor.findings import Finding
from posttrainllm.adapters.loading.blas import ENVIRONMENT, load_blas
from posttrainllm.adapters.messages import collapsed
from posttrainllm.adapters.runtime import Runtime, compile_obstacle, start
from posttrainllm.kernel.errors import BackendError, PosttrainllmError

__all__ = ["examine"]

_TOKENS = 8


def examine() -> list[Finding]:
    """Look at everything, and decode a few tokens with the embedded pair.

    Returns:
        The findings; without MLX no more than that.
    """
    try:
        runtime = start()
    except BackendError as error:
        return [_no_start(str(error))]
    from posttrainllm.adapters.doctor import machine, models
    from posttrainllm.adapters.loading.memory import available_bytes

    free = available_bytes()
    embedded = models.embedded_findings(runtime, free)
    need = sum(finding.facts.get("bytes", 0) for finding in embedded)
    return [
        machine.mlx_finding(runtime),
        machine.device_finding(runtime),
        machine.compiler_finding(runtime, compile_obstacle()),
        machine.blas_finding(runtime, load_blas() if runtime.blas is not None else None),
        machine.memory_finding(free, need),
        machine.cache_finding(),
        *embedded,
        *models.hub_findings(runtime, free),
        _decoding(runtime),
    ]


def _no_start(problem: str) -> Finding:
    """MLX is not there, or a variable of ours keeps it from being started."""
    if problem.startswith(ENVIRONMENT):
        return Finding(name="BLAS", status="broken", found="refused", why=problem, remedy=f"unset {ENVIRONMENT}")
    remedy = "in a new environment, one of: pip install 'posttrainllm[cpu]', 'posttrainllm[cuda13]'; on macOS: mlx"
    return Finding(name="MLX", status="broken", found="cannot be used", why=problem, remedy=remedy)


def _decoding(runtime: Runtime) -> Finding:
    """Whether it runs: nothing else tells for sure."""
    from posttrainllm.adapters.facade import generate, load

    try:
        result = generate(pair=load(), prompt="def add(a, b):", max_tokens=_TOKENS, ignore_eos=True)
    except PosttrainllmError as error:
        why, remedy = str(error), "what is broken or slow above comes first"
    except Exception as error:  # whatever MLX raises where a kernel cannot be built or run
        why, remedy = f"{type(error).__name__}: {collapsed(error, 300)}", "report it, with this output"
    else:
        count = len(result.token_ids)
        found = f"{count} tokens of the embedded pair, {runtime.device}"
        return Finding(name="decoding", status="ok", found=found, facts={"tokens": count})
    return Finding(name="decoding", status="broken", found="does not run", why=why, remedy=remedy)
