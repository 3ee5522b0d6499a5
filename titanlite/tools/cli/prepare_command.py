"""`titanlite prepare`: tokenises data, of sources into a folder, or of a config into the cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite.config.load import flavors, load_config, split_command_line
from titanlite.config.schema import FROM_CHECKPOINT, ID_TYPES
from titanlite.data.prepared import is_prepared
from titanlite.data.verification import verify_changed
from titanlite.runtime.errors import ConfigError, printable
from titanlite.tokenizer.kept_files import kept_beside
from titanlite.tokenizer.tokenizer import Tokenizer, named_tokenizer
from titanlite.tools.chat.answer_end import find_answer_end
from titanlite.tools.chat.conversation import control_tokens, template_names
from titanlite.tools.chat.find_template import find_template, read_template
from titanlite.tools.chat.template import PLAIN, ChatTemplate, TemplateError
from titanlite.tools.cli.options import StrictParser, at_least, log
from titanlite.tools.cli.stops import stoppable
from titanlite.tools.prepare.build import BAD_ROWS, Options, build, hold
from titanlite.tools.prepare.cache import prepare
from titanlite.tools.prepare.inspect import inspect
from titanlite.tools.prepare.job import NAME, NO_CHAT, ChatConfig, job_hash, read_job
from titanlite.tools.prepare.plan_job import plan_job
from titanlite.tools.prepare.sources import Found, Keys, Source, find, require_apart

KEYS = Keys("SOURCE", "--pattern", "--field", "--validation", "--ids")
USAGE = """titanlite prepare SOURCE... --out FOLDER [options]
       titanlite prepare --inspect FOLDER
       titanlite prepare [CONFIG] [--section.key=value ...]"""
EPILOG = """\
A SOURCE is a text file, JSON lines, Parquet, or a folder of these; token ids of nanoGPT or llm.c
(.bin), OLMo or NumPy (.npy), Megatron (.bin with .idx) or datatrove (.ds with .ds.index);
hf:NAME[:CONFIG[:SPLIT]] for a data set of the package datasets; or python-stdlib. Text and JSON
lines may be compressed with gzip or zstd. Kinds are detected from the contents.

