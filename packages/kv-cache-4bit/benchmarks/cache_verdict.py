# SPDX-License-Identifier: Apache-2.0
"""From the arms' answers and sizes to a verdict: PASS, FAIL or INCONCLUSIVE.

*Cases*    Each way to an answer is compared apart (cold, behind a cached prefix, decoded), and all of them together, *pooled*. Arms see the same
           tokens: greedy answers are compared up to and including the first position at which bf16, the arm or its peer parts from the others.
*4 bit*    Against bf16's answers an arm may have at most `FLIPS` times the flips of its peer's, the FP8 arm's: positions whose likeliest token differs;
           at most `KL` times its divergence; and of text a loss at most `LOSS` higher than bf16's own.
           An excess over a limit is a mean with its 95 % interval, bootstrapped by sequence: FAIL where the interval lies above 0, PASS where it does not
           reach above, INCONCLUSIVE else. That is too sure of itself where FP8 flips next to nothing, so flips need the exact binomial test as
           well: given the flips of both, those of 4 bit are Binomial(n, 4 / 5) at the limit, and either word needs a tail of at most 2.5 %.
*Same rows* An arm whose peer keeps the same rows (another kernel reads them) may have at most `SAME` times its flips and its divergence.
*Agree*    A rule for an arm without a peer: its likeliest token is bf16's as often as asked, relative to how often bf16 repeats its own.
*Red*      What no sample excuses: pools that do not differ as their bytes do, a feature that never engaged or one that did in stock, a prefix that did
           not come from the cache, answers that hardly depend on the prompt.

FAIL: anything is red, or a case or the pool fails. PASS: the pool passes. The divergence is that of the distributions over the tokens which both arms list
and one bucket or two for the rest (`numinous_tooling.gate.accuracy.distance`): a lower bound, in both arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import stats

from numinous_tooling.gate.accuracy.distance import (
    CONFIDENCE,
    Estimate,
    Positions,
    Scores,
    compare,
    mean_by_sequence,
    ratio_by_sequence,
    summarise,
)
from numinous_tooling.gate.verdict import Word

FLIPS, KL, LOSS = 4.0, 16.0, 0.005  # × FP8's, × FP8's, share of bf16's
SAME = 2.0  # x the flips and the divergence of a peer with the same rows
BASE = "bf16"
POOLED = "pooled"
TAIL = (1 - CONFIDENCE) / 2
SEED = 0
ARRAYS = ("kl_low", "kl_high", "flips", "nll_delta", "sequence")  # of `Positions`
FEWEST_TOKENS = 10  # that may be the likeliest somewhere


@dataclass(frozen=True)
class Arm:
    """One server.

    Args:
        name: of the arm; `BASE` is the one that others are compared with.
        row: bytes of a row of its cache.
        dtype: `--kv-cache-dtype`.
        features: ids of the features that are on; none for stock.
        flags, env: further flags and environment.
        peer: name of the arm that this one is judged against: with FP8 rows, or with the same rows read by another kernel; None: by neither
            rule.
    """

    name: str
    row: int
    dtype: str = "fp8_e4m3"
    features: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    peer: str | None = None


@dataclass(frozen=True)
class Result:
    """What one arm gave.

    Args:
        figures: tokens that fit, speeds, counters; what a record can hold.
        cases: scores of each case, sequence by sequence.
        again: the same once more, of `BASE` alone.
    """

    figures: dict[str, Any]
    cases: dict[str, list[Scores]]
    again: dict[str, list[Scores]]


@dataclass(frozen=True)
class Row:
    """One limit in one case: the arm's figure, the peer's, and their ratio with its interval."""

    case: str
    what: str
    ours: float
    peers: float
    ratio: Estimate
    limit: float
    word: Word
    least: bool = False  # whether the limit is one from below

    def __str__(self) -> str:
        side = "least" if self.least else "most"
        return f"{self.case}: {self.what} {self.ours:.4g} against {self.peers:.4g}, {self.ratio:.3g} x, at {side} {self.limit:g}: {self.word}"


@dataclass(frozen=True)
class Judged:
    """The verdict on one arm, what is red, its rows, and its distance from `BASE` by case."""

    word: Word
    red: tuple[str, ...]
    rows: tuple[Row, ...]
    distances: dict[str, dict[str, Any]]


def judge(
    arms: Sequence[Arm],
    results: Mapping[str, Result],
    bytes_of: Callable[[Arm], int] | None,
    agree: float | None = None,
    text: bool = False,
) -> dict[str, Judged]:
    """The verdict on each arm.

    Args:
        bytes_of: bytes of a token in an arm's cache; None where the pools are not sized by bytes.
        agree: the rule *Agree* for the arms that have no peer.
        text: whether prompts are text, so that the loss on them says something.
    """
    base = results[BASE]
    base_arm = next(arm for arm in arms if arm.name == BASE)
    same = {name: _asked(result) == _asked(base) for name, result in results.items()}
    distances = {
        name: {
            case: compare(base.cases[case], scores)
            for case, scores in (base.again if name == BASE else result.cases).items()
        }
        for name, result in results.items()
        if same[name]
    }
    loss = {case: [-one.logprobs for one in scores] for case, scores in base.cases.items()}
    found = {}
    for arm in arms:
        red = _red(arm, results[arm.name], base)
        if bytes_of is not None:
            red += _pools(results[arm.name], base, bytes_of(arm), bytes_of(base_arm))
        red += [f"{name} was asked other prompts than bf16" for name in (arm.name, arm.peer) if not same.get(name or BASE)]  # fmt: skip
        rows: list[Row] = []
        if same[arm.name] and same.get(arm.peer or BASE):
            ours = distances[arm.name]
            if arm.peer is not None:
                peer = next(other for other in arms if other.name == arm.peer)
                pairs = pairs_of(ours, distances[arm.peer], loss)
                rows = against_peer(pairs, text, same=arm.row == peer.row)
            elif agree is not None and arm is not base_arm:
                rows = agreeing(pairs_of(ours, distances[BASE], loss), agree)
        shown = {case: _distance(one) for case, one in distances.get(arm.name, {}).items()}
        found[arm.name] = Judged(_word(red, rows), tuple(red), tuple(rows), shown)
    return found


def overall(words: Sequence[Word]) -> Word:
    """The verdict on a set of arms."""
    return "FAIL" if "FAIL" in words else "INCONCLUSIVE" if "INCONCLUSIVE" in words else "PASS"


def _word(red: Sequence[str], rows: Sequence[Row]) -> Word:
    if red or any(row.word == "FAIL" for row in rows):
        return "FAIL"
    return overall([row.word for row in rows if row.case == POOLED])


# --- What no sample excuses -------------------------------------------------------------------------------------------


def _asked(result: Result) -> Any:
    return result.figures["prompts"]


def _red(arm: Arm, ours: Result, base: Result) -> list[str]:
    found = []
    counted = ours.figures["counters"]
    idle = [name for name in arm.features if not counted.get(name, {}).get("engaged")]
    if idle or (counted and not arm.features):
        found.append(
            f"counters {counted}; features that are on: {', '.join(arm.features) or 'none'}"
        )
    found += [
        f"{case}: only {sum(bool(scores.cached) for scores in sequences)} of {len(sequences)} prefixes came from the cache"
        for case, sequences in ours.cases.items()
        if case.endswith("prefix") and not all(scores.cached for scores in sequences)
    ]
    warm, context = ours.figures.get("decode_cached", (0, 0))
    if warm < 0.9 * context:
        found.append(f"decode timed a prefill: {warm} of {context} tokens came from the cache")
    likeliest = {int(t) for case in base.cases.values() for one in case for t in one.top_ids[:, 0]}
    if arm.name == BASE and len(likeliest) < FEWEST_TOKENS:
        found.append("stock's answers hardly depend on the prompt; agreement would mean nothing")
    return found


def _pools(ours: Result, base: Result, each: int, of_base: int) -> list[str]:
    ratio = ours.figures["tokens"] / base.figures["tokens"]
    if abs(ratio / (of_base / each) - 1) <= 0.02:
        return []
    return [
        f"{ours.figures['tokens']} tokens fit, {ratio:.4f} x bf16's; by {each} and {of_base} bytes per token {of_base / each:.4f} x"
    ]


# --- Limits -----------------------------------------------------------------------------------------------------------


Pairs = Mapping[str, tuple[Positions, Positions, Any]]


def against_peer(pairs: Pairs, text: bool, same: bool = False) -> list[Row]:
    """Rows of the rule *4 bit*, or *Same rows*, of `pairs_of` an arm and its peer."""
    rows = []
    most_flips, most_kl = (SAME, SAME) if same else (FLIPS, KL)
    for case, (one, two, loss) in pairs.items():
        rows.append(_flips(case, one, two, most_flips))
        rows.append(_at_most(case, "KL", one.kl_low, two.kl_low, most_kl, one.sequence))
        if text and loss.any():
            rows.append(_at_most(case, "loss change", one.nll_delta, loss, LOSS, one.sequence))
    return rows


def agreeing(pairs: Pairs, agree: float) -> list[Row]:
    """Rows of the rule *Agree*, of `pairs_of` an arm and `BASE` again."""
    rows = []
    for case, (one, two, _) in pairs.items():
        kept, again = 1.0 - one.flips, 1.0 - two.flips
        excess = mean_by_sequence(agree * again - kept, one.sequence, SEED)
        sums = (np.bincount(one.sequence, weights=values) for values in (kept, again))
        ratio = ratio_by_sequence(*sums, SEED)
        rows.append(Row(case, "tokens kept", float(kept.mean()), float(again.mean()), ratio, agree, _of(excess), least=True))  # fmt: skip
    return rows


def pairs_of(
    ours: Mapping[str, Positions],
    others: Mapping[str, Positions],
    loss: Mapping[str, Sequence[Any]],
) -> dict[str, tuple[Positions, Positions, Any]]:
    """By case, and pooled: two arms' distances from `BASE` over the positions that both have, and its loss at each.

    Args:
        loss: by case and sequence, of all positions, in nats.
    """
    found: dict[str, tuple[Positions, Positions, Any]] = {}
    for case, losses in loss.items():
        counts = [np.bincount(arm[case].sequence, minlength=len(losses)) for arm in (ours, others)]
        heads = np.minimum(*counts)
        one, two = (_cut(arm[case], heads) for arm in (ours, others))
        each = np.concatenate([part[:n] for part, n in zip(losses, heads, strict=True)])
        if case.endswith("decode"):  # greedy tokens: there is no loss to speak of
            each = np.zeros_like(each)
            one, two = replace(one, nll_delta=each), replace(two, nll_delta=each)
        found[case] = one, two, each
    ones, twos, wholes = zip(*found.values(), strict=True)
    return found | {POOLED: (_joined(ones), _joined(twos), np.concatenate(wholes))}


def _cut(positions: Positions, heads: Any) -> Positions:
    """The first `heads[n]` positions of sequence n."""
    first = np.searchsorted(positions.sequence, np.arange(len(heads)))
    at = np.arange(len(positions)) - first[positions.sequence]
    mask = at < heads[positions.sequence]
    return Positions(*(getattr(positions, name)[mask] for name in ARRAYS), positions.exact)


def _joined(parts: Sequence[Positions]) -> Positions:
    """Positions of several cases, whose sequences are different ones."""
    begin = np.cumsum([0, *(part.sequence.max(initial=-1) + 1 for part in parts)])
    sequence = [part.sequence + at for part, at in zip(parts, begin, strict=False)]
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS[:-1])
    return Positions(*arrays, np.concatenate(sequence), exact=False)


def _at_most(case: str, what: str, ours: Any, peers: Any, limit: float, sequence: Any) -> Row:
    """Whether one figure is at most so many times another, position by position."""
    excess = mean_by_sequence(ours - limit * peers, sequence, SEED)
    sums = (np.bincount(sequence, weights=values) for values in (ours, peers))
    ratio = ratio_by_sequence(*sums, SEED)
    return Row(case, what, float(ours.mean()), float(peers.mean()), ratio, limit, _of(excess))


def _flips(case: str, one: Positions, two: Positions, limit: float = FLIPS) -> Row:
    ours, peers = one.flips.astype(np.float64), two.flips.astype(np.float64)
    row = _at_most(case, "flips", ours, peers, limit, one.sequence)
    tails = binomial_tails(int(ours.sum()), int(peers.sum()), limit)
    sure = row.word == "INCONCLUSIVE" or tails[row.word == "FAIL"] <= TAIL
    return row if sure else replace(row, word="INCONCLUSIVE")


def binomial_tails(ours: int, peers: int, limit: float) -> tuple[float, float]:
    """Chance of at most, and of at least, so many of our events among those of both, where ours are `limit` times as likely."""
    both, share = ours + peers, limit / (1 + limit)
    return float(stats.binom.cdf(ours, both, share)), float(stats.binom.sf(ours - 1, both, share))


def _of(excess: Estimate) -> Word:
    if excess.low is None or excess.high is None or excess.low <= 0 < excess.high:
        return "INCONCLUSIVE"
    return "FAIL" if excess.low > 0 else "PASS"


def _distance(positions: Positions) -> dict[str, Any]:
    summary = summarise(positions, SEED)
    return {
        "positions": summary.positions,
        "sequences": summary.sequences,
        "flips": summary.flips.value,
        "kl": summary.kl_low.value,
        "kl_at_most": summary.kl_high.value,
        "loss_change": summary.nll_delta.value,
    }
