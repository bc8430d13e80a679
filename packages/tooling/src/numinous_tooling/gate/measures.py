# SPDX-License-Identifier: Apache-2.0
"""Figures of a run and of an arm, made from request records; nothing here judges.

All times are seconds of the client's clock. Every figure is made from every record unless its line says otherwise;
failed and short answers are counted beside the figures and never dropped from the counts.

- **Output tok/s, total tok/s**: tokens received (and prompt tokens sent), also those of failed answers, over the wall
  time of the replay, which includes tool gaps and the tail in which few sessions are left.
- **tok/s per user**: of one session, tokens received over the seconds it waited for them (tool gaps excluded);
  percentiles are over sessions and repeats.
- **TTFT**: from the request's sending to its first chunk with tokens. **TPOT**: of one answer, seconds from its first to
  its last chunk over the tokens that came after the first chunk; an answer of one chunk has none. **e2e**: from sending
  to the end of the stream, of answers without an error.
- **Stall**: a gap between two chunks of one answer above `max(STALL_FLOOR_S, STALL_FACTOR x median)`, the median over
  all such gaps of the same records. The wait for the first chunk is TTFT, not a stall. A server that falls silent for
  good is no stall either: the request fails.
- **Goodput** under limits (`Slo`): the share of requests within *all* limits, and their output tokens over the wall
  time. A failed or a short answer is never within. An answer of one chunk has no TPOT, so that limit cannot break it.
- **Cost** per million output tokens: price of the whole server per hour x wall hours, over the output tokens.
- **Cache-hit rate**: cached over all prompt tokens of the requests for which the server says how many were cached; none
  where it never says.
- **Steady state**: the window without ramp-up and tail. A session is *open* from its first sending to its last answer's
  end, tool gaps included; the *level* is half of the greatest number of sessions open at once, rounded up. The window
  begins where the level is reached first, but not before as many answers as the level have ended (their first prompts
  are then in the cache), and ends where the level is reached last. Inside, throughput counts the tokens of the chunks
  that arrived there, and latencies those of requests sent and ended there. A window shorter than
  `STEADY_MIN_SHARE` of the replay, or without a whole request, is none, and the reason is said.

What these figures cannot show: the client sees chunks, not tokens, so a server that sends several tokens at once looks
smooth inside a chunk; percentiles of few requests are one request's; and wall-clock throughput of a replay with tool
gaps says as much about the gaps as about the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.engaged import graph_batches
from numinous_tooling.gate.errors import GateError

STALL_FLOOR_S = 1.0
STALL_FACTOR = 20.0
STEADY_MIN_SHARE = 0.2

Unit = tuple[str, int]  # session, repeat


@dataclass
class ArmRun:
    """One server run: all of its records, and what was observed around it. Times in seconds."""

    index: int
    arm: str
    repeat: int
    records: list[RequestRecord]
    wall_s: float
    lag_p99_s: float
    lag_max_s: float
    other_cores: float = 0.0
    """CPU cores that other programs kept busy during the replay."""
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per feature: `engaged` and `refused:<reason>` counts, warm-up excluded."""
    gauges: dict[str, Any] = field(default_factory=dict)
    """What the server said of itself meanwhile (`GaugeSampler.summary`)."""
    client_cpu_share: float = 0.0
    """CPU seconds of the measuring client per second of the replay."""
    drift: float | None = None
    """The server's prompt tokens against the planned ones, relative; None where it reports none."""
    doubts: list[str] = field(default_factory=list)
    """What made this run doubtful while it ran, one line each."""
    counters_at_start: dict[str, dict[str, int]] = field(default_factory=dict)
    """As `counters`, until the server was ready: what CUDA graphs hold is counted when they are captured."""
    graph_batches: dict[str, dict[str, int]] = field(default_factory=lambda: graph_batches(None, 0))
    """Logged batches of the replay that came from a CUDA graph or not (`engaged.graph_batches`)."""

    @property
    def name(self) -> str:
        """Return for example `A2`: the second run of arm A."""
        return f"{self.arm}{self.repeat}"

    @property
    def bad_answers(self) -> int:
        """Return the number of failed and of short answers."""
        return sum(1 for record in self.records if record.error or record.short)


