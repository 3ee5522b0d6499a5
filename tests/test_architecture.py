"""The rules of the house: which file may import which, and what a run loads."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.config.load import load_config
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import LAUNCHED
from titanlite.tools.prepare.cache import prepare

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "train.py", *sorted((ROOT / "titanlite").rglob("*.py"))]

# From the ground up. A file imports from its own folder and from the floors below; rooms of one
# floor stand apart.
FLOORS = [
    {"runtime"},
    {"config"},
    {"distributed"},
    {"model"},
    {"data", "rules"},
    {"optim"},
    {"observe", "parallel"},
    {"probes", "sinks"},
    {"checkpoint"},
    {"tools"},
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


def test_nothing_but_the_entry_points_is_at_the_root():
    assert {path.name for path in (ROOT / "titanlite").glob("*.py")} == {
        "__init__.py",
        "__main__.py",
    }


def test_no_module_imports_itself_by_way_of_others():
    """Also within a room, where the floors say nothing."""
    modules = {
        module_of(path): {m for m in imports(path) if m != module_of(path)} for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, chain: tuple[str, ...]) -> None:
        assert module not in chain, " -> ".join((*chain, module))
        if module not in done and module in modules:
            for other in modules[module]:
                visit(other, (*chain, module))
            done.add(module)

    for module in modules:
        visit(module, ())


LOADED = """
import json, sys
from pathlib import Path
from titanlite.optim import clip
import train

root = Path(train.__file__).parent

def stop(*arguments):  # the first step's forward and backward are done
    files = {Path(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    names = [str(path.relative_to(root)) for path in files if path.is_relative_to(root / "titanlite")]
    print("LOADED", json.dumps(sorted(names)), flush=True)
    train.process_group.finish(0)

clip.clip_grad_norm = stop
train.run(sys.argv[1:])
"""


def test_a_plain_run_loads_no_room_that_training_does_not_need(arguments):
    """The modules that are really imported by the first step of a run with one process.

    The launcher, in a process before it, has prepared the data.
    """
    prepared = prepare(load_config(arguments).data, Tokenizer())
    command = [sys.executable, "-c", LOADED, *arguments]
    environment = os.environ | {LAUNCHED: json.dumps([str(prepared)])}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("LOADED ")] or [
        result.stderr
    ]
    rooms = {name.split("/")[1] for name in json.loads(line.removeprefix("LOADED "))}
    assert {"checkpoint", "data", "model", "optim", "parallel"} <= rooms
    assert "tools" not in rooms


@pytest.mark.parametrize("path", [p for p in FILES if p.read_text()], ids=module_of)
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def lines_of_code(path: Path) -> int:
    """Lines on which something of the program begins: no blank lines, no comments."""
    return len(
        {node.lineno for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "lineno")}
    )


# Modules of more than 40 lines of code without a test file of their name, and the tests that run
# them instead.
# The list may only become shorter.
TESTED_ELSEWHERE = {
    "checkpoint/manager": "tests/checkpoint/test_checkpoint.py, tests/e2e/test_resume.py",
    "checkpoint/read_step": "tests/checkpoint/test_manifest.py",
    "checkpoint/shard_file": "tests/checkpoint/test_checkpoint.py",
    "checkpoint/step_files": "tests/checkpoint/test_manifest.py",
    "checkpoint/storage": "tests/checkpoint/test_checkpoint.py, tests/e2e/test_faults.py",
    "tools/cli/convert_command": "tests/tools/formats/test_convert.py, tests/tools/formats/test_convert_limits.py",
    "tools/formats/check_export": "tests/tools/formats/test_convert.py",
    "tools/formats/detect_format": "tests/tools/formats/test_foreign.py, tests/tools/formats/test_foreign_hostile.py",
    "tools/formats/export": "tests/tools/formats/test_convert.py",
    "tools/formats/full_state": "tests/tools/formats/test_convert.py, tests/tools/formats/test_convert_limits.py",
    "tools/formats/gguf_file": "tests/tools/formats/test_gguf.py",
    "tools/formats/huggingface": "tests/tools/formats/test_convert.py",
    "tools/formats/load_weights": "tests/tools/formats/test_transformers.py, tests/tools/formats/test_foreign.py",
    "tools/formats/meta": "tests/tools/formats/test_convert.py",
    "tools/formats/safetensors_files": "tests/tools/formats/test_convert.py",
    "tools/formats/stock": "tests/tools/formats/test_foreign.py, tests/tools/formats/test_foreign_hostile.py",
    "tools/formats/targets": "tests/tools/formats/test_convert.py",
}


def test_each_module_has_tests_of_its_name():
    """titanlite/<room>/<name>.py is tested in tests/<room>/test_<name>.py."""
    large = {p.relative_to(ROOT / "titanlite") for p in FILES[1:] if lines_of_code(p) > 40}
    missing = {
        str(p.with_suffix(""))
        for p in large
        if not (ROOT / "tests" / p.parent / f"test_{p.name}").exists()
    }
    assert not missing - TESTED_ELSEWHERE.keys(), "no test file"
    assert not TESTED_ELSEWHERE.keys() - missing, (
        "has a test file now, or is gone: remove it from the list"
    )
    files = [
        word
        for text in TESTED_ELSEWHERE.values()
        for word in text.split(", ")
        if word.startswith("tests/")
    ]
    assert all((ROOT / name).exists() for name in files)
