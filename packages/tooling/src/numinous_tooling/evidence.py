# SPDX-License-Identifier: Apache-2.0
"""Evidence records and the tables made from them.

A record is one JSON line in ``evidence/<package>/<op>.jsonl``; a number in a document exists only with its record.
A table stands in Markdown between two comments, and is rewritten from the records::

    <!-- evidence: scheduler/decode_burst.jsonl columns=case,provider,gpu,ttft_p50_ms -->
    ...generated...
    <!-- /evidence -->

Options, in any order, without spaces inside:

- ``columns=a,b``: one row per record, or ``pivot``: for kernel records, one row per case and one column per provider,
  median microseconds in the cells;
- ``where=name=glob,name=glob``: records whose fields match (``*`` and ``?``); ``runs=latest``: of those, the run with
  the latest time; ``sort=a,b``: by these fields, numbers inside text as numbers;
- of a pivot: ``providers=a,b``: these columns in this order; ``show=copy_roof,roof,ratio``: columns derived from the
  fastest of our own implementations (default ``copy_roof,ratio``), the ratio to the best peer or to that of
  ``against=a``. They never stand without the times.

``python -m numinous_tooling.evidence [--check] FILE…`` rewrites (or only compares) such tables.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
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

KERNEL_FIELDS = (
    "role",
    "agrees",
    "sm_count",
    "median_us",
    "p20_us",
    "p80_us",
    "bytes",
    "flops",
    "flop_unit",
    "l2",
    "settled",
    "roof",
)
"""Further fields of a kernel record.

`role` is ``ours`` or ``peer``; `agrees` says whether the outputs passed the op's comparison (newer records also have
`unequal`: output -> share of elements whose bits are not the reference's); `bytes`, `flops` and
`flop_unit` are the op's `Traffic`; `l2` is the cache state before a launch; `settled` says whether times stood
still after the warm-up; `roof` holds what was measured in the same
run: ``copy_bytes_s`` (read plus written), ``<unit>_flop_s`` and ``launch_floor_us``.
"""

_RATIO = re.compile(r"(?:^|_)(?:ratio|speedup)(?:_|$)")
_TIME = re.compile(r"(?:^|_)(?:us|ms|s)$")
_BLOCK = re.compile(
    r"^(?P<open><!-- evidence: (?P<file>\S+)(?P<options>(?: [^\s>]+)*) -->\n)"
    r"(?P<body>.*?)(?P<close><!-- /evidence -->)",
    re.DOTALL | re.MULTILINE,
)
_OPENED = re.compile(r"^<!-- evidence:", re.MULTILINE)
_OPTIONS = ("columns", "pivot", "where", "runs", "sort", "providers", "show", "against")
_DERIVED = {
    "copy_roof": "% of copy roof",
    "roof": "% of roof",
    "ratio": "best peer / best own",
}


def record_id(record: dict[str, Any]) -> str:
    """``<op>-<12 hex digits>`` over everything but the id itself."""
    content = json.dumps({k: v for k, v in record.items() if k != "id"}, sort_keys=True)
    return f"{record['op']}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def problems_of(record: dict[str, Any]) -> list[str]:
    """What is wrong with a record, as lines; empty if it may be quoted."""
    if not isinstance(record, dict):
        return ["is no JSON object"]
    missing = [name for name in COMMON_FIELDS if name not in record]
    kernel = "median_us" in record
    if kernel:
        missing += [name for name in KERNEL_FIELDS if name not in record]
    problems = [f"field {name} is missing" for name in missing]
    if not missing and record["id"] != record_id(record):
        problems.append(
            f"id {record['id']} does not belong to this content (want {record_id(record)})"
        )
    if not record.get("gpu"):
        problems.append("a figure without its device")
    if kernel and not missing:
        problems += _kernel_problems(record)
    for name in filter(_RATIO.search, record):
        absent = [field for field in ("gpu", "peer", "peer_version") if not record.get(field)]
        if not any(_TIME.search(field) for field in record):
            absent.append("an absolute time")
        if absent:
            problems.append(f"the ratio {name} stands without {', '.join(absent)}")
    return problems


def _kernel_problems(record: dict[str, Any]) -> list[str]:
    problems = []
    if record["role"] not in ("ours", "peer"):
        problems.append(f"role is {record['role']!r}, neither ours nor peer")
    if not record["provider_version"]:
        problems.append(f"provider {record['provider']} has no version")
    if not 0 < record["p20_us"] <= record["median_us"] <= record["p80_us"]:
        problems.append("0 < p20_us <= median_us <= p80_us does not hold")
    if not (isinstance(record["roof"], dict) and record["roof"].get("copy_bytes_s", 0) > 0):
        problems.append("roof has no copy_bytes_s of the same run")
    return problems


def load(path: Path) -> list[dict[str, Any]]:
    """Records of a file in order; raises ValueError naming line and reason for a bad one."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from error
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


