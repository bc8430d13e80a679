# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the product: which features are on, and with which options.

Every variable that starts with ``NUMINOUS_`` must be known: a misspelt flag would otherwise serve stock while its
user believes that the feature is on.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import PatchError
from .feature import Feature, Option

PREFIX = "NUMINOUS_"

TOOLING_VARIABLES = {
    "NUMINOUS_STRICT": "1 (default): a feature that cannot be proven in place ends the process; 0: serve stock, warn",
    "NUMINOUS_STATE_DIR": "folder of process records and counters (default: <tmp>/numinous-<uid>)",
    "NUMINOUS_ENGINE": "wheel or directory that `check` and `doctor` judge instead of the installed engine",
    "NUMINOUS_CACHE": "folder of downloaded models and of gate noise floors (default: ~/.cache/numinous)",
    "NUMINOUS_RUN": "set by the boot code: id shared by the processes of one server",
    "NUMINOUS_DROPPED": "set by the boot code under NUMINOUS_STRICT=0: features that the main process gave up",
    "NUMINOUS_COMMIT": "commit that gates and `bench --evidence` name where the sources are no git checkout",
    "NUMINOUS_REQUIRE_DEVICE": "1: test sessions fail instead of noting that a device tier did not run",
}

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def parse_bool(name: str, text: str) -> bool:
    """True / false of a flag's text; raises PatchError for anything else."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise PatchError(
        f"{name}={text!r} is neither on (1, true, yes, on) nor off (0, false, no, off, empty)"
    )


def any_set(environ: Mapping[str, str] | None = None) -> bool:
    """Whether any variable other than tooling's own is set: the whole cost of numinous in a stock process."""
    environ = os.environ if environ is None else environ
    return any(name.startswith(PREFIX) and name not in TOOLING_VARIABLES for name in environ)


def enabled(features: Iterable[Feature], environ: Mapping[str, str] | None = None) -> list[Feature]:
    """The features whose flag is on, in id order, with every variable checked.

    Raises:
        PatchError: unknown variable, bad value, missing requirement, or two features that exclude each other.
    """
    environ = os.environ if environ is None else environ
    by_flag = {feature.flag: feature for feature in features}
    options = {option.name: option for feature in by_flag.values() for option in feature.options}
    known = [*by_flag, *options, *TOOLING_VARIABLES]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"; did you mean {near[0]}?"
                if near
                else "; is its package installed? (numinous features)"
            )
            raise PatchError(
                f"{name} is set and no installed feature or option has that name{hint}"
            )
    on = [f for flag, f in sorted(by_flag.items()) if parse_bool(flag, environ.get(flag, ""))]
    check_together(on)
    for feature in on:
        for option in feature.options:
            option_value(option, environ)
    return on


def check_together(features: Iterable[Feature]) -> None:
    """Raise PatchError if a requirement is missing or two features exclude each other."""
    on = list(features)
    ids = {feature.id for feature in on}
    for feature in on:
        for needed in feature.requires:
            if needed not in ids:
                raise PatchError(f"{feature.id} requires {needed}, which is off; switch it on too")
        for other in feature.conflicts:
            if other in ids:
                raise PatchError(
                    f"{feature.id} and {other} exclude each other; switch one of them off"
                )


def option_value(option: Option, environ: Mapping[str, str] | None = None) -> Any:
    """The value of one option: its variable if set, else its default. Raises PatchError for an illegal text."""
    environ = os.environ if environ is None else environ
    text = environ.get(option.name, "").strip()
    if not text:
        return option.default
    if option.kind == "bool":
        return parse_bool(option.name, text)
    if option.kind == "str":
        if option.choices and text not in option.choices:
            raise PatchError(f"{option.name}={text!r} is none of {', '.join(option.choices)}")
        return text
    try:
        number = int(text) if option.kind == "int" else float(text)
    except ValueError:
        raise PatchError(f"{option.name}={text!r} is not a number of kind {option.kind}") from None
    if not math.isfinite(number) or (option.minimum is not None and number < option.minimum):
        raise PatchError(
            f"{option.name}={text} is out of range; smallest legal value is {option.minimum}"
        )
    return number


def strict(environ: Mapping[str, str] | None = None) -> bool:
    """``NUMINOUS_STRICT``, on unless switched off."""
    environ = os.environ if environ is None else environ
    return parse_bool("NUMINOUS_STRICT", environ.get("NUMINOUS_STRICT", "1"))
