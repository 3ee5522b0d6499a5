#!/usr/bin/env bash
# datatrove: DocumentTokenizer(eos_token=...) writes documents without the bos that the tokenizer adds.
#
#   findings/datatrove_eos_token_drops_bos.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# A tokenizer.json of Llama 3's kind puts bos before each text, by its post-processor. With
# `eos_token=` datatrove replaces the post-processor by one that appends eos, so bos is gone; without
# it there is bos and no eos. The option's name suggests that eos is added to what is there, and
# nothing is logged. A name of a special token within a text becomes that token in both cases.
#
# Seen with datatrove 0.10.1, tokenizers 0.23.3, Python 3.11 (ids: 0 bos, 1 eos, 2 "a"):
#   eos_token=None: [0, 2, 0, 2, 1, 2]
#   eos_token='<eos>': [2, 1, 2, 1, 2, 1]
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datatrove==0.10.1 tokenizers==0.23.3 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> log || { cat log; exit 1; }
import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

tokenizer = Tokenizer(BPE({"<bos>": 0, "<eos>": 1, "a": 2}, []))
tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("<eos>")])
tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
tokenizer.save("tokenizer.json")
found = {}
for eos in (None, "<eos>"):
    folder = f"tokens_{eos is not None}"
    step = DocumentTokenizer(folder, "tokenizer.json", eos_token=eos, shuffle_documents=False)
    step.run(Document(text=text, id=text) for text in ("a", "a<eos>a"))
    found[eos] = np.fromfile(f"{folder}/00000_unshuffled.ds", np.uint16).tolist()
    print(f"eos_token={eos!r}: {found[eos]}")
assert found[None] == [0, 2, 0, 2, 1, 2], "the behaviour has changed"
assert found["<eos>"] == [2, 1, 2, 1, 2, 1], "the behaviour has changed"
PY
