"""What the README says is so: the tour is the tree, the sections are the config's, the commands parse."""

import re
import shlex
from pathlib import Path

import pytest

from titanlite.config.load import flavors, load_config
from titanlite.config.schema import sections

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TRIVIAL = {"__init__.py", "__main__.py"}


def test_the_tour_visits_every_file_once():
    tour = re.findall(r"^\d+\. \[`([^`]+)`\]\(([^)]+)\): .+", README, re.MULTILINE)
    assert all(name == link for name, link in tour)
    package = (p for p in (ROOT / "titanlite").rglob("*.py") if p.name not in TRIVIAL)
    files = ["train.py", *(str(path.relative_to(ROOT)) for path in package)]
    assert sorted(name for name, _ in tour) == sorted(files)


def test_every_section_and_flavor_is_described():
    assert re.findall(r"^\| `\[(\w+)\]` \|", README, re.MULTILINE) == list(sections())
    assert all(f"`{flavor}`" in README for flavor in flavors())


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


COMMANDS = [line.partition("#")[0] for line in README.splitlines() if "./run_train.sh" in line and line[:1] in ".N"]


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
        for name in re.findall(r"`((?:titanlite|tests|train_configs|docs)/[\w./-]+\.\w+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name}: {name}"
