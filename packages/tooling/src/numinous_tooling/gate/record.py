# SPDX-License-Identifier: Apache-2.0
"""``numinous gate record RUN…``: one evidence record for each finished run folder.

Takes ``verdict.json`` (serving, accuracy) or ``cliff.json`` as it stands and adds nothing: what an older run did not
write down is null. A run that names no GPU or no engine version is refused, since a figure without them says nothing
(an accuracy run with a yardstick may be one on a CPU: its figures are the model's); so is one that ended without a measurement, and one that is recorded already. Records go to ``evidence/gate/<kind>.jsonl``
of the checkout around the working folder.

A record holds the common fields of `numinous_tooling.evidence` (`package` is this one, whose gate it is; `gate` is the
verdict with its reasons), `features` with `packages` and their versions, `options` where the environment of arm B sets some of its features,
`verdict`, and

- serving (`n`: requests of all arms): per arm ``a_…``, ``b_…`` output tok/s, median tok/s per user, median TTFT and TPOT;
  `changes`: per comparison, and in it per metric, the change with its interval, and the word;
- accuracy (`n`: sequences): `rows`, each with figure, interval, floor, limit and word, and `plant`; with a yardstick also its
  flags, and of both arms and each row the divergence that decided and the share of flipped tokens;
- cliff (`n`: probes): the `limit_tok_s_user`, and per arm the frontier.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numinous_tooling import evidence
from numinous_tooling.gate.arms import flag_name
from numinous_tooling.gate.compare import read_run
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import added

CLIFF_FILE = "cliff.json"
CLIFF_SCHEMA = 1
_ROW_FIELDS = ("row", "unit", "word", "figure", "low", "high", "floor", "limit")
_CHANGE_FIELDS = ("word", "change", "low", "high", "noise", "tolerance")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    parser = commands.add_parser(
        "record",
        help="turn finished runs into evidence records, one each",
        description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--evidence", type=Path, metavar="FILE", help="left out: evidence/gate/<kind>.jsonl"
    )


def run(options: argparse.Namespace, arguments: object, interrupts: object, reader: object) -> int:
    """Append the records; returns the exit code. Nothing is written where one run is refused."""
    planned: dict[Path, list[dict[str, Any]]] = {}
    for folder in options.runs:
        kind, document = read(folder)
        try:
            record = record_of_run(kind, document, folder)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise GateError(
                f"{folder} lacks what a verdict holds ({error!r}); run the gate again"
            ) from error
        file = options.evidence or _evidence_folder() / "gate" / f"{kind}.jsonl"
        records = planned.setdefault(file, [])
        _refuse_twice(record, [*_known(file), *records], folder, file)
        records.append(record)
    for file, records in planned.items():
        try:
            evidence.append(file, records)
        except ValueError as error:
            raise GateError(f"{file}: {error}") from error
        for record in records:
            print(f"{file}: {evidence.record_id({'id': '', **record})} {record['gate']}")
    return 0


def read(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return kind and content of a finished run's verdict."""
    file = folder / CLIFF_FILE
    if not file.exists():
        return read_run(folder)
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] != CLIFF_SCHEMA:
            raise GateError(f"{file} has schema {document['schema']}, want {CLIFF_SCHEMA}")
        if not all(arm["frontier"] for arm in document["arms"].values()):
            raise GateError(
                f"{file}: the run ended without a measurement ({'; '.join(document['reasons'])})"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GateError(f"{file} is no verdict of the cliff ({error!r})") from error
    return "cliff", document


def record_of_run(kind: str, document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the record of a run, without its id.

    Raises:
        GateError: the run names no GPU, or no engine version of the arm under test.
    """
    machine, arms = document["machine"], document["arms"]
    versions = arms["B"]["versions"] or {}
    yardstick = kind == "accuracy" and document["method"].get("yardstick")
    if not machine["gpus"] and not yardstick:
        raise GateError(f"{folder}: the run names no GPU; only runs on one are recorded")
    if not versions.get("sglang"):
        raise GateError(
            f"{folder}: the run names no engine version of arm B (a server that was attached does not)"
        )
    git = document["git"] or {}
    figures = {"serving": _serving, "accuracy": _accuracy, "cliff": _cliff}[kind](document)
    plant = document.get("plant")
    return {
        "package": "tooling",
        "version": versions.get("numinous-tooling"),
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "op": f"gate_{kind}",
        "case": f"{Path(document['model'] or 'unnamed').name} {figures.pop('case')}",
        "provider": f"B {arms['B']['label']}{f', planted {plant}' if plant else ''} against A {arms['A']['label']}",
        "provider_version": versions["sglang"],
        # Of several names, all: which ones a server took is not known.
        "gpu": ", ".join(dict.fromkeys(machine["gpus"])) or f"cpu: {machine['cpu']}",
        "driver": machine.get("driver"),
        "cuda": versions.get("cuda"),
        "torch": versions.get("torch"),
        "triton": versions.get("triton"),
        "engine": f"sglang {versions['sglang']}",
        "features": document["features"],
        **_options(document["features"], arms["B"].get("env", {})),
        "packages": {
            name: version for name, version in versions.items() if name.startswith("numinous-")
        },
        "verdict": document["verdict"],
        **figures,
        "gate": f"{document['verdict']}: {'; '.join(document['reasons'])}",
        "command": document["command"],
        "utc": document["started_utc"],
    }


def _options(features: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """What arm B's environment sets of its features' options, as one text; nothing where it sets none."""
    flags = tuple(f"{flag_name(feature)}_" for feature in features)
    options = [
        f"{name.removeprefix(flag)}={value}"
        for flag in flags
        for name, value in sorted(env.items())
        if name.startswith(flag)
    ]
    return {"options": " ".join(options)} if options else {}


def _serving(document: Mapping[str, Any]) -> dict[str, Any]:
    work = document["workload"]
    found: dict[str, Any] = {
        "case": f"{work['kind']} {work['sessions']} sessions x {work['turns']} turns, "
        f"{work['concurrency']} at a time, scale {document['length_scale']:g}, order {document['order']}",
        "n": 0,
    }
    for letter, arm in document["arms"].items():
        pooled = arm["figures"]["pooled"]
        found["n"] += pooled["requests"]
        found |= {
            f"{letter.lower()}_{name}": value
            for name, value in {
                "output_tok_s": pooled["output_tok_s"],
                "user_tok_s_p50": pooled["tok_s_user"]["p50"],
                "ttft_p50_ms": _ms(pooled["ttft_s"]["p50"]),
                "tpot_p50_ms": _ms(pooled["tpot_s"]["p50"]),
                "cache_hit_rate": pooled["cache_hit_rate"],
                "bad_answers": pooled["errors"] + pooled["short_answers"],
            }.items()
        }
    found["changes"] = {
        f"{comparison['test']} against {comparison['base']}": {
            "word": comparison["word"],
            **{
                metric["metric"]: {name: metric[name] for name in _CHANGE_FIELDS}
                for metric in comparison["metrics"]
            },
        }
        for comparison in document["comparisons"]
    }
    found |= _counted(document["arms"]["B"]["figures"])
    lags = [run["client_lag_p99_s"] for run in document["runs"]]
    return found | {"clients": work.get("clients"), "client_lag_p99_ms": _ms(max(lags))}


def _accuracy(document: Mapping[str, Any]) -> dict[str, Any]:
    work = document["workload"]
    more: dict[str, Any] = {}
    if yardstick := document["method"].get("yardstick"):
        more = {"yardstick": yardstick, "margin": document["method"]["margin"]}
        for row in document["rows"]:
            for arm, name in (("b", "distance"), ("yardstick", "floor_distance")):
                if row[name]:
                    more[f"{row['row']}_{arm}_kl"] = row[name]["kl_low"]["value"]
                    more[f"{row['row']}_{arm}_flips_percent"] = 100 * row[name]["flips"]["value"]
    return {
        "case": f"{work['sequences']} sequences x {work['tokens']} tokens, {work['decode_tokens']} decoded, "
        f"{document['method']['distribution']}",
        "n": work["sequences"],
        "plant": document["plant"],
        "rows": [{name: row[name] for name in _ROW_FIELDS} for row in document["rows"]],
        **more,
        **_counted(document["arms"]["B"]),
    }


def _cliff(document: Mapping[str, Any]) -> dict[str, Any]:
    contexts = ", ".join(map(str, document["contexts"]))
    of_b = [search for search in document["searches"] if search["arm"] == "B"]
    return {
        "case": f"contexts {contexts}, {document['limit_tok_s_user']:g} tok/s per user, order {document['order']}",
        "n": sum(len(search["probes"]) for search in document["searches"]),
        "limit_tok_s_user": document["limit_tok_s_user"],
        "pool": document["pool"],
        **{
            f"{letter.lower()}_frontier": arm["frontier"]
            for letter, arm in document["arms"].items()
        },
        "counters": added(search["counters"] for search in of_b),
        "counters_at_start": added(search.get("counters_at_start", {}) for search in of_b),
    }


def _counted(arm: Mapping[str, Any]) -> dict[str, Any]:
    return {"counters": arm["counters"], "counters_at_start": arm.get("counters_at_start")}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _evidence_folder() -> Path:
    try:
        return evidence.find_evidence(Path.cwd())
    except FileNotFoundError as error:
        raise GateError(f"{error}; run it in the checkout, or give --evidence FILE") from error


def _known(file: Path) -> list[dict[str, Any]]:
    try:
        return evidence.load(file) if file.exists() else []
    except ValueError as error:
        raise GateError(str(error)) from error


def _refuse_twice(
    record: Mapping[str, Any], known: list[dict[str, Any]], folder: Path, file: Path
) -> None:
    for other in known:
        # Not the id alone: another version of this command may write other fields of the same run.
        if all(other[name] == record[name] for name in ("op", "command", "utc")):
            raise GateError(
                f"{folder} is recorded already, {other.get('id', 'named twice here')} in {file}"
            )
