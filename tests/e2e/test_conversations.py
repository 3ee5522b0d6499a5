"""Training on conversations: its loss is that of a plain loop over them."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from chats import MARKED
from runs import curve, rows, train_run

from titanlite.data.packing import PackedRows
from titanlite.data.shards import Tokens
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.chat.conversation import ChatEncoder, encode
from titanlite.tools.chat.template import ChatTemplate
from titanlite.tools.cli.main import main
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.load_weights import load_model

SEQ_LEN = 64
CONVERSATIONS = [
    [
        {"role": "user", "content": f"question {i}" + " more" * (i % 5)},
        {"role": "assistant", "content": f"answer {i * i}" * (1 + i % 3)},
        {"role": "user", "content": "and then?"},
        {"role": "assistant", "content": "no"},
    ]
    for i in range(24)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    rows = folder / "a.jsonl"
    rows.write_text("".join(json.dumps({"messages": row}) + "\n" for row in CONVERSATIONS))
    held_out = folder / "b.jsonl"
    held_out.write_text(json.dumps({"messages": CONVERSATIONS[0]}) + "\n")
    template = folder / "t.jinja"
    template.write_text(MARKED)
    command = ["prepare", str(rows), "--chat", "--template", str(template)]
    command += ["--validation", str(held_out), "--out", str(folder / "data")]
    assert main(command) == 0
    return folder / "data"


@pytest.mark.parametrize(
    "layout",
    [
        ["--parallel.cp=2"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--parallel.tp=2"], marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_packed_conversations_is_that_of_each_alone(
    pool, options, data, whole_run, tmp_path, layout
):
    tokens = Tokens(data, json.loads((data / "manifest.json").read_text()), "train")
    num_rows = PackedRows(tokens, SEQ_LEN, "conversations").count
    assert num_rows < len(CONVERSATIONS), "some share a row"
    run = [word for word in options if not word.startswith("--data.path")]
    run += [f"--data.path={data}", f"--run.folder={tmp_path}", "--data.packing=best_fit"]
    run += ["--data.document_mask", "--validation.freq=0", "--training.steps=1", *layout]
    # Each row once
    run += [f"--training.global_batch_size={num_rows}", "--training.local_batch_size=1"]
    run += [f"--checkpoint.initial_load={whole_run()}", f"--training.seq_len={SEQ_LEN}"]
    ranks = 2 if layout else 1
    assert pool.run(ranks, train_run, run) == [0] * ranks
    loss, _ = curve(tmp_path / "debug")[1]
    (row,) = rows(tmp_path / "debug")

    tokenizer = Tokenizer()
    template = ChatTemplate(MARKED, "<|begin_of_text|>", "<|end_of_text|>")
    encoder = ChatEncoder(template, list(tokenizer.special))
    model = load_model(open_full_state(whole_run()), torch.device("cpu"), SEQ_LEN)
    total, count, num_tokens = 0.0, 0, 0
    for messages in CONVERSATIONS:
        ids, targets = encode(encoder.pieces(messages), tokenizer)
        logits = model(torch.tensor([ids[:-1]]))[0].double()
        trained = torch.tensor(targets[1:])
        total += float(
            F.cross_entropy(logits[trained], torch.tensor(ids[1:])[trained], reduction="sum")
        )
        count += int(trained.sum())
        num_tokens += len(ids)
    # Padding is not counted; one row is full, and the last token of it is only a label
    assert row["tokens"] == num_tokens - 1
    assert loss == pytest.approx(total / count, rel=1e-6)
