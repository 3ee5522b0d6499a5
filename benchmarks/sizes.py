"""The size of the project: code by room, words by page, and the modules that a short run loads.

    python benchmarks/sizes.py                 this checkout
    python benchmarks/sizes.py BEFORE          another checkout of titanlite, of any commit
    python benchmarks/sizes.py BEFORE AFTER    two checkouts, side by side

Lines of code are those on which a token of the program stands: comments, docstrings and blank
lines are not counted. A room is a folder of titanlite/ or of titanlite/tools/. The run is two
steps of `debug` by `python train.py`, saved and reported, and its modules are those of titanlite.
The output is Markdown. It takes half a minute for each checkout.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("tests", "benchmarks", "docs", "learn")  # folders of code beside the package
PAGES = ("*.md", "docs/**/*.md", "learn/**/*.md")
SPACES = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
HOOK = """
import os, sys

def leave(code, leave=os._exit):
    names = sorted(name for name in sys.modules if name.split(".")[0] == "titanlite")
    with open(os.environ["LOADED"], "w") as file:
        file.write("\\n".join(names))
    leave(code)

os._exit = leave  # train.py ends with it
"""
OPTIONS = ["debug", "--run.device=cpu", "--training.steps=2"]

Sizes = dict[str, int]


def lines_of_code(source: str) -> int:
    """Lines with a token of the program, without those of docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.type not in SPACES:
            lines |= set(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def code_below(path: Path) -> int:
    return sum(lines_of_code(file.read_text()) for file in sorted(path.rglob("*.py")))


def code_of_rooms(folder: Path) -> Sizes:
    """The lines of code of each room, and of each file beside the rooms."""
    rooms = {path.name: code_below(path) for path in sorted(folder.iterdir()) if is_room(path)}
    files = {
        path.name: lines_of_code(path.read_text())
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("__")
    }
    return rooms | files


def is_room(path: Path) -> bool:
    return (path / "__init__.py").is_file() and path.name != "tools"


def code(root: Path) -> Sizes:
    core = {"train.py": lines_of_code((root / "train.py").read_text())}
    core |= code_of_rooms(root / "titanlite")
    tools = code_of_rooms(root / "titanlite/tools")
    sizes = {"**core**": sum(core.values())}
    sizes |= core
    sizes["**tools**"] = sum(tools.values())
    sizes |= {f"tools/{name}": lines for name, lines in tools.items()}
    for name in OTHERS:
        sizes[f"**{name}**"] = code_below(root / name)
    return sizes


def words(root: Path) -> Sizes:
    """The words of each page, as `wc -w` counts them."""
    pages = sorted({page for pattern in PAGES for page in root.glob(pattern)})
    sizes = {str(page.relative_to(root)): len(page.read_text().split()) for page in pages}
    return {"**all pages**": sum(sizes.values())} | sizes


def modules(root: Path) -> Sizes:
    """The modules of titanlite that a run of two steps has loaded when it ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        loaded = folder / "loaded"
        environment = os.environ | {"PYTHONPATH": f"{folder}:{root}", "LOADED": str(loaded)}
        command = [sys.executable, "train.py", *OPTIONS, f"--run.folder={folder}"]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{root}: {' '.join(command)}\n{done.stdout}{done.stderr}")
        names = loaded.read_text().splitlines()
    in_tools = sum(name.startswith("titanlite.tools") for name in names)
    return {"**modules of titanlite**": len(names), "of these in tools": in_tools}


TABLES: dict[str, Callable[[Path], Sizes]] = {
    "lines of code": code,
    "words": words,
    "loaded by a run of two steps": modules,
}


def table(title: str, columns: list[Sizes]) -> list[str]:
    """A table with a column for each checkout; a dash where a checkout does not have the row."""
    heads = ["before", "after"] if len(columns) == 2 else [""]
    lines = [f"| {title} | {' | '.join(heads)} |", "|---" + "|---:" * len(columns) + "|"]
    for name in dict.fromkeys(name for sizes in reversed(columns) for name in sizes):
        cells = [f"{sizes[name]:,}" if name in sizes else "-" for sizes in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT], help="checkouts")
    roots = [folder.resolve() for folder in parser.parse_args().folders]
    if len(roots) > 2:
        parser.error(f"{len(roots)} folders: expected none, BEFORE, or BEFORE and AFTER")
    for root in roots:
        if not (root / "train.py").is_file():
            parser.error(f"{root}: no train.py, so it is not a checkout of titanlite")
    for title, measure in TABLES.items():
        print("\n".join(table(title, [measure(root) for root in roots])))


if __name__ == "__main__":
    main()
