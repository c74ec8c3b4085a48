"""The header of a GGUF file: its keys, typed, and where its tensors lie.

Owns: parsing, through the `gguf` package, of whatever bytes are in a file.  Does not know: what the
keys mean.
Idea: the package's reader, with arrays read faster, and each of its failures turned into one error.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from runtime.errors import ModelFileError

_MAX_TENSORS = 1 << 16


class Reader(gguf.GGUFReader):  # type: ignore[misc]  # the package has no types
    """A GGUFReader that reads an array in one go.

    The stock one makes several numpy views for each of the 150,000 array elements of a small
    model's vocabulary, which takes 2 s; this takes 0.1 s.  Should the package stop calling this
    hook, `_value` falls back to its own way of decoding.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        start = orig_offs + 12
        raw_of, length = struct.unpack_from("<IQ", self.data, orig_offs)
        of = gguf.GGUFValueType(raw_of)
        if of == gguf.GGUFValueType.STRING:
            texts, end = _strings(self.data, start, length)
            values: np.ndarray[Any, Any] = np.array(texts, dtype=object)
        else:
            dtype = np.dtype(self.gguf_scalar_to_np[of])
            end = start + length * dtype.itemsize
            values = np.frombuffer(self.data, dtype, length, start)
        return end - orig_offs, [values], [0], [gguf.GGUFValueType.ARRAY, of]

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        """Name the tensor whose rows are no whole blocks; the stock reader names the size alone."""
        for field in fields:
            _, name, _, dims, kind, _ = field.parts
            block_len, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            if len(dims) and dims[0] % block_len:
                raise ValueError(
                    f"tensor {str(bytes(name), 'utf-8')} has rows of {dims[0]} numbers, no "
                    f"multiple of its type's blocks of {block_len}"
                )
        super()._build_tensors(start_offs, fields)


def _strings(buffer: Any, start: int, count: int) -> tuple[list[str], int]:
    """Decode `count` length-prefixed strings; return them and the offset behind the last."""
    view = memoryview(buffer)
    read_length = struct.Struct("<Q").unpack_from
    texts = []
    at = start
    for _ in range(count):
        (length,) = read_length(view, at)
        end = at + 8 + length
        if end > len(view):
            raise ValueError("a string runs past the end of the file")
        texts.append(str(view[at + 8 : end], "utf-8"))
        at = end
    return texts, at


def _value(field: Any, path: Path) -> Any:
    """Return a header field as a Python value; an array is a list."""
    try:
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        if is_array and len(field.data) == 1:
            return field.parts[field.data[0]].tolist()
        return field.contents()
    except ValueError as error:  # bytes that are no UTF-8
        raise ModelFileError(f"{path}: key {field.name!r} cannot be decoded: {error}") from error


def open_header(path: Path) -> Reader:
    """Read the header of a GGUF file, whatever state the file is in.

    Errors: ModelFileError for bytes that are no GGUF, or not one that can be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    if head[:4] != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file: it begins with {head[:4]!r}")
    version = int.from_bytes(head[4:8], "little")
    if version not in (2, 3):
        big_endian = int.from_bytes(head[4:8], "big") in (2, 3)
        what = "is big-endian" if big_endian else f"has GGUF version {version}"
        raise ModelFileError(f"{path} {what}; only little-endian versions 2 and 3 can be read")
    num_tensors = int.from_bytes(head[8:16], "little")
    if num_tensors > _MAX_TENSORS:  # reading that many records of nothing would take hours
        raise ModelFileError(f"{path} claims {num_tensors} tensors: it is damaged, fetch it again")
    try:
        with np.errstate(all="raise"):
            return Reader(path)
    except Exception as error:  # the package raises whatever its parsing stumbles over
        raise ModelFileError(
            f"{path} is cut short or damaged ({type(error).__name__}: {error}); fetch it again, "
            "or, if it is whole, upgrade the 'gguf' package"
        ) from error


class Keys:
    """The key-value part of a header, typed; a wrong or missing value is a ModelFileError."""

    def __init__(self, reader: Reader, path: Path) -> None:
        self._fields = reader.fields
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def integer(self, key: str, *, default: int | None = None) -> int:
        """Return a whole number."""
        return int(self._typed(key, int, default))

    def optional_integer(self, key: str) -> int | None:
        """Return a whole number, or None where the key is absent."""
        return self.integer(key) if key in self else None

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a number."""
        return float(self._typed(key, (int, float), default))

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string."""
        return str(self._typed(key, str, default))

    def flag(self, key: str) -> bool | None:
        """Return a truth value, or None where the key is absent."""
        return self._typed(key, bool, None) if key in self else None

    def array(self, key: str, of: type, *, default: list[Any] | None = None) -> list[Any]:
        """Return an array whose elements are of type `of`."""
        values: list[Any] = self._typed(key, list, default)
        if values and type(values[0]) is not of:
            raise self._wrong(key, values[0])
        return values

    def _typed(self, key: str, kind: Any, default: Any) -> Any:
        field = self._fields.get(key)
        if field is None:
            if default is None:
                raise ModelFileError(
                    f"{self._path} has no key {key!r}: it is damaged or was converted by an "
                    "outdated tool; fetch another copy or convert the model again"
                )
            return default
        value = _value(field, self._path)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(key, value)
        return value

    def _wrong(self, key: str, value: object) -> ModelFileError:
        return ModelFileError(
            f"{self._path}: key {key!r} holds {type(value).__name__} {str(value)[:40]!r}, which "
            "is not of the kind that belongs there; fetch another copy or convert the model again"
        )
