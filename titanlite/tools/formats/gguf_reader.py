"""Reads a GGUF file, quantized or not: names, metadata, dequantization.

What it is: the metadata becomes a `LlamaConfig`, and tensors get titanlite's names; the package
`gguf` (`pip install gguf`) dequantizes. Its reader of headers is not used: with a wrong
length in the file it takes hours. Quantized matrices are read as fp32, row by row: these are the
numbers with which llama.cpp computes, not those of the model before it was quantized.
`gguf_tokenizer.py` reads the tokenizer.
Order of rows: that of titanlite in the architecture `llama`, Hugging Face's in `qwen2` and `qwen3`.
What it costs: the header is read, of at most 64 MB; rows are dequantized when they are used.
Reference: github.com/ggml-org/ggml, docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import struct
from array import array
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.model.flavors import LlamaConfig, RopeScaling
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.kept_files import to_files
from titanlite.tokenizer.tokenizer_json import TEMPLATE_FILE
from titanlite.tools.formats import gguf_kept, gguf_tokenizer
from titanlite.tools.formats.full_state import About, FullState, FullTensor, Part, reading
from titanlite.tools.formats.gguf_file import (
    ARCHITECTURES,
    DTYPES,
    FREQUENCIES,
    SCALING,
    architecture_of,
    frequency_factors,
    names,
    package,
    stored_width,
)
from titanlite.tools.formats.shape_file import checked, sequence_length

VERSIONS = (2, 3)
# The format's types of values, by number: those of struct, text, and arrays
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TEXT = 8
ARRAY = 9
MOST_BYTES = 1 << 26  # of the header; Gemma's, with 256,000 tokens, has 14 MB
MOST_TEXTS = 1 << 20  # of all arrays; Gemma has 262,144 tokens and 514,906 merges
MOST_ENTRIES = 1 << 16  # fields, and tensors: Llama 3 405B has 1,138
MOST_FREQUENCIES = 1 << 12  # half the width of a head
# Fields of the family by which other models differ -> values with which they change nothing
NEUTRAL = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "use_parallel_residual": (False,),
}


class _Header:
    """Reads the header of a GGUF file. Every length in it is bounded before memory is taken."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MOST_BYTES
        self._texts_left = MOST_TEXTS

    def bytes(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"a header of more than {MOST_BYTES} bytes")
        content = self._file.read(count)
        if len(content) < count:
            raise ValueError("it is cut short")
        return content

    def count(self, what: str, most: int) -> int:
        """The number of fields or tensors."""
        number: int = self.number("Q")
        if number > most:
            raise ValueError(f"{number} {what}; at most {most} are read")
        return number

    def number(self, code: str) -> Any:
        """A number of struct's format `code`."""
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value of one of the format's types; numbers of an array stay packed."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        item_kind = self.number("I")
        count = self.number("Q")
        if item_kind in NUMBERS:
            code = NUMBERS[item_kind].replace("?", "B")
            numbers = array(code)
            numbers.frombytes(self.bytes(count * numbers.itemsize))
            return numbers
        if item_kind != TEXT:
            raise ValueError(f"an array of {count} values of type {item_kind}")
        self._texts_left -= count
        if self._texts_left < 0:
            raise ValueError(f"arrays of more than {MOST_TEXTS} texts")
        return [self.text() for _ in range(count)]

    def position(self) -> int:
        return self._file.tell()


@dataclasses.dataclass(frozen=True)
class QuantizedTensor(FullTensor):
    """A matrix of a ggml type, read as fp32. Its part has the bytes of each row."""

    kind: str = "Q8_0"

    def _read(self, start: int, stop: int) -> Tensor:
        gguf = package()
        (part,) = self.parts
        rows = part.read(torch.uint8, start, stop).numpy()
        return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.kind]))


class Content(NamedTuple):
    """What a GGUF file holds."""

    fields: dict[str, Any]
    tensors: dict[str, FullTensor]  # by the names in the file


