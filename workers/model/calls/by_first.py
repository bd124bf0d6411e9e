"""Forms that a family has beside each other, told by the first character of the calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.model.calls.sink import CallSink, Reader
from workers.model.calls.source import CallSource, Reading


@dataclass(frozen=True)
class ByFirst:
    """Reads by the reader of the first character, else by `other`."""

    readers: Mapping[str, Reader]
    other: Reader

    def __call__(self, source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
        """Read calls."""
        read = self.readers.get((yield from source.peek_word()), self.other)
        yield from read(source, sink, tools)
