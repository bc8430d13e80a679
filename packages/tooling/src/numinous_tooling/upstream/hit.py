# SPDX-License-Identifier: Apache-2.0
"""Which bugs a serve command would meet, from the ``[doctor]`` tables of the headers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.serve_command import ServeCommand

from .headers import TESTS, Fix

HIT, MISSED, UNDECIDED = "hit", "missed", "undecided"

DECIDED = ("kv_cache_dtype",)
"""Flags whose ``auto`` stands for one thing, here the model's own type; for others the engine chooses later."""

FALLS_BACK = {
    "prefill_attention_backend": "attention_backend",
    "decode_attention_backend": "attention_backend",
}
SPECULATIVE = "speculative_"

_MISSING = object()
_TEXT_CONFIG = "text_config"


def split_config(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The serve command without ``--config <file>.json``, and that file.

    The engine's own ``--config`` takes YAML, and stays.
    """
    rest: list[str] = []
    found = None
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--config" and (value if equals else left[0] if left else "").endswith(".json"):
            found = value if equals else left.pop(0)
        else:
            rest.append(word)
    return rest, found


def with_config(serve: ServeCommand, file: str | Path) -> ServeCommand:
    """The command with the model configuration of a file; raises PatchError when it holds none."""
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PatchError(
            f"{file} cannot be read ({error}); name the config.json of the model"
        ) from None
    if not isinstance(config, dict):
        raise PatchError(f"{file} holds no JSON object; name the config.json of the model")
    return replace(serve, model_config=config)


def judge(fix: Fix, serve: ServeCommand) -> tuple[str, str]:
    """`HIT`, `MISSED` or `UNDECIDED`, and what it depends on, as one line.

    A flag that the engine resolves itself (its default is None, or it is ``auto``) decides nothing; nor does the
    configuration of a model that is not on this machine. A fix without ``[doctor]`` is undecided for every command.
    """
    doctor = fix.header.get("doctor")
    if not doctor:
        return UNDECIDED, "its header names no condition"
    open_: list[str] = []
    for item in doctor["when"]:
        holds = _holds(item, serve)
        if holds is False:
            return MISSED, _said(item)
        if holds is None:
            open_.append(_said(item))
    if open_:
        return UNDECIDED, "if " + " and ".join(open_)
    return HIT, ", ".join(_met(item, serve) for item in doctor["when"])


def _holds(item: Mapping[str, Any], serve: ServeCommand) -> bool | None:
    (test,) = (key for key in TESTS if key in item)
    if "env" in item:
        value: Any = serve.environ.get(item["env"], _MISSING)
    elif "flag" in item:
        name = item["flag"]
        if name not in serve.given and name not in serve.defaults:
            return None  # another version's flag
        value = _flag(serve, name)
        if (
            value is None
            and name.startswith(SPECULATIVE)
            and not _flag(serve, f"{SPECULATIVE}algorithm")
        ):
            value = _MISSING  # off, and nobody chooses
        elif value is None:
            # Given by nobody: the engine chooses.
            return None if test != "set" else item["set"] is False
        if value == "auto" and name not in DECIDED and test in ("is", "any", "not"):
            return True if test != "not" and "auto" in item[test] else None
    else:
        if serve.model_config is None:
            return None
        value = _config(serve.model_config, item["config"])
    if test == "set":
        there = value is not _MISSING and value is not None and value is not False
        return there is item["set"]
    if value is _MISSING or value is None:
        # A key that is not there has no value in the list; an unset variable as well.
        return test == "not"
    return _compare(test, value, item[test])


def _flag(serve: ServeCommand, name: str) -> Any:
    """Value of a flag; the backend of a phase is the common one where it is not given."""
    value = serve.given.get(name, serve.defaults.get(name))
    return _flag(serve, FALLS_BACK[name]) if value is None and name in FALLS_BACK else value


def _compare(test: str, value: Any, wanted: Any) -> bool | None:
    if test == "ends":
        return isinstance(value, str) and value.endswith(tuple(map(str, wanted)))
    if test in ("above", "below"):
        try:
            number = float(value)
        except (TypeError, ValueError):
            return None
        return bool(number > wanted if test == "above" else number < wanted)
    values = value if isinstance(value, list) else [value]
    shared = any(_same(one, two) for one in values for two in wanted)
    return not shared if test == "not" else shared


def _same(one: object, two: object) -> bool:
    # `--flag 8` and `= "8"` of an environment variable mean the same as 8; True is not 1.
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two or str(one).lower() == str(two).lower()
    return one == two or str(one) == str(two)


def _config(config: Mapping[str, Any], path: str) -> Any:
    for top in (config, config.get(_TEXT_CONFIG)):
        value: Any = top
        for part in path.split("."):
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING:
            return value
    return _MISSING


def _name(item: Mapping[str, Any]) -> str:
    if "flag" in item:
        return "--" + str(item["flag"]).replace("_", "-")
    return str(item["env"]) if "env" in item else f"{item['config']} of the model"


def _said(item: Mapping[str, Any]) -> str:
    (test,) = (key for key in TESTS if key in item)
    value = item[test]
    if test == "set":
        return f"{_name(item)} is {'set' if value else 'not set'}"
    words = {"is": "is", "any": "has", "not": "is not", "ends": "ends with"}
    shown = " or ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{_name(item)} {words.get(test, f'is {test}')} {shown}"


def _met(item: Mapping[str, Any], serve: ServeCommand) -> str:
    """A condition that holds, by the value that makes it hold."""
    if "set" in item or "not" in item:
        return _said(item)
    if "flag" in item:
        value = _flag(serve, item["flag"])
    elif "env" in item:
        value = serve.environ.get(item["env"])
    else:
        value = _config(serve.model_config or {}, item["config"])
    shown = ", ".join(map(str, value)) if isinstance(value, list) else value
    return f"{_name(item)} {shown}"
