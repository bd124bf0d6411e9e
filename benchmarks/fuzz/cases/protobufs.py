"""Protobuf messages of any type with odd values, and their bytes changed."""

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from benchmarks.fuzz.cases.texts import MARKS, ODD, references

_DEPTH = 3
_INTEGERS = (
    0,
    1,
    2,
    64,
    -1,
    (1 << 31) - 1,
    (1 << 32) - 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
)
_FLOATS = (0.0, 0.5, -1.0, 1e308, float("inf"), float("nan"))
_whole = tuple(text for text in MARKS + ODD if text.isprintable() or text.isspace())
_texts = st.one_of(
    st.sampled_from(("hi", "{}", "user", "look_up")), references, st.sampled_from(_whole)
)


@st.composite
def serialized(draw: st.DrawFn, method: MethodDescriptor, resolve: Callable[[str], str]) -> bytes:
    """Draw a request of a method: valid, changed in its bytes, or random bytes.

    `resolve` replaces references by ids that there are.
    """
    if draw(st.sampled_from((True, False, False, False, False))):
        return draw(st.binary(max_size=60))
    message = GetMessageClass(method.input_type)()
    _fill(draw, message, method.input_type, _DEPTH, resolve)
    data: bytes = message.SerializeToString()
    return _change(draw, data)


def _fill(
    draw: st.DrawFn,
    message: Any,
    descriptor: Descriptor,
    depth: int,
    resolve: Callable[[str], str],
) -> None:
    """Set about half of the fields of a message."""
    for field in descriptor.fields:
        nested = field.message_type
        if (nested is not None and not depth) or not draw(st.booleans()):
            continue
        if nested is not None and nested.GetOptions().map_entry:
            continue
        if nested is not None:
            target = getattr(message, field.name)
            inner = target.add() if field.is_repeated else target
            inner.SetInParent()
            _fill(draw, inner, nested, depth - 1, resolve)
        elif field.is_repeated:
            getattr(message, field.name).extend(
                draw(_scalar(field, resolve)) for _ in range(draw(st.integers(0, 2)))
            )
        else:
            setattr(message, field.name, draw(_scalar(field, resolve)))


def _scalar(field: FieldDescriptor, resolve: Callable[[str], str]) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        binary = field.type == FieldDescriptor.TYPE_BYTES
        return st.binary(max_size=40) if binary else _texts.map(resolve)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from(_FLOATS)
    bits = 64 if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    unsigned = kind in (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_UINT32)
    least, beyond = (0, 1 << bits) if unsigned else (-(1 << bits - 1), 1 << bits - 1)
    return st.sampled_from([number for number in _INTEGERS if least <= number < beyond])


def _change(draw: st.DrawFn, data: bytes) -> bytes:
    """Flip, cut, repeat or leave the bytes of a message."""
    change = draw(st.sampled_from(("none", "none", "flip", "cut", "repeat", "insert")))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if change == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if change == "cut":
        return data[:at]
    if change == "repeat":
        return data * 2
    if change == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
    return data
