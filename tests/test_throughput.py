"""`posttrainllm bench`: what it says has to be true, whatever the machine's speed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner
from support import tiny_pair

from posttrainllm.adapters.cli import cli
from posttrainllm.evals.bench.check import problems
from posttrainllm.evals.bench.contenders import MlxLm, Ours, contenders_for
from posttrainllm.evals.bench.costs import predicted_speedup
from posttrainllm.evals.bench.measure import Round, measure, references
from posttrainllm.evals.bench.summary import acceptance_by_position, format_table, missing_fields, summarize
from posttrainllm.evals.bench.workload import measure_pair
from posttrainllm.evals.throughput import choose_prompts

SMALL = ("--repeats", "2", "--draft-k", "2,4", "--max-tokens", "24")


def bench(*arguments):
    return CliRunner().invoke(cli, ["bench", *arguments])


@pytest.fixture(scope="module")
def result():
    done = bench(*SMALL)
    assert done.exit_code == 0, done.stderr
    return done


def test_it_prints_a_table_and_ends_in_one_json_line(result):
    *table, line = result.stdout.splitlines()
    value = json.loads(line)
    assert [row["name"] for row in value["rows"]] == [
        *("plain, width 1", "speculative, K=2", "speculative, K=4"),
        *("mlx-lm plain", "mlx-lm speculative, K=2", "mlx-lm speculative, K=4"),
    ]
    for row in value["rows"]:
        assert any(row["name"] in text for text in table)
    assert max(map(len, table[:-1])) <= 100
    assert missing_fields(value["rows"]) == []
    assert problems(line, 0.2) == []


def test_every_row_of_ours_equals_its_reference_and_counts_what_it_did(result):
    for row in json.loads(result.stdout.splitlines()[-1])["rows"]:
        assert row["prompts"] == 2
        assert not row["failed"]
        assert row["equal"] == (2 if row["draft_k"] else None)
        if row["draft_k"]:
            assert len(row["acceptance_by_position"]) == row["draft_k"]
            assert row["acceptance_by_position"] == sorted(row["acceptance_by_position"], reverse=True)
            assert 1 < row["tokens_per_step"] <= row["draft_k"] + 1


def test_both_engines_accept_the_same_since_they_decode_the_same(result):
    table = {row["name"]: row for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    for k in (2, 4):
        ours, theirs = table[f"speculative, K={k}"], table[f"mlx-lm speculative, K={k}"]
        assert abs(ours["accept_rate"] - theirs["accept_rate"]) < 0.05


def test_json_prints_the_line_alone():
    done = bench("--json", "--no-mlx-lm", "--repeats", "1", "--draft-k", "2", "--max-tokens", "8")
    assert [row["name"] for row in json.loads(done.stdout)["rows"]] == ["plain, width 1", "speculative, K=2"]


def test_a_row_whose_output_differs_is_reported_as_failed_and_not_as_fast(monkeypatch):
    """Case: a fast wrong row. The speculative one is made to emit another id at the end of one prompt."""
    original = Ours.finish

    def wrong(self):
        original(self)
        if self.draft_k:
            self.ids[-1] += 1

    monkeypatch.setattr(Ours, "finish", wrong)
    done = bench("--no-mlx-lm", "--repeats", "1", "--draft-k", "2", "--max-tokens", "8")
    assert done.exit_code == 3
    *table, line = done.stdout.splitlines()
    row = next(text for text in table if text.startswith("speculative, K=2"))
    assert "failed" in row
    assert "differs 0/1" in row
    assert json.loads(line)["rows"][1]["failed"]
    assert "speculative, K=2: 0 of 1 equal the reference" in problems(line, 0.0)


def test_mlx_lms_rate_stands_in_brackets_where_it_leaves_its_own_plain_output(monkeypatch):
    original = MlxLm.finish

    def wrong(self):
        original(self)
        if self.draft_k:
            self.ids[-1] += 1

    monkeypatch.setattr(MlxLm, "finish", wrong)
    done = bench("--repeats", "1", "--draft-k", "2", "--max-tokens", "8")
    assert done.exit_code == 0
    row = next(text for text in done.stdout.splitlines() if text.startswith("mlx-lm speculative, K=2"))
    assert re.search(r"\(\d+\.\d\) .* differs 0/1", row)


def test_prompts_are_all_different_and_none_is_measured_twice(embedded_pair):
    """Case: repeated prompts flatter a benchmark."""
    texts = [(f"def f{index}(x): return x", " + 1") for index in range(6)]
    prompts = choose_prompts(embedded_pair.tokenizer, [*texts, *texts], 6, 6)
    assert len(set(map(tuple, prompts))) == 6
    assert {len(prompt) for prompt in prompts} == {6}
    done = bench("--repeats", "40")
    assert done.exit_code == 2
    assert "--repeats: got 40, expected at most 39" in done.stderr


def test_the_warm_up_and_the_first_step_stay_outside_the_clock():
    """Case: the same. A contender that logs what it is asked shows what lies between the clock's two ends."""
    log = []

    class Logged:
        name, engine, draft_k, steps = "logged", "posttrainllm", 0, ()

        def begin(self, prompt, count):
            log.append(("begin", tuple(prompt)))
            self.ids = [1, 2]

        def finish(self):
            log.append(("finish", len(self.ids)))
            self.ids = [1, 2, 3, 4, 5]

    ((only,),) = measure([Logged()], [[7, 8]], 5, {"logged": [[1, 2, 3, 4, 5]]})
    assert log == [("begin", (7, 8)), ("finish", 2)]
    assert only.equal
    assert only.tokens == 5


