"""A pickle -> plain data, without running it.

What it is: a pickle is a program for a stack machine, and `pickle.load` runs it: GLOBAL fetches any function, REDUCE
calls it. This machine has fewer instructions. GLOBAL accepts listed names only; REDUCE, NEWOBJ and BUILD record
the call (`Made`) and do not make it; a dict stays a list of pairs (`Pairs`).
Why it is here: `pickle.Unpickler` with its own `find_class` runs no code either, but 8 bytes (a large memo index) make
it allocate 4 GB, and 1 MB (a deep tuple used as a key, and hashed) crashes the process.
What it costs: about 1 us per instruction, and at most 80 bytes of memory per byte of the pickle.
Reference: the standard library's `pickletools`, which describes every instruction.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Container
from typing import Any

# How Python 3.11.0 to 3.11.3 pickle a member of an enumeration: of a listed class, by name
GETATTR = "builtins.getattr"


class Name(str):
    """A class or function by its full name; as a value, what an enumeration or a dtype is pickled as."""

    __slots__ = ()


class Made:
    """A recorded call of `name` with `arguments`, and the `state` for its result."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any) -> None:
        self.name, self.arguments, self.state = name, arguments, None


class Pairs(list[Any]):
    """A dict as (key, value) pairs. Keys come from the file: hashing them can take unlimited time and stack."""

    __slots__ = ()


class UnsafeName(pickle.UnpicklingError):
    """The pickle refers to a name that is not listed."""


def read_pickle(data: bytes, names: Container[str]) -> Any:
    """The data in the pickle. Raises pickle.UnpicklingError; UnsafeName if it refers to more than `names`."""
    machine = _Machine(data, names)
    try:
        while (code := machine.take(1)) != pickle.STOP:
            if code not in _STEPS:
                raise pickle.UnpicklingError(f"instruction {code!r} at byte {machine.at - 1} is not one of an index")
            _STEPS[code](machine)
        return machine.stack.pop()
    except (IndexError, ValueError, TypeError, struct.error):
        raise pickle.UnpicklingError(f"it is damaged at byte {machine.at}") from None


class _Machine:
    """The stack, the positions of its marks, and the memo of earlier values."""

    def __init__(self, data: bytes, names: Container[str]) -> None:
        self.data, self.at, self.names = data, 0, names
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) < count:
            raise pickle.UnpicklingError(f"it ends early, at byte {len(self.data)}")
        self.at += count
        return piece

    def number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "little", signed=signed)

    def text(self, count: int) -> str:
        return self.take(count).decode()

    def line(self) -> str:
        return self.take(self.data.index(b"\n", self.at) + 1 - self.at)[:-1].decode()

    def pop(self, start: int) -> list[Any]:
        """Everything from `start` on; negative counts from the top."""
        if -start > len(self.stack) or start > len(self.stack):
            raise IndexError
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop_mark(self) -> list[Any]:
        return self.pop(self.marks.pop())

    def find(self, name: str) -> None:
        if name not in self.names and name != GETATTR:
            raise UnsafeName(name if len(name) < 100 else name[:100] + "...")
        self.stack.append(Name(name))

    def make(self) -> None:
        function, arguments = self.pop(-2)
        if type(function) is not Name or type(arguments) is not tuple:
            raise TypeError
        if function == GETATTR:
            match arguments:
                case (Name() as member_of, str(member)) if type(member) is str:
                    function, arguments = member_of, (member,)
                case _:
                    raise UnsafeName(GETATTR)
        ordered = function == "collections.OrderedDict" and arguments == ()
        self.stack.append(Pairs() if ordered else Made(function, arguments))

    def build(self) -> None:
        (state,) = self.pop(-1)
        if type(self.stack[-1]) is Pairs:  # attributes of an OrderedDict, as a module's state_dict() has: not needed
            return
        if type(self.stack[-1]) is not Made:
            raise TypeError
        self.stack[-1].state = state

    def append(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not Pairs:
            raise TypeError
        self.stack[-1].extend(zip(values[::2], values[1::2], strict=True))

    def put(self, index: int) -> None:
        if index > len(self.memo):  # picklers count up
            raise IndexError
        self.memo[index : index + 1] = [self.stack[-1]]


_Step = Callable[[_Machine], object]


def _push(value: Callable[[_Machine], Any]) -> _Step:
    return lambda m: m.stack.append(value(m))


_STEPS: dict[bytes, _Step] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.NONE: _push(lambda m: None),
    pickle.NEWTRUE: _push(lambda m: True),
    pickle.NEWFALSE: _push(lambda m: False),
    pickle.BININT1: _push(lambda m: m.number(1)),
    pickle.BININT2: _push(lambda m: m.number(2)),
    pickle.BININT: _push(lambda m: m.number(4, signed=True)),
    pickle.LONG1: _push(lambda m: m.number(m.number(1), signed=True)),
    pickle.BINFLOAT: _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    pickle.SHORT_BINUNICODE: _push(lambda m: m.text(m.number(1))),
    pickle.BINUNICODE: _push(lambda m: m.text(m.number(4))),
    pickle.EMPTY_TUPLE: _push(lambda m: ()),
    pickle.EMPTY_LIST: _push(lambda m: []),
    pickle.EMPTY_DICT: _push(lambda m: Pairs()),
    pickle.MARK: lambda m: m.marks.append(len(m.stack)),
    pickle.TUPLE: _push(lambda m: tuple(m.pop_mark())),
    pickle.TUPLE1: _push(lambda m: tuple(m.pop(-1))),
    pickle.TUPLE2: _push(lambda m: tuple(m.pop(-2))),
    pickle.TUPLE3: _push(lambda m: tuple(m.pop(-3))),
    pickle.APPEND: lambda m: m.append(m.pop(-1)),
    pickle.APPENDS: lambda m: m.append(m.pop_mark()),
    pickle.SETITEM: lambda m: m.set_items(m.pop(-2)),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_mark()),
    pickle.MEMOIZE: lambda m: m.memo.append(m.stack[-1]),
    pickle.BINPUT: lambda m: m.put(m.number(1)),
    pickle.LONG_BINPUT: lambda m: m.put(m.number(4)),
    pickle.BINGET: _push(lambda m: m.memo[m.number(1)]),
    pickle.LONG_BINGET: _push(lambda m: m.memo[m.number(4)]),
    pickle.GLOBAL: lambda m: m.find(f"{m.line()}.{m.line()}"),
    pickle.STACK_GLOBAL: lambda m: m.find(".".join(m.pop(-2))),
    pickle.REDUCE: _Machine.make,
    pickle.NEWOBJ: _Machine.make,
    pickle.BUILD: _Machine.build,
    pickle.BINPERSID: _push(lambda m: Made("persistent", m.pop(-1)[0])),  # what torch.save stores beside the pickle
}
