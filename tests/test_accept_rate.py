"""The accept-rate command: what it counts, the prompts it counts on, and the rate it promises."""

import importlib.util
import json

import pytest
from click.testing import CliRunner

from posttrainllm.adapters.batch import decode
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.rows import RowRequest, RowStep
from posttrainllm.evals import accept_rate
from posttrainllm.evals.accept_rate import HELD_OUT, command, measure, read_prompts
from posttrainllm.evals.counting import acceptance, count_equal, repeated_share
from posttrainllm.kernel.errors import CapacityError, NonFiniteError, UsageError


def row_step(tokens, proposed=0, accepted=0, finite=True):
    return RowStep(tokens=tuple(tokens), proposed=proposed, accepted=accepted, finite=finite, margins=())


class CountingEngine:
    """Emits seed, seed + 1, ... in pairs; the step behind an insert leaves the new row out, as one in flight does."""

    def __init__(self, rows, finite=True):
        self.rows, self.finite, self.released = rows, finite, []
        self._rows, self._fresh = {}, set()

    def insert(self, row, request):
        assert row not in self._rows
        self._rows[row] = [request.seed, request.limit - len(request.prompt)]
        self._fresh.add(row)

    def release(self, row):
        self.released.append(self._rows.pop(row)[1])

    def step(self):
        output = {}
        for row, (start, left) in self._rows.items():
            if row not in self._fresh:
                tokens = range(start, start + min(2, left))
                output[row] = row_step(tokens, finite=self.finite)
                self._rows[row] = [start + len(tokens), left - len(tokens)]
        self._fresh.clear()
        return output


def test_acceptance_sums_over_steps_and_prompts():
    runs = [
        [row_step([1, 2, 3], proposed=4, accepted=2), row_step([4], proposed=1, accepted=1)],
        [row_step([5], proposed=4, accepted=0)],
    ]
    assert acceptance(runs) == (3, 9)
    assert acceptance([]) == (0, 0)


def test_the_first_tokens_count_whole_steps_that_start_before_the_last_of_them():
    steps = [row_step([1, 2, 3], proposed=4, accepted=2) for _ in range(3)]  # they start at 0, 3 and 6
    assert acceptance([steps], first=3) == (2, 4)
    assert acceptance([steps], first=4) == (4, 8)
    assert acceptance([steps], first=6) == (4, 8)
    assert acceptance([steps, steps], first=7) == (12, 24)


def test_a_repeated_gram_is_one_that_stood_earlier_in_the_same_text():
    assert repeated_share([[1, 2, 3, 4, 5, 6]]) == 0
    assert repeated_share([[7] * 8]) == 4 / 5
    assert repeated_share([[1, 2, 1, 2, 1, 2]]) == 1 / 3
    assert repeated_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0  # another text is not looked at
    assert repeated_share([[1, 2, 3], []]) is None
    assert repeated_share([[1, 1, 2]], n=1) == 1 / 3


def test_prompts_are_equal_by_their_ids_whatever_the_steps():
    runs = [[row_step([1, 2]), row_step([3])], [row_step([1])]]
    assert count_equal(runs, [[row_step([1]), row_step([2, 3])], [row_step([2])]]) == 1


def test_every_request_is_decoded_to_its_limit_in_the_order_given():
    requests = [RowRequest(prompt=[0], limit=1 + count, seed=100 * count) for count in (5, 1, 2, 4, 3)]
    engine = CountingEngine(rows=2)
    ids = [[index for step in steps for index in step.tokens] for steps in decode(engine, requests)]
    assert ids == [list(range(request.seed, request.seed + request.limit - 1)) for request in requests]
    assert engine.released == [0] * 5


def test_logits_that_are_not_finite_end_the_measurement():
    with pytest.raises(NonFiniteError, match="request 1 of 1: the target's logits are not finite"):
        decode(CountingEngine(rows=1, finite=False), [RowRequest(prompt=[0], limit=3)])


def test_rows_do_not_depend_on_the_order_of_the_prompts(embedded_pair):
    texts = ["def add(a, b):\n", "import os\n\n\nclass Path:", "for index in range("]
    requests = [RowRequest(prompt=embedded_pair.tokenizer.encode(text), limit=24, draft_k=2) for text in texts]
    engine = Engine(embedded_pair, capacity=256, width=3, rows=2)
    forwards, backwards = decode(engine, requests), decode(engine, requests[::-1])
    assert forwards == backwards[::-1]


def test_speculative_output_equals_the_reference_on_a_few_prompts(embedded_pair):
    result = measure(embedded_pair, read_prompts(HELD_OUT)[18:22], draft_k=4, max_tokens=10, rows=3)
    assert result["equal_width_k_plus_1"] == result["prompts"] == 4
    assert 0 <= result["equal_width_1"] <= 4
    for name in ("t0", "t1_leviathan", "t1_coupled"):
        accepted, proposed = result[name]["accepted_proposed"]
        assert result[name]["accept_rate"] == accepted / proposed
        assert result[name]["accept_rate"] == result[name]["accept_rate_first_32"]  # 10 tokens are among the first
        assert 1 <= result[name]["tokens_per_step"] <= 5
    assert (result["model"], result["draft_model"]) == ("target-16m", "draft-3m")
    assert json.loads(json.dumps(result)) == result


