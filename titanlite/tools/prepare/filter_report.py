"""What the preparation of a corpus dropped, and why.

What it is: for each rule (`filters.py`, and the removal of duplicates) the number of documents and
bytes that it dropped, with the first three as examples. Each part of a corpus has its own report;
the reports are added in order, so that the sum does not depend on how parts were assigned to
processes. A report is plain data that JSON stores.
Why it is here: a limit that fits one kind of text can drop nearly all of another without an error.
The summary warns of each rule that drops more than half of the documents that reach it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from titanlite.runtime.typed_json import Count, typed
from titanlite.tools.prepare.filters import RULES

EXAMPLES = 3  # for each rule
EXAMPLE_CHARS = 80
TOO_MANY = 0.5  # share of the documents that reach a rule; above it the rule gets a warning


class ShownExample(TypedDict):
    """A row of a file, and the start of its text or what is wrong with it."""

    file: str
    row: Count
    text: str


class Example(ShownExample, total=False):
    """In a part's record: `row` counts from 0 in the piece of the file from byte `begin` on."""

    begin: Count


@dataclass
class Dropped:
    """What one rule dropped."""

    documents: Count = 0
    bytes: Count = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class FilterReport:
    """Counts of all documents, and of those that each rule dropped."""

    documents: Count = 0
    bytes: Count = 0
    rules: dict[str, Dropped] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError if more is said to be dropped than was read: the file is damaged."""
        if sum(dropped.documents for dropped in self.rules.values()) > self.documents:
            raise ValueError(
                f"report: its rules drop more than {self.documents} documents, all that there were"
            )

    def count(self, text: str, rule: str, file: str, row: int, begin: int) -> None:
        """Counts a document that was read; `rule` dropped it, "" if it stays.

        `row`: its number, from 0 on, in the piece of the file that begins at byte `begin`
        (`rows.numbered`).
        """
        size = len(text.encode("utf-8", "surrogatepass"))
        self.documents += 1
        self.bytes += size
        if rule:
            self.drop(text, rule, file, row, begin)

    def drop(self, text: str, rule: str, file: str, row: int, begin: int) -> None:
        """Counts a document that was counted before as dropped: duplicates are found last."""
        dropped = self.rules.setdefault(rule, Dropped())
        dropped.documents += 1
        dropped.bytes += len(text.encode("utf-8", "surrogatepass"))
        if len(dropped.examples) < EXAMPLES:
            dropped.examples.append(
                {"file": file, "row": row, "begin": begin, "text": _printable(text)}
            )

    def add(self, other: FilterReport) -> None:
        """Adds the report of the next part."""
        self.documents += other.documents
        self.bytes += other.bytes
        for rule, others in other.rules.items():
            dropped = self.rules.setdefault(rule, Dropped())
            dropped.documents += others.documents
            dropped.bytes += others.bytes
            dropped.examples = (dropped.examples + others.examples)[:EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FilterReport:
        """Raises ValueError if it is not what `to_json` wrote."""
        return typed(cls, data)

    def summary(self) -> list[str]:
        """The lines that a user sees, with a warning for each rule that drops too many."""
        total = sum(dropped.documents for dropped in self.rules.values())
        size = sum(dropped.bytes for dropped in self.rules.values())
        lines = [
            f"read {self.documents:,} documents, {self.bytes / 1e6:,.1f} MB; "
            f"dropped {self._amount(total, size)}"
        ]
        # In the order in which they were applied: first the filters, then the search for duplicates
        rules = [rule for rule in RULES if rule in self.rules]
        rules += [rule for rule in self.rules if rule not in RULES]
        reached = self.documents
        for rule in rules:
            dropped = self.rules[rule]
            lines.append(f"  {rule}: {self._amount(dropped.documents, dropped.bytes)}")
            lines += [f"    {e['file']}:{e['row']}: {e['text']}" for e in dropped.examples]
            if dropped.documents > TOO_MANY * reached:
                share = 100 * dropped.documents / reached
                lines.append(
                    f"  WARNING: {rule} drops {share:.1f} % of what reaches it; "
                    "does it suit this text?"
                )
            reached -= dropped.documents
        return lines

    def _amount(self, documents: int, size: int) -> str:
        share = 100 * documents / max(1, self.documents)
        return f"{documents:,} documents ({share:.1f} %), {size / 1e6:,.1f} MB"


def _printable(text: str) -> str:
    """The start of a text on one line, without terminal control characters."""
    start = " ".join(text[: 4 * EXAMPLE_CHARS].split())
    if len(start) > EXAMPLE_CHARS:
        start = start[:EXAMPLE_CHARS] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in start)
