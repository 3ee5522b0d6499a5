#!/usr/bin/env bash
# torch.distributed.checkpoint: with plan caching a process can save with one kind of writer only.
#
#   findings/dcp_plan_cache_is_global.sh     needs Python 3.10 to 3.13, and packages from PyPI
#
# DefaultSavePlanner(enable_plan_caching=True) keeps its plans in dictionaries of the class, by the
# class's name. So a new planner for another writer finds the plan of the first writer, with that
# writer's storage data, as its own of the last save, and the writer fails on it. A process that
# saves checkpoints with FileSystemWriter and exports with HuggingFaceStorageWriter meets this at its
# first export. Two planners without caching work.
#
# Seen with torch 2.13.0, safetensors 0.8.0, Python 3.11:
#   FileSystemWriter: saved
#   HuggingFaceStorageWriter: TypeError: argument of type '_StoragePrefix' is not iterable
#   HuggingFaceStorageWriter, without caching: saved
# The script fails if that is no longer so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
import torch.distributed.checkpoint as dcp


def save(writer, caching):
    planner = dcp.DefaultSavePlanner(enable_plan_caching=caching)
    try:
        dcp.save({"weight": torch.ones(4)}, storage_writer=writer, planner=planner)
    except BaseException as error:  # CheckpointException is no Exception
        return str(error).strip().splitlines()[-1]
    return "saved"


first = save(dcp.FileSystemWriter("first"), caching=True)
print("FileSystemWriter:", first)
second = save(dcp.HuggingFaceStorageWriter("second", save_distributed=True), caching=True)
print("HuggingFaceStorageWriter:", second)
third = save(dcp.HuggingFaceStorageWriter("third", save_distributed=True), caching=False)
print("HuggingFaceStorageWriter, without caching:", third)
assert first == third == "saved", "the behaviour has changed"
assert "'_StoragePrefix' is not iterable" in second, "the behaviour has changed"
PY
