"""Free block ids kept as runs of neighbours, so that an allocation is usually one contiguous run.

Boundary tags (Knuth, TAOCP vol. 1, section 2.5) make joining with both neighbours O(1); runs are binned by the power of
two of their length, and a bit mask over the bins finds a fitting one without a search.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class FreeRuns:
    """A set of ids in ``range(total)``, all free at first. O(1) per run given or taken, whatever the total."""

    def __init__(self, total: int) -> None:
        self.count = 0
        """Ids in the set."""
        self._length = array("i", bytes(4 * total))  # of runs, at both ends; 0 elsewhere
        self._bins: list[dict[int, None]] = [{} for _ in range(total.bit_length() + 1)]
        self._filled = 0  # bit b is set while bin b, the runs with bit_length(length) == b, is not empty
        self.give(0, total)

    def give(self, start: int, length: int) -> None:
        """Put ``length`` ids from ``start`` into the set, joined with their neighbours. They must not be in it."""
        lengths = self._length
        self.count += length
        after = start + length
        if start > 0 and (left := lengths[start - 1]):
            start -= left
            length += left
            self._unlink(start, left)
        if after < len(lengths) and (right := lengths[after]):
            length += right
            self._unlink(after, right)
        lengths[start] = lengths[start + length - 1] = length
        number = length.bit_length()
        self._bins[number][start] = None
        self._filled |= 1 << number

    def take(self, wanted: int, after: int = -1) -> tuple[int, int]:
        """Take up to ``wanted`` ids as one run ``(start, length)``; all of them for sure if a run is twice as long.

        A run that begins at ``after + 1`` is preferred, so that a growing sequence stays contiguous. The set must not
        be empty and ``wanted`` must be positive.
        """
        lengths, bins = self._length, self._bins
        start = after + 1
        if 0 < start < len(lengths) and (length := lengths[start]) and start in bins[length.bit_length()]:
            number = length.bit_length()
            del bins[number][start]
        else:  # used, or the end of a run, or inside of one
            sure = (wanted - 1).bit_length() + 1  # every run from this bin on is long enough
            fitting = self._filled >> sure
            number = sure + (fitting & -fitting).bit_length() - 1 if fitting else self._filled.bit_length() - 1
            start, _ = bins[number].popitem()  # unlike a peek at the end, popitem never walks over deleted entries
            length = lengths[start]
        last, rest = start + length - 1, length - wanted
        lengths[start] = 0
        if rest > 0:
            start_of_rest, bin_of_rest = start + wanted, rest.bit_length()
            lengths[start_of_rest] = lengths[last] = rest
            bins[bin_of_rest][start_of_rest] = None
            self._filled |= 1 << bin_of_rest
            length = wanted
        else:
            lengths[last] = 0
        if not bins[number]:
            self._filled ^= 1 << number
        self.count -= length
        return start, length

    def runs(self) -> Iterator[tuple[int, int]]:
        """Every run as ``(start, length)``, for checking; in no particular order."""
        for runs in self._bins:
            for start in runs:
                yield start, self._length[start]

    def _unlink(self, start: int, length: int) -> None:
        self._length[start] = self._length[start + length - 1] = 0
        bin_index = length.bit_length()
        runs = self._bins[bin_index]
        del runs[start]
        if not runs:
            self._filled ^= 1 << bin_index
