"""The console: the line of a logged step, the time until the end, and which ranks write."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from titanlite.observe.console import HORIZON, Eta, duration, step_line
from titanlite.observe.logging import log_to_file, setup_logging

ROW = {
    "step": 120, "loss": 3.14159, "grad_norm": 0.98765, "lr": 3e-4, "tps": 123456.7, "tflops": 1.2345,
    "mfu": None, "memory_gib": 0.512, "data_percent": 12.34, "data_wait_percent": 1.2,
}  # fmt: skip


def test_the_line_of_a_step():
    assert step_line("step 120/800", ROW, 754.0) == (
        "step 120/800  loss 3.1416  grad_norm 0.988  lr 3.00e-04  "
        "tps 123,457  tflops 1.23  mfu n/a  memory 0.51GiB  "
        "epoch 0.12  wait 1.2%  eta 12:34"
    )
    assert "  mfu 41.2%  " in step_line("", ROW | {"mfu": 41.23}, 754.0)
    assert "  epoch 4.00  " in step_line("", ROW | {"data_percent": 400.0}, 754.0)
    assert step_line("", ROW, None).endswith("  eta n/a")


def test_durations():
    assert [duration(s) for s in (0, 59.6, 65, 3599, 7384, 90_000)] == [
        "0:00", "1:00", "1:05", "59:59", "2:03:04", "1 d 1:00:00",
    ]  # fmt: skip


def test_the_remaining_time_is_that_of_the_last_minutes():
    """A compiled first step does not count; validations between logged steps do."""
    eta = Eta()
    assert eta.remaining(60.0, 1, 999) is None
    assert eta.remaining(69.0, 10, 990) == 990
    assert eta.remaining(79.0 + 9.0, 20, 980) == pytest.approx(980 * 28 / 19)
    # A rollback of 15 steps
    assert eta.remaining(98.0, 30, 985) == pytest.approx(985 * 38 / 29)
    for i in range(1, 5):
        last = eta.remaining(98.0 + i * HORIZON / 2, 30 + i * 10, 10)
    assert last == HORIZON / 2
    assert eta.remaining(5000.0, 80, 0) == 0


def test_debug_messages_are_in_the_file_and_on_request_on_the_console(
    monkeypatch, capsys, tmp_path
):
    logger = logging.getLogger("titanlite")
    monkeypatch.setenv("LOG_RANK", "0")
    try:
        for level in ("", "debug"):
            monkeypatch.setenv("LOG_LEVEL", level)
            setup_logging(0)
            log_to_file(Path(tmp_path, f"log{level}.txt"))
            logger.debug("12 tensors")
            assert capsys.readouterr().out == ("12 tensors\n" if level else "")
            assert "DEBUG 12 tensors" in Path(tmp_path, f"log{level}.txt").read_text()
    finally:
        logger.handlers.clear()


def test_log_rank_chooses_who_speaks(monkeypatch, capsys, tmp_path):
    logger = logging.getLogger("titanlite")
    monkeypatch.setenv("LOG_RANK", "1, 3")
    try:
        for rank in range(4):
            setup_logging(rank)
            if rank == 0:
                log_to_file(tmp_path / "log.txt")
            logger.info("step")
            logger.warning("careful")
        assert capsys.readouterr().out.splitlines() == [
            "careful", "[rank 1] step", "[rank 1] careful",
            "[rank 2] careful", "[rank 3] step", "[rank 3] careful",
        ]  # fmt: skip
        assert "INFO step" in (tmp_path / "log.txt").read_text()
    finally:
        logger.handlers.clear()


def test_messages_with_an_event_are_also_lines_of_events_jsonl(tmp_path):
    logger = logging.getLogger("titanlite")
    try:
        setup_logging(0)
        log_to_file(tmp_path / "log.txt")
        logger.info("step 1")
        assert not (tmp_path / "events.jsonl").exists()
        logger.info("saved %s", "x", extra={"event": "save", "step": 3})
        logger.warning("stop", extra={"event": "signal"})
        first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        assert {**first, "time": 0} == {"time": 0, "event": "save", "step": 3, "text": "saved x"}
        assert second.keys() == {"time", "event", "text"}
        assert second["time"] >= first["time"] > 1e9
        assert (tmp_path / "log.txt").read_text().count("\n") == 3
    finally:
        logger.handlers.clear()