def read_header(path: Path) -> Content:
    """Reads all but the tensors' numbers.

    Raises ValueError for a file that is not complete, ConfigError for types without a reader.
    """
    gguf = package()
    size = path.stat().st_size
    with path.open("rb") as file:
        header = _Header(file)
        if header.bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = header.number("I")
        if version in [struct.unpack(">I", struct.pack("<I", known))[0] for known in VERSIONS]:
            raise ValueError("it is for big-endian machines; write it for little-endian ones")
        if version not in VERSIONS:
            raise ValueError(f"version {version}; expected {' or '.join(map(str, VERSIONS))}")
        num_tensors = header.count("tensors", MOST_ENTRIES)
        num_fields = header.count("fields", MOST_ENTRIES)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = header.text()
            fields[name] = header.value(header.number("I"))
        stored: dict[str, tuple[tuple[int, ...], Any, int]] = {}  # shape, type, offset
        for _ in range(num_tensors):
            name = header.text()
            num_dims = header.number("I")
            if not 1 <= num_dims <= 4:
                raise ValueError(f"{name[:200]!r} has {num_dims} dimensions; expected 1 to 4")
            # The innermost dimension is first
            shape = tuple(header.number("Q") for _ in range(num_dims))[::-1]
            kind = gguf.GGMLQuantizationType(header.number("I"))
            stored[name] = (shape, kind, header.number("Q"))
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise ValueError(f"general.alignment = {alignment!r:.40}")
        data = -(-header.position() // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in stored.items():
        tensors[name] = _tensor(path, name, shape, kind, data + offset, size)
    return Content(fields, tensors)


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], kind: Any, begin: int, size: int
) -> FullTensor:
    """The tensor of this ggml type from byte `begin` of a file of `size` bytes."""
    block, block_bytes = package().GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise ValueError(f"{name[:200]!r}: rows of {shape[-1]} numbers, in blocks of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if begin + nbytes > size:
        raise ValueError(f"it ends before {name[:200]!r} does")
    offsets = (0,) * len(shape)
    if kind.name in DTYPES:
        return FullTensor(DTYPES[kind.name], shape, (Part(path, begin, offsets, shape or (1,)),))
    if len(shape) != 2:
        raise ConfigError(f"{path}: {name[:200]!r} is {kind.name} of shape {shape}")
    part = Part(path, begin, offsets, (shape[0], shape[1] // block * block_bytes))
    return QuantizedTensor(torch.float32, shape, (part,), kind=kind.name)


def open_file(path: Path) -> FullState:
    """The checkpoint in a GGUF file. Raises CorruptCheckpoint or ConfigError."""
    with reading(path, "a GGUF file that can be read"):
        fields, tensors = read_header(path)
        factors: np.ndarray[Any, Any] | None = None
        if FREQUENCIES in tensors:
            divisors = tensors.pop(FREQUENCIES)
            if len(divisors.shape) != 1 or divisors.shape[0] > MOST_FREQUENCIES:
                raise ValueError(f"{FREQUENCIES} of shape {divisors.shape}")
            factors = divisors.read().float().numpy()
        config = _config(path, fields, tensors, factors)
    architecture = fields["general.architecture"]
    by_name = _take_ours(tensors, config, architecture)
    length = sequence_length(fields.get(f"{architecture}.context_length", 0))
    # What is left in `tensors` is not known: comparing the models reports it
    about = About("gguf", config, gguf_tokenizer.read_tokenizer(path, fields), seq_len=length)
    about.files |= to_files(gguf_kept.read_fields(fields, config.vocab_size))
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        about.files[TEMPLATE_FILE] = template.encode()
    return FullState(path, about, by_name | tensors)


def read_back(path: Path, config: LlamaConfig) -> FullState:
    """Opens a file that `gguf_file.write` made of this model. Raises CorruptCheckpoint.

    Its metadata is not read: it has fp32 where the model may have more digits.
    """
    with reading(path, "a GGUF file that can be read"):
        _, tensors = read_header(path)
    tensors.pop(FREQUENCIES, None)
    by_name = _take_ours(tensors, config, architecture_of(config))
    return FullState(path, About("gguf", config), by_name | tensors)


def _take_ours(
    tensors: dict[str, FullTensor], config: LlamaConfig, architecture: str
) -> dict[str, FullTensor]:
    """Removes the model's parameters from the tensors, and returns them by our names."""
    taken: dict[str, FullTensor] = {}
    for name, gguf_name in names(config).items():
        if gguf_name in tensors:
            width = stored_width(name, architecture, config)
            taken[name] = dataclasses.replace(tensors.pop(gguf_name), half_split=width)
    return taken


def _config(
    path: Path,
    fields: dict[str, Any],
    tensors: dict[str, FullTensor],
    factors: np.ndarray[Any, Any] | None,
) -> LlamaConfig:
    """The model that the metadata describes.

    Raises ConfigError with every field that titanlite's Llama does not support, KeyError for one
    that is missing.
    """
    split = fields.get("split.count", 0)
    if split not in (0, 1):
        raise ConfigError(
            f"{path}: is a part of a model in {split!r:.40} files; join them: "
            "llama-gguf-split --merge FIRST_PART TARGET.gguf"
        )
    kind = fields.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{path}: general.type = {kind!r:.99}; allowed: 'model'")
    family = fields["general.architecture"]
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: general.architecture = {family!r:.99}; "
            f"allowed: {', '.join(map(repr, ARCHITECTURES))}"
        )

    def of_family(name: str, default: Any = None) -> Any:
        return _of_all_layers(path, f"{family}.{name}", fields.get(f"{family}.{name}", default))

    def count(name: str) -> int:
        value: Any = of_family(name, fields[f"{family}.{name}"])
        if type(value) is not int or value < 1:
            raise ValueError(f"{family}.{name} = {value!r:.40}: expected an integer above 0")
        return value

    linear_factor = of_family("rope.scaling.factor", of_family("rope.scale_linear", 0.0))
    # llama.cpp scales linearly where there is a factor and no type
    scaling = of_family("rope.scaling.type", "linear" if linear_factor else "none")
    divides = factors is not None and not (factors == 1).all()
    both = scaling == "linear" and linear_factor not in (0, 1) and divides
    allowed = {
        **{name: (of_family(name, usual[0]), usual) for name, usual in NEUTRAL.items()},
        "attention.sliding_window_pattern": (
            of_family("attention.sliding_window_pattern", None),
            (None,),
        ),
        "rope.scaling.type": (scaling, ("none", "linear")),
        f"rope.scaling.factor beside {FREQUENCIES}": (linear_factor if both else 1, (1,)),
    }
    problems = [
        f"{path}: {family}.{name} = {value!r:.99}; allowed: {', '.join(map(repr, choices))}"
        for name, (value, choices) in allowed.items()
        if value not in choices
    ]
    if problems:
        raise ConfigError(problems)
    dim = count("embedding_length")
    heads = count("attention.head_count")
    head_dim = of_family("attention.key_length", dim // heads)
    if of_family("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"{path}: {family}.rope.dimension_count = {of_family('rope.dimension_count')}; "
            f"allowed: the width of a head, {head_dim}"
        )
    if of_family("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{path}: {family}.attention.value_length = {of_family('attention.value_length')}; "
            f"allowed: that of a key, {head_dim}"
        )
    config = LlamaConfig(
        dim=dim,
        num_layers=count("block_count"),
        num_heads=heads,
        num_kv_heads=of_family("attention.head_count_kv", heads),
        ffn_dim=count("feed_forward_length"),
        vocab_size=tensors["token_embd.weight"].shape[0],
        tied_embeddings="output.weight" not in tensors,
        rope_theta=of_family("rope.freq_base", 10000.0),
        norm_eps=_shortest(fields[f"{family}.attention.layer_norm_rms_epsilon"]),
        explicit_head_dim=head_dim,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=of_family("attention.sliding_window", 0),
    )
    if scaling == "linear" and linear_factor not in (0, 1):
        config = dataclasses.replace(config, rope_scaling=RopeScaling(linear_factor, kind="linear"))
    config = checked(config)
    if factors is not None:
        stated = {name: fields[key] for name, key in SCALING.items() if key in fields}
        found = _llama3_scaling(path, config, factors, stated)
        if found:
            config = dataclasses.replace(config, rope_scaling=found)
    return checked(config)


def _of_all_layers(path: Path, name: str, value: Any) -> Any:
    """The value of a field that may have one for each layer.

    Raises ConfigError if the layers differ.
    """
    if not isinstance(value, array):
        return value
    different = sorted(set(value))
    if len(different) != 1:
        shown = ", ".join(map(str, different[:5]))
        raise ConfigError(f"{path}: {name} = {shown} by layer; allowed: one for all layers")
    return different[0]


def _shortest(value: float) -> float:
    """The number with the fewest digits that has these 32 bits; 1e-5 is read as 9.9999997e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(
    path: Path, config: LlamaConfig, factors: np.ndarray[Any, Any], stated: dict[str, Any]
) -> RopeScaling | None:
    """The scaling of Llama 3.1 that has these divisors of the frequencies; None if all are 1.

    `stated`: its numbers, as titanlite writes them; other software leaves them out.
    """
    if factors.shape != (config.head_dim // 2,):
        raise ConfigError(
            f"{path}: {FREQUENCIES} is of shape {factors.shape}; expected "
            f"{config.head_dim // 2} divisors, one per pair of a head"
        )
    if (factors == 1).all() and len(stated) < len(SCALING):
        return None
    if len(stated) == len(SCALING):
        candidates = [RopeScaling(**stated)]
    else:
        candidates = _fitted_scalings(config, factors.astype(np.float64))
    for scaling in candidates:
        if not (scaling.factor > 1 and scaling.high_freq_factor > scaling.low_freq_factor > 0):
            continue
        expected = frequency_factors(dataclasses.replace(config, rope_scaling=scaling))
        if expected is not None and np.allclose(expected, factors, rtol=1e-5):
            return scaling
    if len(stated) == len(SCALING):
        numbers = ", ".join(f"{SCALING[name]} = {value!r:.40}" for name, value in stated.items())
        raise ConfigError(
            f"{path}: {FREQUENCIES} is not the scaling that its keys state: {numbers}"
        )
    raise ConfigError(
        f"{path}: {FREQUENCIES} is not a scaling as Llama 3.1 has it, with any factor and original "
        "context"
    )


def _fitted_scalings(config: LlamaConfig, factors: np.ndarray[Any, Any]) -> list[RopeScaling]:
    """Scalings with Llama 3.1's bounds that can have these divisors, the most likely first.

    The largest divisor is the factor. Any divisor between it and 1 gives the original context:
    1 / divisor is a blend of 1 / factor and 1 by the turns that a pair makes over this context.
    Without such a divisor many contexts give the same ones.
    """
    factor = _shortest(float(factors.max(initial=0.0)))
    if not 1 < factor < math.inf:
        return []
    usual = RopeScaling(factor)
    half = config.head_dim // 2
    wavelengths = 2 * math.pi * config.rope_theta ** (np.arange(half) / half)
    low = usual.low_freq_factor
    high = usual.high_freq_factor
    is_blend = (factors > 1.0001) & (factors < 0.9999 * factor)
    if is_blend.any():
        shares = (1 / factors[is_blend] - 1 / factor) / (1 - 1 / factor)
        contexts = wavelengths[is_blend] * (low + (high - low) * shares)
        return [RopeScaling(factor, original_context=round(float(contexts[0])))]
    kept = wavelengths[factors <= 1.0001].max(initial=1.0)
    divided = wavelengths[factors > 1.0001].min(initial=math.inf)
    between = round(math.sqrt(high * kept * low * divided))
    return [usual, RopeScaling(factor, original_context=between)]
