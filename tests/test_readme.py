"""What the README and the pages beside it say is so: length, links, commands, route, rooms."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
from page_commands import commands

from titanlite.config.load import flavors, load_config
from titanlite.config.schema import sections
from titanlite.tools.cli.main import COMMANDS as SUBCOMMANDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
PAGES = (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md")))

NUMBERED = re.compile(r"^\d+\. \[`([^`]+)`\]\((?:\.\./)?([^)]+)\):\s.+", re.MULTILINE)
FIRST_SITTING = NUMBERED.findall(README)
ROUTE = NUMBERED.findall(ARCHITECTURE)
# The table "left out": files, and packages with all that is in them
EXCUSED = re.findall(
    r"^\| \[`(titanlite/[^`]+)`\]\(\.\./([^)]+)\) \| .+ \|$", ARCHITECTURE, re.MULTILINE
)


def test_the_readme_is_short():
    assert len(README.split()) <= 900


def test_links_of_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (ROOT / link.partition("#")[0]).exists(), link


def test_the_map_of_the_documents_names_every_document():
    assert "(docs/README.md)" in README
    page_map = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or re.search(rf"\({page.name}[#)]", page_map), page.name


def test_the_first_sitting_is_six_files_of_the_route():
    assert len(FIRST_SITTING) == 6
    assert set(FIRST_SITTING) <= set(ROUTE)


def test_the_core_route_exists():
    """Files that exist, each once, as many as the texts say."""
    assert all(name == link for name, link in ROUTE)
    names = [name for name, _ in ROUTE]
    assert len(set(names)) == len(names)
    assert all((ROOT / name).is_file() for name in names)
    assert f"{len(names)} files" in ARCHITECTURE
    assert f"{len(names)} files" in README


def imports_of_train() -> set[str]:
    """The files and packages of ours that train.py imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / "train.py").read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("titanlite"):
            continue
        path = (node.module or "").replace(".", "/")
        if (ROOT / path).is_dir():
            names |= {f"{path}/{alias.name}.py" for alias in node.names}
        else:
            names.add(f"{path}.py")
    return names


def test_every_module_that_train_imports_is_on_the_route_or_excused():
    assert all(name == link and (ROOT / link).exists() for name, link in EXCUSED)
    route = {name for name, _ in ROUTE}
    excused = {name for name, _ in EXCUSED}
    assert not route & excused
    unexplained = [
        name
        for name in sorted(imports_of_train() - route)
        if name not in excused and str(Path(*Path(name).parts[:2])) not in excused
    ]
    assert not unexplained


def places_of_rooms() -> dict[str, int]:
    """Room -> the number of its layer in the contract of pyproject.toml, counted from the ground."""
    text = (ROOT / "pyproject.toml").read_text()
    (contract,) = re.findall(r"^layers = \[.*?\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    layers = re.findall(r'^    "(.+?)"', contract, re.MULTILINE)[::-1]
    return {room: i for i, layer in enumerate(layers) for room in layer.split(" | ")}


def test_every_room_has_its_line_from_the_ground_up():
    pattern = r"^\| \[`(\w+)/`\]\(\.\./titanlite/(\w+)\) \| .+ \|$"
    rooms = re.findall(pattern, ARCHITECTURE, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "titanlite").glob("*/__init__.py")}
    assert [name for name, _ in rooms] == [link for _, link in rooms]
    assert {name for name, _ in rooms} == folders
    assert [places_of_rooms()[name] for name, _ in rooms] == sorted(places_of_rooms().values())


def test_every_tool_has_its_line():
    pattern = r"^\| \[`(\w+)/`\]\(\.\./titanlite/tools/(\w+)\) \| .+ \|$"
    tools = re.findall(pattern, ARCHITECTURE, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "titanlite/tools").glob("*/__init__.py")}
    assert {name for name, _ in tools} == {link for _, link in tools} == folders


def test_every_section_and_flavor_is_described():
    described = re.findall(r"^\| `\[(\w+)\]` \|", CONFIGURATION, re.MULTILINE)
    assert described == list(sections())
    assert all(f"`{flavor}`" in CONFIGURATION for flavor in flavors())


def test_the_readme_has_four_commands_in_the_order_in_which_they_work():
    first, second, third, fourth = commands(README)
    assert first == "./run_train.sh"
    assert second == "./run_tests.sh"
    assert third.startswith("NGPU=2 ./run_train.sh debug ")
    assert fourth == ".venv/bin/python -m titanlite verify --quick"
    resumed = load_config(shlex.split(third)[2:])
    assert resumed.training.steps > load_config(["debug"]).training.steps


def test_the_commands_of_the_readme_fit_on_a_telephone():
    """GitHub shows about 39 characters of a code block on a screen of 390 pixels."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert all(len(line) <= 39 for block in blocks for line in block.splitlines())


def test_the_first_screen_has_what_a_stranger_looks_for():
    screen = "\n".join(README.splitlines()[:40])
    assert commands(screen)[:2] == ["./run_train.sh", "./run_tests.sh"]
    assert "![" in screen
    assert "| proven |" in screen
    assert "tok/s" in screen
    assert "What it is not: " in screen
    assert "licence" in screen


def test_the_figures_of_the_first_screen_are_those_of_the_results():
    """The largest error in fp32 of all layouts, and the row of each size in its table."""
    stored = json.loads((RESULTS / "2026-11-27-verify.json").read_text())["results"]
    drawn = json.loads((RESULTS / "2026-11-27-drawn_layouts.json").read_text())
    layouts = [row for part in stored.values() for row in part["rows"]] + drawn
    assert all(row["passed"] for row in layouts)
    fp32 = [row for row in layouts if not re.search("float8|bfloat16|float16", row["layout"])]
    figures = ("loss", "grad_norm", "gradient", "parameters")
    largest = max(row[figure] for row in fp32 for figure in figures)
    assert f"largest relative error in fp32 is {largest:.1e}".replace("e-0", "e-") in README
    for size, case in {
        "1b": "1b, batch 8, compiled loss",
        "3b": "3b",
        "8b": "8b, selective, batch 2",
    }.items():
        table = (RESULTS / f"2026-11-26-throughput_{size}.md").read_text()
        (row,) = re.findall(rf"^\| {case} \|.*$", table, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        speed, mfu, peak = cells[1], cells[3], float(cells[6])
        assert f"{speed}, {mfu}, {peak:.1f} GiB" in README


PAGES_WITH_COMMANDS = [ROOT / "README.md", ROOT / "docs/running.md"]
TRAINING = [
    command
    for page in PAGES_WITH_COMMANDS
    for command in commands(page.read_text())
    if "./run_train.sh" in command
]
TOOLS = [
    command
    for page in PAGES_WITH_COMMANDS
    for command in commands(page.read_text())
    if command.startswith("titanlite ")
]


@pytest.mark.parametrize("command", TRAINING)
def test_commands_parse(command):
    words = shlex.split(command)
    arguments = words[words.index("./run_train.sh") + 1 :]
    if "--help" not in arguments:
        load_config(arguments)


def test_every_subcommand_is_shown():
    assert len(TRAINING) >= 5
    assert {shlex.split(command)[1] for command in TOOLS} >= set(SUBCOMMANDS) - {"train"}


def test_documents_name_existing_files():
    for document in PAGES:
        for name in re.findall(
            r"`((?:titanlite|tests|train_configs|docs)/[\w./-]+\.\w+)`", document.read_text()
        ):
            assert (ROOT / name).exists(), f"{document.name}: {name}"