Train on the result with --data.path=FOLDER. An interrupted command goes on when it is repeated.
Without --out and --inspect, the arguments are those of `titanlite train`, and its data is prepared
into the cache."""

ADVICE = "stopped; the same command goes on with what is missing"
TEXTS = {  # options with a text: (default, name of the value, help)
    "tokenizer": ("", "FILE", "default: the bundled one of 4,096 tokens"),
    "pattern": ("**/*", "GLOB", "which files of a folder to use; default: **/*"),
    "field": (
        "",
        "NAME",
        "field or column of JSON lines and Parquet with the text; default: text, with --chat "
        "messages (or text, the answer to --prompt-field)",
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
    if not names & {"-h", "--help", "--out", "--inspect"}:
        with stoppable(ADVICE):
            return _prepare_config(argv)
    options = _parser().parse_args(argv)
    if options.inspect:
        if options.sources or options.out:
            raise ConfigError("--inspect takes one prepared folder, and neither SOURCE nor --out")
        return inspect(options.inspect, options.tokenizer)
    if not options.sources:
        raise ConfigError(
            "--out without SOURCE: name what to prepare, "
            "as in: titanlite prepare my_texts --out my_data"
        )
    with stoppable(ADVICE):
        return _prepare_sources(options)


def _prepare_config(argv: list[str]) -> int:
    """Prepares [data] of a configuration into the cache."""
    names, _ = split_command_line(argv)
    word = names[0] if names else ""
    if word and word not in flavors() and not word.endswith(".toml") and Path(word).exists():
        raise ConfigError(
            f"{word!r} is a file or folder, not a config: add --out FOLDER to prepare it"
        )
    parser = _parser()
    own = [word.partition("=")[0] for word in argv if parser.is_known(word)]
    if own:
        raise ConfigError(f"{own[0]}: is for SOURCE with --out FOLDER, or --inspect FOLDER")
    parser.parse_beside_config(argv)
    config = load_config(argv)
    if config.model.flavor == FROM_CHECKPOINT:
        from titanlite.tools.formats.adopt import adopt_checkpoint  # which needs torch

        config = adopt_checkpoint(config)
    section = config.data
    tokenizer = named_tokenizer(section.tokenizer)
    for part in section.parts():
        print(prepare(part, tokenizer, log))
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
        "--ids",
        default="auto",
        choices=ID_TYPES,
        help="type of the ids in token files that do not state it (.bin, raw .npy); default: auto, "
        "decided by the data",
    )
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
        "--drop-duplicates",
        action="store_true",
        help="drop documents that equal an earlier one; one of --validation stays before others",
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
        "--inspect", type=Path, metavar="FOLDER", help="print, verify and sample a prepared folder"
    )
    return parser


def chat_from(options: argparse.Namespace, tokenizer: Tokenizer) -> ChatConfig:
    """How conversations become text. Raises ConfigError."""
    if not options.chat:
        for name in ("template", "last_answer"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} has no effect without --chat")
        return NO_CHAT
    if options.template:
        template = read_template(Path(options.template))
    else:
        template = find_template(tokenizer.path) or PLAIN
    ends = template_names(tokenizer, kept_beside(options.tokenizer, of_model=False))
    special = tuple(tokenizer.special)
    control = tuple(control_tokens(tokenizer))
    try:
        end = find_answer_end(ChatTemplate(template, *ends), special)
    except TemplateError as error:
        raise ConfigError(f"the chat template cannot render a conversation: {error}") from None
    if end is None:
        raise ConfigError(
            "the chat template writes no special token of the tokenizer after an answer, and "
            "begins the next turn with none: a model trained with it could not end an answer; "
            "expected one that writes {{ eos_token }} there (--template)"
        )
    if end.marker:
        log(
            f"the chat template ends an answer by the {printable(end.token)} of the next turn: it "
            "is trained as the end of each answer"
        )
    return ChatConfig(template, *ends, special, control, options.last_answer, end.marker)


def _tokenizer_and_template(
    options: argparse.Namespace, tokenizer: Tokenizer, chat: ChatConfig
) -> str:
    """Describes which tokenizer and which template a model of this data needs."""
    encoding = f"the bundled one of {len(tokenizer.ranks):,} tokens (--tokenizer names another)"
    if options.tokenizer:
        encoding = str(tokenizer.path)
    template = f"that beside {tokenizer.path}"
    if options.template:
        template = options.template
    elif chat.template == PLAIN:
        template = "a plain one (--template names another)"
    return f"tokenizer: {encoding}; chat template: {template}"


def _default_field(options: argparse.Namespace) -> str:
    if options.chat and not options.prompt_field:
        return "messages"
    return "text"


def _prepare_sources(options: argparse.Namespace) -> int:
    tokenizer = named_tokenizer(options.tokenizer, "--tokenizer")
    chat = chat_from(options, tokenizer)
    if options.chat:
        log(_tokenizer_and_template(options, tokenizer, chat))
    field = options.field or _default_field(options)
    folder = options.out.absolute()
    sources: list[tuple[Source, Found]] = []
    for path in options.sources:
        source = Source(
            path,
            options.pattern,
            field,
            options.prompt_field,
            options.validation,
            KEYS,
            options.ids,
        )
        if is_prepared(Path(path)):
            raise ConfigError(f"{path}: is prepared already; train on it with --data.path={path}")
        found = find(source)
        require_apart(source, found, folder)
        sources.append((source, found))
    if options.validation:
        held_out = source.held_out()
        require_apart(held_out, find(held_out), folder)
    how = Options(options.drop_duplicates, chat, options.workers, options.max_bad_rows)
    if folder.exists():
        _require_repeated(sources, tokenizer, folder, how)
        log(f"{folder}: is prepared already")
    else:
        with hold(folder, wait=False):
            build(sources, tokenizer, folder, how, log)
    verify_changed(folder)
    print(folder)
    return 0


def _require_repeated(
    sources: list[tuple[Source, Found]], tokenizer: Tokenizer, folder: Path, options: Options
) -> None:
    """Raises ConfigError unless the folder, which exists, was made by the same command."""
    if not (folder / NAME).is_file() or not is_prepared(folder):
        raise ConfigError(
            f"{folder}: exists and is not prepared data; choose another folder for --out"
        )
    job = plan_job(sources, tokenizer, options.drop_duplicates, options.chat)
    if job_hash(read_job(folder)) != job_hash(job):
        raise ConfigError(
            f"{folder}: was prepared from other files or options, which its {NAME} lists; "
            "choose another folder for --out"
        )
