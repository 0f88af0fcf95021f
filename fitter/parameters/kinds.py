"""Kinds of parameters: how to check and convert a value between command line, TOML, JSON, Python and C.

A kind knows no parameter by name; ``fitter.parameters.table`` gives each parameter its kind. Kinds are grouped by what
their values are converted to, and take most conversions from the kinds above them; so they are in one file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from fitter.errors import PlanError, UsageError
from fitter.parameters.values import (
    MAX_DEVICES,
    SIZE,
    Lora,
    TensorBuftOverride,
    check_timeout,
    items,
    number,
    parse_overrides,
    parse_size,
    parse_tokens,
    parse_whole,
    path,
    plain_pattern,
    read_size,
    shares,
    shown,
    shown_in_file,
    size,
    split_list,
    text,
    texts,
    whole,
)
from fitter.text import MIB

_T = TypeVar("_T")


class Entry(Protocol):
    """A value in a JSON document. Each method raises an error that names the place of a wrong type."""

    def __getitem__(self, key: str) -> Entry: ...
    def text(self) -> str: ...
    def flag(self) -> bool: ...
    def whole(self) -> int: ...
    def number(self) -> float: ...
    def one_of(self, *choices: str) -> Any: ...
    def maybe(self, kind: Callable[[Any], _T]) -> _T | None: ...
    def each(self, kind: Callable[[Any], _T]) -> tuple[_T, ...]: ...


@runtime_checkable
class Described(Protocol):
    """The fields of a virtual device that are checked before its use. Memory in bytes."""

    @property
    def name(self) -> str: ...
    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...


# --- strings, words, flags and functions


@dataclass(frozen=True)
class Kind:
    """A string, and the base of all other kinds. In its methods ``called`` is the parameter's name for messages.

    Attributes:
        metavar: Stands for a value in ``--help``.
        is_repeated: Whether the option may be repeated.
        has_commas: Whether each value may be a list with commas.
        is_file: Whether a value begins with the path of a file.
    """

    metavar: str | None = None
    is_repeated: ClassVar[bool] = False
    has_commas: ClassVar[bool] = False
    is_file: ClassVar[bool] = False

    def check(self, called: str, value: Any) -> Any:
        """Convert a value from Python to fitter's. Raises ``UsageError``."""
        return text(called, value)

    def parse(self, word: str) -> Any:
        """Convert a word of the command line. Raises ``UsageError``."""
        return word

    def of_word(self, called: str, word: str) -> Any:
        """Convert a word of the command line that is a value from Python. Raises ``UsageError``."""
        try:
            return self.parse(text(called, word))
        except UsageError as error:
            raise UsageError(str(error) if called in str(error) else f"{called}: {error}") from None

    def read(self, where: str, value: Any) -> Any:
        """Convert a value of a TOML file or a marker; ``where`` names it in errors. Raises ``UsageError``."""
        if not isinstance(value, str) or not value:
            raise UsageError(f"{where} is {shown_in_file(value)}: give a string in quotes")
        return value

    def planned(self, value: Any) -> Any:
        """Convert a checked value to the one in ``Params``."""
        return value

    def to_json(self, value: Any) -> Any:
        """Convert a value of ``Params`` to JSON."""
        return value

    def from_json(self, entry: Entry) -> Any:
        """Convert ``to_json``'s result to the value of ``Params``."""
        return entry.text()

    def word(self, value: Any) -> str:
        """Convert a value to a command-line argument of llama.cpp. Raises ``UsageError`` or ``PlanError``."""
        return str(value)

    def native(self, called: str, value: Any) -> Any:
        """Convert a value to a field of llama.cpp's struct. Raises ``UsageError`` if it is out of range."""
        raise UsageError(f"{called} is a string, and no field of llama.cpp's structs is one")


