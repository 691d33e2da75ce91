"""The types of a request's fields, each with what /openapi.json says of it.

What a type alone cannot say (ranges, the ids of a vocabulary) is said here once more in JSON Schema's words; a test
asks a server at and beside every such bound, so that the two cannot drift apart.
"""

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

from posttrainllm.adapters.params import MAX_LOGPROBS

__all__ = [
    "EMITTED_IDS",
    "LONGEST_STOP",
    "MOST_CHOICES",
    "MOST_STOPS",
    "MOST_STOP_IDS",
    "PROMPT_IDS",
    "Bias",
    "Choices",
    "Content",
    "Count",
    "FromZeroToOne",
    "Json",
    "Logprobs",
    "Modalities",
    "Penalty",
    "Prompts",
    "Repetition",
    "Seed",
    "Share",
    "Stops",
    "Temperature",
    "TokenIds",
    "TopK",
    "whole",
]

Json: TypeAlias = dict[str, Any]
MOST_CHOICES = 128
MOST_STOPS = 64
MOST_STOP_IDS = 1024
LONGEST_STOP = 256  # the engine's thread holds text back against it
EMITTED_IDS, PROMPT_IDS = "the largest id that may be emitted", "the largest id that a prompt may hold"
"""Stand for the number, which the server that is asked puts there."""


def whole(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is 16.

    Args:
        value: any.

    Returns:
        The same, as a whole number where it is one.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, ids, or a list of either, as a list; it looks no further than the first thing that is wrong.

    A union of four types would try them all, and keep what is wrong with every entry of each.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError
    if isinstance(value[0], (str, list)):
        return [entry if isinstance(entry, str) else _ids(entry) for entry in value]
    return [_ids(value)]


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    ids = [whole(entry) for entry in value]
    if not all(type(entry) is int for entry in ids):  # a bool is an int, too
        raise ValueError
    return ids


def _content(value: Any) -> str:
    """A message's text, which may come in parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError
    return "".join(part["text"] for part in parts)


def _text_alone(value: Any) -> list[str]:
    """["text"]: what is answered anyway."""
    if not isinstance(value, list) or any(entry != "text" for entry in value):
        raise ValueError
    return value


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return texts


def _number(least: float, most: float, **more: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": "number", "minimum": least, "maximum": most, **more})


def _whole_number(least: int, most: int | None = None) -> WithJsonSchema:
    return WithJsonSchema({"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})})


def _ids_schema(most: str, **more: Any) -> Json:
    return {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": most}, **more}


_STOP: Json = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
_TEXT: Json = {"type": "string", "minLength": 1}
_PROMPT_IDS = _ids_schema(PROMPT_IDS, minItems=1)
_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_Whole = BeforeValidator(whole)

Count = Annotated[int, _Whole, _whole_number(1)]
Choices = Annotated[int, _Whole, _whole_number(1, MOST_CHOICES)]
Seed = Annotated[int, _Whole, _whole_number(0, 2**64 - 1)]
TopK = Annotated[int, _Whole, _whole_number(-1, 2**31 - 1)]
Logprobs = Annotated[int, _Whole, _whole_number(0, MAX_LOGPROBS)]
Temperature = Annotated[
    float, WithJsonSchema({"anyOf": [{"const": 0}, {"type": "number", "minimum": 1e-4, "maximum": 1e4}]})
]
Share = Annotated[float, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1})]
FromZeroToOne = Annotated[float, _number(0, 1)]
Penalty = Annotated[float, _number(-2, 2)]
Repetition = Annotated[float, _number(0.01, 10)]
Bias = Annotated[  # its numbers are checked where its ids are
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _PROMPT_IDS,
                {"type": "array", "items": {"anyOf": [_TEXT, _PROMPT_IDS]}, "minItems": 1, "maxItems": MOST_CHOICES},
            ]
        }
    ),
]
Stops = Annotated[
    list[str],
    PlainValidator(_texts),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}]}),
]
TokenIds = Annotated[list[int], PlainValidator(_ids), WithJsonSchema(_ids_schema(EMITTED_IDS, maxItems=MOST_STOP_IDS))]
Content = Annotated[
    str, PlainValidator(_content), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})
]
Modalities = Annotated[
    list[str], PlainValidator(_text_alone), WithJsonSchema({"type": "array", "items": {"const": "text"}})
]
