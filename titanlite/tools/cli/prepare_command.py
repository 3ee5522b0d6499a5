"""`titanlite prepare`: tokenises data, of sources into a folder, or of a config into the cache."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path

from titanlite.config.load import flavors, load_config
from titanlite.config.schema import FROM_CHECKPOINT
from titanlite.data.prepared import is_prepared
from titanlite.data.verification import verify_changed
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.progress import progress_bar
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat.conversation import control_tokens
from titanlite.tools.chat.find_template import find_template, read_template
from titanlite.tools.chat.template import PLAIN, ChatTemplate, TemplateError
from titanlite.tools.cli.options import StrictParser, at_least
from titanlite.tools.cli.prepare_options import (
    add_duplicate_options,
    add_filter_options,
    duplicates_from,
    filters_from,
)
from titanlite.tools.cli.stops import stoppable
from titanlite.tools.prepare.build import BAD_ROWS, Options, begin, build, working_folder
from titanlite.tools.prepare.cache import prepare
from titanlite.tools.prepare.inspect import inspect
from titanlite.tools.prepare.job import NAME, NO_CHAT, ChatConfig, differences, read_job
from titanlite.tools.prepare.locks import hold
from titanlite.tools.prepare.merge import MANIFEST, decide_duplicates, merge, missing_parts
from titanlite.tools.prepare.part import run_part, verdicts_path
from titanlite.tools.prepare.plan_job import Settings, plan_job
from titanlite.tools.prepare.records import record_path
from titanlite.tools.prepare.sources import Found, Keys, Source, find, require_apart

KEYS = Keys("SOURCE", "--pattern", "--field", "--validation")
USAGE = """titanlite prepare SOURCE... --out FOLDER [options]
       titanlite prepare SOURCE... --out FOLDER --part I/N [options]
       titanlite prepare --merge FOLDER
       titanlite prepare --inspect FOLDER
       titanlite prepare [CONFIG] [--section.key=value ...]"""
EPILOG = """\
A SOURCE is a text file, JSON lines, Parquet, or a folder of these; token ids of nanoGPT, llm.c
or Megatron (.bin, .idx); hf:NAME[:CONFIG[:SPLIT]] for a data set of the package datasets; or
python-stdlib. Text and JSON lines may be compressed with gzip or zstd. Kinds are detected from
the contents.

