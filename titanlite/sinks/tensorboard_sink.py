"""TensorBoard: event files in the run's folder, for `tensorboard --logdir outputs`.

What it is: one event file, which is written anew from metrics.jsonl at each start of the run,
because an event file cannot be shortened to the step from which a run resumes. It begins with a
mark at which a running TensorBoard drops what it has read before. Values have the 32 bits
of TensorBoard's scalars; metrics.jsonl has all digits.
What it costs: about 60 bytes per value.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from titanlite.runtime.files import read_bounded
from titanlite.sinks.metric_names import Scalars
from titanlite.sinks.provenance import Provenance


class TensorBoardSink:
    """Writes event files in a folder that has no others."""

    def __init__(self, folder: Path, origin: Provenance) -> None:
        self.folder = folder
        self.origin = origin
        self.writer: SummaryWriter | None = None

    def open(self) -> defaultdict[str, int]:
        """Deletes the event files of earlier attempts, and starts a new one, without any steps."""
        if self.writer is not None:  # writing has failed, and its thread has ended or ends now
            failed = self.writer
            self.writer = None
            failed.close()
        for path in self.folder.glob("events.out.tfevents.*"):
            path.unlink()
        self.writer = SummaryWriter(str(self.folder), purge_step=0, max_queue=1000)
        facts = "\n".join(f"    {name}: {value}" for name, value in self.origin.facts.items())
        self.writer.add_text("environment", facts, 0)
        self.writer.add_text(
            "config", "".join(f"    {line}\n" for line in self.origin.toml.splitlines()), 0
        )
        return defaultdict(lambda: -1)

    @staticmethod
    def metric_name(name: str) -> str:
        return name

    def send(self, rows: list[Scalars]) -> None:
        """Writes the values to disk."""
        assert self.writer is not None
        for step, time, values in rows:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step, walltime=time)
        self.writer.flush()

    def attach(self, path: Path, name: str) -> None:
        """Adds the path of a file as a text, and the lines of JSON: TensorBoard keeps no files."""
        assert self.writer is not None
        text = f"    {path}\n"
        if path.suffix == ".jsonl":
            text += "".join(f"    {line}\n" for line in read_bounded(path).decode().splitlines())
        self.writer.add_text(name, text, 0)

    def close(self, failed: bool) -> None:
        """Closes the file."""
        assert self.writer is not None
        self.writer.close()
        self.writer = None
