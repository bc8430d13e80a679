# SPDX-License-Identifier: Apache-2.0
"""What features counted in a server's processes while it was measured: the proof that the code under test ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Counters = dict[str, dict[str, int]]
"""Feature -> `engaged` and `refused:<reason>` -> count."""
CountersReader = Callable[[Path], Counters]


def read_counters(state_dir: Path) -> Counters:
    """Read the feature counters that the processes of a server left in `state_dir`."""
    from numinous_tooling.patching import counters

    totals: Counters = counters.read_totals(state_dir)
    return totals


def counted_between(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> Counters:
    """Return what was counted between two readings; features with nothing are left out."""
    result: Counters = {}
    for feature, counts in after.items():
        known = before.get(feature, {})
        rest = {key: count - known.get(key, 0) for key, count in counts.items()}
        rest = {key: count for key, count in rest.items() if count}
        if rest:
            result[feature] = rest
    return result


def never_ran(
    name: str, counters: Mapping[str, Mapping[str, int]], features: Sequence[str]
) -> list[str]:
    """Return one line per feature that was to run in `name` (a run or an arm) and did not."""
    lines = []
    for feature in features:
        counts = counters.get(feature, {})
        if counts.get("engaged", 0) <= 0:
            refused = ", ".join(
                f"{key} {count}" for key, count in sorted(counts.items()) if key != "engaged"
            )
            lines.append(f"{name}: {feature} never ran ({refused or 'no counters'})")
    return lines
