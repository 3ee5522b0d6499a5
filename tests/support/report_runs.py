"""Folders as runs leave them, with curves of known parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FLOOR, SCALE, EXPONENT, NOISE = 2.0, 12.0, 0.4, 0.03
SPIKE = 1800  # step
BEGIN = 1_700_000_000.0  # of the events
HOSTILE = '</script><img src=x onerror="document.title=1">&<!--'


def losses(steps: np.ndarray, seed: int = 0) -> np.ndarray:
    """A power law with noise."""
    noise = np.random.default_rng(seed).normal(0, NOISE, len(steps))
    return FLOOR + SCALE * np.asarray(steps, float) ** -EXPONENT + noise


def rows(last: int = 3000, freq: int = 10, spike: int = SPIKE) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a run with all columns."""
    steps = np.array([1, *range(freq, last + 1, freq)])
    values = losses(steps)
    values[steps == spike] += 1.5
    result = []
    for step, loss in zip(steps.tolist(), values.tolist(), strict=True):
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": 1 + 30 / step,
            "lr": 3e-4 * min(1, step / 100),
        }
        row |= {
            "tokens": 4096 * step,
            "tps": 900.0,
            "tps_global": 1800.0 + step % 7,
            "tflops": 0.4,
            "mfu": 41.5,
        }
        row |= {
            "memory_gib": 3.2,
            "data_percent": step / 40,
            "seconds": 2.5 * step,
            "data_wait_percent": 0.2,
        }
        row |= {
            "time/data": 0.1,
            "time/forward": 0.8,
            "time/backward": 1.4,
            "time/optimizer": 0.2,
            "time/other": 0.01,
        }
        row |= {
            "step_seconds_p50": 2.4,
            "step_seconds_p95": 2.9,
            "step_seconds_max": 3.3,
            "noise_scale": 4000.0 + step,
        }
        row |= {"epochs/text": step / 4000}
        result.append(row)
        if step % 1000 == 0:
            loss = 2.1 + 12 * step**-0.4
            validation = {"validation/text/loss": loss, "validation/text/bits_per_byte": loss / 2.5}
            result.append(
                {"step": step, **validation, "validation/text/perplexity": float(np.exp(loss))}
            )
            result.append(
                {"step": step, **{f"gradient_norm/layers.{i}": 1.0 + i for i in range(12)}}
            )
    return result


def event(
    name: str, step: int | None, seconds: float, text: str = "", **about: Any
) -> dict[str, Any]:
    return {
        "time": BEGIN + seconds,
        "step": step,
        "event": name,
        "text": text or f"a {name}",
        "about": about or None,
    }


EVENTS = [
    event(
        "start",
        0,
        0,
        "debug: 1,312,768 parameters",
        parameters=1_312_768,
        device="cpu x 2",
        layout="tp 2",
    ),
    event("save", 1000, 2600, "saved checkpoints/step-1000"),
    event("resume", 1000, 5000, "resumed from step-1000"),
    event(
        "start", 1000, 5001, parameters=1_312_768, device="cpu x 2", layout="tp 2", torch="2.13.0"
    ),
    event("spike", SPIKE, 6500, "step 1800: its update was skipped"),
    event("signal", None, 7000, "stop requested"),
    event("save", 2000, 7001),
    event("end", 2000, 7002, "stopped after step 2000", finished=False),
    event("resume", 2000, 8000),
    event(
        "start", 2000, 8001, parameters=1_312_768, device="cpu x 2", layout="tp 2", torch="2.13.0"
    ),
    event("save", 3000, 9900),
    event("end", 3000, 9990, "\ndone: 3000 steps. In outputs/x", finished=True),
]
CONFIG = """[run]
name = "a"
[model]
flavor = "debug"
[training]
steps = 3000
seq_len = 256
global_batch_size = 16
[schedule]
warmup_steps = 100
"""


def write_run(
    folder: Path, metrics: list[dict[str, Any]] | None = None, config: str = CONFIG
) -> Path:
    """Writes a whole run to a new folder."""
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", rows() if metrics is None else metrics)
    write_lines(folder / "events.jsonl", EVENTS)
    samples = [
        {"step": step, "prompt": "def", "text": f" f(x): # {step}"}
        for step in (0, 1000, 2000, 3000)
    ]
    write_lines(folder / "samples.jsonl", samples)
    (folder / "config.toml").write_text(config)
    return folder


def write_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in objects))
