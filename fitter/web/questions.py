"""The parameters of a question that touch no file, program or device of the server, and answers that are kept."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
    model_validator,
)

from fitter.errors import Remedy, UsageError
from fitter.machine.gpu import parse_gpus
from fitter.model import location
from fitter.model.files import header_cache
from fitter.model.files.addresses import HUB
from fitter.model.repository_models import is_repository
from fitter.model.shapes.catalogue import CONFIG, SHAPE, by_name, similar_shape
from fitter.parameters.kinds import Amount, Flag, Kind, Number, OneOf, Seconds, Size, Texts, Whole
from fitter.parameters.table import PARAMETERS
from fitter.parameters.values import MAX_DEVICES
from fitter.planning.request.session import is_written
from fitter.storage import identity
from fitter.text import LONGEST_NAME, printable
from fitter.web.allowed_files import Root

ASKED = (
    "program",
    "n_ctx",
    "fit_ctx",
    "n_seq_max",
    "kv_unified",
    "type_k",
    "type_v",
    "flash_attn",
    "n_batch",
    "n_ubatch",
    "split_mode",
    "margin",
    "host_memory",
    "host_margin",
    "host_bandwidth",
    "prompt",
    "generate",
    "workload",
    "users",
    "objective",
    "allow",
    "time_limit",
)
"""Parameters of a question beside model and cards; none names a file, a program or a host."""

SECONDS = 30.0
"""Longest time limit of a plan, and the time limit of a header."""

LONGEST = 300
"""Most characters of a text."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*):/", re.IGNORECASE)
_SCHEMES = ("https", "http", HUB)

_Text = Annotated[str, Field(max_length=LONGEST)]
_Gpus = Annotated[
    Annotated[list[_Text], Field(min_length=1, max_length=MAX_DEVICES)] | _Text | None,
    AfterValidator(lambda given: [given] if isinstance(given, str) else given),
]


def _plain(given: Any) -> Any:
    """Check the kind of a value: in one step, since each type of a union makes an error of its own."""
    values = given if isinstance(given, list) and len(given) <= MAX_DEVICES else [given]
    # the type itself, since a flag is a whole number too
    kinds = (int, str) if values is given else (bool, int, float, str, type(None))
    if not all(type(each) in kinds and not (isinstance(each, str) and len(each) > LONGEST) for each in values):
        raise ValueError("no value of this kind is taken")
    return given


_Value = Annotated[Any, PlainValidator(_plain)]


