#!/usr/bin/env bash
# One protocol that extends torch's Stateful makes every dcp.save of the process fail, up to Python 3.11.
#
#   PYTHON=python3.11 findings/stateful_protocol_of_typing.sh      needs packages from PyPI
#
# torch.distributed.checkpoint.stateful.Stateful is a runtime-checkable protocol of typing_extensions.
# Below Python 3.12 that is another class than typing.Protocol. A protocol of one's own that extends it
# with typing.Protocol, as type checkers accept, is among its subclasses, and isinstance(x, Stateful)
# asks all subclasses: it raises TypeError for every x that is not Stateful. dcp.save and dcp.load ask
# that of each entry of the state, so they fail, although they do not use the protocol. A class that was
# asked about before the protocol was defined is remembered, and makes no error.
# With typing_extensions.Protocol it works; so does a protocol that repeats the methods.
#
# Seen with torch 2.13.0, typing_extensions 4.16.0, Python 3.11.7:
#   without the protocol: dcp.save succeeded
#   with the protocol: TypeError: Protocols with non-method members don't support issubclass()
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 typing_extensions==4.16.0 numpy==2.2.6
cd "$folder"
cat > save.py <<'PY'
import sys
import typing

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

if sys.argv[1] == "with":

    @typing.runtime_checkable
    class Resettable(Stateful, typing.Protocol):
        def reset(self) -> None: ...


try:
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=sys.argv[1])
    print(sys.argv[1], "the protocol: dcp.save succeeded")
except TypeError as error:
    print(sys.argv[1], f"the protocol: TypeError: {error}")
PY
for case in without with; do "$folder/venv/bin/python" -W ignore save.py "$case"; done | tee found
diff found - <<'TXT' || { echo "the behaviour has changed"; exit 1; }
without the protocol: dcp.save succeeded
with the protocol: TypeError: Protocols with non-method members don't support issubclass()
TXT
