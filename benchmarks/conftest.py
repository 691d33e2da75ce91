"""Options, order and summary of the benchmarks. They are no tests: `pytest` collects tests/ alone, `make bench` this.

pytest-benchmark clocks every round. The rounds of a contender become one row of its table, and a second table says what
they mean in tokens a second and beside each other.
"""

import importlib.metadata
import json
import statistics
from typing import Any

import pytest
from pytest_benchmark.stats import Stats

from posttrainllm.adapters.runtime import Runtime, start
from posttrainllm.evals.bench.machine import CpuWatch, cpu_count

_CONTENDERS = ("ours plain", "ours speculative", "mlx-lm plain", "mlx-lm speculative")
_PLAIN = ("ours plain", "mlx-lm plain")
_LINE = "{:<20}{:>8}{:>14}{:>8}{:>14}{:>12}{:>11}"

_ROUNDS = pytest.StashKey[list[dict[str, Any]]]()
_RUNTIME = pytest.StashKey[Runtime]()
_WATCH = pytest.StashKey[CpuWatch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--repeats`."""
    parser.addoption("--repeats", type=int, default=39, help="rounds of every contender, each with a prompt of its own")


def pytest_configure(config: pytest.Config) -> None:
    """Load the BLAS: the benchmark modules import MLX, and it has to come before."""
    config.stash[_WATCH] = CpuWatch()
    config.stash[_RUNTIME] = start()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat outside, contender inside: whatever slows the machine for a while slows all of them."""
    if "contender" in metafunc.fixturenames:
        repeats = range(metafunc.config.getoption("--repeats"))
        order = [(repeat, contender) for repeat in repeats for contender in _CONTENDERS]
        metafunc.parametrize(("repeat", "contender"), order, ids=[f"{repeat}, {name}" for repeat, name in order])


def pytest_benchmark_group_stats(
    config: pytest.Config, benchmarks: list[dict[str, Any]]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Merge the rounds of a contender into one row; a round whose output failed its check has no `extra_info`."""
    checked = [bench for bench in benchmarks if bench["extra_info"]]
    config.stash[_ROUNDS] = [
        {**bench["params"], **bench["extra_info"], "tok_s": bench["extra_info"]["clocked"] / bench["total"]}
        for bench in checked
    ]
    rows = []
    for contender in _CONTENDERS:
        rounds = [bench for bench in checked if bench["params"]["contender"] == contender]
        if rounds:
            stats: Any = Stats()  # type: ignore[no-untyped-call]  # pytest-benchmark has no annotations
            for bench in rounds:
                stats.update(bench["total"])
            rows.append({**rounds[0], **stats.as_dict(), "name": contender, "fullname": contender})
    return [("decoding alone", rows)] if rows else []


@pytest.hookimpl(trylast=True)  # behind pytest-benchmark's table
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print tokens a second, what recording costs, then one JSON line."""
    recording = _recording(terminalreporter)
    repeats = _whole_repeats(config.stash.get(_ROUNDS, []))
    if not repeats:
        return
    results = {contender: _result(contender, repeats) for contender in _CONTENDERS}
    terminalreporter.write_line("")
    terminalreporter.write_line(
        _LINE.format("contender", "tok/s", "min-max", "accept", "x best plain", "min-max", "reference")
    )
    for contender, result in results.items():
        rate = result["accept_rate"]
        terminalreporter.write_line(
            _LINE.format(
                contender,
                f"{result['tok_s']:.1f}",
                "{:.1f}-{:.1f}".format(*result["tok_s_range"]),
                "-" if rate is None else f"{rate:.3f}",
                f"{result['ratio']:.2f}",
                "{:.2f}-{:.2f}".format(*result["ratio_range"]),
                f"{result['reference_ids']}/{len(repeats)}",
            )
        )
    terminalreporter.write_line(json.dumps(_setting(config, repeats) | {"results": results, "recording": recording}))


def _recording(terminalreporter: pytest.TerminalReporter) -> Any:
    """What test_recording.py measured, printed; None where it did not run."""
    reports = terminalreporter.getreports("passed")
    found = [value for report in reports for name, value in report.user_properties if name == "recording"]
    for cost in found:
        terminalreporter.write_line(
            f"\nrecording a trace: {cost['share_of_decode']:.2%} of the decode time in the recorder (median of "
            f"{cost['prompts']} prompts, {cost['share_range'][0]:.2%} to {cost['share_range'][1]:.2%}); "
            f"decode time with / without {cost['decode_time_ratio']:.3f}"
        )
    return found[0] if found else None


def _whole_repeats(rounds: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Rounds by contender, for every repeat that all of them finished: only those can be set side by side."""
    repeats: dict[int, dict[str, dict[str, Any]]] = {}
    for measured in rounds:
        repeats.setdefault(measured["repeat"], {})[measured["contender"]] = measured
    return [repeat for repeat in repeats.values() if len(repeat) == len(_CONTENDERS)]


def _result(contender: str, repeats: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the repeats; a ratio is taken within its repeat, to the plain one that was faster there."""
    rounds = [repeat[contender] for repeat in repeats]
    speeds = [measured["tok_s"] for measured in rounds]
    ratios = [repeat[contender]["tok_s"] / max(repeat[name]["tok_s"] for name in _PLAIN) for repeat in repeats]
    proposed = sum(measured["proposed"] for measured in rounds)
    return {
        "tok_s": round(statistics.median(speeds), 1),
        "tok_s_range": [round(min(speeds), 1), round(max(speeds), 1)],
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "accept_rate": round(sum(measured["accepted"] for measured in rounds) / proposed, 3) if proposed else None,
        "reference_ids": sum(measured["reference_ids"] for measured in rounds),
    }


def _setting(config: pytest.Config, repeats: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the numbers depend on."""
    runtime, measured = config.stash[_RUNTIME], repeats[0][_CONTENDERS[0]]
    return {
        "benchmark": "decode",
        "device": runtime.device,
        "device_name": runtime.device_name,
        "cpus": cpu_count(),
        "others_cpu": config.stash[_WATCH].others(),
        "mlx": runtime.mlx_version,
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "blas": runtime.blas,
        **{name: measured[name] for name in ("dtype", "k", "temperature", "prompt_tokens", "new_tokens")},
        "repeats": len(repeats),
        "prompts": len(repeats),
    }
