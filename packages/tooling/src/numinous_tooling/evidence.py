# SPDX-License-Identifier: Apache-2.0
"""Evidence records and the README tables made from them.

A record is one JSON line in ``evidence/<package>/<op>.jsonl``; a number in a document exists only with its record.
A table stands in Markdown between two comments, and is rewritten from the records::

    <!-- evidence: scheduler/decode_burst.jsonl columns=case,provider,gpu,ttft_p50_ms -->
    ...generated...
    <!-- /evidence -->

``python -m numinous_tooling.evidence [--check] FILE…`` rewrites (or only compares) such tables.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

COMMON_FIELDS = (
    "id",
    "package",
    "version",
    "commit",
    "dirty",
    "op",
    "case",
    "provider",
    "provider_version",
    "gpu",
    "driver",
    "cuda",
    "torch",
    "triton",
    "engine",
    "n",
    "gate",
    "command",
    "utc",
)
"""Fields of every record. `gpu` is the device name, or ``cpu: <model>``; `gate` says what had to hold before timing."""

KERNEL_FIELDS = ("sm_count", "median_us", "p20_us", "p80_us", "bytes", "flops", "roof")
"""Further fields of a kernel record."""

_BLOCK = re.compile(
    r"(?P<open><!-- evidence: (?P<file>\S+) columns=(?P<columns>\S+)(?: where=(?P<where>\S+))? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- /evidence -->)",
    re.DOTALL,
)


def record_id(record: dict[str, Any]) -> str:
    """``<op>-<12 hex digits>`` over everything but the id itself."""
    content = json.dumps({k: v for k, v in record.items() if k != "id"}, sort_keys=True)
    return f"{record['op']}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def problems_of(record: dict[str, Any]) -> list[str]:
    """What is wrong with a record, as lines; empty if it may be quoted."""
    missing = [name for name in COMMON_FIELDS if name not in record]
    if "median_us" in record:
        missing += [name for name in KERNEL_FIELDS if name not in record]
    problems = [f"field {name} is missing" for name in missing]
    if not missing and record["id"] != record_id(record):
        problems.append(
            f"id {record['id']} does not belong to this content (want {record_id(record)})"
        )
    if not record.get("gpu"):
        problems.append("a figure without its device")
    return problems


def load(path: Path) -> list[dict[str, Any]]:
    """Records of a file in order; raises ValueError naming line and reason for a bad one."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        if problems := problems_of(record):
            raise ValueError(f"{path}:{number}: {'; '.join(problems)}")
        records.append(record)
    return records


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Add records, each with its id; raises ValueError before anything is written if one is incomplete."""
    lines = []
    for record in records:
        complete = {"id": "", **record}
        complete["id"] = record_id(complete)
        if problems := problems_of(complete):
            raise ValueError("; ".join(problems))
        lines.append(json.dumps(complete, separators=(", ", ": ")) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as sink:
        sink.writelines(lines)


def from_verdict(
    verdict: dict[str, Any], *, package: str, version: str, **facts: Any
) -> list[dict[str, Any]]:
    """Records of a serving gate, one per arm, from its ``verdict.json``.

    Args:
        verdict: the parsed file.
        package: whose evidence it is.
        version: of that package.
        facts: what the file does not know: commit, dirty, driver, cuda, torch, triton where they differ.
    """
    gpus = verdict["machine"]["gpus"]
    device = (
        gpus[0]
        if gpus
        else f"cpu: {verdict['machine']['cpu']}, {verdict['machine']['cores']} cores"
    )
    work = verdict["workload"]
    records = []
    for name, arm in verdict["arms"].items():
        pooled, versions = arm["figures"]["pooled"], arm["versions"] or {}
        records.append(
            {
                "package": package,
                "version": version,
                "op": "gate_serving",
                "case": f"{Path(verdict['model']).name} {work['sessions']} sessions x {work['turns']} turns, "
                f"scale {verdict['length_scale']:g}, order {verdict['order']}",
                "provider": f"{name} {arm['label']}",
                "provider_version": versions.get("sglang"),
                "gpu": device,
                "torch": versions.get("torch"),
                "triton": versions.get("triton"),
                "engine": f"sglang {versions.get('sglang')}",
                "n": pooled["requests"],
                "output_tok_s": pooled["output_tok_s"],
                "user_tok_s_p50": pooled["tok_s_user"]["p50"],
                "ttft_p50_ms": 1000 * pooled["ttft_s"]["p50"],
                "tpot_p50_ms": 1000 * pooled["tpot_s"]["p50"],
                "cache_hit_rate": pooled["cache_hit_rate"],
                "counters": arm["figures"]["counters"],
                "verdict": verdict["verdict"],
                "comparisons": verdict["comparisons"],
                "gate": "no errors, no short answers, B engaged, A without numinous",
                "command": verdict["command"],
                "utc": verdict["started_utc"],
                **facts,
            }
        )
    return records


def render(text: str, evidence: Path) -> str:
    """`text` with every evidence table rewritten from the records below `evidence`."""
    return _BLOCK.sub(lambda match: match["open"] + _table(match, evidence) + match["close"], text)


def _table(match: re.Match[str], evidence: Path) -> str:
    records = load(evidence / match["file"])
    if match["where"]:
        name, _, wanted = match["where"].partition("=")
        records = [record for record in records if wanted in str(record.get(name, ""))]
    columns = match["columns"].split(",")
    rows = [columns, ["---"] * len(columns)]
    rows += [[_cell(record.get(column)) for column in columns] for record in records]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value).replace("|", "\\|")


def find_evidence(start: Path) -> Path:
    """The folder ``evidence`` of the checkout that holds `start`; raises FileNotFoundError."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "evidence").is_dir() and (folder / "packages").is_dir():
            return folder / "evidence"
    raise FileNotFoundError(f"no evidence/ beside packages/ above {start}")


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check the tables of the files named; exit 1 if ``--check`` finds a stale one."""
    parser = argparse.ArgumentParser(
        prog="python -m numinous_tooling.evidence", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="compare only; exit 1 if a table is stale"
    )
    options = parser.parse_args(argv)
    stale = 0
    for path in options.files:
        before = path.read_text(encoding="utf-8")
        after = render(before, find_evidence(path.parent))
        if before == after:
            continue
        if options.check:
            stale += 1
            sys.stdout.writelines(
                difflib.unified_diff(
                    before.splitlines(True), after.splitlines(True), str(path), "records"
                )
            )
        else:
            path.write_text(after, encoding="utf-8")
            print(f"rewritten: {path}")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