def test_prompts_that_outgrow_the_context_are_refused(embedded_pair):
    with pytest.raises(CapacityError, match="ends at 1034 tokens, expected at most the context of 1024"):
        measure(embedded_pair, read_prompts(HELD_OUT)[:1], draft_k=4, max_tokens=970, rows=1)


@pytest.mark.parametrize(("equal", "status"), [(40, 0), (39, 3)])
def test_the_command_prints_a_table_and_one_json_line_and_fails_when_output_differs(monkeypatch, equal, status):
    run = {"accept_rate": 0.5, "accept_rate_first_32": None, "tokens_per_step": 3.0, "repeated_4_grams": 0.25}
    result = {"prompts": 40, "max_tokens": 128, "draft_k": 4, "t0": run, "t1_leviathan": run, "t1_coupled": run}
    result |= {"source_repeated_4_grams": None, "equal_width_k_plus_1": equal, "equal_width_1": 38, "rows": 8}
    result |= dict.fromkeys(["model", "draft_model", "dtype", "device", "device_name", "mlx_version"], "x")
    result |= {"blas": "OpenBLAS x"}
    monkeypatch.setattr(accept_rate, "load_pair", lambda *_, **__: None)
    monkeypatch.setattr(accept_rate, "measure", lambda *_, **__: result)
    printed = CliRunner().invoke(command, [])
    assert printed.exit_code == status
    lines = printed.stdout.splitlines()
    assert json.loads(lines[-1]) == result
    assert f"width 5: {equal} of 40 prompts" in printed.stdout
    assert "width 1: 38 of 40 prompts" in printed.stdout
    assert "BLAS OpenBLAS x" in lines[-2]
    assert json.loads(CliRunner().invoke(command, ["--json"]).stdout) == result


@pytest.mark.parametrize("content", ["", "\n", "[1]", '{"text": ""}', '{"text": 1}', "{", '{"line": 1}'])
def test_a_prompts_file_without_prompts_is_a_usage_error(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"prompts\.jsonl"):
        read_prompts(path)
    with pytest.raises(UsageError, match="No such file"):
        read_prompts(tmp_path / "missing.jsonl")


def test_the_held_out_prompts_are_40_of_64_ids_from_distinct_files_of_both_packages(embedded_pair):
    records = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    encode, decode_ids = embedded_pair.tokenizer.encode, embedded_pair.tokenizer.decode
    assert [record["package"] for record in records] == ["networkx"] * 20 + ["dask"] * 20
    assert len({record["file"] for record in records}) == 40
    assert len({record["text"] for record in records}) == 40
    for record in records:
        ids = encode(record["text"])
        assert len(ids) == 64
        assert decode_ids(ids) == record["text"]
        assert len(encode(record["text"] + record["continuation"])) == 64 + 128


def test_the_rule_draws_the_same_prompts_twice_and_leaves_tests_and_licensed_files_out(
    embedded_pair, tmp_path, monkeypatch
):
    path = HELD_OUT.with_name("build_heldout.py")
    spec = importlib.util.spec_from_file_location("build_heldout", path)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setattr(build, "PROMPTS_PER_PACKAGE", 2)
    body = "".join(f"def function_{index}(value):\n    return value + {index}\n" for index in range(800))
    for package, version in build.PACKAGES.items():
        (tmp_path / f"{package}-{version}.dist-info").mkdir()
        for name in ("one.py", "two.py", "copied.py", "empty.py", "tests/helpers.py", "test_three.py", "conftest.py"):
            file = tmp_path / package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            prefix = "# Copyright someone else\n" if name == "copied.py" else ""
            file.write_text("" if name == "empty.py" else prefix + body, encoding="utf-8")
    drawn = build.choose_prompts(tmp_path, embedded_pair.tokenizer)
    assert drawn == build.choose_prompts(tmp_path, embedded_pair.tokenizer)
    assert sorted(prompt.file for prompt in drawn) == [
        "dask/one.py",
        "dask/two.py",
        "networkx/one.py",
        "networkx/two.py",
    ]
    for prompt in drawn:
        source = (tmp_path / prompt.file).read_text(encoding="utf-8").split("\n")
        assert "\n".join(source[prompt.line - 1 :]).startswith(prompt.text + prompt.continuation)


@pytest.mark.slow
def test_the_embedded_pair_accepts_six_tenths_and_equals_the_reference_on_all_held_out_prompts(embedded_pair):
    result = measure(embedded_pair, read_prompts(HELD_OUT), draft_k=4, max_tokens=128, rows=8)
    print(json.dumps(result))
    assert result["prompts"] == result["equal_width_k_plus_1"] == 40
    assert result["t0"]["accept_rate"] >= 0.6
