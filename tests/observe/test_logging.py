"""Logs: which ranks write to the console."""

from __future__ import annotations

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
            "careful", "[rank 1] step", "[rank 1] careful", "[rank 2] careful", "[rank 3] step", "[rank 3] careful",
        ]  # fmt: skip
        assert "INFO step" in (tmp_path / "log.txt").read_text()
    finally:
        logger.handlers.clear()
