"""What Python processes of ours can import; tests/e2e/test_hostile_folder.py starts every command."""

from __future__ import annotations

import ast
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

import train
from titanlite.runtime import interpreter, limited_child
from titanlite.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def process(monkeypatch, tmp_path):
    """As if this were a process that Python has just started in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/usr/lib/python"])
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(sys, "flags", type("Flags", (), {"isolated": 0}))  # of Python 3.10
    return tmp_path


@pytest.mark.parametrize("first", ["", "current", f"{ROOT}/titanlite"])
def test_what_python_puts_first_is_taken_out(process, monkeypatch, first):
    sys.path.insert(0, str(process) if first == "current" else first)
    interpreter.leave_out_current_folder()
    assert sys.path == ["/usr/lib/python"]
    assert os.environ["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize("variable", [":/a", "/a:", "/a::/b"])
def test_empty_entries_of_the_variable_are_taken_out(process, monkeypatch, variable):
    monkeypatch.setenv("PYTHONPATH", variable)
    sys.path[:0] = ["/bin", *(entry or str(process) for entry in variable.split(":"))]
    interpreter.leave_out_current_folder()
    assert sys.path == ["/bin", *filter(None, variable.split(":")), "/usr/lib/python"]
    assert os.environ["PYTHONPATH"] == ":".join(filter(None, variable.split(":")))


@pytest.mark.parametrize("variable", ["{}", ":{}", "."])
def test_a_current_folder_that_the_variable_names_stays(process, monkeypatch, variable):
    monkeypatch.setenv("PYTHONPATH", variable.format(process))
    sys.path[:0] = ["/bin", str(process)]
    interpreter.leave_out_current_folder()
    assert sys.path == ["/bin", str(process), "/usr/lib/python"]
    assert os.environ["PYTHONPATH"] == str(process)


def test_a_safe_path_stays(process, monkeypatch):
    """Its first entry is not the current folder that Python puts there, even if it is the same one."""
    monkeypatch.setattr(sys, "flags", type("Flags", (), {"isolated": 0, "safe_path": True}))
    sys.path.insert(0, str(process))
    interpreter.leave_out_current_folder()
    assert sys.path == [str(process), "/usr/lib/python"]


def test_a_deleted_current_folder(process):
    sys.path.insert(0, "")
    process.rmdir()
    interpreter.leave_out_current_folder()
    assert sys.path == ["/usr/lib/python"]
    process.mkdir()


def test_children_find_the_package_unless_it_is_installed(monkeypatch):
    assert interpreter.environment({}) == {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    assert interpreter.environment({"PYTHONPATH": f":/a:{ROOT}:"})["PYTHONPATH"] == f"/a:{ROOT}"
    monkeypatch.setattr(interpreter, "PACKAGES", site.getsitepackages()[0])
    assert interpreter.environment({})["PYTHONPATH"] == ""


@pytest.mark.parametrize("safe", ["", "1"])
def test_code_does_not_find_the_current_folder(tmp_path, safe):
    """Without the variable too, which Python 3.10 does not know."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    environment = os.environ | {"PYTHONSAFEPATH": safe}
    done = subprocess.run(
        interpreter.python("import json; print(sys.argv[1:])", 1, "a b"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['1', 'a b']\n"


def test_an_isolated_process_finds_neither_the_current_folder_nor_pythonpath(tmp_path):
    (tmp_path / "resource.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        interpreter.isolated(limited_child.forbid, []),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0


def test_processes_are_started_from_the_root_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert interpreter.in_root_folder(os.getcwd) == "/"
    with pytest.raises(ZeroDivisionError):
        interpreter.in_root_folder(lambda: 1 / 0)
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_standard_streams_that_are_closed(tmp_path, closed):
    """The same numbers for a child; a file that is opened gets none of them."""
    child = "import os; [os.fstat(number) for number in range(3)]"
    code = (
        "import subprocess, sys; from titanlite.tools.cli.main import main; "
        "code = main(['--version']); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); assert file.fileno() > 2; "
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **interpreter.environment()},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("run", [main, train.run], ids=["a command", "train.py"])
def test_programs_open_what_is_closed(monkeypatch, run):
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["train", "--help"]) == 0
    assert sys.stdout is not None


# Where a program names the interpreter, or starts processes by multiprocessing, and why it finds no
# module of the current folder. Anything else uses `interpreter.python` or `interpreter.call`.
STARTERS = {
    "runtime/interpreter.py": "the functions themselves",
    "tools/cli/processes.py": "starts train.py by its path, in `interpreter.environment`",
    "tools/verify/pool.py": "starts its server in / and in `interpreter.environment`",
    "runtime/shell_command.py": "prints the interpreter's name; asks it, isolated, for titanlite",
}


def test_every_interpreter_is_started_by_these_functions():
    found = set()
    for path in (ROOT / "titanlite").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if any(
                name.startswith(("sys.executable", "multiprocessing", "ProcessPoolExecutor"))
                for name in names
            ):
                found.add(path.relative_to(ROOT / "titanlite").as_posix())
    assert found == STARTERS.keys()
