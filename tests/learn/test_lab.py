"""The failure lab: the answers are in the files of each run, and wrong ones are refused."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launches import environment

from titanlite.distributed.run_folder import lock
from titanlite.runtime.errors import ConfigError

ROOT = Path(__file__).parents[2]
LAB = ROOT / "learn/lab/lab.py"


def start(folder: Path, case: str) -> None:
    """Runs a case in separate processes."""
    command = [sys.executable, str(LAB), "start", case, "--folder", str(folder)]
    variables = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def read_answers(case: str, run: Path) -> dict[str, str]:
    """What a reader finds in the files, and not in the hidden one."""
    console = (run / "console.txt").read_text()
    steps = [int(path.name[5:]) for path in run.glob("checkpoints/step-*") if "." not in path.name]
    found = {"survived": str(max(steps))}
    if case == "freeze":
        (report,) = run.glob("hang/rank-*.txt")
        first = report.read_text().splitlines()[0]
        match = re.match(r'rank (\d) .* in "(.+)" of step (\d+) ', first)
        assert match, first
        found |= dict(zip(("rank", "phase", "at"), match.groups(), strict=True))
        assert f"rank-{found['rank']}" not in report.name
    elif case == "kill":
        match = re.search(r"the process of rank (\d) was killed by SIGKILL", console)
        assert match, console
        (unfinished,) = run.glob("checkpoints/step-*.tmp-*")
        found["rank"] = match[1]
        found["at"] = unfinished.name.partition(".")[0].removeprefix("step-")
        found["phase"] = "saving"
    elif case == "disk":
        match = re.search(r"step (\d+) could not be saved in .*: rank (\d): .*too large", console)
        assert match, console
        found["at"], found["rank"] = match.groups()
    else:
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        (text,) = [event["text"] for event in events if event["event"] == "rollback"]
        match = re.match(r"step (\d+) \(samples (\d+) to (\d+)\).*rolled back to step (\d+)", text)
        assert match, text
        found = {"at": match[1], "samples": f"{match[2]}-{match[3]}", "survived": match[4]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["freeze", "kill", "disk", "poison"])
def test_right_answers_are_in_the_files_and_wrong_ones_are_refused(tmp_path, capsys, case):
    start(tmp_path, case)
    answers = read_answers(case, tmp_path / case)
    main = runpy.run_path(str(LAB))["main"]

    def answer(given: dict[str, str]) -> tuple[int, str]:
        words = [word for name, value in given.items() for word in (f"--{name}", value)]
        code = main(["answer", case, "--folder", str(tmp_path), *words])
        return code, capsys.readouterr().out

    code, output = answer(answers)
    assert code == 0, output
    assert "All right." in output
    for name, value in answers.items():
        wrong = f"{value}1"
        if name == "phase":
            wrong = "update" if value != "update" else "saving"
        code, output = answer(answers | {name: wrong})
        assert code == 1, output
        assert f"--{name} {wrong}: this is not" in output
        assert output.count(": right") == len(answers) - 1
    code, output = answer({})
    assert code == 1
    assert output.count("not answered") == len(answers)


def test_mistakes_are_answered(tmp_path):
    main = runpy.run_path(str(LAB))["main"]
    folder = ["--folder", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"did you mean freeze\?"):
        main(["start", "freez", *folder])
    with pytest.raises(ConfigError, match="expected `start kill` before"):
        main(["answer", "kill", *folder])
    refused = [
        ("answer poison --rank 1", "--rank: poison does not ask for it; expected --at, --samples"),
        ("answer freeze --phase upd", "'upd'.*one of: reading data, forward and backward, update"),
        ("answer poison --samples 16", "expected the first and the last, as 16-23"),
        ("answer kill --at eight", "--at 'eight': expected a number"),
        ("start kill --at 8", "expected `answer kill`"),
    ]
    for command, message in refused:
        with pytest.raises(ConfigError, match=message):
            main([*command.split(), *folder])
    with lock(tmp_path / ".lab.lock"), pytest.raises(ConfigError, match="a case is running there"):
        main(["start", "disk", *folder])
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not a folder of the lab"):
        main(["start", "disk", *folder])
    assert (tmp_path / "disk/mine.txt").exists()
