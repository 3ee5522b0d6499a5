"""evaluations.jsonl, and what the report shows of it."""

from __future__ import annotations


def test_the_report_has_the_newest_results_and_curves(whole_run, tmp_path):
    from titanlite.tools.evaluate.record import append
    from titanlite.tools.report.page import contents
    from titanlite.tools.report.run_data import read_run
    from titanlite.tools.report.text_report import text_report

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes((whole_run() / "metrics.jsonl").read_bytes())
    # An evaluation may be of an earlier step
    for step, accuracy in ((6, 0.5), (3, 0.25), (6, 0.75)):
        append(
            folder,
            step,
            "model",
            {"evaluate/sums/acc": accuracy, "evaluate/sums/acc_stderr": 0.1},
            {},
        )
    append(folder, 6, "ema", {"evaluate/sums/acc": 1.0, "evaluate/sums/f1": float("nan")}, {})
    with (folder / "evaluations.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "evalu')  # an evaluation that was killed
    append(folder, 6, "model", {"evaluate/text/loss": 2.5, "evaluate/text/tokens": 640}, {})
    run = read_run(folder)
    assert run.notes == ["evaluations.jsonl: 1 damaged line was skipped"]
    page = contents([run])
    table = {row[0]: row[1] for row in page["table"]}
    assert table["evaluated: sums, acc"] == "0.7500 ± 0.1000 at step 6"
    assert table["evaluated: sums, acc (averaged weights)"] == "1.0000 at step 6"
    assert table["evaluated: text, loss"] == "2.5000 at step 6"
    assert not {name for name in table if "f1" in name or ("tokens" in name and "text" in name)}
    (chart,) = [chart for chart in page["charts"] if chart["section"] == "Evaluation"]
    assert chart["title"] == "acc"
    assert [(line["label"], line["x"], line["y"]) for line in chart["series"]] == [
        ("sums", [3, 6], [0.25, 0.75])
    ]
    assert "evaluated: sums, acc" in text_report([run])
