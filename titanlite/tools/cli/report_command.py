"""`titanlite report`: what one run has done, or several compared, as a page, as text, or live."""

from __future__ import annotations

import sys
from pathlib import Path

from titanlite.config.mistakes import suggestion
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import replace_file
from titanlite.tools.cli.options import StrictParser, at_least

EPILOG = """Without options, writes report.html into the first run's folder: one file that needs no network. Every run
writes its own when it ends. docs/report.md says how to read it."""


def run(argv: list[str]) -> int:
    """Writes or prints the report, or serves it until Ctrl-C. Raises ConfigError."""
    parser = StrictParser(
        prog="titanlite report",
        usage="titanlite report RUN... [--out FILE | --text | --live [--port N]]",
        description="Show what a run has done, or compare several runs.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, as outputs/debug"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--out", type=Path, metavar="FILE", help="where to write the page")
    how.add_argument("--text", action="store_true", help="print the report, in at most 80 columns")
    how.add_argument(
        "--live",
        action="store_true",
        help="serve the page on 127.0.0.1, with newer data as it comes",
    )
    parser.add_argument(
        "--port", type=at_least(int, 0, 65535), metavar="N", help="of --live; 0: any; default 8765"
    )
    options = parser.parse_args(argv)
    if options.port is not None and not options.live:
        raise ConfigError("--port: only with --live")
    folders = _folders(options.runs)
    if options.live:
        return _serve(folders, options.port)
    # With numpy, which --help does not need
    from titanlite.tools.report.page import NAME, contents, page, trends_of
    from titanlite.tools.report.run_data import read_runs

    runs = read_runs(folders)
    if options.text:
        from titanlite.tools.report.text_report import text_report

        print(
            text_report(runs, trends_of(runs), blocks="utf" in (sys.stdout.encoding or "").lower())
        )
        return 0
    out: Path = options.out or folders[0] / NAME
    try:
        replace_file(out.absolute(), page(contents(runs)).encode())
    except OSError as error:
        raise ConfigError(
            f"{out}: {error.strerror or error}; expected a file to write, with --out"
        ) from None
    print(out)
    return 0


def _folders(paths: list[Path]) -> list[Path]:
    """The folders, each once. Raises ConfigError for those that hold no run."""
    problems = []
    for path in paths:
        if not path.is_dir():
            near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            hint = suggestion(path.name, near) or "; expected a run's folder, as outputs/debug"
            problems.append(
                f"{path}: {'not a folder' if path.exists() else 'no such folder'}{hint}"
            )
        elif not any((path / name).exists() for name in ("metrics.jsonl", "config.toml")):
            problems.append(
                f"{path}: has no metrics.jsonl; expected a run's folder, as outputs/debug"
            )
    from titanlite.tools.report.page import MOST_RUNS

    if len(paths) > MOST_RUNS:
        problems.append(f"{len(paths)} runs: expected at most {MOST_RUNS} in one report")
    if problems:
        raise ConfigError(problems)
    return list({path.resolve(): path for path in paths}.values())


def _serve(folders: list[Path], port: int | None) -> int:
    from titanlite.tools.report.live import HOST, PORT, build_server

    server = build_server(folders, PORT if port is None else port)
    print(f"http://{HOST}:{server.server_address[1]}/ (Ctrl-C ends)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0
