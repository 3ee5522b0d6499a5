"""Tests in another process whether `tokenizers` can read a file.

Why it is here: a malformed file can make the package's Rust code panic twice and abort the process;
it must be an ordinary error instead. A file that the child has read is assumed safe to read here.
What it is: the child has limits of memory and CPU time (`runtime/limited_child.py`).
What it costs: 0.1 s, and reading the file twice.
"""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys

from titanlite.runtime import limited_child

MEMORY = 1 << 33  # bytes of addresses
SECONDS = 60
TEXT = "Some text: 12 \u00e9 \u65e5\u672c\t\n"  # encoded and decoded once


@functools.lru_cache(4)
def problem_of(texts: tuple[str, ...]) -> str:
    """Describes why the package cannot use one of these tokenizers; "" if it can."""
    command = limited_child.command(main, ("tokenizers",))
    done = subprocess.run(
        command, input=json.dumps(texts).encode(), capture_output=True, check=False
    )
    if done.returncode != 0:
        return "reading it ends the process that reads it"
    answer: str = json.loads(done.stdout)
    return answer


# From here on: the child


def main() -> None:
    """Reads tokenizers from standard input, a list of JSON, and answers with the problem."""
    limited_child.forbid()
    limited_child.limit({resource.RLIMIT_CPU: SECONDS})
    texts = json.loads(sys.stdin.buffer.read())
    # Imported here, because only the child needs it
    import tokenizers

    limited_child.limit({resource.RLIMIT_AS: MEMORY})
    problem = ""
    try:
        for text in texts:
            encoder = tokenizers.Tokenizer.from_str(text)
            encoder.decode(encoder.encode(TEXT, add_special_tokens=False).ids)
            encoder.get_vocab(with_added_tokens=True)
    except Exception as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0][:300]
    sys.stdout.write(json.dumps(problem))
