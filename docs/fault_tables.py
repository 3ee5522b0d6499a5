"""Writes the tables of faults.md from what the planted faults change.

    python -m docs.fault_tables

What it is: runs every fault of `titanlite break` and writes, between the two comments of each
check, the largest difference of each figure. A test runs the faults again, and compares.
Why it is here: a table of numbers that is not computed again would soon be wrong.
What it costs: about three minutes on two cores.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from titanlite.tools.faults.catalogue import FAULTS
from titanlite.tools.faults.experiment import Experiments
from titanlite.tools.faults.fault import CHECKS, OF_A_FILE, Fault
from titanlite.tools.faults.quiz import number
from titanlite.tools.verify.pool import Pool

PAGE = Path(__file__).with_name("faults.md")
FIRST = ("fault", "what is planted", "shipped by", "off first")


def link(thread: str) -> str:
    repository, _, issue = thread.partition("#")
    name = repository.rpartition("/")[2]
    return f"[{name}#{issue}](https://github.com/{repository}/issues/{issue})"


def prediction(fault: Fault) -> str:
    if fault.figure in OF_A_FILE:
        return fault.figure
    return f"{fault.figure}, step {fault.step}"


def description(fault: Fault) -> list[str]:
    """The cells of a row before the figures."""
    threads = ", ".join(link(thread) for thread in fault.threads) or "-"
    return [f"`{fault.name}`", fault.title, threads, prediction(fault)]


def row(fault: Fault, experiments: Experiments) -> str:
    """A line of the table; figures that are off are bold."""
    broken = experiments.run(fault, planted=True)
    off = {each.figure for each in broken.measured if each.is_off}
    cells = description(fault)
    for figure in CHECKS[fault.check]:
        text = number(broken.largest(figure))
        cells.append(f"**{text}**" if figure in off else text)
    return f"| {' | '.join(cells)} |\n"


def table(check: str, experiments: Experiments) -> str:
    head = [*FIRST, *CHECKS[check]]
    lines = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for fault in FAULTS:
        if fault.check == check:
            lines += row(fault, experiments)
    return lines


def printed_in(text: str) -> dict[str, dict[str, float]]:
    """Fault -> figure -> the difference that the page shows."""
    shown: dict[str, dict[str, float]] = {}
    for fault in FAULTS:
        found = re.search(rf"^\| `{fault.name}` \|.*\|$", text, re.MULTILINE)
        if found is None:
            continue
        cells = found[0].strip("| ").split(" | ")
        figures = CHECKS[fault.check]
        values = [float(cell.strip("*")) for cell in cells[len(FIRST) :]]
        shown[fault.name] = dict(zip(figures, values, strict=True))
    return shown


def with_tables(text: str, experiments: Experiments) -> str:
    """The page with the tables as they are now."""
    for check in CHECKS:
        begin = f"<!-- faults of {check} -->\n"
        end = f"<!-- end of {check} -->\n"
        block = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        new = f"{begin}{table(check, experiments)}{end}"
        text = block.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


def main() -> None:
    pool = Pool(["titanlite.tools.faults.experiment"], quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(with_tables(PAGE.read_text(), Experiments(pool, Path(folder))))


if __name__ == "__main__":
    main()
