# SPDX-License-Identifier: Apache-2.0
"""GSM8K: word problems with a number as their answer, asked few-shot, and the paired tests on the outcome.

The four worked examples in front of each problem ship with the package (written for it), so that no problem of the
test set is spent on them. An answer is right when its number is: the one behind ``####``, or the last one if the model
left the mark out. *Exact match* is compared with McNemar's exact test, which looks only at the problems that the arms
answer differently; on few problems, or with a model that solves hardly any, it has no power, and says so. The *gold
loss* has: the loss, in nats per token, on the printed solution of each problem, forced through both arms.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from scipy import stats

from numinous_tooling.gate.errors import GateError

# The test split as published (openai/grade-school-math); only a file of that many problems is compared with it.
STANDARD_COUNT = 1319
STANDARD_SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"

ALPHA = 0.05
POWER = 0.80
STOP = "\n\nQuestion:"

_ANNOTATION = re.compile(r"<<.*?>>")
_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|(?<![\d.])\.\d+)")


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution, and the number that answers it."""

    question: str
    solution: str
    answer: str


@dataclass(frozen=True)
class Problems:
    """What was read: the problems to ask, and whether their file is the published test split."""

    problems: tuple[Problem, ...]
    total: int
    standard: bool


@dataclass(frozen=True)
class ExactMatch:
    """Paired exact match of two arms.

    Args:
        base_right, test_right: problems answered right.
        only_base, only_test: the discordant ones.
        p_value: of McNemar's exact test, two-sided.
        detectable: smallest shift of the share answered right that a test of this size finds with `POWER`.
    """

    problems: int
    base_right: int
    test_right: int
    only_base: int
    only_test: int
    p_value: float
    detectable: float


def load(path: Path, count: int | None) -> Problems:
    """Read JSON lines of ``question`` and ``answer``; `count` keeps the first ones.

    Raises:
        GateError: no such file, or a line that is no problem.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GateError(f"--gsm8k {path}: {error.strerror}") from error
    problems = parse(content, f"--gsm8k {path}")
    standard = (
        len(problems) == STANDARD_COUNT and hashlib.sha256(content).hexdigest() == STANDARD_SHA256
    )
    return Problems(tuple(problems[:count]), len(problems), standard)


def parse(content: bytes, where: str) -> list[Problem]:
    """Parse JSON lines; `where` names the input in errors."""
    problems = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, answer = str(row["question"]), str(row["answer"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise GateError(
                f"{where}, line {number}: no JSON object with question and answer"
            ) from error
        solution = _ANNOTATION.sub("", answer)
        final = final_number(solution)
        if final is None:
            raise GateError(f"{where}, line {number}: the answer holds no number")
        problems.append(Problem(question, solution, final))
    if not problems:
        raise GateError(f"{where}: no problem in it")
    return problems


def prefix() -> str:
    """Return the worked examples that stand in front of each question."""
    file = resources.files("numinous_tooling.gate.accuracy").joinpath("data", "shots.jsonl")
    shots = parse(file.read_bytes(), "shots.jsonl")
    return "".join(f"Question: {shot.question}\nAnswer: {shot.solution}\n\n" for shot in shots)


def prompt(problem: Problem) -> str:
    """Return the text that follows `prefix` for a problem; the solution comes next, after a blank."""
    return f"Question: {problem.question}\nAnswer:"


def final_number(text: str) -> str | None:
    """Return the number behind the last ``####``, or the last number; normalised, None where there is none."""
    _, mark, behind = text.rpartition("####")
    found = _NUMBER.findall(behind if mark else text)
    if not found:
        return None
    number = (found[0] if mark else found[-1]).replace("$", "").replace(",", "")
    value = float(number)
    return str(int(value)) if value.is_integer() else repr(value)


def exact_match(base: Sequence[bool], test: Sequence[bool]) -> ExactMatch:
    """Compare which problems the arms answered right."""
    # Brings pandas along; runs without problems do without.
    from statsmodels.stats.contingency_tables import mcnemar

    both = sum(1 for one, two in zip(base, test, strict=True) if one and two)
    only_base = sum(base) - both
    only_test = sum(test) - both
    count = len(base)
    neither = count - both - only_base - only_test
    table = [[both, only_base], [only_test, neither]]
    return ExactMatch(
        problems=count,
        base_right=sum(base),
        test_right=sum(test),
        only_base=only_base,
        only_test=only_test,
        p_value=float(mcnemar(table, exact=True).pvalue),
        detectable=detectable_shift(count, only_base + only_test),
    )


def detectable_shift(count: int, discordant: int) -> float:
    """Return the net shift, as a share of problems, that McNemar's test finds with `POWER` at level `ALPHA`.

    Normal approximation, (z_alpha/2 + z_power) * sqrt(discordant share / count). Where no problem was discordant the
    share is taken at the upper end of its 95 % interval instead of at 0. The approximation promises too much where few
    are discordant: the exact test needs at least 6 problems that all went one way, so that no shift counts as seen
    which does not bring that many with `POWER` (7.9 expected ones, Poisson).
    """
    share = discordant / count if discordant else 1 - (1 - 0.95) ** (1 / count)
    z = stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(POWER)
    needed = math.ceil(math.log2(2 / ALPHA))  # p = 2 * 0.5 ** needed
    least = stats.chi2.ppf(POWER, 2 * needed) / 2 / count
    return min(1.0, max(float(least), float(z * math.sqrt(share / count))))
