"""Writes the tables of faults.md from what the planted faults change.

    python -m docs.fault_tables

What it is: runs every fault of `titanlite break` and writes, between the two comments of each
check, the largest difference of each figure, and at the top how many faults there are. A test runs
the faults again, and compares.
Why it is here: a table of numbers that is not computed again would soon be wrong.
What it costs: about three minutes on two cores.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from titanlite.tools.faults.catalogue import FAULTS, FOUND_BY
from titanlite.tools.faults.experiment import Experiments
from titanlite.tools.faults.fault import CHECKS, OF_A_FILE, Fault
from titanlite.tools.faults.quiz import number
from titanlite.tools.verify.pool import Pool

PAGE = Path(__file__).with_name("faults.md")
TITLES = {
    "verify": "[in a step](#in-a-step)",
    "experts": "[in a mixture of experts](#in-a-mixture-of-experts)",
    "run": "[in a run](#in-a-run)",
    "export": "[in an export](#in-an-export)",
    "merge": "[in a model with adapters](#in-a-model-with-adapters)",
}
FIRST = ("fault", "what is planted", "shipped by", "found by", "off first")


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
    proofs = ", ".join(proof for proof, names in FOUND_BY.items() if fault.name in names)
    return [f"`{fault.name}`", fault.title, threads, proofs, prediction(fault)]


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


def printed_in(text: str) -> dict[str, dict[str, str]]:
    """Fault -> figure -> the difference that the page shows; bold if it is off."""
    shown: dict[str, dict[str, str]] = {}
    for fault in FAULTS:
        found = re.search(rf"^\| `{fault.name}` \|.*\|$", text, re.MULTILINE)
        if found is None:
            continue
        cells = found[0].strip("| ").split(" | ")
        shown[fault.name] = dict(zip(CHECKS[fault.check], cells[len(FIRST) :], strict=True))
    return shown


def summary(text: str) -> str:
    """A table of the number of faults of each check, counted in the tables of the page."""
    head = ["faults", "planted", *(f"found by {proof}" for proof in FOUND_BY)]
    head.append("loss within the tolerance")
    lines = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    shown = printed_in(text)
    rows = {title: {f.name for f in FAULTS if f.check == check} for check, title in TITLES.items()}
    rows["all"] = set(shown)
    for title, names in rows.items():
        numbers = [len(names), *(len(names & found) for found in FOUND_BY.values())]
        numbers.append(sum("**" not in shown[name].get("loss", "**") for name in names))
        lines += f"| {title} | {' | '.join(map(str, numbers))} |\n"
    return lines


def with_tables(text: str, experiments: Experiments) -> str:
    """The page with the tables as they are now."""
    for check in CHECKS:
        text = with_block(text, check, table(check, experiments))
    return with_block(text, "all", summary(text))


def with_block(text: str, name: str, block: str) -> str:
    """The page with another text between the two comments of this name."""
    begin = f"<!-- faults of {name} -->\n"
    end = f"<!-- end of {name} -->\n"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{block}{end}{rest.partition(end)[2]}"


def main() -> None:
    pool = Pool(["titanlite.tools.faults.experiment"], quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(with_tables(PAGE.read_text(), Experiments(pool, Path(folder))))


if __name__ == "__main__":
    main()
