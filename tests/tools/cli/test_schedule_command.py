"""`titanlite schedule`: the numbers under the picture, the picture's shape, and the SVG."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from messages import assert_mentions

from titanlite.tools.cli.main import main

ROOT = Path(__file__).parents[3]
RUN = [
    "schedule",
    "debug",
    "--training.steps=100",
    "--schedule.warmup_steps=10",
    "--optimizer.lr=1e-3",
]


def table(text: str) -> dict[str, list[str]]:
    """Name of a mark -> the other columns of its row."""
    lines = text.rpartition("\n\n")[2].splitlines()[1:]
    return {line[:22].strip(): line[22:].split() for line in lines}


def test_numbers_and_picture(capsys):
    assert main([*RUN, "--schedule.name=wsd", "--schedule.decay_steps=20"]) == 0
    text = capsys.readouterr().out
    assert table(text) == {
        "first step": ["1", "1.024k", "1.00e-04"],
        "peak, end of warmup": ["10", "10.24k", "1.00e-03"],
        "end of stable phase": ["80", "81.92k", "1.00e-03"],
        "last step": ["100", "102.4k", "1.00e-04"],
    }
    assert max(map(len, text.splitlines())) <= 80
    assert_mentions(text, "debug: wsd, linear decay", "step  1", "tokens  1.024k")
    top, *_ = [line for line in text.splitlines() if line.startswith("  1.00e-03 |")]
    at_peak = [12 + i for i, block in enumerate(top[12:]) if block == "█"]
    assert (at_peak[0] - 12) / 68 == pytest.approx(0.1, abs=0.02)
    assert (at_peak[-1] - 12) / 68 == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--schedule.name=constant"], {"last step": ["100", "102.4k", "1.00e-03"]}),
        (["--schedule.name=inverse_sqrt"], {"last step": ["100", "102.4k", "3.16e-04"]}),
        (
            [
                "--schedule.name=step",
                "--schedule.milestones=0.5 from step 51, 0.25 from 76_800 tokens",
            ],
            {"milestone": ["76", "77.82k", "2.50e-04"], "last step": ["100", "102.4k", "2.50e-04"]},
        ),
        (["--schedule.warmup_steps=200"], {"last step": ["100", "102.4k", "5.00e-04"]}),
        (
            ["--training.steps=1", "--schedule.warmup_steps=0"],
            {"last step": ["1", "1.024k", "1.00e-03"]},
        ),
        (["--optimizer.lr=0"], {"last step": ["100", "102.4k", "0.00e+00"]}),
    ],
)
def test_other_shapes(options, expected, capsys):
    assert main([*RUN, *options]) == 0
    found = table(capsys.readouterr().out)
    assert {name: found.get(name) for name in expected} == expected


def test_the_batch_size_is_drawn_where_it_changes(capsys, tmp_path):
    ramp = "--training.batch_ramp=16 from step 11, 32 by 8 from 200_000 tokens"
    assert main([*RUN, ramp, f"--svg={tmp_path}/a.svg"]) == 0
    text = capsys.readouterr().out
    assert_mentions(text, "sequences per step")
    # 10 steps of 8 and then 16 sequences of 128 tokens; 24 from the middle between 10,240 and
    # 200,000 tokens
    rows = [line.split() for line in text.splitlines() if line.startswith("batch size")]
    assert [(row[2], row[-1]) for row in rows] == [("11", "16"), ("58", "24"), ("89", "32")]
    assert len(list(ET.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_the_svg_is_one_accessible_file_for_light_and_dark(capsys, tmp_path):
    path = tmp_path / "curve.svg"
    assert main([*RUN, "--run.name=a<b&c", "--svg", str(path)]) == 0
    capsys.readouterr()
    text, root = path.read_text(), ET.parse(path).getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert root.get("role") == "img"
    ids = root.get("aria-labelledby").split()
    assert [root.find(f"{name}{tag}").get("id") for tag in ("title", "desc")] == ids
    assert root.find(f"{name}title").text == "a<b&c: cosine"
    assert_mentions(
        root.find(f"{name}desc").text,
        "peak, end of warmup: step 10",
        "1.00e-03",
        "last step: step 100",
    )
    assert_mentions(text, "prefers-color-scheme:dark")
    assert (
        not any(word in text for word in ("http://", "https://", "href", "url(", "<script"))
        or text.count("http") == 1
    )
    points = [
        tuple(map(float, p.split(","))) for p in root.find(f"{name}polyline").get("points").split()
    ]
    xs, ys = zip(*points, strict=True)
    assert list(xs) == sorted(xs)
    assert min(ys) == ys[9] == 44  # the peak, at the top
    assert ys[-1] == pytest.approx(44 + 240 * 0.9, abs=0.1)  # a tenth of it
    assert len(text) < 20_000


def test_a_budget_in_epochs_is_that_of_the_run(capsys, text_file):
    """150 kB of text; the run says how many steps these are."""
    assert main(["schedule", "debug", f"--data.path={text_file}", "--training.epochs=2"]) == 0
    twice = int(table(capsys.readouterr().out)["last step"][0].replace(",", ""))
    assert main(["schedule", "debug", f"--data.path={text_file}", "--training.epochs=1"]) == 0
    once = int(table(capsys.readouterr().out)["last step"][0].replace(",", ""))
    assert 2 * once - 1 <= twice <= 2 * once
    assert once > 20


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--sgv=x"], ("unknown option --sgv", "did you mean --svg?")),
        (["--schedule.nam=wsd"], ("schedule.nam", "did you mean schedule.name?")),
        (["--svg=no/such/folder/x.svg"], ("no/such/folder/x.svg", "No such file")),
        (["--svg"], ("--svg", "expected one argument")),
        (["--schedule.name=step"], ("schedule.milestones = ''", "0.316 from step 8001")),
    ],
)
def test_mistakes_are_one_line(options, expected, capsys):
    assert main([*RUN, *options]) == 2
    error = capsys.readouterr().err
    assert_mentions(error, *expected)
    assert error.count("\n") == 1


def test_it_draws_without_torch_and_in_ascii():
    code = (
        "import sys; from titanlite.tools.cli.main import main; main(sys.argv[1:]); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-X", "utf8=0", "-c", code, *RUN]
    result = subprocess.run(
        command, cwd=ROOT, env={"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert result.stdout.splitlines()[-1] == "False", result.stderr
    assert "####" in result.stdout
    assert result.stdout.isascii()