Train on the result with --data.path=FOLDER. An interrupted command goes on when it is repeated.
Without --out, --merge and --inspect, the arguments are those of `titanlite train`, and its data
is prepared into the cache."""

EXAMPLE = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "yes"}]
ADVICE = "stopped; the same command goes on with what is missing"
TEXTS = {  # options with a text: (default, name of the value, help)
    "tokenizer": ("", "FILE", "default: the bundled one of 4,096 tokens"),
    "pattern": ("**/*", "GLOB", "which files of a folder to use; default: **/*"),
    "field": (
        "",
        "NAME",
        "field or column of JSON lines and Parquet with the text; default: text, with --chat "
        "messages (or the answer to --prompt-field), with --pairs chosen",
    ),
    "prompt-field": (
        "",
        "NAME",
        "field of a prompt before the text; its tokens are not targets of the loss",
    ),
    "template": (
        "",
        "FILE",
        "--chat: a chat template (Jinja); default: that beside the tokenizer, else a plain one",
    ),
    "validation": (
        "",
        "SOURCE",
        "where validation documents come from; default: one document of 20",
    ),
}


def run(argv: list[str]) -> int:
    """Prints the path of the prepared data."""
    names = {word.partition("=")[0] for word in argv}
    if not names & {"-h", "--help", "--out", "--merge", "--inspect"}:
        with stoppable(ADVICE):
            return _prepare_config(argv)
    options = _parser().parse_args(argv)
    if options.inspect or options.merge:
        if options.sources or options.out or options.part:
            raise ConfigError(
                "--inspect and --merge take one prepared folder, "
                "and neither SOURCE, --out nor --part"
            )
        if options.inspect:
            return inspect(options.inspect, options.tokenizer)
        with stoppable(ADVICE):
            return _merge(options)
    if not options.sources:
        raise ConfigError(
            "--out without SOURCE: name what to prepare, "
            "as in: titanlite prepare my_texts --out my_data"
        )
    with stoppable(ADVICE):
        return _prepare_sources(options)


def _prepare_config(argv: list[str]) -> int:
    """From [data] of a configuration into the cache."""
    positional = [word for word in argv if not word.startswith("-")]
    if positional:
        word = positional[0]
        if word not in flavors() and not word.endswith(".toml") and Path(word).exists():
            raise ConfigError(
                f"{word!r} is a file or folder, not a config: add --out FOLDER to prepare it"
            )
    config = load_config(argv)
    if config.model.flavor == FROM_CHECKPOINT:
        from titanlite.tools.formats.adopt import adopt_checkpoint  # which needs torch

        config = adopt_checkpoint(config)
    section = config.data
    tokenizer = Tokenizer(section.tokenizer)
    for part in section.parts():
        print(prepare(part, tokenizer, _log))
    return 0


def _parser() -> StrictParser:
    parser = StrictParser(
        prog="titanlite prepare",
        usage=USAGE,
        description="Tokenise data once, into a folder that training maps into memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="what to prepare")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the folder to make")
    for name, (default, metavar, text) in TEXTS.items():
        parser.add_argument(f"--{name}", default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="rows are conversations: messages, or a prompt and its answer; only what the "
        "assistant says is a target of the loss",
    )
    parser.add_argument(
        "--last-answer", action="store_true", help="--chat: only the last answer is a target"
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="--chat: a row has two conversations or answers, the fields chosen and rejected, "
        "for training with dpo.beta",
    )
    parser.add_argument(
        "--max-bad-rows",
        type=at_least(float, 0),
        default=BAD_ROWS,
        metavar="N",
        help="how many documents may be unreadable; below 1: a share of all; "
        f"default: {BAD_ROWS:g}",
    )
    parser.add_argument(
        "--workers",
        type=at_least(int, 1, 4096),
        default=0,
        metavar="N",
        help="processes; default: one per core",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where parts run; default: local",
    )
    add_filter_options(parser)
    add_duplicate_options(parser)
    parts = parser.add_argument_group("several machines")
    parts.add_argument(
        "--part", type=_part, metavar="I/N", help="make part I of N (1/N to N/N), on any machine"
    )
    parts.add_argument(
        "--merge", type=Path, metavar="FOLDER", help="compare or join the parts of FOLDER"
    )
    parser.add_argument(
        "--inspect", type=Path, metavar="FOLDER", help="print, verify and sample a prepared folder"
    )
    return parser


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with I from 1 to N, as 3/64")
    return int(match[1]), int(match[2])


def chat_from(options: argparse.Namespace, tokenizer: Tokenizer) -> ChatConfig:
    """How conversations become text. Raises ConfigError."""
    if not options.chat:
        for name in ("template", "last_answer", "pairs"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} has no effect without --chat")
        return NO_CHAT
    if options.template:
        template = read_template(Path(options.template))
    else:
        template = find_template(tokenizer.path) or PLAIN
    names = {i: name for name, i in tokenizer.special.items()}
    ends = (names[tokenizer.bos], names[tokenizer.eos])
    try:
        ChatTemplate(template, *ends).text(EXAMPLE)
    except TemplateError as error:
        raise ConfigError(f"the chat template cannot render a conversation: {error}") from None
    special = tuple(tokenizer.special)
    control = tuple(control_tokens(tokenizer))
    last_only = options.last_answer or options.pairs  # what comes before them must be the same
    return ChatConfig(template, *ends, special, control, last_only, options.pairs)


def _default_field(options: argparse.Namespace) -> str:
    if options.pairs:
        return "chosen"
    if options.chat and not options.prompt_field:
        return "messages"
    return "text"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _prepare_sources(options: argparse.Namespace) -> int:
    num_parts = options.part[1] if options.part else 0
    tokenizer = Tokenizer(options.tokenizer)
    chat = chat_from(options, tokenizer)
    settings = Settings(num_parts, filters_from(options), duplicates_from(options), chat)
    field = options.field or _default_field(options)
    folder = options.out.absolute()
    sources: list[tuple[Source, Found]] = []
    for path in options.sources:
        source = Source(
            path, options.pattern, field, options.prompt_field, options.validation, KEYS
        )
        if is_prepared(Path(path)):
            raise ConfigError(f"{path}: is prepared already; train on it with --data.path={path}")
        found = find(source)
        require_apart(source, found, folder)
        sources.append((source, found))
    if options.validation:
        held_out = source.held_out()
        require_apart(held_out, find(held_out), folder)
    # Several machines may make parts at the same time
    lock = hold(folder, shared=bool(options.part))
    with contextlib.nullcontext() if folder.exists() else lock:
        if folder.exists():
            _repeated(sources, tokenizer, folder, settings)
        elif options.part:
            return _make_part(sources, tokenizer, folder, settings, options.part[0] - 1)
        else:
            build_options = Options(settings, options.workers, options.max_bad_rows, options.engine)
            build(sources, tokenizer, folder, build_options, _log)
    verify_changed(folder)
    print(folder)
    return 0


def _repeated(
    sources: list[tuple[Source, Found]], tokenizer: Tokenizer, folder: Path, settings: Settings
) -> None:
    """Raises ConfigError unless the folder, which exists, was made by the same command."""
    if not (folder / NAME).is_file() or not is_prepared(folder):
        raise ConfigError(
            f"{folder}: exists and is not prepared data; choose another folder for --out"
        )
    done = read_job(folder)
    changed = differences(done, plan_job(sources, tokenizer, settings, done))
    if changed:
        raise ConfigError(
            f"{folder}: was prepared differently ({changed}); choose another folder for --out"
        )
    _log(f"{folder}: is prepared already")


def _make_part(
    sources: list[tuple[Source, Found]],
    tokenizer: Tokenizer,
    folder: Path,
    settings: Settings,
    part: int,
) -> int:
    """The next step of one part."""
    job = begin(sources, tokenizer, folder, settings)
    work = working_folder(folder)
    with progress_bar(job.size([part]), f"part {part + 1}") as bar:
        run_part(job, work, tokenizer, part, bar.update)
    print(record_path(work, part, read=not record_path(work, part).exists()))
    return 0


def _merge(options: argparse.Namespace) -> int:
    folder = options.merge.absolute()
    work = working_folder(folder)
    if not work.is_dir() and is_prepared(folder):
        verify_changed(folder)
        _log(f"{folder}: is merged already")
        print(folder)
        return 0
    if not (work / NAME).is_file():
        raise ConfigError(
            f"{folder}: nothing to merge; first: titanlite prepare SOURCE --out FOLDER --part I/N"
        )
    with hold(folder):
        return _merge_parts(options, folder, work)


def _merge_parts(options: argparse.Namespace, folder: Path, work: Path) -> int:
    """The next step that needs all parts."""
    job = read_job(work)
    compared = True
    if job.duplicates.remove != "none":
        compared = verdicts_path(work, job.parts - 1, final=True).exists()
    # With a manifest, the records of the parts may be gone: an earlier merge was interrupted
    if not (work / MANIFEST).exists():
        missing = missing_parts(job, work, read=not compared)
        if missing:
            shown = ", ".join(f"{part + 1}/{job.parts}" for part in missing[:20])
            if len(missing) > 20:
                shown += ", ..."
            raise ConfigError(
                f"{folder}: {len(missing)} of {job.parts} parts are missing: "
                f"run with --part {shown}"
            )
        if not compared:
            decide_duplicates(job, work, _log)
            _log(
                "now run every part once more, which tokenises what is left, and then --merge again"
            )
            return 0
    merge(job, work, folder, Tokenizer(job.tokenizer), options.max_bad_rows, _log)
    verify_changed(folder)
    print(folder)
    return 0
