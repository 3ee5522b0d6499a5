"""What the README says is so: the core route, the rooms, the sections of the config, the commands."""

import re
import shlex
from pathlib import Path

import pytest
from test_architecture import floor

from titanlite.config.load import flavors, load_config
from titanlite.config.schema import sections

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


ROUTE = re.findall(r"^\d+\. \[`([^`]+)`\]\(([^)]+)\): .+", README, re.MULTILINE)


def test_the_core_route_exists():
    """Files that exist, each once, as many as the text says."""
    assert all(name == link for name, link in ROUTE)
    names = [name for name, _ in ROUTE]
    assert len(set(names)) == len(names)
    assert all((ROOT / name).is_file() for name in names)
    assert f"{len(names)} files" in README


def test_every_room_has_its_line_from_the_ground_up():
    rooms = re.findall(r"^\| \[`(\w+)/`\]\(titanlite/(\w+)\) \| .+ \|$", README, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "titanlite").glob("*/__init__.py")}
    assert [name for name, _ in rooms] == [link for _, link in rooms]
    assert {name for name, _ in rooms} == folders
    floors = [floor(name) for name, _ in rooms]
    assert floors == sorted(floors)


def test_every_section_and_flavor_is_described():
    assert re.findall(r"^\| `\[(\w+)\]` \|", README, re.MULTILINE) == list(sections())
    assert all(f"`{flavor}`" in README for flavor in flavors())


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


COMMANDS = [
    line.partition("#")[0]
    for line in README.splitlines()
    if "./run_train.sh" in line and line[:1] in ".N"
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    words = shlex.split(command)
    arguments = words[words.index("./run_train.sh") + 1 :]
    if "--help" not in arguments:
        load_config(arguments)


def test_there_are_commands():
    assert len(COMMANDS) >= 5


def test_documents_name_existing_files():
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(
            r"`((?:titanlite|tests|train_configs|docs)/[\w./-]+\.\w+)`", document.read_text()
        ):
            assert (ROOT / name).exists(), f"{document.name}: {name}"
