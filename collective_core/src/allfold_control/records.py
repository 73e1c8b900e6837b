"""The record of a group's term as JSON: on control links, in the store and in answers."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    WrapSerializer,
)

from allfold_core.schema import UnknownSchema
from allfold_core.survival.term_record import TermRecord

T = TypeVar("T")


# In JSON the opening is "epoch", as older versions read and write it. Not an alias: that needs a
# configuration of the dataclass, in which the strictness of the message around it would be lost.
def _from_json(data: Any) -> Any:
    if isinstance(data, dict) and "epoch" in data and "opening" not in data:
        return {("opening" if key == "epoch" else key): value for key, value in data.items()}
    return data


def _to_json(record: TermRecord, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
    return {("epoch" if key == "opening" else key): each for key, each in handler(record).items()}


Record = Annotated[
    TermRecord,
    AfterValidator(TermRecord.check),
    BeforeValidator(_from_json),
    WrapSerializer(_to_json),
]
"""A record whose parts fit each other."""

_RECORD: TypeAdapter[TermRecord] = TypeAdapter(Record)


def checked(adapter: TypeAdapter[T], data: Any) -> T:
    """Return the value of a message.

    Raises:
        UnknownSchema: a part of it is of another schema.
        ValueError: it is none.
    """
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        causes = (each.get("ctx", {}).get("error") for each in error.errors())
        for cause in causes:
            if isinstance(cause, UnknownSchema):
                raise cause from error
        raise
    except (KeyError, TypeError, AttributeError) as error:  # of a field with a form of its own
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_record(data: Any) -> TermRecord:
    """Return the record in a JSON value; raises as :func:`checked`."""
    return checked(_RECORD, data)


def record_fields(record: TermRecord) -> dict[str, Any]:
    """Return the JSON value of a record, which :func:`read_record` reads."""
    fields: dict[str, Any] = _RECORD.dump_python(record, mode="json")
    return fields
