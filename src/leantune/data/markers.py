"""Marked spans of a prompt: what stands between two marker strings, which are not part of the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from leantune.data.templates import Segment
from leantune.errors import DataError


class Markers(NamedTuple):
    """The strings that open and close a marked span, `data.markers`."""

    opening: str
    closing: str

    def split(self, segments: Sequence[Segment], where: str) -> list[Segment]:
        """The same text without the markers; what stood between them is segments of its own, `marked`.

        Markers inside learned text are text. Raises `DataError`, naming `where`, for markers that are
        nested or have no partner in their segment.
        """
        pieces = list[Segment]()
        for segment in segments:
            pieces += [segment] if segment.supervised else self._pieces(segment, where)
        return pieces

    def _pieces(self, segment: Segment, where: str) -> list[Segment]:
        # A marker that begins with the other one has to be tried first.
        longest, other = sorted(self, key=len, reverse=True)
        pieces, inside, before = list[Segment](), False, ""
        for part in re.split(f"({re.escape(longest)}|{re.escape(other)})", segment.text):
            if part not in self:
                pieces += [Segment(part, marked=inside)] if part else []
            elif inside == (part == self.opening):
                problem = "inside a marked span; spans cannot be nested" if inside else "but closes no span"
                raise DataError(f"{where}: the marker {part!r} stands after {before[-40:]!r}, {problem}")
            else:
                inside = not inside
            before = part
        if inside:
            raise DataError(
                f"{where}: the marker {self.opening!r} before {before[:40]!r} is never closed; put "
                f"{self.closing!r} after the span"
            )
        pieces = pieces or [Segment("")]
        return [*pieces[:-1], replace(pieces[-1], eos=segment.eos)]