@dataclass(frozen=True)
class OneOf(Kind):
    """One of some ``words``, each with llama.cpp's number.

    Attributes:
        is_open: Whether a file may contain other words.
        spellings: Further words that llama.cpp accepts, each with its meaning.
    """

    words: Mapping[str, int] = field(default_factory=dict)
    is_open: bool = False
    spellings: Mapping[str, str] = field(default_factory=dict)

    def check(self, called: str, value: Any) -> str:
        word = self.parse(text(called, value))
        if word not in self.words:
            raise UsageError(f"{called} is {shown(value)}: give one of {', '.join(self.words)}")
        return word

    def parse(self, word: str) -> str:
        return self.spellings.get(word, word)

    def read(self, where: str, value: Any) -> str:
        if self.is_open:
            return str(super().read(where, value))
        if not isinstance(value, str) or value not in self.words:
            *others, last = (f'"{word}"' for word in self.words)
            raise UsageError(f"{where} is {shown_in_file(value)}: give {', '.join(others)} or {last}")
        return value

    def from_json(self, entry: Entry) -> Any:
        return entry.text() if self.is_open else entry.one_of(*self.words)

    def native(self, called: str, value: Any) -> int:
        if value not in self.words:
            raise UsageError(f"{called} is '{value}': give one of {', '.join(self.words)}")
        return self.words[value]


class Flag(Kind):
    """True or false."""

    def check(self, called: str, value: Any) -> bool:
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            value = value.item()
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        raise UsageError(f"{called} is {shown(value)}: give True or False")

    def read(self, where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"{where} is {shown_in_file(value)}: give true or false")
        return value

    def from_json(self, entry: Entry) -> bool:
        return entry.flag()

    def word(self, value: Any) -> str:
        return "true" if value else "false"

    def native(self, called: str, value: Any) -> bool:
        return bool(value)


class Function(Kind):
    """A function, for Python only."""

    def check(self, called: str, value: Any) -> Any:
        if not callable(value):
            raise UsageError(f"{called} is {shown(value)}: give a function")
        return value


