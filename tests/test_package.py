"""What is installed, what importing it pulls in, and the rules that keep kernel/ pure."""

import ast
import doctest
import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import posttrainllm
import posttrainllm.adapters
import posttrainllm.evals
import posttrainllm.kernel

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    module.name
    for package in (posttrainllm.kernel, posttrainllm.adapters)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not module.name.endswith("__main__") and ".api" not in module.name
)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def code_of(path: Path) -> str:
    """The source without its docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree)


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize(
    ("statement", "banned"),
    [
        ("import posttrainllm", {"mlx", "mlx_lm", "transformers", "numpy"}),
        ("import posttrainllm.kernel.compiled", {"mlx_lm", "transformers", "click", "rich"}),
        ("import posttrainllm.adapters.cli", {"mlx", "mlx_lm", "transformers"}),
    ],
)
def test_importing_pulls_in_no_more_than_it_needs(statement, banned):
    code = f"import sys\n{statement}\nprint({{name.split('.')[0] for name in sys.modules}} & {banned!r} or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("path", sources("kernel"), ids=lambda path: path.name)
def test_the_kernel_imports_mlx_attrs_and_itself_alone(path):
    allowed = ("mlx.core", "attrs", "numpy", "posttrainllm.kernel", "typing", "collections.abc")
    assert all(name.startswith(allowed) for name in imports_of(path)), imports_of(path)


@pytest.mark.parametrize("path", sources("adapters"), ids=lambda path: path.name)
def test_adapters_do_not_import_evals(path):
    assert not any(name.startswith("posttrainllm.evals") for name in imports_of(path))


@pytest.mark.parametrize("path", sources("kernel"), ids=lambda path: path.name)
def test_the_kernel_syncs_nothing_assigns_no_elements_and_draws_with_explicit_keys(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("item", "tolist", "eval", "async_eval", "seed", "state"), f"line {node.lineno}"
        if isinstance(node, ast.Assign):
            assert not any(isinstance(target, ast.Subscript) for target in node.targets), f"line {node.lineno}"
        is_draw = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("mx.random.")
        if is_draw and ast.unparse(node.func) not in ("mx.random.key", "mx.random.split"):
            assert any(keyword.arg == "key" for keyword in node.keywords), f"line {node.lineno}"


def test_the_decoding_path_is_compiled_in_one_place():
    using = [
        str(path.relative_to(ROOT))
        for folder in ("kernel", "adapters", "evals")
        for path in sources(folder)
        if "mx.compile" in code_of(path)
    ]
    training = ["evals/zoo/evaluate_command.py", "evals/zoo/step.py"]  # decodes nothing
    assert sorted(set(using) - set(training)) == ["kernel/compiled.py"]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_exported_sorted_and_documented(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert exported == sorted(exported, key=lambda word: (not word.isupper(), word[0].islower(), word))
    defined = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == name and callable(value)
    }
    assert defined <= set(exported), defined - set(exported)
    for key in exported:
        value = getattr(module, key)
        if callable(value) and getattr(value, "__module__", None) == name:
            assert value.__doc__, f"{name}.{key} has no docstring"


def test_the_example_of_the_python_api_runs():
    result = doctest.testmod(posttrainllm)
    assert result.attempted >= 3
    assert result.failed == 0


def test_the_readmes_python_example_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n", 1)[1].split("```", 1)[0]
    exec(compile(code, "README.md", "exec"), {})  # the example is ours


def test_versions_agree():
    assert posttrainllm.__version__ == importlib.metadata.version("posttrainllm")
    assert f"## [{posttrainllm.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_root_package_exports_what_it_promises():
    for name in posttrainllm.__all__:
        assert getattr(posttrainllm, name)
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = posttrainllm.lode


@pytest.mark.slow
def test_the_wheel_holds_one_top_level_package_and_the_embedded_pair(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"posttrainllm"}
    for needed in (
        "posttrainllm/py.typed",
        "posttrainllm/adapters/loading/cblas_halves.h",
        "posttrainllm/adapters/loading/cblas_shim.c",
        "posttrainllm/evals/prompts/heldout.jsonl",
        "posttrainllm/kernel/compiled.py",
        "posttrainllm/kernel/pure_step.py",
        "posttrainllm/models/draft-3m/model.safetensors",
        "posttrainllm/models/target-16m/model-00003-of-00003.safetensors",
        "posttrainllm/models/target-16m/tokenizer.json",
    ):
        assert needed in names
    packaged = {name for name in names if name.endswith(".py") and not name.startswith("posttrainllm/evals/prompts")}
    on_disk = {
        f"posttrainllm/{path.relative_to(ROOT)}".replace("adapters/api/", "")
        for folder in ("kernel", "adapters", "evals", "models")
        for path in sources(folder)
        if "prompts" not in path.parts
    }
    assert packaged == on_disk
