"""Filters a corpus, drops near duplicates and tokenises it, with datatrove; titanlite trains on the
result.

    pip install datatrove orjson spacy tokenizers
    python -m docs.corpus my_texts my_corpus --workers 8      # JSON lines with the field text
    ./run_train.sh debug --data.path=my_corpus/tokens

What it is: three passes of datatrove (https://github.com/huggingface/datatrove) over English text.
The filters are those of Gopher, C4 and FineWeb with the limits of datatrove; the near duplicates
are found by MinHash. On a cluster, the same pipelines run in a SlurmPipelineExecutor or a
RayPipelineExecutor in place of the LocalPipelineExecutor. A second start goes on with the tasks
that are missing.
What is left out: the filters that download something when they run, which are LanguageFilter
(a model of fastText), URLFilter and C4BadWordsFilter (lists of words).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig

from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.formats.huggingface_tokenizer import to_files

FILES = "**/*.jsonl*"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", type=Path, help="a folder of JSON lines, also within gzip")
    parser.add_argument("out", type=Path, help="the folder to make; the ids are in its tokens")
    parser.add_argument("--tokenizer", default="", help="default: the bundled one")
    parser.add_argument("--tasks", type=int, default=1, help="pieces of work, at most one per file")
    parser.add_argument("--workers", type=int, default=1, help="tasks that run at the same time")
    options = parser.parse_args()
    if not any(options.source.glob(FILES)):
        parser.error(f"{options.source}: expected a folder of JSON lines, with files {FILES}")
    build_corpus(options.source, options.out, options.tokenizer, options.tasks, options.workers)


def build_corpus(source: Path, out: Path, tokenizer: str, tasks: int, workers: int) -> None:
    """Writes `out/tokens`, and beside it what the passes leave for each other."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_file = write_tokenizer(Tokenizer(tokenizer), out / "tokenizer.json")
    # 14 buckets of 8 hashes find documents from a Jaccard similarity of about 0.7 on. SHA-1, because
    # the default, xxhash64, fails with the package xxhash 4
    minhash = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    texts = JsonlReader(str(source), glob_pattern=FILES)
    filtered = JsonlReader(str(out / "filtered"))  # the same documents in the same tasks, twice

    filters = [
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),  # as FineWeb does
        FineWebQualityFilter(),
    ]
    signatures = MinhashDedupSignature(str(out / "signatures"), minhash)
    buckets = MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=minhash)
    clusters = MinhashDedupCluster(str(out / "buckets"), str(out / "duplicates"), config=minhash)
    tokens = DocumentTokenizer(str(out / "tokens"), tokenizer_file, shuffle_documents=False)

    passes = {
        "filter": ([texts, *filters, JsonlWriter(str(out / "filtered"))], tasks),
        "sign": ([filtered, signatures], tasks),
        "compare": ([buckets], minhash.num_buckets),
        "cluster": ([clusters], 1),
        "tokenise": ([filtered, MinhashDedupFilter(str(out / "duplicates")), tokens], tasks),
    }
    for name, (pipeline, count) in passes.items():
        LocalPipelineExecutor(
            pipeline, tasks=count, workers=workers, logging_dir=str(out / "logs" / name)
        ).run()
        if name == "filter" and not (out / "filtered").exists():
            sys.exit(
                f"{source}: the filters drop every document; expected English prose in the field "
                f"text. {out / 'logs/filter/stats.json'} counts what each filter drops"
            )


def write_tokenizer(tokenizer: Tokenizer, path: Path) -> str:
    """A tokenizer.json that makes the ids of `titanlite prepare`; returns its name.

    It has no special tokens: a text that contains "<|end_of_text|>" would end its document there.
    It adds none around a document either: titanlite puts bos and eos there when it reads the ids.
    """
    content = json.loads(to_files(tokenizer, 0)["tokenizer.json"])
    added = content["added_tokens"]
    content["added_tokens"] = [
        entry for entry in added if entry["content"] not in tokenizer.special
    ]
    content["post_processor"] = None
    path.write_text(json.dumps(content))
    return str(path)


if __name__ == "__main__":
    main()
