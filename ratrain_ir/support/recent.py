"""Results of the last few questions, for questions that are soon asked again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from attrs import define, field

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MOST = 4


@define(eq=False)
class Recent(Generic[K, V]):
    """Holder of the last few results by key, so that what is held stays small however much is asked."""

    _found: dict[K, V] = field(factory=dict, init=False)

    def of(self, key: K, make: Callable[[], V]) -> V:
        """Return the result for a key; make it if it is not held, and drop the oldest one."""
        if key not in self._found:
            if len(self._found) == _MOST:
                del self._found[next(iter(self._found))]
            self._found[key] = make()
        return self._found[key]
