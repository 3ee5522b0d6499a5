"""learn/steps/: ten programs that compute what train.py computes."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from runs import curve, train_run

from titanlite.tools.learn.check import expected_losses
from titanlite.tools.learn.exercise import gap_lines
from titanlite.tools.learn.lessons import LESSONS
from titanlite.tools.learn.measure import losses_of

ROOT = Path(__file__).parents[3]
STEPS = ROOT / "learn/steps"
PROGRAMS = sorted(STEPS.glob("[0-9]*_*.py"), key=lambda path: int(path.stem.split("_")[0]))


@pytest.mark.slow
def test_the_files_are_those_that_titanlite_makes_and_trains_on(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    make_files = runpy.run_path(str(STEPS / "make_rows.py"))["make_files"]
    make_files(tmp_path)
    for name in ("text.txt", "bytes.model", "rows.txt"):
        assert (tmp_path / name).read_text() == (STEPS / name).read_text()
    files = [f"--data.path={tmp_path}/text.txt", f"--data.tokenizer={tmp_path}/bytes.model"]
    for name, file in (("steps", "losses.txt"), ("experts", "experts_losses.txt")):
        arguments = [str(STEPS / f"{name}.toml"), f"--run.folder={tmp_path}", *files]
        assert pool.run(1, train_run, arguments) == [0]
        trained = curve(tmp_path / name)
        losses, norms = expected_losses(file)
        assert [loss for loss, _ in trained.values()] == pytest.approx(losses, rel=1e-5)
        assert [norm for _, norm in trained.values()] == pytest.approx(norms, rel=1e-4)


# Numbers of processes other than those of the lessons, which test_check.py runs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("10_experts", 4),
        ("2_ddp", 4),
        ("3_zero1", 4),
        ("4_fsdp", 4),
        ("6_fsdp_tp", 2),
        ("7_pipeline", 3),
        ("7_pipeline", 4),
        ("8_ring_attention", 4),
    ],
)
def test_every_step_prints_the_losses_of_train(pool, name, processes):
    (lesson,) = [lesson for lesson in LESSONS if lesson.step == name]
    losses, _ = expected_losses(lesson.losses)
    ranks = pool.run(processes, losses_of, str(STEPS / f"{name}.py"), timeout=120)
    assert ranks[0] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]])
def test_a_step_starts_its_own_processes_and_runs_under_torchrun(launcher):
    program = ["learn/steps/3_zero1.py", *([] if launcher else ["2"])]
    command = [sys.executable, *launcher, *program]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    printed = [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]
    assert printed == pytest.approx(expected_losses("losses.txt")[0], abs=2e-5), done.stderr


@pytest.mark.parametrize("variable", [True, False], ids=["torchrun", "argument"])
@pytest.mark.parametrize("number", ["0", "3", "two"])
def test_a_number_of_processes_that_does_not_divide_is_refused(monkeypatch, variable, number):
    monkeypatch.setattr(sys, "argv", ["4_fsdp.py", *([] if variable else [number])])
    if variable:
        monkeypatch.setenv("WORLD_SIZE", number)
    launch = runpy.run_path(str(STEPS / "common.py"))["launch"]
    with pytest.raises(SystemExit, match=f"{number} processes; this step runs on 1, 2, 4"):
        launch(list, processes=2, allowed=(1, 2, 4))


def imported(path: Path) -> set[str]:
    """The modules that a file imports, by their first name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_step_is_short_plain_and_names_what_replaces_it(path):
    text = path.read_text()
    assert 100 <= len(text.splitlines()) <= 150
    own = {"common", "llama", "tokens"}
    assert imported(path) - own <= {"__future__", "torch", *sys.stdlib_module_names}
    header = ast.get_docstring(ast.parse(text))
    for part in ("What is new:", "What it costs:", "Read next:", f"python learn/steps/{path.name}"):
        assert part in header, part
    first, last = gap_lines(text)
    assert 20 <= last - first + 1 <= 40, "lines of the gap"
    end = text.partition("# With torch, and in titanlite:")[2]
    named = re.findall(r"([\w/]+\.py): ([\w, ]+)", end)
    assert named
    for file, names in named:
        for name in names.split(", "):
            assert re.search(
                rf"^ *(def|class) {name.strip()}\b", (ROOT / file).read_text(), re.M
            ), name


def test_there_are_ten_programs_and_a_lesson_for_each():
    assert [path.stem for path in PROGRAMS] == [lesson.step for lesson in LESSONS if lesson.step]
    assert len(PROGRAMS) == 10
    assert "titanlite" not in imported(STEPS / "llama.py") | imported(STEPS / "common.py")
