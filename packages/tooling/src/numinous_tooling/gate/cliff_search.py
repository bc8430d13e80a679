# SPDX-License-Identifier: Apache-2.0
"""The search for a cliff, without servers: the largest concurrency that holds, from probes that say yes or no.

**Rule.** From a guess the concurrency is doubled while it holds, or halved while it does not, until two neighbours
disagree; then the bracket is bisected until its ends are within `resolution` of each other (0: neighbours). A curve
that holds up to some concurrency and nowhere above is *monotone*, and for every such curve this finds the cliff.

**Noise.** Near the cliff a probe may come out either way. So both ends of the final bracket are probed again; where the
second answer differs from the first, a third decides by majority, and the concurrency is *disputed*. An end that the
majority moves to the other side takes part of the bracket with it, and the search goes on from there. No concurrency is
probed more than three times, so it ends.

**Not monotone.** A concurrency that fails (by majority) below one that holds is reported; then there is no one cliff, and
the bracket is that of the last place where yes turns into no. Only what was probed can be seen: a dip or a recovery
between the probes of a search is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MAJORITY_OF = 3


@dataclass
class Bracket:
    """What a search found: the largest concurrency seen to hold, the smallest above it seen not to.

    `holds` None: not even 1 holds. `fails` None: the highest concurrency that was allowed holds.
    """

    answers: dict[int, list[bool]] = field(default_factory=dict)
    """Every probe's answer, per concurrency."""

    def verdict(self, concurrency: int) -> bool:
        """Return the majority of a concurrency's answers; of two that differ the first."""
        given = self.answers[concurrency]
        return given[0] if 2 * sum(given) == len(given) else 2 * sum(given) > len(given)

    @property
    def holds(self) -> int | None:
        """Return the largest concurrency that holds."""
        return max((n for n in self.answers if self.verdict(n)), default=None)

    @property
    def fails(self) -> int | None:
        """Return the smallest concurrency above `holds` that does not hold."""
        above = self.holds or 0
        return min((n for n in self.answers if n > above), default=None)

    @property
    def disputed(self) -> tuple[int, ...]:
        """Return the concurrencies whose answers differ."""
        return tuple(sorted(n for n, given in self.answers.items() if len(set(given)) > 1))

    @property
    def inversions(self) -> tuple[int, ...]:
        """Return the concurrencies that do not hold although a higher one does."""
        highest = self.holds or 0
        return tuple(sorted(n for n in self.answers if n < highest and not self.verdict(n)))


def search(
    probe: Callable[[int], bool], start: int, highest: int, resolution: float = 0.0
) -> Bracket:
    """Find the largest concurrency of 1 to `highest` that holds.

    Args:
        probe: measures one concurrency and says whether it holds.
        start: the first guess.
        highest: never exceeded.
        resolution: how far apart, relative to the lower, the ends of the bracket may stay.
    """
    found = Bracket()

    def ask(concurrency: int) -> bool:
        found.answers.setdefault(concurrency, []).append(probe(concurrency))
        return found.verdict(concurrency)

    ask(min(max(1, start), highest))
    while True:
        _narrow(found, ask, highest, resolution)
        ends = [n for n in (found.holds, found.fails) if n is not None]
        unsure = [n for n in ends if _unsure(found.answers[n])]
        if not unsure:
            return found
        for concurrency in unsure:
            ask(concurrency)


def _unsure(answers: list[bool]) -> bool:
    """Return whether an end of the bracket is to be probed again."""
    return len(answers) == 1 or (len(answers) < MAJORITY_OF and len(set(answers)) > 1)


def _narrow(found: Bracket, ask: Callable[[int], bool], highest: int, resolution: float) -> None:
    """Probe until the ends of the bracket are known and near each other."""
    while True:
        holds, fails = found.holds or 0, found.fails
        if fails is None:
            if holds >= highest:
                return
            ask(min(highest, 2 * holds))
        elif fails - holds <= max(1.0, resolution * holds):
            return
        elif holds == 0:
            # Below a failure nothing is known to hold: halve on, the last step is 1.
            ask(fails // 2)
        else:
            ask((holds + fails) // 2)