def render(text: str, evidence: Path) -> str:
    """`text` with every evidence table rewritten from the records below `evidence`.

    Raises:
        ValueError: a block is not closed, has an unknown option, or asks for what the records do not hold.
        FileNotFoundError: a block names a file that does not exist.
    """
    done, count = _BLOCK.subn(
        lambda match: match["open"] + _table(match, evidence) + match["close"], text
    )
    if count != len(_OPENED.findall(text)):
        raise ValueError("an evidence block is malformed or not closed by <!-- /evidence -->")
    return done


def select(
    records: Iterable[dict[str, Any]],
    where: Sequence[tuple[str, str]] = (),
    *,
    latest: bool = False,
    sort: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Records whose fields match the globs of `where`; of those the latest run, sorted."""
    chosen = [
        record
        for record in records
        if all(fnmatch.fnmatchcase(str(record.get(name, "")), glob) for name, glob in where)
    ]
    if latest and chosen:
        last = max(record["utc"] for record in chosen)
        chosen = [record for record in chosen if record["utc"] == last]
    for name in reversed(sort):
        chosen.sort(key=lambda record, name=name: natural(record.get(name)))  # type: ignore[misc]
    return chosen


def natural(value: object) -> list[tuple[bool, float, str]]:
    """A sort key under which ``M8`` comes before ``M16``."""
    parts = re.split(r"(\d+(?:\.\d+)?)", "" if value is None else str(value))
    return [(bool(n % 2), float(part) if n % 2 else 0.0, part) for n, part in enumerate(parts)]


def bound_us(record: dict[str, Any], *, flops: bool = True) -> float | None:
    """Time that the measured roofs allow for the byte and FLOP model; None where a roof was not measured."""
    roof, times = record["roof"], [1e6 * record["bytes"] / record["roof"]["copy_bytes_s"]]
    if flops and record["flops"]:
        rate = roof.get(f"{record['flop_unit']}_flop_s")
        if not rate:
            return None
        times.append(1e6 * record["flops"] / rate)
    return float(max(times))


def _table(match: re.Match[str], evidence: Path) -> str:
    options: dict[str, str] = {}
    for word in match["options"].split():
        name, _, value = word.partition("=")
        if name not in _OPTIONS:
            raise ValueError(f"evidence block of {match['file']}: unknown option {word}")
        options[name] = value
    where = [
        (name, glob)
        for name, _, glob in (item.partition("=") for item in _words(options.get("where")))
    ]
    latest, sort = options.get("runs") == "latest", _words(options.get("sort"))
    records = select(load(evidence / match["file"]), where, latest=latest, sort=sort)
    if "pivot" in options:
        providers, show = _words(options.get("providers")), options.get("show", "copy_roof,ratio")
        return pivot(
            records,
            match["file"],
            providers=providers,
            show=_words(show),
            against=options.get("against"),
        )
    columns = _words(options.get("columns"))
    if not columns:
        raise ValueError(f"evidence block of {match['file']}: wants columns=… or pivot")
    if any(map(_RATIO.search, columns)):
        want = {"gpu", "peer", "peer_version"} - set(columns)
        if want or not any(map(_TIME.search, columns)):
            raise ValueError(
                f"evidence block of {match['file']}: a ratio needs gpu, peer, peer_version and an absolute time beside it"
            )
    return _markdown(columns, [[_cell(record.get(name)) for name in columns] for record in records])


def pivot(
    records: Sequence[dict[str, Any]],
    file: str,
    *,
    providers: Sequence[str] = (),
    show: Sequence[str] = ("copy_roof", "ratio"),
    against: str | None = None,
) -> str:
    """A Markdown table of kernel records: rows cases, columns providers, cells median microseconds, a note below.

    Args:
        records: one run or several; times are compared within a run only, so each run has rows of its own.
        file: which the note names.
        providers: columns and their order; default: ours, then peers, as they come.
        show: derived columns.
        against: the peer of the ratio; default: the best one of the row.
    """
    if alien := [record["id"] for record in records if "median_us" not in record]:
        raise ValueError(f"{file}: {alien[0]} is no kernel record; a pivot takes nothing else")
    if unknown := set(show) - set(_DERIVED):
        raise ValueError(
            f"{file}: show={','.join(sorted(unknown))}; there are {','.join(_DERIVED)}"
        )
    order = dict.fromkeys(
        record["provider"]
        for role in ("ours", "peer")
        for record in records
        if record["role"] == role
    )
    names = list(providers or order)
    if missing := [name for name in names if name not in order]:
        raise ValueError(f"{file}: no record of provider {', '.join(missing)} among those selected")
    records = [record for record in records if record["provider"] in names]
    keys = [name for name in ("op", "gpu", "utc") if len({r[name] for r in records}) > 1] + ["case"]
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in records:
        row = rows.setdefault((record["gpu"], record["utc"], record["op"], record["case"]), {})
        if record["provider"] in row:
            raise ValueError(f"{file}: {record['id']} repeats a case and provider of its run")
        row[record["provider"]] = record
    versions = {
        name: " / ".join(
            dict.fromkeys(str(r["provider_version"]) for r in records if r["provider"] == name)
        )
        for name in names
    }
    heads = ["run" if key == "utc" else key for key in keys]
    if against is not None and against not in names:
        raise ValueError(f"{file}: no column of provider {against} to compare with")
    derived = {**_DERIVED, **({"ratio": f"{against} / best own"} if against else {})}
    heads += [f"{name} {versions[name]}, µs" for name in names] + [derived[name] for name in show]
    lines = []
    for row in rows.values():
        first = next(iter(row.values()))
        cells = [_cell(first[key]) for key in keys] + [_time(row.get(name)) for name in names]
        lines.append(cells + [_derived(name, row, against) for name in show])
    roof = bool({"copy_roof", "roof"} & set(show))
    return _markdown(heads, lines) + "\n" + _note(records, file, roof=roof)


def best(row: dict[str, dict[str, Any]], role: str) -> dict[str, Any] | None:
    """The fastest of a role among the providers of one case and run; one that agrees goes before one that differs."""
    return min((r for r in row.values() if r["role"] == role), key=_rank, default=None)


def _derived(name: str, row: dict[str, dict[str, Any]], against: str | None) -> str:
    own = best(row, "ours")
    peer = row.get(against) if against else best(row, "peer")
    if own is None:
        return ""
    if name == "ratio":
        if peer is None:
            return ""
        mark = "" if peer["agrees"] else " \\*"
        name = "" if against else f" {peer['provider']}"
        return f"{peer['median_us'] / own['median_us']:.2f}×{name}{mark}"
    bound = bound_us(own, flops=name == "roof")
    return "" if bound is None else f"{100 * bound / own['median_us']:.0f} %"


def _note(records: Sequence[dict[str, Any]], file: str, *, roof: bool) -> str:
    if not records:
        return "No record is selected.\n"
    parts = ["Median of one launch in µs; " + _each(records, "gpu")]
    modes = dict.fromkeys(record["l2"].partition(",")[0] for record in records)
    within = {record["case"] for record in records if record["l2"].endswith("within L2")}
    said = f" ({len(within)} cases fit into it)" if within else ""
    parts.append("L2 " + ", ".join(modes) + said)
    if roof:
        copies = sorted({r["roof"]["copy_bytes_s"] for r in records})
        parts.append("copy roof " + ", ".join(f"{rate / 1e12:.2f} TB/s" for rate in copies))
    floors = sorted(
        {r["roof"]["launch_floor_us"] for r in records if "launch_floor_us" in r["roof"]}
    )
    if floors:
        parts.append("launch floor " + ", ".join(f"{floor:.2f} µs" for floor in floors))
    commits = dict.fromkeys(
        f"{r['commit'][:12]}{' (dirty)' if r['dirty'] else ''}" for r in records
    )
    parts.append("commit " + ", ".join(commits))
    parts.append(f"run {_each(records, 'utc')}")
    parts.append(f"{len(records)} records from `{records[0]['id']}` on in `evidence/{file}`")
    differ = any(not record["agrees"] for record in records)
    return "; ".join(parts) + "." + (" \\* differs from the reference.\n" if differ else "\n")


def _each(records: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(str(record[name]) for record in records))


def _time(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    return _cell(float(record["median_us"])) + ("" if record["agrees"] else " \\*")


def _rank(record: dict[str, Any]) -> tuple[bool, float]:
    return not record["agrees"], float(record["median_us"])


def _words(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value)
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