@dataclass(frozen=True)
class Slo:
    """Limits that one answer has to keep, in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def holds(self, record: RequestRecord) -> bool:
        """Return whether the answer is complete and within all limits."""
        if record.error or record.short or record.ttft_s is None:
            return False
        measured = (
            (self.ttft, record.ttft_s),
            (self.tpot, tpot_s([record])),
            (self.e2e, record.e2e_s),
        )
        return all(limit is None or value is None or value <= limit for limit, value in measured)

    def __str__(self) -> str:
        limits = ((limit.name, getattr(self, limit.name)) for limit in fields(self))
        return ",".join(f"{name}={value:g}" for name, value in limits if value is not None)


def parse_slo(text: str) -> Slo:
    """Parse `ttft=2,tpot=0.05,e2e=60` (seconds, any of them)."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in Slo.__dataclass_fields__ or name in limits or not 0 < value < math.inf:
            raise GateError(
                f"--slo {text}: write limits in seconds, each once: "
                + ",".join(f"{limit.name}=F" for limit in fields(Slo))
            )
        limits[name] = value
    return Slo(**limits)


@dataclass(frozen=True)
class Metric:
    """A judged quantity: how to get it from the records of one session in one repeat.

    `scale` says how two arms are compared: `ratio` by the logarithm of their ratio, `share` (values of 0 to 1) by
    their difference.
    """

    name: str
    label: str
    unit: str
    higher_is_better: bool
    value: Callable[[Sequence[RequestRecord]], float | None]
    scale: Literal["ratio", "share"] = "ratio"


def tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Return output tokens per second of waiting for them."""
    waited_s = sum(record.e2e_s for record in records)
    tokens = sum(record.got_tokens for record in records)
    return tokens / waited_s if tokens and waited_s > 0 else None


def mean_ttft_s(records: Sequence[RequestRecord]) -> float | None:
    """Return the mean time to first token in seconds."""
    times = [record.ttft_s for record in records if record.ttft_s is not None]
    mean_s = fmean(times) if times else 0.0
    return mean_s if mean_s > 0 else None


def tpot_s(records: Sequence[RequestRecord]) -> float | None:
    """Return seconds per output token after the first chunk, over all answers of more than one chunk."""
    seconds, tokens = 0.0, 0
    for record in records:
        if len(record.chunks) > 1:
            seconds += record.chunks[-1][0] - record.chunks[0][0]
            tokens += record.chunks[-1][1] - record.chunks[0][1]
    return seconds / tokens if tokens and seconds > 0 else None


METRICS: tuple[Metric, ...] = (
    Metric("tok_s_user", "output tok/s per user", "tok/s", True, tokens_per_s),
    Metric("ttft", "time to first token", "s", False, mean_ttft_s),
    Metric("tpot", "time per output token", "s", False, tpot_s),
)


def judged_metrics(slo: Slo | None) -> tuple[Metric, ...]:
    """Return the metrics that a run is judged by: `METRICS`, and the share within limits where there are limits."""
    if slo is None:
        return METRICS

    def within(records: Sequence[RequestRecord]) -> float | None:
        return fmean(map(slo.holds, records)) if records else None

    label = f"requests within {slo}"
    return (*METRICS, Metric("goodput", label, "share", True, within, scale="share"))


def units(runs: Sequence[ArmRun], metric: Metric) -> dict[Unit, float]:
    """Return the metric per session and repeat; sessions without a value are left out."""
    values: dict[Unit, float] = {}
    for run in runs:
        by_session: dict[str, list[RequestRecord]] = {}
        for record in run.records:
            by_session.setdefault(record.session, []).append(record)
        for session, records in by_session.items():
            value = metric.value(records)
            if value is not None:
                values[session, run.repeat] = value
    return values


def percentiles(values: Sequence[float], points: Sequence[int]) -> dict[str, float | None]:
    """Return named percentiles, None each where there are no values."""
    if not values:
        return {f"p{point}": None for point in points}
    return {f"p{point}": float(np.percentile(np.asarray(values), point)) for point in points}


def chunk_gaps_s(records: Sequence[RequestRecord]) -> list[float]:
    """Return the seconds between neighbouring chunks, of all answers."""
    return [after[0] - before[0] for r in records for before, after in pairwise(r.chunks)]


def stalls(records: Sequence[RequestRecord]) -> dict[str, float | int | None]:
    """Return `count` and `longest_s` of the stalls, the `limit_s` above which a gap is one (None without gaps)."""
    gaps = chunk_gaps_s(records)
    if not gaps:
        return {"count": 0, "longest_s": None, "limit_s": None}
    limit_s = max(STALL_FLOOR_S, STALL_FACTOR * median(gaps))
    long = [gap for gap in gaps if gap > limit_s]
    return {"count": len(long), "longest_s": max(long, default=None), "limit_s": limit_s}


@dataclass(frozen=True)
class Window:
    """A span of one replay, in seconds since its start."""

    begin_s: float
    end_s: float

    def holds(self, record: RequestRecord) -> bool:
        """Return whether a request was sent and ended inside."""
        return self.begin_s <= record.sent_s and record.sent_s + record.e2e_s <= self.end_s

    def tokens(self, records: Sequence[RequestRecord]) -> int:
        """Return the output tokens that arrived inside, those of its first moment not."""
        count = 0
        for record in records:
            before = 0
            for seconds, tokens in record.chunks:
                if self.begin_s < record.sent_s + seconds <= self.end_s:
                    count += tokens - before
                before = tokens
        return count


def _level_spans(records: Sequence[RequestRecord]) -> tuple[int, Iterator[tuple[float, float]]]:
    """Return the level (see the module's docstring), and the spans in which at least so many sessions are open."""
    spans: dict[str, tuple[float, float]] = {}
    for record in records:
        begin, end = spans.get(record.session, (math.inf, 0.0))
        spans[record.session] = (
            min(begin, record.sent_s),
            max(end, record.sent_s + record.e2e_s),
        )
    # At equal times an end counts before a beginning: two sessions in turn are never two at once.
    steps = sorted(
        [(begin, 1) for begin, _ in spans.values()] + [(end, -1) for _, end in spans.values()]
    )
    count, counts = 0, []
    for _, step in steps:
        count += step
        counts.append(count)
    level = (max(counts) + 1) // 2
    return level, (
        (steps[i][0], steps[i + 1][0]) for i in range(len(steps) - 1) if counts[i] >= level
    )


def steady_window(run: ArmRun) -> Window | str:
    """Return the steady-state window of a run by the rule above, or why there is none."""
    if not run.records:
        return "no requests"
    level, spans_at_level = _level_spans(run.records)
    spans = list(spans_at_level)
    ends = sorted(record.sent_s + record.e2e_s for record in run.records)
    if not spans:
        return "no two sessions were open for any time"
    window = Window(max(spans[0][0], ends[level - 1]), spans[-1][1])
    length_s = window.end_s - window.begin_s
    if length_s < STEADY_MIN_SHARE * run.wall_s:
        return (
            f"at least {level} sessions were open, with first answers, for {max(0.0, length_s):.3g} of "
            f"{run.wall_s:.3g} s only"
        )
    if not any(map(window.holds, run.records)):
        return "no request was sent and answered in the steady span"
    return window


def summarise_steady(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """Return throughput and latencies inside the steady-state windows; `reason` alone where a run has none."""
    if not runs:
        return {"reason": "no runs"}
    windows = []
    for run in runs:
        window = steady_window(run)
        if isinstance(window, str):
            return {"reason": f"{run.name}: {window}"}
        windows.append((run, window))
    inside = [r for run, window in windows for r in run.records if window.holds(r)]
    seconds = sum(window.end_s - window.begin_s for _, window in windows)
    tokens = sum(window.tokens(run.records) for run, window in windows)
    return {
        "windows_s": [[round(w.begin_s, 6), round(w.end_s, 6)] for _, w in windows],
        "requests": len(inside),
        "output_tok_s": tokens / seconds,
        **latencies(inside),
    }


def latencies(records: Sequence[RequestRecord]) -> dict[str, dict[str, float | None]]:
    """Return percentiles of TTFT, TPOT and e2e in seconds."""
    points = (50, 90, 99)
    return {
        "ttft_s": percentiles([r.ttft_s for r in records if r.ttft_s is not None], points),
        "tpot_s": percentiles([v for r in records if (v := tpot_s([r])) is not None], points),
        "e2e_s": percentiles([r.e2e_s for r in records if r.error is None], points),
    }


def summarise_run(
    runs: Sequence[ArmRun], slo: Slo | None = None, price_usd_h: float | None = None
) -> dict[str, Any]:
    """Return the printed figures of one run, or of several pooled.

    Args:
        runs: runs of one arm.
        slo: limits of goodput; None: no goodput.
        price_usd_h: price of the server in USD per hour; None: no cost.
    """
    records = [record for run in runs for record in run.records]
    wall_s = sum(run.wall_s for run in runs)
    output = sum(record.got_tokens for record in records)
    prompt = sum(record.prompt_tokens for record in records)
    told = [record for record in records if record.cached_tokens is not None]
    told_prompt = sum(record.prompt_tokens for record in told)
    cached = sum(record.cached_tokens or 0 for record in told)
    figures: dict[str, Any] = {
        "requests": len(records),
        "output_tok_s": output / wall_s if wall_s else None,
        "total_tok_s": (output + prompt) / wall_s if wall_s else None,
        "tok_s_user": percentiles(list(units(runs, METRICS[0]).values()), (10, 50, 90)),
        **latencies(records),
        "stalls": stalls(records),
        "cache_hit_rate": cached / told_prompt if told_prompt else None,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "errors": sum(1 for r in records if r.error),
        "short_answers": sum(1 for r in records if r.short),
        "steady": summarise_steady(runs),
        "goodput": None,
        "usd_per_m_output": None,
    }
    if slo is not None:
        good = [record for record in records if slo.holds(record)]
        good_tokens = sum(record.got_tokens for record in good)
        figures["goodput"] = {
            "slo": str(slo),
            "request_share": len(good) / len(records) if records else None,
            "output_tok_s": good_tokens / wall_s if wall_s else None,
        }
    if price_usd_h is not None and output:
        figures["usd_per_m_output"] = price_usd_h * wall_s / 3600 / output * 1e6
    return figures


def summarise(
    runs: Sequence[ArmRun], arm: str, slo: Slo | None = None, price_usd_h: float | None = None
) -> dict[str, Any]:
    """Return an arm's pooled figures, the same for each repeat (the spread), and its counters summed."""
    own = [run for run in runs if run.arm == arm]
    return {
        "pooled": summarise_run(own, slo, price_usd_h),
        "repeats": [summarise_run([run], slo, price_usd_h) for run in own],
        "counters": added(run.counters for run in own),
        "counters_at_start": added(run.counters_at_start for run in own),
    }


def added(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the sums of feature counters."""
    totals: dict[str, dict[str, int]] = {}
    for counters in parts:
        for feature, counts in counters.items():
            total = totals.setdefault(feature, {})
            for key, count in counts.items():
                total[key] = total.get(key, 0) + count
    return totals


def by_repeat(values: Mapping[Unit, float]) -> dict[int, dict[str, float]]:
    """Return unit values as session values per repeat."""
    repeats: dict[int, dict[str, float]] = {}
    for (session, repeat), value in values.items():
        repeats.setdefault(repeat, {})[session] = value
    return repeats
