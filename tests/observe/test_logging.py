"""Logs: which ranks write to the console."""

from __future__ import annotations

import json
import logging

from titanlite.observe.logging import log_to_file, setup_logging


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
