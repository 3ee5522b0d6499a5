"""The report of what was dropped: counts, examples, warnings, and sums of parts."""

import json
import sysconfig
from pathlib import Path

from messages import assert_mentions

from titanlite.tools.prepare.filter_report import EXAMPLES, FilterReport
from titanlite.tools.prepare.filters import FilterConfig, rejection


def report_of(texts: list[str], config: FilterConfig, file: str = "a.jsonl") -> FilterReport:
    report = FilterReport()
    for row, text in enumerate(texts):
        report.count(text, rejection(text, config), file, row, 0)
    return report


def test_counts_and_examples():
    report = report_of(["x", "a long enough document", "가", "", "y"], FilterConfig(min_chars=5))
    dropped = report.rules["min_chars"]
    assert (report.documents, report.bytes, dropped.documents, dropped.bytes) == (5, 27, 4, 5)
    assert dropped.examples == [
        {"file": "a.jsonl", "row": row, "begin": 0, "text": text}
        for row, text in [(0, "x"), (2, "가"), (3, "")]
    ]


def test_parts_add_up_to_the_whole_and_go_through_json():
    texts = [f"{'#' * (i % 3)} text {i}" for i in range(20)] + ["tiny"]
    config = FilterConfig(min_chars=5, max_symbol_ratio=0.15)
    whole, total = report_of(texts, config), FilterReport()
    whole.drop(texts[0], "near duplicate", "a.jsonl", 0, 0)
    for start in range(0, len(texts), 5):
        part = FilterReport()
        for row in range(start, min(start + 5, len(texts))):
            part.count(texts[row], rejection(texts[row], config), "a.jsonl", row, 0)
        if start == 0:
            part.drop(texts[0], "near duplicate", "a.jsonl", 0, 0)
        total.add(FilterReport.from_json(json.loads(json.dumps(part.to_json()))))
    assert total == whole
    assert len(total.rules["max_symbol_ratio"].examples) == EXAMPLES


def test_the_summary_warns_of_limits_that_do_not_fit_the_text():
    """A limit of guides to filtering the web drops nearly all source code, which must not pass
    unnoticed.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = [text for path in files if len(text := path.read_text("utf-8", "replace")) > 1000]
    report = report_of(code, FilterConfig(max_symbol_ratio=0.1))
    dropped = report.rules["max_symbol_ratio"].documents
    assert 0.9 < dropped / len(code) < 1
    share = f"{100 * dropped / len(code):.1f} %"
    (warning,) = [line for line in report.summary() if "WARNING" in line]
    assert_mentions(warning, "max_symbol_ratio", share)
    assert_mentions(
        "\n".join(report.summary()),
        f"{len(code)} documents",
        f"{dropped} documents ({share})",
        "a.jsonl:0: ",
    )
    assert "WARNING" not in "\n".join(report_of(code, FilterConfig(max_symbol_ratio=0.5)).summary())


def test_a_warning_is_about_the_documents_that_reach_a_rule():
    texts = ["x"] * 50 + ["####### " * 3] * 30 + ["plain words in a comment"] * 20
    report = report_of(texts, FilterConfig(min_chars=5, max_symbol_ratio=0.1))
    report.rules = dict(reversed(report.rules.items()))  # parts meet the rules in any order
    lines = report.summary()
    assert [line for line in lines if "WARNING" in line] == [lines[-1]]
    assert_mentions(lines[-1], "max_symbol_ratio", "60.0 %")


def test_examples_are_one_printable_line():
    report = FilterReport()
    report.count("\x1b[31mred\u202e\n\n tail" + "z" * 1000, "min_chars", "file", 0, 0)
    (example,) = report.rules["min_chars"].examples
    assert example["text"].startswith("\\x1b[31mred\\u202e tail")
    assert example["text"].isprintable()
    assert len(example["text"]) < 100


def test_an_empty_report():
    assert FilterReport().summary() == [
        "read 0 documents, 0.0 MB; dropped 0 documents (0.0 %), 0.0 MB"
    ]
