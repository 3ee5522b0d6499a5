"""Messages from other ranks: JSON; the fields of heartbeats are checked before they are used.

What it is: what `exchange.py` receives, and the heartbeats that `watchdog.py` reads from the store.
Why it is here: the network is trusted, but another version of titanlite or other software may
answer at the address. An invalid heartbeat must not end the thread that watches for hangs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from titanlite.distributed.hang_diagnosis import Diagnosis, Heartbeat
from titanlite.runtime.errors import ConfigError

SAMPLE = Heartbeat(0, "", 0)


def read_message(content: bytes) -> Any:
    """The JSON value that another rank has sent. Raises ConfigError if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"a message between ranks is not JSON ({error}); check that all ranks run the same titanlite, and "
            "that nothing else uses MASTER_PORT"
        ) from None


def read_heartbeat(content: bytes) -> Heartbeat | None:
    """A heartbeat from the store; None if a field is absent or of another type, as if none had
    arrived.
    """
    try:
        beat = Heartbeat(**json.loads(content))
        beat = replace(
            beat, clock=float(beat.clock), limit=float(beat.limit), still=float(beat.still)
        )
        found = Diagnosis(**beat.diagnosis or {"message": "", "frozen": []})
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    valid = all(type(value) is type(getattr(SAMPLE, name)) for name, value in vars(beat).items())
    valid = valid and type(found.message) is str and type(found.frozen) is list
    return beat if valid and all(type(rank) is int for rank in found.frozen) else None
