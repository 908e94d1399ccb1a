"""Hypothesis strategies for everything that waterclock_proto's types can hold."""

import re
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

T = TypeVar("T", bound=msgspec.Struct)

TEXT = st.characters(codec="utf-8")
"""Any character that JSON can carry: no lone surrogates, but NUL and all others."""


def values(kind: type[T]) -> st.SearchStrategy[T]:
    """Return a strategy for every value of a Struct type that its own decoder accepts."""
    return cast("st.SearchStrategy[T]", _values(kind))


@cache
def _values(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    required = {each.name: of_type(each.type) for each in info.fields if each.required}
    optional = {each.name: of_type(each.type) for each in info.fields if not each.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: kind(**fields))


def of_type(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high)
        case inspect.StrType(pattern=str() as pattern, max_length=longest):
            matching = st.from_regex(re.compile(pattern), alphabet=TEXT)
            return matching.filter(lambda text: longest is None or len(text) <= longest)
        case inspect.StrType(min_length=shortest, max_length=longest):
            return st.text(TEXT, min_size=shortest or 0, max_size=longest)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=allowed):
            return st.sampled_from(allowed)
        case inspect.StructType(cls=cls):
            return values(cls)
        case inspect.UnionType(types=types):
            return st.one_of([of_type(each) for each in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(of_type(item), max_size=4).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key), of_type(value), max_size=4)
        case _:
            raise NotImplementedError(f"no strategy for {kind}: a new sort of field needs one")
