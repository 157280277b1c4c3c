"""The configuration of a published checkpoint: each field is used, or refused by name."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from graphgen.errors import GraphgenError
from graphgen.files import read_json
from graphgen.models.published.language_model import language_fields
from graphgen.models.published.no_effect import WITHOUT_EFFECT
from graphgen.nn.feed_forward import Activation

T = TypeVar("T", bool, int, float, str)
W = TypeVar("W")

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_LARGEST = 1 << 24  # size
_MOST_LAYERS = 1000  # each becomes an object before the weights show that there are fewer

_OFF = ("is_decoder", "add_cross_attention", "tie_encoder_decoder", "tf_legacy_loss")
"""What older files note of any model; false is what every class without such a field does."""

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}
"""What configurations call the activations of `nn.FeedForward`."""


class Config:
    """The fields of a config.json, taken one by one; `finish` refuses the ones that nobody took.

    A field that is null counts as absent, unless it is `optional`; `absent` holds what those taken
    mean. `stored` holds the names of the checkpoint's weights, for what no field says. Errors name
    the file and the field, what it is and what it must be.
    """

    def __init__(self, fields: dict[str, Any], where: str = "config.json"):
        self._fields = {key: value for key, value in fields.items() if value is not None}
        self._null = fields.keys() - self._fields.keys()
        self._taken, self.ignored = set[str](), list[str]()
        self.parts, self.absent = dict[str, Config](), dict[str, list[Any]]()
        self.stored, self.asked = frozenset[str](), False
        self.where, self.model_type = where, "model"
        self.model_type = self.take("model_type", str)

    @classmethod
    def read(cls, path: Path) -> "Config":
        """The configuration in a file."""
        return cls(language_fields(read_json(path), path), str(path))

    @property
    def fields(self) -> dict[str, Any]:
        """All fields that are not null."""
        return dict(self._fields)

    def replace(self, fields: Mapping[str, Any]) -> None:
        """Take these fields instead of those of the file."""
        self._fields |= fields

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A field, or the default.

        Sizes (int) are from 1 to 2^24, layers at most 1000; tokens and what norms add, from 0 on.
        """
        value: Any = self.raw(name, default)
        if name not in self._fields:
            self.absent.setdefault(name, []).append(value)
        if value is None:
            raise GraphgenError(f"{self.where}: the field {name!r} is missing")
        whole = type(value) is int and abs(value) <= _LARGEST
        value = float(value) if kind is float and whole else value
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            self.refuse(name, value, _WORDS[kind])
        if kind is float and name.endswith(("eps", "epsilon")) and float(value) < 0.0:
            self.refuse(name, value, "at least 0")
        largest = _MOST_LAYERS if name.endswith(("layer", "layers")) else _LARGEST
        least, what = (0, "a token") if name.endswith("_token_id") else (1, "a size")
        if kind is int and not least <= int(value) <= largest:
            self.refuse(name, value, f"{what} from {least} to {largest}")
        return value

    def optional(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """A field: None if it is null, the default if it is absent."""
        self._taken.add(name)
        none = name in self._null or (default is None and name not in self._fields)
        return None if none else self.take(name, kind, default)

    def raw(self, name: str, default: Any = None) -> Any:
        """A field of any type, such as a list or a dictionary."""
        self._taken.add(name)
        return self._fields.get(name, default)

    def count(self, name: str, default: int) -> int:
        """A field that counts something, from 0 to 65535."""
        found = self.raw(name, default)
        if type(found) is not int or not 0 <= found < 1 << 16:
            self.refuse(name, found, "a number from 0 to 65535")
        return found

    def given(self, name: str) -> Any:
        """A field as the file has it, only looked at: None if it is absent."""
        return self._fields.get(name)

    def has(self, *beginnings: str, ending: str = "") -> bool:
        """Whether the checkpoint has a weight of such a name; that is noted, as `asked`."""
        self.asked, begin = True, beginnings or ("",)
        return any(name.startswith(begin) and name.endswith(ending) for name in self.stored)

    def part(self, name: str, model_type: str, **absent: Any) -> "Config":
        """The configuration in a field, an object, of a part of this model type.

        `absent` are the values of fields that it lacks. An older copy of it, `name`_dict, has to
        agree. `finish` finishes the parts, too.
        """
        found, copy = self.raw(name, {}), self.raw(f"{name}_dict", {})
        for field, value in ((name, found), (f"{name}_dict", copy)):
            if not isinstance(value, dict):
                self.refuse(field, value, "an object")
        for field, value in copy.items():
            if field in found and found[field] != value:
                self.refuse(f"{name}_dict", copy, f"what {name} says: {field} {found[field]!r}")
        if found.get("model_type", model_type) != model_type:
            self.refuse(name, found, f"of model_type {model_type!r}")
        fields = absent | copy | found | {"model_type": model_type}
        own = self.parts[name] = type(self)(fields, f"{self.where}: {name}")
        own.stored = self.stored
        return own

    def named(self, *names: str) -> str:
        """The name by which the file has a field that was renamed; it may have all, if equal."""
        self._taken.update(names)
        given = [name for name in names if name in self._fields]
        for other in given[1:]:
            if self._fields[other] != self._fields[given[0]]:
                self.refuse(other, self._fields[other], f"{given[0]}, {self._fields[given[0]]!r}")
        return given[0] if given else names[0]

    def ignore(self, *names: str) -> None:
        """Accept fields that change no result; `ignored` holds those that the file has."""
        self._taken.update(names)
        self.ignored += [name for name in names if name in self._fields]

    def choose(self, name: str, choices: Mapping[str, W], default: str | None = None) -> W:
        """The entry of `choices` for the field, whose value must be one of the keys."""
        value = self.take(name, str, default)
        if value not in choices:
            self.refuse(name, value, f"one of {', '.join(choices)}")
        return choices[value]

    def expect(self, name: str, *values: Any) -> None:
        """Refuse the field unless it is absent or one of `values`."""
        self._taken.add(name)
        if name in self._fields and self._fields[name] not in values:
            self.refuse(name, self._fields[name], " or ".join(map(repr, values)) or "absent")

    def refuse(self, name: str, value: Any, wanted: str) -> NoReturn:
        """Raise the error for a field that is not what it must be."""
        whose = f"{self.model_type}: " * bool(self.model_type)  # a part may be no model
        raise GraphgenError(f"{self.where}: {whose}{name} is {value!r:.100}; it must be {wanted}")

    def finish(self) -> None:
        """Raise an error that names every field that changes the computation and was not taken."""
        for part in self.parts.values():
            part.finish()
            self.ignored += part.ignored
        left = [
            f"{name} = {value!r:.60}"
            for name, value in sorted(self._fields.items())
            if name not in self._taken
            and not WITHOUT_EFFECT.fullmatch(name)
            and not (value is False and name in _OFF)
            and value not in ("", [], {})  # which says nothing
        ]
        if left:
            raise GraphgenError(
                f"{self.where}: {self.model_type or 'it'} does not have these fields: "
                f"{'; '.join(left)}; they may change the computation: remove them if they do not"
            )