def test_acceptance_by_position_counts_only_steps_that_proposed_there():
    assert acceptance_by_position([(4, 4), (4, 0), (2, 2), (2, 1)]) == [3 / 4, 2 / 4, 1 / 2, 1 / 2]
    assert acceptance_by_position([(0, 0)]) == []


def test_the_prediction_is_leviathans_where_a_verification_costs_one_forward():
    """Against table 1 of arXiv:2211.17192, where c is near 0."""
    for alpha, draft_k, expected in ((0.6, 2, 1.96), (0.8, 5, 3.69), (0.9, 10, 6.86)):
        assert predicted_speedup(alpha, draft_k, draft_cost=0.0, verify_cost=1.0) == pytest.approx(expected, abs=0.005)
    assert predicted_speedup(1.0, 4, draft_cost=0.25, verify_cost=1.0) == pytest.approx(2.5)


def test_ratios_are_taken_within_a_prompt_to_the_plain_row_that_was_faster_there():
    def one(name, k, speed):
        return Round(
            contender=name, engine="posttrainllm", draft_k=k, tokens_per_s=speed, steps=((k, 1),), tokens=10, equal=True
        )

    repeats = [
        [one("plain, width 1", 0, 100.0), one("speculative, K=2", 2, 300.0), one("mlx-lm plain", 0, 150.0)],
        [one("plain, width 1", 0, 200.0), one("speculative, K=2", 2, 300.0), one("mlx-lm plain", 0, 150.0)],
    ]
    table = {row["name"]: row for row in summarize(repeats, None)}
    assert table["speculative, K=2"]["ratio_range"] == [1.5, 2.0]
    assert table["plain, width 1"]["ratio_range"] == [0.667, 1.0]
    assert table["mlx-lm plain"]["ratio_range"] == [0.75, 1.0]


def test_a_self_draft_is_accepted_whole_in_the_table():
    pair = tiny_pair(dtype="bfloat16", draft="same")
    value = measure_pair(pair, [[3, 4], [5, 6], [7, 8]], [2], 13, mlx_lm=False, quiet=True)
    row = value["rows"][1]
    assert row["accept_rate"] == 1.0
    assert row["acceptance_by_position"] == [1.0, 1.0]
    assert any("1.000" in text for text in format_table(value["rows"]))


def test_without_a_draft_the_plain_rows_are_measured_alone(tiny_checkpoint):
    done = bench(str(tiny_checkpoint), "--repeats", "1", "--max-tokens", "12")
    assert done.exit_code == 0, done.stderr
    value = json.loads(done.stdout.splitlines()[-1])
    assert [row["name"] for row in value["rows"]] == ["plain, width 1", "mlx-lm plain"]
    assert value["draft_model"] is value["forward_s"] is None
    assert problems(json.dumps(value), 0.0) == ["got no draft, expected one: nothing speculative was measured"]


