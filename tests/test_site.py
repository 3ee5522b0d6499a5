"""The site of the documents: what the generator is given has every page, and links that work there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs.site.stage import LINK, Stage, navigation

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    Stage(ROOT, folder).run()
    return folder


def test_links_lead_to_pages_of_the_site(pages):
    linked = 0
    for page in pages.rglob("*.md"):
        text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for _, link, _ in LINK.findall(text):
            target = link.partition("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).is_file(), f"{page}: {link}"
                linked += 1
    assert linked > 500


def test_every_document_is_a_page_and_in_the_navigation(pages):
    entries = navigation((ROOT / "docs/README.md").read_text())
    named = {page for entry in entries for pages_of in entry.values() for page in listed(pages_of)}
    for path in (ROOT / "docs").glob("*.md"):
        assert (pages / "docs" / path.name).is_file()
        assert f"docs/{path.name}" in named


def listed(entry: object) -> list[str]:
    """The pages of an entry of the navigation."""
    if isinstance(entry, list):
        return [page for part in entry for page in part.values()]
    return [str(entry)]


def test_source_files_and_folders_become_pages(pages, tmp_path):
    source = (pages / "titanlite/parallel/fsdp.py.md").read_text()
    assert (ROOT / "titanlite/parallel/fsdp.py").read_text().rstrip() in source
    folder = (pages / "titanlite/parallel/index.md").read_text()
    assert "[fsdp.py](fsdp.py.md)" in folder
    page = Stage(ROOT, tmp_path).convert(
        "docs/x.md",
        "Text:\n- [a](../train.py#L3)\n- [b](https://c)\n\n```\n[d](../train.py)\n```\n",
    )
    assert page == (
        "Text:\n\n- [a](../train.py.md#L-0-3)\n- [b](https://c)\n\n```\n[d](../train.py)\n```\n"
    )


def test_the_script_refuses_what_it_does_not_know():
    done = subprocess.run(
        [shutil.which("bash") or "bash", "run_docs.sh", "sevre"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "error: sevre: expected nothing or serve\n"
