"""What a disk may hold after a power failure: a model of a file system in which only what was
synced is certain.

What it is: the recorded file operations of a program are applied one by one. After each, the power
may fail. What fsync of a file or folder has confirmed is there; of what came later any part may be:
the entries of a folder (created, renamed, removed) each or not; a write whole, not, as zeros, or
half of it. A rename is one change of its folder.
Why it is here: POSIX promises no more. Journals keep more order, but which depends on the file
system and its options.
What it costs: the states of n unsynced operations are more than 2^n. Beyond `ALL` of them those
that keep or drop one operation, or all from one on, are taken, and some at random.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from io_calls import Call

ALL = 256  # so many states of one moment are enumerated
AT_RANDOM = 64
DROPPED, KEPT, ZEROS, HALF = range(4)
Tree = dict[str, "bytes | None"]  # path -> content, or None for a folder


class Node:
    """A file or a folder: its synced content, its content now, and the changes between them."""

    def __init__(self, folder: bool) -> None:
        self.synced: Any = {} if folder else b""
        self.now: Any = {} if folder else b""
        self.pending: list[Any] = []

    def change(self, change: Any) -> None:
        self.now = changed(self.now, change, KEPT)
        self.pending.append(change)

    def sync(self) -> None:
        self.synced, self.pending = self.now, []


def changed(content: Any, change: Any, how: int) -> Any:
    """A folder's entries, or a file's bytes, after a change that has reached the disk as `how`
    says.
    """
    if how == DROPPED:
        return content
    if isinstance(content, dict):
        return {name: node for name, node in {**content, **change}.items() if node}
    if isinstance(change, int):  # a new size
        return content[:change].ljust(change, b"\0")
    offset, data = change
    data = {KEPT: data, ZEROS: bytes(len(data)), HALF: data[: len(data) // 2]}[how]
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


class Disk:
    """What is below `root`, which holds `tree` at first."""

    def __init__(self, root: Path, tree: Tree) -> None:
        self.root, self.top = os.path.realpath(root), Node(folder=True)
        self.nodes: list[Node] = []
        for path, content in tree.items():
            self.apply(Call("mkdir" if content is None else "open", f"{self.root}/{path}"))
            if content:
                self.apply(Call("write", f"{self.root}/{path}", "", 0, content))
        for node in (self.top, *self.nodes):
            node.sync()

    def find(self, path: str) -> tuple[Node, str, Any]:
        """Returns the folder of a path, the name in it, and what is there now."""
        node = self.top
        *folders, name = os.path.relpath(path, self.root).split("/")
        for part in folders:
            node = node.now[part]
        return node, name, self.top if name == "." else node.now.get(name)

    def apply(self, call: Call) -> None:
        if call.name == "reported":
            return
        folder, name, node = self.find(call.path)
        if call.name in ("mkdir", "open") and node is None:
            node = Node(folder=call.name == "mkdir")
            self.nodes.append(node)
            folder.change({name: node})
        elif call.name == "open" and call.number & os.O_TRUNC and node.now:
            node.change(0)
        elif call.name == "write":
            node.change((call.number, call.data))
        elif call.name == "truncate":
            node.change(call.number)
        elif call.name == "unlink":
            folder.change({name: None})
        elif call.name == "rename":
            other, new, _ = self.find(call.other)
            assert other is folder, (
                "a rename into another folder is two changes, which this model does not have"
            )
            folder.change({new: node, name: None})
        elif call.name == "link":
            other, new, _ = self.find(call.other)
            other.change({new: node})
        elif call.name == "fsync":
            node.sync()

    def crashes(self, draw: random.Random) -> Iterator[Tree]:
        """The states in which the disk may be after a power failure now."""
        nodes = [node for node in (self.top, *self.nodes) if node.pending]
        changes = [(node, i) for node in nodes for i in range(len(node.pending))]
        options = [range(4 if isinstance(node.pending[i], tuple) else 2) for node, i in changes]
        count = len(changes)
        if math.prod(map(len, options)) <= ALL:
            choices: Iterator[tuple[int, ...]] = itertools.product(*options)
        else:
            chosen = {(how,) * count for how in (DROPPED, KEPT)}
            for i, how in ((at, how) for at in range(count) for how in options[at]):
                for before, after in itertools.product((DROPPED, KEPT), repeat=2):
                    chosen.add((before,) * i + (how,) + (after,) * (count - i - 1))
            chosen |= {tuple(draw.choice(option) for option in options) for _ in range(AT_RANDOM)}
            choices = iter(sorted(chosen))
        contents: dict[tuple[int, ...], Any] = {}  # of a node, by what has become of its changes
        for choice in choices:
            content, rest = {}, iter(choice)
            for node in nodes:
                key = (id(node), *itertools.islice(rest, len(node.pending)))
                if key not in contents:
                    contents[key] = node.synced
                    for change, how in zip(node.pending, key[1:], strict=True):
                        contents[key] = changed(contents[key], change, how)
                content[id(node)] = contents[key]
            yield dict(self._tree(self.top, "", content))

    def _tree(
        self, node: Node, path: str, content: dict[int, Any]
    ) -> Iterator[tuple[str, bytes | None]]:
        held = content.get(id(node), node.synced)
        if not isinstance(held, dict):
            yield path, held
            return
        if path:
            yield path, None
        for name, inner in held.items():
            yield from self._tree(inner, f"{path}/{name}" if path else name, content)


def write_tree(tree: Tree, folder: Path) -> None:
    """Writes a tree as real files, so that the program can be started on them."""
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir(parents=True)
        else:
            (folder / path).write_bytes(content)


def read_tree(folder: Path) -> Tree:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