# --- whole numbers


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from ``least`` to ``most``; ``most`` is ``None`` if larger numbers mean "all"."""

    metavar: str | None = "N"
    least: int = 0
    most: int | None = None

    def holds(self, value: int) -> bool:
        """Return whether ``value`` is in the range."""
        return self.least <= value and (self.most is None or value <= self.most)

    @property
    def range(self) -> str:
        """The range, for messages."""
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"

    def check(self, called: str, value: Any) -> int:
        number_of = whole(called, value)
        if not self.holds(number_of):
            raise UsageError(f"{called} is {shown(number_of)}: give {self.range}")
        return number_of

    def parse(self, word: str) -> int | None:
        number = parse_whole(word)
        if number < self.least:
            raise UsageError(f"{shown(number)} is too small; the smallest is {self.least}")
        return number

    def read(self, where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.holds(value):
            raise UsageError(f"{where} is {shown_in_file(value)}: give a whole number, {self.range}")
        return value

    def from_json(self, entry: Entry) -> int:
        return entry.whole()

    def native(self, called: str, value: Any) -> int:
        low, high = (-(2**31), 2**31 - 1) if self.least < 0 else (self.least, 2**32 - 1)
        if not low <= value <= high:
            raise UsageError(f"{called} {value} is not between {low} and {high}")
        return int(value)


class Amount(Whole):
    """A whole number, or a text with a number and a unit."""

    def of_text(self, word: str) -> int:
        """Convert a text. Raises ``UsageError``."""
        return parse_whole(word)

    def check(self, called: str, value: Any) -> int:
        return super().check(called, self._number(value))

    def parse(self, word: str) -> int | None:
        return super().parse(str(self.of_text(word)))

    def read(self, where: str, value: Any) -> int:
        return super().read(where, self._number(value))

    def _number(self, value: Any) -> Any:
        """Convert a text; return any other value, and a text that is no amount, for the check of its type."""
        try:
            return self.of_text(value) if isinstance(value, str) else value
        except UsageError:
            return value


class Tokens(Amount):
    """A number of tokens; ``32k`` is 32 times 1024."""

    def of_text(self, word: str) -> int:
        return parse_tokens(word)


class TokenCounts(Tokens):
    """A number of tokens, or a list of one or more."""

    def check(self, called: str, value: Any) -> Any:
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
            return super().check(called, value)
        check_one = super().check
        several = tuple(check_one(called, item) for item in items(called, value, "numbers of tokens"))
        if not several:
            raise UsageError(f"{called} is an empty list: give a number of tokens, or a list of them")
        return several


class Mebibytes(Amount):
    """A number of MiB, or a size with a unit."""

    def of_text(self, word: str) -> int:
        if not word.strip()[-1:].isalpha():
            return parse_whole(word)
        if 0 < (size_of := parse_size(word)) < MIB:
            raise UsageError(f"{shown(word)} is less than a MiB")
        return size_of // MIB


class Layers(Whole):
    """A number of layers; -1 means all. On the command line ``auto`` leaves the choice to the fit."""

    def parse(self, word: str) -> int | None:
        if word in ("auto", "-1"):
            return None
        if word in ("all", "-2"):
            return -1
        if not word.isascii() or not word.isdigit():
            raise UsageError(f"{shown(word)} is not a number of layers, 'auto' or 'all'")
        return parse_whole(word)

    def check(self, called: str, value: Any) -> Any:
        is_word = isinstance(value, str) and value in ("auto", "all")
        return self.parse(value) if is_word else super().check(called, value)

    def read(self, where: str, value: Any) -> int:
        return -1 if value == "all" else super().read(where, value)

    def word(self, value: Any) -> str:
        return str(value) if value >= 0 else "all"


# --- other numbers


@dataclass(frozen=True)
class Number(Kind):
    """A number, or a string with a number and a unit, such as a bandwidth; with ``is_list`` also several."""

    is_list: bool = False

    def check(self, called: str, value: Any) -> Any:
        if self.is_list and isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray)):
            return tuple(self._check(called, item) for item in items(called, value, "numbers"))
        return self._check(called, value)

    def _check(self, called: str, value: Any) -> float | str:
        return text(called, value) if isinstance(value, str) else number(called, value)


class Seconds(Kind):
    """A time in seconds."""

    def check(self, called: str, value: Any) -> float:
        seconds = number(called, value)
        check_timeout(seconds, called.partition(" (")[0].replace("_", " "))
        return seconds

    def parse(self, word: str) -> float:
        try:
            return float(word)
        except ValueError:
            raise UsageError(f"'{word}' is not a number of seconds, such as 60") from None


@dataclass(frozen=True)
class Rate(Kind):
    """A number above 0 of ``unit``."""

    unit: str = "tokens per second"

    def check(self, called: str, value: Any) -> float:
        rate = number(called, value)
        if not 0 < rate < math.inf:
            raise UsageError(f"{called} is {shown(value)}: give {self.unit} above 0")
        return rate

    def parse(self, word: str) -> float:
        try:
            return self.check("the number", float(word))
        except ValueError:
            raise UsageError(f"{shown(word)} is not a number of {self.unit}, such as 10") from None

    def read(self, where: str, value: Any) -> float:
        return self.check(where, value)


class Share(Kind):
    """A share of 0 or more, such as 0.1 or ``10%``; ``none`` is no limit."""

    def check(self, called: str, value: Any) -> float:
        if isinstance(value, str):
            return self._read(called, value)
        share = number(called, value)
        if not share >= 0:
            raise UsageError(f"{called} is {shown(value)}: give 0 or more")
        return share

    def parse(self, word: str) -> float:
        return self._read("the share", word)

    def read(self, where: str, value: Any) -> float:
        return self.check(where, value)

    def _read(self, called: str, word: str) -> float:
        if word == "none":
            return math.inf
        try:
            share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 <= share < math.inf:
            raise UsageError(f"{called} is {shown(word)}: give 0 or more, such as 0.1 or 10%, or 'none'")
        return share


# --- bytes


@dataclass(frozen=True)
class Size(Kind):
    """Bytes: a number, or a string with a unit.

    Attributes:
        is_list: Whether several values are allowed.
        in_mib: Whether the command-line option takes MiB where a number has no unit.
        least: The fewest bytes above 0: a smaller number is likely to be of another unit.
    """

    is_list: bool = False
    in_mib: bool = False
    least: int = 0

    def check(self, called: str, value: Any) -> int | tuple[int, ...]:
        if self.is_list and isinstance(value, Iterable) and not isinstance(value, str):
            return tuple(self._check(called, item) for item in items(called, value, "bytes, or one number for all"))
        return self._check(called, value)

    def _check(self, called: str, value: Any) -> int:
        checked = size(called, value)
        if 0 < checked < self.least:
            raise UsageError(
                f"{called} is {checked} bytes, less than a MiB: give more, or write a unit, such as "
                f'"{checked}MiB" or "{checked}GiB"'
            )
        return checked

    def parse(self, word: str) -> Any:
        if not self.in_mib:
            return word
        parts = split_list(word)
        is_each = [
            (part.isascii() and part.isdigit()) or bool((match := SIZE.fullmatch(part)) and match[2]) for part in parts
        ]
        if not all(is_each) or (len(parts) > 1 and not self.is_list):
            example = "1024 or 1024,512" if self.is_list else "1024"
            raise UsageError(f"'{word}' is not a number of MiB such as {example}, nor a size such as 2GiB")
        sizes = tuple(parse_whole(part) * MIB if part.isdigit() else parse_size(part) for part in parts)
        return sizes if len(sizes) > 1 else sizes[0]

    def read(self, where: str, value: Any) -> int | tuple[int, ...]:
        if self.is_list and isinstance(value, list):
            return tuple(self._read(where, item) for item in value)
        return self._read(where, value)

    def _read(self, where: str, value: Any) -> int:
        return self._check(where, read_size(where, value))


class MebibyteSize(Size):
    """Bytes of an option that llama.cpp takes in MiB. A plan rounds them down to whole MiB."""

    def planned(self, value: Any) -> int:
        return int(value) // MIB * MIB

    def from_json(self, entry: Entry) -> int:
        return entry.whole()

    def word(self, value: Any) -> str:
        return str(value // MIB)

    def native(self, called: str, value: Any) -> int:
        return int(value)


AUTO = "auto"
"""A margin of the measured bytes, however small."""


class Margin(Size):
    """Bytes that must stay free, one number for all devices or several; or ``auto``."""

    def check(self, called: str, value: Any) -> Any:
        return AUTO if isinstance(value, str) and value == AUTO else super().check(called, value)

    def parse(self, word: str) -> Any:
        return AUTO if word == AUTO else super().parse(word)

    def read(self, where: str, value: Any) -> Any:
        return AUTO if value == AUTO else super().read(where, value)


# --- lists


class Shares(Kind):
    """A share for each device. An empty list means not set."""

    def check(self, called: str, value: Any) -> tuple[float, ...]:
        return shares(called, self.of_word(called, value) if isinstance(value, str) else value)

    def parse(self, word: str) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in split_list(word))
        except ValueError:
            raise UsageError(f"{shown(word)} is not a list of numbers such as 3,1") from None

    def read(self, where: str, value: Any) -> tuple[float, ...]:
        if not isinstance(value, list) or any(type(item) not in (int, float) for item in value):
            raise UsageError(f"{where} is {shown_in_file(value)}: give a list of numbers such as [3, 1]")
        return shares(where, value)

    def planned(self, value: Any) -> tuple[float, ...] | None:
        return tuple(value) or None

    def to_json(self, value: Any) -> list[float] | None:
        return None if value is None else list(value)

    def from_json(self, entry: Entry) -> tuple[float, ...] | None:
        return entry.maybe(lambda split: split.each(lambda share: share.number()))

    def word(self, value: Any) -> str:
        """Write the shares without trailing zeros: llama.cpp adds zeros, and accepts one entry fewer than devices."""
        length = len(value)
        while length > 1 and value[length - 1] == 0:
            length -= 1
        if length >= MAX_DEVICES:
            raise PlanError(
                f"llama.cpp's -ts takes at most {MAX_DEVICES - 1} devices, but this plan splits over {length}: "
                "leave one out with -dev"
            )
        return ",".join(f"{share:.9g}" for share in value[:length])


class Texts(Kind):
    """Several strings."""

    is_repeated: ClassVar[bool] = True
    has_commas: ClassVar[bool] = True

    def check(self, called: str, value: Any) -> tuple[str, ...]:
        given = texts(called, value)
        if self.is_file or not self.has_commas:
            return given
        return tuple(part for each in given for part in each.split(","))

    def read(self, where: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) and value:
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise UsageError(f"{where} is {shown_in_file(value)}: give a list of strings in quotes")
        return tuple(value)

    def to_json(self, value: Any) -> list[str]:
        return list(value or ())

    def from_json(self, entry: Entry) -> tuple[Any, ...]:
        return entry.each(lambda item: item.text())

    def word(self, value: Any) -> str:
        return ",".join(value)


class DeviceNames(Texts):
    """Names of devices, in order; ``none`` is an empty list."""

    is_repeated: ClassVar[bool] = False

    def check(self, called: str, value: Any) -> tuple[str, ...]:
        names = tuple(name for each in texts(called, value) for name in self.of_word(called, each))
        return () if [name.lower() for name in names] == ["none"] else names

    def parse(self, word: str) -> tuple[str, ...]:
        if word == "none":
            return ()
        names = tuple(word.split(","))
        if not all(names):
            raise UsageError(f"'{word}' has an empty name: write names with one comma between them, or none")
        return names

    def word(self, value: Any) -> str:
        return ",".join(value) or "none"


class Overrides(Texts):
    """Buffer types for tensors, as ``pattern=buffer type``."""

    def planned(self, value: Any) -> tuple[TensorBuftOverride, ...]:
        return parse_overrides(value)

    def to_json(self, value: Any) -> list[dict[str, str]]:  # type: ignore[override]
        return [{"pattern": override.pattern, "buffer_type": override.buffer_type} for override in value]

    def from_json(self, entry: Entry) -> tuple[TensorBuftOverride, ...]:
        return entry.each(lambda one: TensorBuftOverride(one["pattern"].text(), one["buffer_type"].text()))

    def word(self, value: Any) -> str:
        return ",".join(_override(override) for override in value)


def _override(override: TensorBuftOverride) -> str:
    """Write ``pattern=buffer type``. llama.cpp splits at every comma and at the first equals sign."""
    for char in ",=":
        if char in override.pattern:
            raise UsageError(
                f"tensor pattern '{override.pattern}' has '{char}' in it, which llama.cpp's -ot cannot take: "
                "write '.' instead"
            )
    return f"{plain_pattern(override.pattern)}={override.buffer_type}"


class Reservations(Texts):
    """A size for each named device: a mapping in Python, or strings such as ``CUDA0=2GiB``."""

    has_commas: ClassVar[bool] = False

    def check(self, called: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return texts(called, value)
        given = {text(called, key): amount for key, amount in value.items()}
        return {key: size(f"{called} of {shown(key)}", amount) for key, amount in given.items()}


class Gpus(Texts):
    """Virtual devices, or strings that describe them."""

    has_commas: ClassVar[bool] = False

    def check(self, called: str, value: Any) -> tuple[Any, ...]:
        gpus = [value] if isinstance(value, (str, Described)) else items(called, value, "GPUs")
        for gpu in gpus:
            if isinstance(gpu, str):
                text(called, gpu)
            elif not isinstance(gpu, Described):
                raise UsageError(f"{called} has {shown(gpu)}: describe a GPU, such as 'rtx-4090'")
            elif not size(f"{gpu.name}.free", gpu.free) <= size(f"{gpu.name}.total", gpu.total) > 0:
                raise UsageError(
                    f"{gpu.name} has {gpu.free} of {gpu.total} bytes free: give a total above 0, and no more free bytes"
                )
        return tuple(gpus)


# --- files


class Path(Kind):
    """A file."""

    is_file: ClassVar[bool] = True

    def check(self, called: str, value: Any) -> str:
        return _file(called, value)


def _file(called: str, value: Any, what: str = "the path of a file") -> str:
    """Check a path: an empty one comes from a variable without a value."""
    if not (file := path(called, value)):
        raise UsageError(f"{called} is an empty text: give {what}")
    return file


class Build(Kind):
    """A build of llama.cpp: ``python``, or the path of a directory or of a program."""

    def check(self, called: str, value: Any) -> str:
        return _file(called, value, "python, a directory or a llama-server")

    def parse(self, word: str) -> str:
        return self.check("this", word)


class Paths(Texts):
    """Files."""

    is_file: ClassVar[bool] = True

    def check(self, called: str, value: Any) -> tuple[str, ...]:
        given = [value] if isinstance(value, (str, bytes, os.PathLike)) else items(called, value, "paths")
        return tuple(_file(called, item) for item in given)


class PlanFiles(Paths):
    """Files that ``fitter --json`` wrote."""

    has_commas: ClassVar[bool] = False


class Adapters(Paths):
    """Files with LoRA adapters; ``Params`` has each with its scale."""

    def planned(self, value: Any) -> tuple[Lora, ...]:
        return tuple(Lora(each) for each in value)

    def to_json(self, value: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"path": lora.path, "scale": lora.scale} for lora in value]

    def from_json(self, entry: Entry) -> tuple[Lora, ...]:
        return entry.each(lambda lora: Lora(lora["path"].text(), lora["scale"].number()))


class ScaledPaths(Texts):
    """Files, each followed by a colon and a scale."""

    is_file: ClassVar[bool] = True
