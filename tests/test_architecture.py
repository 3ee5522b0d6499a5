"""The rules of the house: which file may import which, and how long a file and a function may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "train.py", *sorted((ROOT / "titanlite").rglob("*.py"))]

# From the ground up. A file imports from its own folder and from the floors below; rooms of one floor stand apart.
FLOORS = [
    {"config"},
    {"distributed"},
    {"model"},
    {"data"},
    {"optim"},
    {"observe", "parallel"},
    {"checkpoint"},
    {"formats"},
    {"verify"},
    {"cli"},
    {"train", "__main__", "__init__"},
]


def room(module: str) -> str:
    """titanlite.model.llama -> model; train -> train."""
    parts = module.split(".")
    return parts[1] if parts[0] == "titanlite" and len(parts) > 1 else parts[0]


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> list[str]:
    """Modules of the project that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not (isinstance(node, ast.ImportFrom) and node.level), "imports are absolute"
        found += [name for name in names if name.split(".")[0] in ("titanlite", "train")]
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down(path):
    here = room(module_of(path))
    for module in imports(path):
        there = room(module)
        assert there != "train", "nothing imports train.py"
        assert here == there or floor(there) < floor(here), f"{path} imports {module}"


def test_the_model_knows_no_parallelism_and_parallelism_no_model():
    for path in (ROOT / "titanlite/model").glob("*.py"):
        assert "torch.distributed" not in path.read_text(), path
    for path in (ROOT / "titanlite/parallel").glob("*.py"):
        assert not any(module == "titanlite.model.llama" for module in imports(path)), path


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= (400 if path.name in ("schema.py", "rules.py") else 300)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= (160 if (path.name, node.name) == ("train.py", "main") else 60), node.name


@pytest.mark.parametrize("path", [p for p in FILES if p.read_text()], ids=module_of)
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def lines_of_code(path: Path) -> int:
    """Lines on which something of the program begins: no blank lines, no comments."""
    return len({node.lineno for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "lineno")})


# Modules of more than 40 lines of code without a test file of their name, and the tests that run them instead.
# The list may only become shorter.
TESTED_ELSEWHERE = {
    "checkpoint/dcp": "tests/checkpoint/test_checkpoint.py",
    "checkpoint/manager": "tests/checkpoint/test_checkpoint.py, tests/e2e/test_resume.py",
    "checkpoint/resume": "tests/e2e/test_resume.py",
    "checkpoint/shard_file": "tests/checkpoint/test_checkpoint.py",
    "checkpoint/state": "tests/checkpoint/test_checkpoint.py",
    "checkpoint/storage": "tests/checkpoint/test_checkpoint.py, tests/e2e/test_faults.py",
    "cli/convert": "tests/formats/test_convert.py, tests/formats/test_convert_limits.py",
    "distributed/watchdog": "tests/e2e/test_hang.py",
    "formats/check": "tests/formats/test_convert.py",
    "formats/fill": "tests/formats/test_foreign.py, tests/formats/test_foreign_hostile.py",
    "formats/full_state": "tests/formats/test_convert.py, tests/formats/test_convert_limits.py",
    "formats/gguf_file": "tests/formats/test_gguf.py",
    "formats/huggingface": "tests/formats/test_convert.py",
    "formats/huggingface_tokenizer": "tests/formats/test_convert.py",
    "formats/load": "tests/formats/test_transformers.py, tests/formats/test_gguf.py",
    "formats/meta": "tests/formats/test_convert.py",
    "formats/pickled": "tests/formats/test_foreign_hostile.py",
    "formats/place": "tests/formats/test_convert.py",
    "formats/recognise": "tests/formats/test_foreign.py, tests/formats/test_foreign_hostile.py",
    "formats/safetensors_files": "tests/formats/test_convert.py",
    "formats/stock": "tests/formats/test_foreign.py",
    "formats/stock_index": "tests/formats/test_foreign_hostile.py",
    "formats/targets": "tests/formats/test_convert.py",
    "formats/torch_file": "tests/formats/test_convert.py, tests/formats/test_foreign_hostile.py",
}


def test_each_module_has_tests_of_its_name():
    """titanlite/<room>/<name>.py is tested in tests/<room>/test_<name>.py."""
    large = {p.relative_to(ROOT / "titanlite") for p in FILES[1:] if lines_of_code(p) > 40}
    missing = {str(p.with_suffix("")) for p in large if not (ROOT / "tests" / p.parent / f"test_{p.name}").exists()}
    assert not missing - TESTED_ELSEWHERE.keys(), "no test file"
    assert not TESTED_ELSEWHERE.keys() - missing, "has a test file now, or is gone: remove it from the list"
    files = [word for text in TESTED_ELSEWHERE.values() for word in text.split(", ") if word.startswith("tests/")]
    assert all((ROOT / name).exists() for name in files)