def test_the_references_are_plain_decoding_at_the_width_of_the_verification():
    pair = tiny_pair(draft="noisy")
    first, *_ = contenders_for(pair.plain("test"), [4], capacity=256)
    first.begin([3, 4, 5], 10)
    first.finish()
    assert references(pair, 0, [[3, 4, 5]], 10, 256) == [first.ids]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft-k", "0"), "--draft-k: got 0, expected 1 to 32"),
        (("--draft-k", "2,x"), "--draft-k: got '2,x', expected whole numbers"),
        (("--draft-k", ""), "--draft-k: got ''"),
        (("--repeats", "0"), "--repeats: got 0, expected 1 or more"),
        (("--prompt-tokens", "0"), "--prompt-tokens: got 0, expected 1 or more"),
        (("--max-tokens", "9"), "--max-tokens: got 9, expected 10 or more"),
        (("--prompts-file", "/nowhere.jsonl"), "/nowhere.jsonl: No such file"),
        (("--plot", "x.pdf"), "--plot: got 'x.pdf', expected a file name that ends in .png"),
        (("--plot", "/nowhere/x.png"), "--plot: /nowhere/x.png: No such file"),
        (("--plot", "/proc/x.png"), "--plot: /proc/x.png: No such file"),
        (
            ("--prompt-tokens", "300", "--max-tokens", "30"),
            "--prompt-tokens: got 300, expected no more than ",
        ),
        (("--repeats", "400", "--max-tokens", "30"), "--repeats: got 400, expected at most "),
    ],
)
def test_bad_options_are_one_line(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_workload_beyond_the_context_is_refused_with_both_numbers():
    done = bench("--prompt-tokens", "64", "--max-tokens", "2000")
    assert done.exit_code == 1
    assert "2000 generated, expected at most the context of 1024" in done.stderr


def test_the_plot_is_drawn(tmp_path):
    path = tmp_path / "plot.png"
    done = bench("--no-mlx-lm", "--repeats", "1", "--draft-k", "1,2", "--max-tokens", "8", "--plot", str(path))
    assert done.exit_code == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_result_that_lacks_something_is_told_so(result):
    value = json.loads(result.stdout.splitlines()[-1])
    del value["rows"][1]["predicted"], value["versions"]
    value["rows"][2]["accept_rate"] = 0.1
    found = problems(json.dumps(value), 0.2)
    assert "versions is missing" in found
    assert "speculative, K=2: predicted is missing" in found
    assert "speculative, K=4: got accept rate 0.1, expected 0.2 or more" in found
    assert problems("torn {", 0.0)[0].startswith("no result of posttrainllm bench")


@pytest.mark.slow
def test_the_script_keeps_table_result_and_picture(tmp_path):
    script = Path(__file__).parent.parent / "evals" / "specdec-throughput.sh"
    done = subprocess.run(
        [script, "--out", str(tmp_path / "kept"), "--repeats", "1", "--draft-k", "2", "--max-tokens", "16"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {"table.txt", "result.json", "throughput.png"}
    assert json.loads((tmp_path / "kept" / "result.json").read_text())["benchmark"] == "throughput"


def test_a_target_that_is_not_finite_ends_the_measurement_with_one_line(tiny_checkpoint, tmp_path):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "nan")
    weights = mx.load(str(path / "model.safetensors"))
    weights["model.norm.weight"] = mx.full(weights["model.norm.weight"].shape, mx.nan)
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    done = bench(str(path), "--repeats", "1", "--max-tokens", "12")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: plain, width 1: step 0: the target's logits are not finite")


@pytest.mark.parametrize(
    "content", [b'{"text": "\\ud800 abc"}', b'{"text":' * 100_000, b"[]", b'{"text": 3}', b"\xff\xfe"], ids=str
)
def test_a_prompts_file_that_is_wrong_is_one_line(tmp_path, content):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    done = bench("--prompts-file", str(file))
    assert done.exit_code == 2
    assert "expected a JSON object a line" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_prompts_file_may_start_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf" + b"".join(b'{"text": "def f%d(x): return x + 1"}\n' % index for index in range(3))
    )
    arguments = ("--prompts-file", str(file), "--prompt-tokens", "6", "--repeats", "1", "--draft-k", "2")
    assert bench(*arguments, "--max-tokens", "6", "--no-mlx-lm").exit_code == 0


def test_every_prompt_starts_with_another_contender():
    order = []

    class Logged:
        engine, draft_k, steps = "posttrainllm", 0, ()

        def __init__(self, name):
            self.name = name

        def begin(self, prompt, count):
            order.append(self.name)
            self.ids = [1]

        def finish(self):
            self.ids = [1, 2]

    repeats = measure([Logged("a"), Logged("b"), Logged("c")], [[1], [2], [3]], 2, {})
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [[one.contender for one in rounds] for rounds in repeats] == [["a", "b", "c"]] * 3


def test_help_of_the_script_says_how_to_call_it_and_leaves_nothing_behind(tmp_path):
    script = Path(__file__).parent.parent / "evals" / "specdec-throughput.sh"
    for arguments in (["--help"], ["--serve", "--help"]):
        done = subprocess.run([script, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert "[--serve] [--short] [--out FOLDER]" in done.stdout
    assert list(tmp_path.iterdir()) == []
