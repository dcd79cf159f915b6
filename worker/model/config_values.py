"""Reads values of configs, and has rules for them. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
MOST = 2**53  # all JSON parsers agree on integers up to this one
MOST_LAYERS = 10_000  # ten times those of the deepest model: lists have an entry for each
MOST_REAL = 3.4e38  # about the largest float32
KNOWN_ACTIVATIONS = {  # transformers' names
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
}
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def list_of_layers(config: Config, key: str, allowed: Collection[Any]) -> list[Any]:
    """Read a list that has an allowed value for each layer. Raises KeyError or ValueError."""
    values = config[key]
    if not isinstance(values, list) or len(values) != config["num_hidden_layers"] or set(values) - set(allowed):
        raise ValueError(f"its {key} do not tell of each layer")
    return values


def shown(name: str) -> str:
    """Return a name from a config, shortened and without line breaks."""
    return repr(name)[1:-1][:80]


def line_of(error: Exception, most: int) -> str:
    """Return an error's text as one printable line of at most `most` characters."""
    words = " ".join(str(error).split())[:most]
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)


@dataclass(frozen=True)
class KeyRule:
    """A test for a key's value, and the description of valid values."""

    words: str
    holds: Callable[[Any], bool]

    def of(self, config: Config, key: str) -> Any:
        """Read a value. Raises KeyError if it is absent, ValueError if it is another one than expected."""
        if not self.holds(config[key]):
            raise ValueError(f"its {key} is {config[key]!r:.80}")
        return config[key]

    def or_null(self) -> KeyRule:
        return self.or_else(KeyRule("null", lambda value: value is None))

    def or_else(self, other: KeyRule) -> KeyRule:
        return KeyRule(f"{self.words}, or {other.words}", lambda value: self.holds(value) or other.holds(value))

    def list_of(self, count: int | None = None) -> KeyRule:
        said = "a list, each" if count is None else f"a list of {count:,}, each"

        def holds(value: Any) -> bool:
            return isinstance(value, list) and count in (None, len(value)) and all(map(self.holds, value))

        return KeyRule(f"{said} {self.words}", holds)


def whole(least: int, words: str, most: int = MOST) -> KeyRule:
    return KeyRule(words, lambda value: type(value) is int and least <= value <= most)


SIZE = whole(1, f"a positive integer, at most {MOST:,}")
COUNT = whole(0, f"an integer from 0 to {MOST:,}")
LAYERS = whole(1, f"a positive integer, at most {MOST_LAYERS:,}", MOST_LAYERS)
SOME_LAYERS = whole(0, f"an integer from 0 to {MOST_LAYERS:,}", MOST_LAYERS)
LAST_LAYER = whole(-1, f"an integer from -1 to {MOST_LAYERS:,}", MOST_LAYERS)
POSITIVE = KeyRule("a finite number above 0", lambda value: type(value) in (int, float) and 0 < value <= MOST_REAL)
BASE = KeyRule("a finite number above 0, other than 1", lambda value: POSITIVE.holds(value) and value != 1)
NOT_NEGATIVE = KeyRule(
    "a finite number, 0 or more", lambda value: type(value) in (int, float) and 0 <= value <= MOST_REAL
)
SHARE = KeyRule("a number above 0, at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
LIMIT = KeyRule(
    "a number, 0 or more, or Infinity",  # transformers writes it as `Infinity`
    lambda value: (type(value) in (int, float) and value >= 0) or value == {"__float__": "Infinity"},
)
SWITCH = KeyRule("true or false", lambda value: isinstance(value, bool))
ACTIVATION = KeyRule(
    "an activation that transformers has, silu for one",
    lambda value: isinstance(value, str) and value in KNOWN_ACTIVATIONS,
)
WORD = KeyRule("a word", lambda value: isinstance(value, str))
DTYPE = KeyRule(f"one of {', '.join(DTYPES)}", lambda value: isinstance(value, str) and value in DTYPES)


def number_of(config: Config, key: str) -> float:
    """Read a number above 0. Raises KeyError or ValueError."""
    return float(POSITIVE.of(config, key))
