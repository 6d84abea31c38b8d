"""What outlives a call of a fold: globals, closures, defaults, attributes of functions and of the objects they use."""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from itertools import count
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

from walstream.ledger.fold import Fold

from .purity_traps import is_stdlib

_MOST: Final = 5_000
"""Values looked at before and after each event. Larger state shows itself when two results differ."""

_SCALARS: Final = (int, float, complex, str, bytes, bool, type(None), Decimal)


class State:
    """The values that the functions of a fold can reach beside their arguments."""

    def __init__(self, fold: Fold) -> None:
        self._roots: dict[str, tuple[Any, str]] = {}
        self._known: set[int] = set()
        for event_type in fold.event_types:
            self._reach(fold.function(event_type))

    def frozen(self) -> dict[str, Any]:
        """All of them as they are now."""
        budget = [_MOST]
        return {name: _freeze(_value(*root), budget, set()) for name, root in self._roots.items()}

    def changed(self, before: dict[str, Any]) -> str | None:
        """The name of one that is not as it was; ``None`` if all are."""
        after = self.frozen()
        return next((name for name in before if after[name] != before[name]), None)

    def _reach(self, function: Any) -> None:
        if id(function) in self._known:
            return
        self._known.add(id(function))
        if isinstance(function, functools.partial):
            self._root(f"an argument of {function!r}", function, "args")
            self._root(f"an argument of {function!r}", function, "keywords")
            self._reach(function.func)
        elif isinstance(function, MethodType):
            self._root(f"the object of {function.__qualname__}", function, "__self__")
            self._reach(function.__func__)
        elif not isinstance(function, FunctionType):
            call = getattr(type(function), "__call__", None)  # noqa: B004 (its function is wanted)
            if isinstance(call, FunctionType):
                self._root(f"the object {type(function).__qualname__}", function, "__dict__")
                self._reach(call)
            wrapped = getattr(function, "__wrapped__", None)  # what functools.cache makes: the cache itself is fair
            if wrapped is not None:
                self._reach(wrapped)
        elif not is_stdlib(function.__code__.co_filename):
            self._reach_function(function)

    def _reach_function(self, function: FunctionType) -> None:
        name, module = function.__qualname__, function.__module__
        for attribute in ("__defaults__", "__kwdefaults__", "__dict__"):
            if getattr(function, attribute) is not None:
                self._root(f"{attribute} of {name}", function, attribute)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._follow(f"the variable {variable} around {name}", cell, "cell_contents")
        names = list(_global_names(function.__code__))
        for variable in names:
            if variable not in function.__globals__:
                continue
            self._follow(f"the global {module}.{variable}", function.__globals__, variable)
            other = function.__globals__[variable]
            if isinstance(other, ModuleType) and _of_the_application(other):
                for each in names:  # whichever of them are attributes of it
                    if each in vars(other):
                        self._follow(f"the global {other.__name__}.{each}", vars(other), each)

    def _follow(self, name: str, holder: Any, key: str) -> None:
        try:
            value = _value(holder, key)
        except ValueError:  # an empty cell
            return
        if isinstance(value, FunctionType | MethodType | functools.partial) or hasattr(value, "__wrapped__"):
            self._reach(value)
        elif isinstance(value, type):
            if not _foreign(value):
                self._root(f"a class attribute of {value.__qualname__}", value, "__dict__")
        elif not isinstance(value, ModuleType | BuiltinFunctionType | Fold):
            self._root(name, holder, key)

    def _root(self, name: str, holder: Any, key: str) -> None:
        self._roots[name] = (holder, key)


def _value(holder: Any, key: str) -> Any:
    return holder.get(key) if isinstance(holder, dict) else getattr(holder, key)


def _of_the_application(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file or module.__name__.partition(".")[0] == "walstream"
    return bool(file) and not installed and not is_stdlib(file)


def _foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in {"builtins", "typing", "walstream", "enum", "collections", "decimal"}


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _freeze(value: Any, budget: list[int], above: set[int]) -> Any:
    """Something that is equal later if nothing in the value has changed."""
    budget[0] -= 1
    if isinstance(value, _SCALARS) or budget[0] <= 0 or id(value) in above or len(above) > 20:
        return value if isinstance(value, _SCALARS) else None
    if isinstance(value, dict | list | tuple | deque | set | frozenset) and len(value) > budget[0]:
        return len(value)
    above = above | {id(value)}
    if isinstance(value, dict) or type(value).__name__ == "mappingproxy":
        return [(_freeze(key, budget, above), _freeze(each, budget, above)) for key, each in list(value.items())]
    if isinstance(value, list | tuple | deque):
        return [_freeze(each, budget, above) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, bytearray | array):
        return bytes(value)
    if isinstance(value, count):
        return repr(value)
    inner = getattr(value, "__dict__", None)
    if isinstance(value, type | ModuleType | FunctionType):
        return None
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return _freeze([inner if isinstance(inner, dict) else None, slots], budget, above)


def _slots(kind: type) -> tuple[str, ...]:
    """The names of the ``__slots__`` of a class and its bases."""
    return tuple(
        name for base in kind.__mro__ for name, each in vars(base).items() if isinstance(each, MemberDescriptorType)
    )
