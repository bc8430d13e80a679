# SPDX-License-Identifier: Apache-2.0
"""Keep what a training and a comparison with the engine gave, in `evidence/gate/judge_models.jsonl`.

    python packages/tooling/benchmarks/judge_models/record.py --model DIR [--check CHECK.json]
        [--patched CHECK.json --fix NAME …]

`DIR/record.json` is what `train.py` wrote, a `CHECK.json` what `check_engine.py` printed, of the released engine or of one
with fixes of `upstream-fixes/`. To be run where they were made: the record names this machine's GPU and versions.
A training that is recorded already is not recorded again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numinous_tooling import __version__, evidence


def training(record: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence of one training: recipe, steps, losses, sha256 of corpus and files.

    Args:
        record: `record.json` of `train.py`.
        facts: commit, device, versions and time (`numinous_tooling.bench.facts.run_facts`).
    """
    return {
        "package": "tooling",
        "version": __version__,
        **facts,
        "torch": record["versions"]["torch"],
        "engine": None,
        "op": "judge_training",
        "case": f"{record['model']}, {record['parameters'] / 1e6:.1f} M parameters",
        "provider": "train.py",
        "provider_version": __version__,
        "n": sum(phase["tokens"] for phase in record["phases"]),
        "train_s": record["seconds"]["all"],
        **{
            f"{name}_{figure}": round(loss[figure], 4)
            for name, loss in record["eval"].items()
            for figure in ("nats_per_token", "bits_per_byte")
        },
        **{key: record[key] for key in ("recipe", "corpus", "phases", "kda", "files")},
        "versions": record["versions"],
        "gate": "none: a training",
        "command": f"train.py --model {record['model']} … ; again: {record['repeat']}",
    }


def engine_check(
    record: Mapping[str, Any],
    check: Mapping[str, Any],
    facts: Mapping[str, Any],
    fixes: Sequence[str] = (),
) -> dict[str, Any]:
    """Evidence of one comparison of the engine with the training module.

    Args:
        record: of the training.
        check: what `check_engine.py` printed.
        facts: as for `training`.
        fixes: names of the upstream fixes that were in the engine.

    Raises:
        ValueError: the check is of other weights than the training's.
    """
    weights = record["files"]["model.safetensors"]["sha256"]
    if check["weights"] != weights:
        raise ValueError(
            f"the check is of weights {check['weights'][:12]}, the model has {weights[:12]}"
        )
    return {
        "package": "tooling",
        "version": __version__,
        **facts,
        "op": "judge_engine",
        "case": f"{record['model']}, {weights[:12]}",
        "provider": "sglang",
        "provider_version": " + ".join((facts["engine"], *fixes)),
        "n": check["positions"],
        **{key: value for key, value in check.items() if key not in ("positions", "weights")},
        "gate": "none: `holds` says whether the limits of check_engine.py hold",
        "command": f"check_engine.py --model {record['model']} …",
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record a training and an engine check.")
    parser.add_argument("--model", type=Path, required=True, help="directory that train.py wrote")
    parser.add_argument("--check", type=Path, help="what check_engine.py printed")
    parser.add_argument("--patched", type=Path, metavar="CHECK", help="the same of an engine with --fix in it")  # fmt: skip
    parser.add_argument("--fix", action="append", default=[], metavar="NAME", help="repeatable")
    parser.add_argument("--evidence", type=Path, help="file to append to; left out: the checkout's")
    options = parser.parse_args(argv)
    if (options.patched is None) != (not options.fix):
        parser.error("--patched and --fix belong together")

    from numinous_tooling.bench.clocks import CpuClock, CudaClock  # imports torch
    from numinous_tooling.bench.facts import run_facts

    try:
        record = json.loads((options.model / "record.json").read_text(encoding="utf-8"))
        clock = CpuClock() if record["device"] == "cpu" else CudaClock()
        facts = run_facts(clock, os.environ)
        path = options.evidence
        if path is None:
            path = evidence.find_evidence(Path(__file__).parent) / "gate" / "judge_models.jsonl"
        known = evidence.load(path) if path.exists() else []
        made = [training(record, facts)]
        if any(one["op"] == "judge_training" and one["files"] == record["files"] for one in known):
            made = []
        for report, fixes in ((options.check, ()), (options.patched, options.fix)):
            if report is not None:
                check = json.loads(report.read_text(encoding="utf-8"))
                made.append(engine_check(record, check, facts, fixes))
        evidence.append(path, made)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        print(f"record: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"{len(made)} records in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
