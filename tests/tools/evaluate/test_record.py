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
    for step, loss in ((6, 0.5), (3, 0.25), (6, 0.75)):
        append(folder, step, "model", {"evaluate/code/loss": loss}, {})
    infinite = {"evaluate/code/loss": 1.0, "evaluate/code/perplexity": float("inf")}
    append(folder, 6, "ema", infinite, {})
    with (folder / "evaluations.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "evalu')  # an evaluation that was killed
    append(folder, 6, "model", {"evaluate/text/loss": 2.5, "evaluate/text/tokens": 640}, {})
    run = read_run(folder)
    assert run.notes == ["evaluations.jsonl: 1 damaged line was skipped"]
    page = contents([run])
    table = {row[0]: row[1] for row in page["table"]}
    assert table["evaluated: code, loss"] == "0.7500 at step 6"
    assert table["evaluated: code, loss (averaged weights)"] == "1.0000 at step 6"
    assert table["evaluated: text, loss"] == "2.5000 at step 6"
    assert not {
        name
        for name in table
        if "code, perplexity" in name or ("tokens" in name and "text" in name)
    }
    (chart,) = [chart for chart in page["charts"] if chart["section"] == "Evaluation"]
    assert chart["title"] == "loss"
    assert [(line["label"], line["x"], line["y"]) for line in chart["series"]] == [
        ("code", [3, 6], [0.25, 0.75])
    ]
    assert "evaluated: code, loss" in text_report([run])
