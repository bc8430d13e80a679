# SPDX-License-Identifier: Apache-2.0
"""The A/A noise floor of a setting: measured once, kept in a file, used by every later A/B run of that setting.

A gate run whose arms serve the same (`--features none`, same flags, environment and interpreter) is an A/A run. Where
nothing in it is in doubt, the scatter of its runs per metric is added to the floor of its *setting*: model, server
command, flags and environment of arm A (without flags that only features need, which change nothing in stock),
versions, workload (without seed), concurrency, machine, GPU driver. The file's name is a digest of the setting, and the
setting stands inside it in plain words; a file whose setting is not the one asked for is refused, so the floor of another
setting is never used. Of several A/A runs the variances are pooled, weighted by their degrees of freedom.

What it cannot show: a floor of two to four server starts knows little of rare events, and nothing of what has changed
on the machine since; it is a lower bound, never a substitute for repeats (`verdict`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numinous_tooling.gate.arms import FEATURE_SERVER_FLAGS, Arm
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.folder import locked
from numinous_tooling.gate.measures import ArmRun, Metric
from numinous_tooling.gate.verdict import Noise, doubts, same_arm_noise

SCHEMA = 1
# Chooses requests but not their kind, or follows from the rest.
_NOT_SETTING = ("seed", "names", "requests_per_run")


def default_folder() -> Path:
    """Return `NUMINOUS_CACHE`/gate-floors; without that variable, beside the downloaded models."""
    if own := os.environ.get("NUMINOUS_CACHE"):
        return Path(own).expanduser() / "gate-floors"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "numinous" / "gate-floors"


def is_same_against_same(arms: Mapping[str, Arm]) -> bool:
    """Return whether arms A and B serve the same, so that their difference is noise."""
    a, b = arms["A"], arms["B"]
    plain_a, plain_b = (
        {name: value for name, value in arm.env.items() if name != "SGLANG_PLUGINS"}
        for arm in (a, b)
    )
    return not b.features and (a.python, a.flags, plain_a) == (b.python, b.flags, plain_b)


def machine_of(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a machine decides how fast it is; its kernel may be updated."""
    return {key: machine.get(key) for key in ("cpu", "cores", "gpus")}


def setting_of(
    arm: Arm,
    features: Sequence[str],
    *,
    model: str,
    command: Sequence[str],
    versions: Mapping[str, str],
    workload: Mapping[str, Any],
    machine: Mapping[str, Any],
    driver: str | None,
) -> dict[str, Any]:
    """Return the setting whose noise a run shares, in plain words.

    Args:
        arm: the stock arm.
        features: those under test; the flags that they need are no part of the setting.
        model: as the servers get it.
        command: the server's, placeholders not filled.
        versions: of the arm's interpreter.
        workload: what decides the requests; the seed is left out.
        machine: as `provenance.machine` says it.
        driver: of the GPU.
    """
    flags = list(arm.flags)
    for feature in features:
        needed = list(FEATURE_SERVER_FLAGS.get(feature, ()))
        for start in range(len(flags) - len(needed), -1, -1):
            if needed and flags[start : start + len(needed)] == needed:
                del flags[start : start + len(needed)]
                break
    setting = {
        "model": model,
        "command": list(command),
        "flags": flags,
        "env": dict(arm.env),
        "versions": dict(versions),
        "workload": {key: value for key, value in workload.items() if key not in _NOT_SETTING},
        "machine": machine_of(machine),
        "driver": driver,
    }
    # As it will come back from the file: tuples are lists there.
    plain: dict[str, Any] = json.loads(json.dumps(setting))
    return plain


def setting_key(setting: Mapping[str, Any]) -> str:
    """Return the digest that names a setting's file."""
    text = json.dumps(setting, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Floor:
    """The stored A/A runs of one setting: `runs` hold `utc`, `source`, and per metric `sd` and `df`."""

    folder: Path
    setting: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def file(self) -> Path:
        """Return where it is stored."""
        return self.folder / f"{setting_key(self.setting)}.json"

    def noise(self) -> dict[str, Noise]:
        """Return the pooled noise per metric; empty without a stored run."""
        pooled: dict[str, Noise] = {}
        for name in sorted({name for run in self.runs for name in run["metrics"]}):
            parts = [run["metrics"][name] for run in self.runs if name in run["metrics"]]
            df = sum(part["df"] for part in parts)
            sd = math.sqrt(sum(part["df"] * part["sd"] ** 2 for part in parts) / df)
            pooled[name] = Noise(sd, df)
        return pooled

    def add(self, utc: str, source: str, noise: Mapping[str, Noise]) -> None:
        """Add an A/A run and store the floor; the file is replaced as a whole."""
        metrics = {name: {"sd": n.sd, "df": n.df} for name, n in noise.items()}
        temporary = self.file.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder, wait=True):
                # Another run may have added its own since this one began.
                self.runs = load(self.folder, self.setting).runs
                self.runs.append({"utc": utc, "source": source, "metrics": metrics})
                document = {"schema": SCHEMA, "setting": self.setting, "runs": self.runs}
                temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                temporary.replace(self.file)
        except OSError as error:
            raise GateError(
                f"the noise floor cannot be stored in {self.folder} ({error.strerror}); choose another --floor-dir"
            ) from error

    def described(self) -> dict[str, Any]:
        """Return what verdict.json says of it."""
        return {
            "file": str(self.file),
            "used": bool(self.runs),
            "aa_runs": [{"utc": run["utc"], "source": run["source"]} for run in self.runs],
            "metrics": {name: {"sd": n.sd, "df": n.df} for name, n in self.noise().items()},
        }


def load(folder: Path, setting: dict[str, Any]) -> Floor:
    """Return the floor of a setting, without runs where none is stored; refuse a file that is not that floor."""
    floor = Floor(folder, setting)
    try:
        content = floor.file.read_bytes()
    except FileNotFoundError:
        return floor
    except OSError as error:
        raise GateError(
            f"{floor.file} cannot be read ({error.strerror}); see --floor-dir"
        ) from error
    try:
        document = json.loads(content)
        if document["schema"] != SCHEMA or document["setting"] != setting:
            raise ValueError
        floor.runs = list(document["runs"])
        floor.described()
        for noise in floor.noise().values():
            if not (noise.df >= 1 and 0 <= noise.sd < math.inf):
                raise ValueError
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise GateError(
            f"{floor.file} is no noise floor of this setting; remove it and measure it again with --features none"
        ) from error
    return floor


def noise_of_run(
    runs: Sequence[ArmRun],
    metrics: Sequence[Metric],
    max_lag_s: float | None,
    max_uneven_cores: float = math.inf,
) -> dict[str, Noise]:
    """Return the noise of an A/A run per metric; empty where the run is in doubt or has one repeat.

    Shares are left out: their scatter follows from the share, which the limits of a run decide.
    """
    own = [run for run in runs if run.arm in "AB"]
    if any(run.bad_answers for run in own) or doubts(own, max_lag_s, max_uneven_cores):
        return {}
    if min(sum(run.arm == arm for run in own) for arm in "AB") < 2:
        return {}
    found = {
        m.name: noise
        for m in metrics
        if m.scale == "ratio" and (noise := same_arm_noise(m, own)) is not None
    }
    return found
