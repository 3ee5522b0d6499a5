"""Compares predictions of `titanlite plan` with published measurements of other trainers.

    python benchmarks/plan_rows.py ROWS.csv [--seed 0] [--write] [--shared]

`plan_cases.py` says what ROWS.csv has and which rows are compared, `plan_fit.py` how the rates are
fitted. `--write` writes them with their errors to titanlite/tools/plan/fitted.py; `--shared` fits
the constants of `step_time.Shared` too, in some minutes.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from pathlib import Path

import report
from plan_cases import Case, read_cases
from plan_fit import (
    Halves,
    choice_losses,
    error_of,
    fit_all,
    fit_shared,
    halves,
)

from titanlite.tools.plan.accuracy import Error, Fitted
from titanlite.tools.plan.step_time import SHARED, Rates, Shared

FILE = report.ROOT / "titanlite/tools/plan/fitted.py"
HEADER = '''"""Rates of GPUs and the errors of predicted times. Written by `benchmarks/plan_rows.py --write`."""

from titanlite.tools.plan.accuracy import Error, Fitted

FITTED: dict[str, Fitted] = {
'''


def shown(error: Error) -> str:
    return f"{error.median:.1%}, {error.p90:.1%} of {error.rows}"


def compare_times(divided: dict[str, Halves], fitted: dict[str, Fitted], shared: Shared) -> None:
    print("\n## Time\n")
    print("Error: median and 90th percentile, on the judged half.\n")
    print("| GPU | rows | products, attention, links, host ms | error | of a constant MFU |")
    print("|---|---|---|---|---|")
    judged: list[tuple[float, float, Case]] = []
    for name, half in divided.items():
        found = fitted.get(name)
        if found is None:
            rows = len(half.fitted) + len(half.judged)
            print(f"| {name} | {rows} | too few | | |")
            continue
        rates = Rates(*found.rates)
        for case in half.judged:
            constant = found.constant_mfu / case.mfu - 1
            judged.append((case.ratio(rates, shared), constant, case))
        values = ", ".join(f"{value:.2f}" for value in found.rates)
        constant_error = f"{shown(found.constant_error)} ({found.constant_mfu:.1%})"
        print(f"| {name} | {found.rows} | {values} | {shown(found.error)} | {constant_error} |")
    total = error_of([abs(ratio - 1) for ratio, _, _ in judged])
    of_constants = error_of([abs(error) for _, error, _ in judged])
    medians = [found.error.median for found in fitted.values()]
    print(f"\nAll: {shown(total)}; a constant MFU for each GPU: {shown(of_constants)}.")
    print(
        f"Each GPU counted once: median {statistics.median(medians):.1%}, "
        f"mean {statistics.mean(medians):.1%}.\n"
    )
    print_trainers(judged)
    print("The largest misses of the judged half:\n")
    print("| row | layout | predicted / measured |")
    print("|---|---|---|")
    judged.sort(key=lambda miss: -abs(miss[0] - 1))
    for ratio, _, case in judged[:15]:
        print(f"| {case.name} | {case.row['layout'][:60]} | {ratio:.2f} |")
    losses = choice_losses([case for _, _, case in judged], fitted, shared)
    everywhere = [case for half in divided.values() for case in half.fitted + half.judged]
    of_all = choice_losses(everywhere, fitted, shared)
    print("\nThe layout with the best prediction, among rows that differ in their layout only, is")
    print(
        f"slower than the best one by {statistics.mean(losses):.1%} on average of {len(losses)} "
        f"groups of the judged half, {statistics.mean(of_all):.1%} of {len(of_all)} of all rows."
    )


def print_trainers(judged: list[tuple[float, float, Case]]) -> None:
    print("| trainer | median of predicted / measured | error | of a constant MFU |")
    print("|---|---|---|---|")
    for name in dict.fromkeys(case.trainer for _, _, case in judged):
        rows = [one for one in judged if one[2].trainer == name]
        ratio = statistics.median(one[0] for one in rows)
        error = error_of([abs(one[0] - 1) for one in rows])
        constant = error_of([abs(one[1]) for one in rows])
        print(f"| {name} | {ratio:.2f} | {shown(error)} | {shown(constant)} |")
    print()


def print_own(divided: dict[str, Halves], fitted: dict[str, Fitted], shared: Shared) -> None:
    """Our own measurements, which are among the rows of their GPU."""
    print("\n## Our own rows\n")
    print("Tokens per second of one GPU.\n")
    print("| GPU | case | measured | predicted | ratio | half |")
    print("|---|---|---|---|---|---|")
    for name, half in divided.items():
        for title, cases in (("fitted", half.fitted), ("judged", half.judged)):
            for case in cases:
                if case.trainer == "titanlite" and name in fitted:
                    predicted = case.predicted(Rates(*fitted[name].rates), shared)
                    print(
                        f"| {name} | {case.row['layout']} | {case.measured:,.0f} | "
                        f"{predicted:,.0f} | {predicted / case.measured:.2f} | {title} |"
                    )


def compare_memory(cases: list[Case]) -> None:
    print("## Memory\n")
    print("FSDP2, with dtypes that are known: GiB.\n")
    print("| row | layout | measured | predicted | error | |")
    print("|---|---|---|---|---|---|")
    stated = [case for case in cases if case.row["memory_gb"] not in ("", "OOM")]
    sharded = [case for case in stated if case.is_fsdp2]
    within = 0
    below = 0
    for case in sharded:
        measured = float(case.row["memory_gb"])
        low, high = case.memory_gib
        middle = low if case.trainer == "KempnerForge" else (low + high) / 2
        error = middle / measured - 1
        within += abs(error) <= 0.1
        below += measured <= high
        where = "ABOVE" if measured > high else ""
        print(
            f"| {case.name} | {case.row['layout'][:44]} {case.row['ac']} | {measured:.1f} | "
            f"{low:.1f} to {high:.1f} | {error:+.1%} | {where} |"
        )
    print(f"\nWithin 10 %: {within} of {len(sharded)}. At or below the upper end: {below}.")
    reserved = [case.memory_gib for case in sharded if case.trainer != "KempnerForge"]
    widths = [high / low - 1 for low, high in reserved]
    print(
        f"Width of the range where reserved memory is stated: {statistics.median(widths):.1%}, at "
        f"most {max(widths):.1%}. KempnerForge states allocated memory, which is the lower end.\n"
    )
    print("Others:\n")
    print("| row | layout | measured | predicted |")
    print("|---|---|---|---|")
    for case in stated:
        if case not in sharded:
            low, high = case.memory_gib
            print(
                f"| {case.name} | {case.row['layout'][:44]} {case.row['ac']} | "
                f"{float(case.row['memory_gb']):.1f} | {low:.1f} to {high:.1f} |"
            )


def compare_verdicts(cases: list[Case]) -> None:
    print("\n## Verdicts\n")
    print("Each row that ran is a verdict `fits`, each OOM is one `does not fit`.\n")
    counts = Counter((case.trainer, case.verdict) for case in cases)
    total = Counter(case.verdict for case in cases)
    print("| trainer | " + " | ".join(sorted(total)) + " |")
    print("|---|" + "---|" * len(total))
    for trainer in dict.fromkeys(case.trainer for case in cases):
        numbers = " | ".join(str(counts[trainer, verdict]) for verdict in sorted(total))
        print(f"| {trainer} | {numbers} |")
    print("| all | " + " | ".join(str(total[verdict]) for verdict in sorted(total)) + " |")
    print("\nThose that are not right:\n")
    print("| row | layout | of GiB | predicted, with the context | verdict |")
    print("|---|---|---|---|---|")
    for case in cases:
        if not case.verdict.startswith("right"):
            low, high = case.needed_gib
            print(
                f"| {case.name} | {case.row['layout'][:52]} {case.row['ac'][:14]} | "
                f"{case.machine.memory_gib:.1f} | {low:.1f} to {high:.1f} | {case.verdict} |"
            )


def write(fitted: dict[str, Fitted]) -> None:
    """Writes the module of rates and errors."""
    lines = [HEADER]
    for name, found in fitted.items():
        lines.append(f"    {name!r}: {found!r},\n")
    FILE.write_text("".join(lines) + "}\n")
    print(f"\nWrote {FILE}; format it with ruff.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--shared", action="store_true")
    arguments = parser.parse_args()
    cases, left_out = read_cases(arguments.rows)
    print(f"{len(cases)} rows are expressed, {sum(left_out.values())} are not.\n")
    compare_memory(cases)
    compare_verdicts(cases)
    divided = halves(cases, arguments.seed)
    shared = SHARED
    if arguments.shared:
        shared = fit_shared(divided)
        print(f"\nFitted: {shared}")
    fitted = fit_all(divided, shared)
    compare_times(divided, fitted, shared)
    print_own(divided, fitted, shared)
    print("\n## Rows that are not expressed\n")
    for text, count in left_out.most_common():
        print(f"- {count}: {text}")
    if arguments.write:
        write(fitted)


if __name__ == "__main__":
    main()
