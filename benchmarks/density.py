"""How dense the code is to read: figures of style, by one command.

    python benchmarks/density.py                    the core, tools and both
    python benchmarks/density.py PATH [PATH ...]    any other Python code, for a comparison

What it is: counts on the syntax tree, of all files below the paths but tests. Lines of code are
those on which a token of the program stands: no blank lines, comments and docstrings.
Why it is here: a line with many expressions, two assignments or a condition inside has to be read
twice. The figures are a thermometer and no gate: the aim is a body that reads as easily as its
header.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = (
    "train.py",
    "titanlite/runtime",
    "titanlite/config",
    "titanlite/distributed",
    "titanlite/model",
    "titanlite/data",
    "titanlite/rules",
    "titanlite/parallel",
    "titanlite/optim",
    "titanlite/observe",
    "titanlite/probes",
    "titanlite/sinks",
    "titanlite/checkpoint",
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("paths", nargs="*", type=Path)
    paths = parser.parse_args().paths
    groups = {str(path): [path] for path in paths}
    if not paths:
        core = [ROOT / name for name in CORE]
        tools = [ROOT / "titanlite/tools"]
        groups = {"core": core, "tools": tools, "core and tools": core + tools}
    print(
        "| | files | lines of code | expression nodes per line | lines over 100 | lazy imports "
        "| walrus | tuple assignments | ternaries | `Any` arguments | comment lines in bodies |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, group in groups.items():
        print(row(name, [file for path in group for file in python_files(path)]))


def python_files(path: Path) -> list[Path]:
    """The files of a path that are not tests."""
    if path.is_file():
        return [path]
    return [file for file in sorted(path.rglob("*.py")) if not is_test(file.relative_to(path))]


def is_test(file: Path) -> bool:
    return "tests" in file.parts or "test" in file.parts or file.name.startswith("test_")


def row(name: str, files: list[Path]) -> str:
    """A row of the table; lazy imports, walrus, tuple assignments and ternaries per 1,000 lines."""
    total: Counter[str] = Counter()
    for file in files:
        total += measure(file.read_text())
    lines = max(1, total["code"])
    per_1000 = [
        f"{1000 * total[key] / lines:.1f}"
        for key in ("lazy import", "walrus", "tuple assignment", "ternary")
    ]
    cells = [
        name,
        str(len(files)),
        f"{total['code']:,}",
        f"{total['expression'] / lines:.1f}",
        f"{100 * total['over 100'] / max(1, total['line']):.1f} %",
        *per_1000,
        f"{100 * total['Any argument'] / max(1, total['argument']):.1f} %",
        f"{100 * total['comment in body'] / max(1, total['body line']):.1f} %",
    ]
    return f"| {' | '.join(cells)} |"


def measure(source: str) -> Counter[str]:
    """Counts in the source of a file."""
    counts: Counter[str] = Counter()
    tree = ast.parse(source)
    lines = source.splitlines()
    counts["line"] = len(lines)
    counts["over 100"] = sum(len(line) > 100 for line in lines)
    docstrings = lines_of_docstrings(tree)
    code, comments = lines_of_tokens(source)
    counts["code"] = len(code - docstrings)
    bodies: set[int] = set()
    for node in ast.walk(tree):
        counts["expression"] += isinstance(node, ast.expr)
        counts["walrus"] += isinstance(node, ast.NamedExpr)
        counts["ternary"] += isinstance(node, ast.IfExp)
        counts["tuple assignment"] += is_tuple_assignment(node)
        if isinstance(node, FUNCTIONS):
            bodies |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
            counts["lazy import"] += sum(is_import(inner) for inner in ast.walk(node))
            for argument in arguments_of(node):
                counts["argument"] += 1
                counts["Any argument"] += is_any(argument.annotation)
    bodies -= docstrings
    counts["comment in body"] = len(comments & bodies)
    counts["body line"] = len((code | comments) & bodies)
    return counts


def lines_of_docstrings(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            first = node.body[0]
            found |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return found


def lines_of_tokens(source: str) -> tuple[set[int], set[int]]:
    """Lines with a token of the program, and lines with a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    spaces = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in spaces:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code, comments


def is_tuple_assignment(node: ast.AST) -> bool:
    """Several values to several names in one statement; not the unpacking of one value."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """The arguments that a caller passes: without self and cls."""
    spec = function.args
    return [
        argument
        for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)
        if argument.arg not in ("self", "cls")
    ]


def is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


if __name__ == "__main__":
    main()
