"""Copies the documents to where a site generator can read them, with links that work on the site.

    ./run_docs.sh            # this, then mkdocs-material; build/docs/site/index.html
    ./run_docs.sh serve      # the same on http://127.0.0.1:8000

What it is: every page that can be reached from README.md, at its path in the repository. A page
may link to a source file or a folder; on GitHub that works, on a site it would lead nowhere. So
each linked source file becomes a page with its text, and each linked folder a list of its files.
The navigation is the map in docs/README.md.
Why it is here: the Markdown stays what is read in an editor and on GitHub, and is the only source.
What it costs: seconds, and some hundred files in build/docs, which git ignores.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build/docs/pages"
CONFIG = ROOT / "build/docs/mkdocs.yml"
IMAGES = {".svg", ".png", ".jpg", ".html"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".yml": "yaml"}
LINKED = ("titanlite", "train_configs")  # folders whose files are pages too; others are only listed


class Stage:
    """Writes pages, and follows their links."""

    def __init__(self, root: Path, pages: Path) -> None:
        self.root = root
        self.pages = pages
        self.written: set[str] = set()
        self.waiting = ["README.md"]

    def run(self) -> None:
        while self.waiting:
            name = self.waiting.pop()
            if name in self.written:
                continue
            self.written.add(name)
            source = self.root / name
            if source.is_dir():
                self._write_folder(name)
            elif source.suffix == ".md":
                text = source.read_text()
                (self._target(name)).write_text(self.convert(name, text))
            elif source.suffix in IMAGES:
                shutil.copyfile(source, self._target(name))
            else:
                self._write_source(name)

    def convert(self, name: str, text: str) -> str:
        """A page's Markdown with the site's links, outside of code."""
        parts = []
        end = 0
        for fence in FENCE.finditer(text):
            parts += [self._convert_prose(name, text[end : fence.start()]), fence[0]]
            end = fence.end()
        return "".join([*parts, self._convert_prose(name, text[end:])])

    def _convert_prose(self, name: str, prose: str) -> str:
        # Where a list follows a line of text, the generator expects an empty line before it
        prose = re.sub(r"(?m)^((?![-*|#> ]|\d+\. ).+)\n(?=(?:[-*]|\d+\.) )", r"\1\n\n", prose)
        return LINK.sub(lambda link: link[1] + self._link(name, link[2]) + link[3], prose)

    def _link(self, name: str, link: str) -> str:
        target, hash_sign, anchor = link.partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        source = self.root / path
        if not source.exists():
            return link  # the generator reports it
        self.waiting.append(path)
        page = path
        if source.is_dir():
            page = self._index(path)
        elif source.suffix not in {".md", *IMAGES}:
            page = f"{path}.md"
            anchor = re.sub(r"^L(\d+)$", r"L-0-\1", anchor)  # as the highlighter names a line
        return posixpath.relpath(page, posixpath.dirname(name) or ".") + hash_sign + anchor

    def _index(self, folder: str) -> str:
        """The page of a folder: its README.md, or a list of its files."""
        readme = f"{folder}/README.md"
        if (self.root / readme).exists():
            self.waiting.append(readme)
            return readme
        return f"{folder}/index.md"

    def _write_folder(self, folder: str) -> None:
        page = self._index(folder)
        if page.endswith("README.md"):
            return
        lines = [f"# {folder}", ""]
        for path in sorted((self.root / folder).iterdir()):
            if not path.is_file() or path.name.startswith("."):
                continue
            shown = f"`{path.name}`"
            if folder.startswith(LINKED):
                shown = f"[{path.name}]({self._link(page, path.name)})"
            lines.append(f"- {shown}{_first_line(path)}")
        self._target(page).write_text("\n".join(_hidden(lines)) + "\n")

    def _write_source(self, name: str) -> None:
        text = (self.root / name).read_text()
        fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
        language = LANGUAGES.get(Path(name).suffix, "text")
        lines = [f"# {name}", "", f'{fence}{language} linenums="1"', text.rstrip(), fence]
        self._target(f"{name}.md").write_text("\n".join(_hidden(lines)) + "\n")

    def _target(self, name: str) -> Path:
        path = self.pages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _hidden(lines: list[str]) -> list[str]:
    """Source files would come first in every search."""
    return ["---", "search:", "  exclude: true", "---", "", *lines]


def _first_line(path: Path) -> str:
    """What a Python file says of itself in its first line."""
    found = re.match(r'"""(.+?)(?:"""|\n)', path.read_text()) if path.suffix == ".py" else None
    return f": {found[1]}" if found else ""


def navigation(page_map: str) -> list[dict[str, object]]:
    """The headings of docs/README.md, each with its pages."""
    entries: list[dict[str, object]] = [
        {"titanlite": "README.md"},
        {"All documents": "docs/README.md"},
    ]
    for section in re.split(r"^## ", page_map, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        pages = [
            {title[0].upper() + title[1:]: posixpath.normpath(posixpath.join("docs", link))}
            for title, link in re.findall(r"\[([^]]+)\]\(([^)#]+\.md)\)", body)
        ]
        entries.append({heading: pages})
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy the documents for the site generator.")
    parser.add_argument("--report", type=Path, help="the report of a run, shown as a page")
    options = parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    Stage(ROOT, PAGES).run()
    entries = navigation((ROOT / "docs/README.md").read_text())
    if options.report:
        shutil.copyfile(options.report, PAGES / "report_of_a_run.html")
        (PAGES / "a_run.md").write_text((ROOT / "docs/site/a_run.md.txt").read_text())
        entries.append({"The report of a run": "a_run.md"})
    theme = (ROOT / "docs/site/mkdocs.yml").read_text()
    CONFIG.write_text(f"{theme}\nnav: {json.dumps(entries)}\n")


if __name__ == "__main__":
    main()
