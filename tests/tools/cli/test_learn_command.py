"""`titanlite learn`."""

import re
import subprocess
from pathlib import Path

import pytest

from titanlite.tools.cli.main import main
from titanlite.tools.learn.exercise import OPEN
from titanlite.tools.learn.lessons import LESSONS
from titanlite.tools.learn.problems import PROBLEMS, answer, plan_of
from titanlite.tools.learn.progress import progress_file

COURSE = Path(__file__).parents[3] / "learn"


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write_right_answers(folder: Path) -> None:
    lines = []
    for problem in PROBLEMS["planning"]:
        lines.append(f"[{problem.name}]")
        plan = plan_of(problem.arguments, problem.gpus)
        lines += [f"{question} = {answer(plan, question)!r}" for question in problem.questions]
    (folder / "answers.toml").write_text("\n".join(lines))


@pytest.mark.slow
def test_a_lesson_is_started_checked_and_listed_as_passed(capsys, tmp_path):
    assert main(["learn", "start", "planning"]) == 0
    assert "titanlite learn check learn-planning\n" in capsys.readouterr().out
    assert main(["learn", "check", "learn-planning"]) == 1
    write_right_answers(tmp_path / "learn-planning")
    assert main(["learn", "check", "learn-planning"]) == 0
    assert "titanlite learn start five_axes\n" in capsys.readouterr().out
    assert main(["learn"]) == 0
    rows = capsys.readouterr().out.splitlines()[: len(LESSONS)]
    assert [row.split()[1] for row in rows if " passed " in row] == ["planning"]


@pytest.mark.slow
def test_the_commands_of_an_exercise_run_in_its_folder_as_printed(tmp_path, monkeypatch):
    """Where titanlite is not installed, and the gap is still open."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert main(["learn", "start", "fsdp", "--folder", "my exercise"]) == 0
    folder = tmp_path / "my exercise"
    block = re.findall(r"^```\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)[0]
    program, check = block.splitlines()
    for command, said in ((program, OPEN), (check, "WRONG  the program failed")):
        done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 1
        assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chek"], "did you mean check?"),
        (["start", "dpp"], "unknown lesson 'dpp'"),
        (["check", "nowhere"], "nowhere: no lesson.txt"),
        (["check"], "titanlite learn start"),
        (["check", "--timeout=0"], "--timeout"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, said, capsys):
    assert main(["learn", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_damaged_record_of_progress_is_named(capsys):
    progress_file().parent.mkdir(parents=True)
    progress_file().write_text("{")
    assert main(["learn"]) == 2
    assert str(progress_file()) in capsys.readouterr().err


def test_the_course_lists_every_lesson_and_its_links_lead_somewhere():
    text = (COURSE / "README.md").read_text()
    for number, lesson in enumerate(LESSONS, start=1):
        assert f"| {number} | [{lesson.name}](lessons/{number:02}_{lesson.name}.md) |" in text
        page = (COURSE / f"lessons/{number:02}_{lesson.name}.md").read_text()
        assert page.startswith(f"# {number}. {lesson.title}\n")
        assert page.count("<summary>answer</summary>") >= 2
