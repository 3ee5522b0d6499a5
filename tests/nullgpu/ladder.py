"""The layouts of `titanlite verify` on a pretended GPU, as runs that must not crash: each line says
how one ended.

    python tests/nullgpu/pretended_gpu.py --devices 2 python tests/nullgpu/ladder.py [--quick] [--layout ...]

The workers train as for `titanlite verify`; the reference is computed on the CPU, so that the
differences, which mean nothing, can be computed and are thrown away.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from titanlite.model.flavors import resolve_flavor
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.verify.compare import measure, reference
from titanlite.tools.verify.ladder import ladder, make_case, reason_not_fitting
from titanlite.tools.verify.pool import Pool, WorkerError


def main() -> int:
    """Returns 1 if a layout crashed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layout", action="append")
    options = parser.parse_args()
    cpu, gpu = (
        Pool(["titanlite.tools.verify.compare"], device, quiet=True) for device in ("cpu", "cuda")
    )
    tokenizer, crashed = Tokenizer(), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reference.pt")
        for name in options.layout or ladder(options.processes, options.quick, "cuda"):
            case = make_case(["debug"], name, "cuda")
            llama = resolve_flavor(case.config.model, tokenizer.size)
            if reason_not_fitting(case, llama):
                continue
            on_cpu = dataclasses.replace(
                case.config,
                run=dataclasses.replace(case.config.run, device="cpu"),
                float8=dataclasses.replace(case.config.float8, emulate=True),
            )
            began, error = time.monotonic(), ""
            try:
                cpu.run(1, reference, on_cpu, llama, path, timeout=300)
                gpu.run(case.processes, measure, case.config, llama, path, timeout=600)
            except WorkerError as problem:
                error = str(problem)
                crashed += 1
            print(
                f"{'crashed' if error else 'ran':7}  {time.monotonic() - began:6.1f}  {case.name}",
                flush=True,
            )
            print("".join(f"    {line}\n" for line in error.splitlines()), end="", flush=True)
    print(f"{crashed} crashed")
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