class _Strict(BaseModel):
    """An object of known keys alone."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, given: Any) -> Any:
        """Leave out all unknown keys but the first: each makes an error, and the first is told."""
        if not isinstance(given, dict):
            return given
        unknown = next((key for key in given if key not in cls.model_fields), None)
        return {key: value for key, value in given.items() if key == unknown or key in cls.model_fields}


class Asked(_Strict):
    """Model, cards and session of a question."""

    model: _Text = Field(
        description="A path below the server's --root, https://…, hf://org/repo/file.gguf, or shape://NAME[:TYPE]."
    )
    gpus: _Gpus = Field(
        None,
        description=f"{PARAMETERS['gpus'].text} [default: the server's own devices, where no other machine can ask it]",
    )
    session: str = Field(
        "",
        max_length=64,
        pattern="^[A-Za-z0-9_.-]*$",
        description="A name of the asker's choice: a newer question with the same one ends this one, with status 409.",
    )

    def keywords(self, *, has_devices: bool) -> dict[str, Any]:
        """Return the keywords of ``fitter.fit``. Raises ``UsageError``, also without a card if the server's devices are
        not offered.
        """
        given = {name: getattr(self, name, None) for name in ASKED}
        if given["workload"] is not None and not is_written(str(given["workload"])):
            raise UsageError("workload is neither numbers such as prompt=12000,answer=300 nor a name: no file is read")
        if self.gpus is not None:
            parse_gpus(self.gpus)
        elif not has_devices:
            raise UsageError(
                "gpus is not set, and other machines can ask this server, so its own are not told: name cards"
            )
        program = {"program": PARAMETERS["program"].check(given.pop("program") or PROGRAM)}
        limit = SECONDS if given["time_limit"] is None else PARAMETERS["time_limit"].check(given["time_limit"])
        if limit > SECONDS:
            raise UsageError(f"time_limit is {limit:g}: the server searches for {SECONDS:g} seconds at most")
        return {**given, **program, "gpus": self.gpus, "time_limit": limit}


PROGRAM = "llama-server"
"""Default program of a plan, as on the command line."""

_USUAL = {"program": PROGRAM, "time_limit": f"{SECONDS:g} seconds, the most"}
"""Defaults that are not those of ``fitter.fit``."""


def _schema(kind: Kind) -> dict[str, Any]:
    """Return the JSON type of a parameter; its ``kind`` checks the value."""
    if isinstance(kind, Flag):
        return {"type": "boolean"}
    if isinstance(kind, Whole):
        return {
            "type": ["integer", "string"] if isinstance(kind, Amount) else "integer",
            "minimum": kind.least,
            "maximum": kind.most,
        }
    if isinstance(kind, OneOf):
        return {"type": "string", "enum": list(kind.words)}
    if isinstance(kind, Seconds):
        return {"type": "number", "exclusiveMinimum": 0, "maximum": SECONDS}
    if isinstance(kind, Texts):
        return {"type": "array", "items": {"type": "string"}}
    if isinstance(kind, (Size, Number)):
        one = {"type": ["integer" if isinstance(kind, Size) else "number", "string"]}
        return {"anyOf": [one, {"type": "array", "items": one}]} if kind.is_list else one
    return {"type": "string"}


def _meaning(name: str) -> str:
    each = PARAMETERS[name]
    if name in _USUAL:
        return f"{each.help} [default: {_USUAL[name]}]"
    if not isinstance(each.kind, Size):
        return each.text
    # the command line has MiB there
    usual = re.sub(r"\d+", r"\g<0> MiB", each.default_text) if each.kind.in_mib else each.default_text
    return f"{each.help} Bytes, or a text such as 24GiB. {usual}"


if TYPE_CHECKING:
    PlanQuestion = Asked
else:
    PlanQuestion = create_model(
        "PlanQuestion",
        __base__=Asked,
        **{
            name: (
                Annotated[_Value, WithJsonSchema({"anyOf": [_schema(PARAMETERS[name].kind), {"type": "null"}]})],
                Field(None, description=_meaning(name)),
            )
            for name in ASKED
        },
    )
    """A question for a plan: ``Asked``, and every parameter of ``ASKED``."""

MOST_QUESTIONS = 64
"""Most questions in one request."""


class PlanQuestions(_Strict):
    """Several questions, each answered by itself."""

    questions: list[PlanQuestion] = Field(
        min_length=1, max_length=MOST_QUESTIONS, description=f"Up to {MOST_QUESTIONS} questions, each as for a plan."
    )


@dataclass(frozen=True)
class Wanted:
    """A requested model, or a repository or directory of models.

    ``opens``: its path or address; ``called``: its path below the root.
    """

    opens: str
    called: str | None = None
    is_elsewhere: bool = False
    is_repository: bool = False


def wanted(model: str, root: Root | None) -> Wanted:
    """Find the requested model. Raises ``UsageError``, and ``ModelError`` for a file outside the ``root``."""
    text = model.strip()
    if not text:
        raise UsageError("the model has no name: choose one")
    if shape := by_name(text):
        return Wanted(shape.address)
    match = _ADDRESS.match(text)
    scheme = match[1].lower() if match else ""
    if scheme == SHAPE:
        return Wanted(text)
    if scheme in _SCHEMES and "://" in text[: len(scheme) + 3]:
        several = is_repository(text)
        return Wanted(text, is_elsewhere=not several, is_repository=several)
    if scheme:
        more = " or config.json" if scheme == CONFIG else ""
        raise UsageError(
            f"{printable(text, LONGEST_NAME)}: no {scheme}:// address{more} is asked for: give https://…, hf://… or shape://…"
        )
    if root is None:
        name = printable(text, LONGEST_NAME)
        if hint := "" if "/" in text else similar_shape(text.replace(":", "-")):
            raise UsageError(f"no model has the name '{name}'; {hint}")
        none = f"'{name}' is no address, and the server offers no directory: name a shape or an address"
        raise UsageError(none, Remedy(", or start it with --root", "root"))
    if text.endswith("/"):
        return Wanted(str(root.folder(text)), text, is_repository=True)
    return Wanted(str(root.file(text)), text)


MOST_KEPT = 64 << 20
"""Most bytes of all answers."""


class KnownAnswers:
    """The last answers, ``most`` bytes of them, by their questions."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0
        """Bytes of all answers."""
        self.hits = 0
        """Questions whose answer was known."""

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, question: str) -> bytes | None:
        """Return the answer to a question, and keep it longer than others; ``None`` if it is not known."""
        answer = self._answers.get(question)
        if answer is not None:
            self._answers.move_to_end(question)
            self.hits += 1
        return answer

    def put(self, question: str, answer: bytes) -> None:
        """Keep an answer, and forget those that were longest not asked for."""
        self.bytes += len(answer) - len(self._answers.pop(question, b""))
        self._answers[question] = answer
        while self.bytes > self._most:
            self.bytes -= len(self._answers.popitem(last=False)[1])


def question_key(model: str, keywords: Mapping[str, Any]) -> str:
    """Return a text that differs for other keywords, another model, and another version of its files.

    The time limit makes no difference: a plan that it cut short is not kept. Raises ``FitterError`` if the model cannot
    be opened.
    """
    with header_cache.reading():
        files = location.model_files(model)
        asked = {name: value for name, value in keywords.items() if name != "time_limit"}
        return json.dumps([model, [identity(str(file)) for file in files], asked], sort_keys=True)
