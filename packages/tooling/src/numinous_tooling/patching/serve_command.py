# SPDX-License-Identifier: Apache-2.0
"""Read a serve command line the way the engine would, without importing the engine.

SGLang 0.5.20 declares its arguments as annotated class fields in ``srt/arg_groups/fields/*.py``
(``name: A[type, Arg(...)] = default``); the declarations are read with `ast`. The same `ServeCommand` view is built
from a live ``ServerArgs`` in the engine's own process, so that a feature judges both in one function.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engine import EngineTree
from .errors import PatchError

FIELDS = "srt/arg_groups/fields/"
CHOICES = "srt/arg_groups/choices.py"
EXTRA = "srt/server_args.py"  # a few flags are registered by hand there


@dataclass(frozen=True)
class Argument:
    """One declared server argument."""

    name: str
    flags: tuple[str, ...]
    kind: str  # bool, int, float, str, list, other
    default: Any
    choices: tuple[Any, ...] | None


@dataclass(frozen=True)
class ServeCommand:
    """What a launch asks for.

    ``given`` holds the values that the user typed (or, in the engine's process, every resolved value); ``defaults``
    the engine's defaults; ``model_config`` the parsed ``config.json`` of a local model directory, else None.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    model_config: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()

    def get(self, name: str) -> Any:
        """Value of argument `name` (field name with underscores); raises KeyError if the engine has none such."""
        if name in self.given:
            return self.given[name]
        return self.defaults[name]


def read_arguments(tree: EngineTree) -> dict[str, Argument]:
    """field name -> declaration, for every argument with a command-line flag.

    Raises:
        PatchError: the engine does not declare its arguments where 0.5.20 does.
    """
    named_lists = _named_choices(tree)
    found: dict[str, Argument] = {}
    for path in tree.files(FIELDS):
        if path.endswith(".py"):
            for node in ast.walk(ast.parse(tree.read(path))):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    argument = _argument(node, named_lists)
                    if argument is not None:
                        found[argument.name] = argument
    for node in ast.walk(ast.parse(tree.read(EXTRA))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            flags = tuple(w for w in words if isinstance(w, str) and w.startswith("--"))
            keywords = {k.arg: k.value for k in node.keywords if k.arg}
            if flags:
                name = flags[0].lstrip("-").replace("-", "_")
                kind = (
                    "bool"
                    if "StoreTrue" in _text(keywords, "action")
                    or "store_true" in _text(keywords, "action")
                    else "str"
                )
                found.setdefault(
                    name, Argument(name, flags, kind, _literal(keywords.get("default")), None)
                )
    if "model_path" not in found:
        raise PatchError(
            f"{tree.where}: no argument declarations below {FIELDS}; not an engine that this version knows"
        )
    return found


def _named_choices(tree: EngineTree) -> dict[str, tuple[Any, ...]]:
    lists: dict[str, tuple[Any, ...]] = {}
    for node in ast.parse(tree.read(CHOICES)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            if isinstance(value, list | tuple):
                lists[node.targets[0].id] = tuple(value)
    return lists


def _argument(node: ast.AnnAssign, named_lists: Mapping[str, tuple[Any, ...]]) -> Argument | None:
    annotation = node.annotation
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name)):
        return None
    if annotation.value.id != "A" or not isinstance(annotation.slice, ast.Tuple):
        return None
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    type_text = ast.unparse(annotation.slice.elts[0])
    keywords: dict[str, ast.expr] = {}
    for element in annotation.slice.elts[1:]:
        if (
            isinstance(element, ast.Call)
            and isinstance(element.func, ast.Name)
            and element.func.id == "Arg"
        ):
            keywords = {k.arg: k.value for k in element.keywords if k.arg}
    if _literal(keywords.get("no_cli")) is True:
        return None
    main = _literal(keywords.get("cli_name")) or "--" + name.replace("_", "-")
    aliases = _literal(keywords.get("aliases")) or []
    choices_node = keywords.get("choices")
    choices = (
        named_lists.get(choices_node.id)
        if isinstance(choices_node, ast.Name)
        else _literal(choices_node)
    )
    kind = _kind(type_text, keywords)
    return Argument(
        name=name,
        flags=(main, *aliases),
        kind=kind,
        default=_literal(node.value),
        choices=tuple(choices) if choices else None,
    )


def _text(keywords: Mapping[str, ast.expr], name: str) -> str:
    return ast.unparse(keywords[name]) if name in keywords else ""


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _kind(type_text: str, keywords: Mapping[str, ast.expr]) -> str:
    if "nargs" in keywords or "List[" in type_text or "list[" in type_text:
        return "list"
    if "type_parser" in keywords or "action" in keywords:
        return "other"
    bare = type_text.removeprefix("Optional[").removesuffix("]")
    return bare if bare in ("bool", "int", "float", "str") else "other"


def parse_command(
    words: Sequence[str], tree: EngineTree, environ: Mapping[str, str] | None = None
) -> ServeCommand:
    """Parse the user's own serve command.

    Args:
        words: for example ``["sglang", "serve", "--model-path", …]`` or ``["python", "-m", "sglang.launch_server", …]``;
            leading ``NAME=value`` words are taken as environment.

    Raises:
        PatchError: not a serve command of the engine.
    """
    words = list(words)
    if len(words) == 1:
        words = shlex.split(words[0])
    env = dict(os.environ if environ is None else environ)
    while words and "=" in words[0] and words[0].split("=", 1)[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    rest = _arguments_of(words)
    arguments = read_arguments(tree)
    by_flag = {flag: argument for argument in arguments.values() for flag in argument.flags}
    given: dict[str, Any] = {}
    problems: list[str] = []
    index = 0
    while index < len(rest):
        word = rest[index]
        index += 1
        flag, has_value, inline = word.partition("=")
        argument = by_flag.get(flag) or _abbreviated(flag, by_flag, problems)
        if argument is None:
            if flag not in ("-h", "--help"):
                problems.append(_unknown(word, flag, by_flag))
            while index < len(rest) and not _is_flag(rest[index], by_flag):
                index += 1  # the unknown flag's values say nothing more
            continue
        values = [inline] if has_value else []
        if not has_value and argument.kind != "bool":
            while index < len(rest) and not _is_flag(rest[index], by_flag):
                values.append(rest[index])
                index += 1
                if argument.kind != "list":
                    break
        given[argument.name] = _convert(argument, values, problems)
        if argument.name == "config":
            problems.append(
                "--config: values in the file are not judged; put them on the command line for this check"
            )
    defaults = {name: argument.default for name, argument in arguments.items()}
    model_config = _model_config(given.get("model_path"))
    return ServeCommand(given, defaults, env, model_config, tuple(problems))


def _arguments_of(words: list[str]) -> list[str]:
    for index, word in enumerate(words):
        if word == "sglang.launch_server" or word.endswith("launch_server.py"):
            return words[index + 1 :]
        if (
            word == "serve"
            and index
            and Path(words[index - 1]).name in ("sglang", "sglang.cli.main")
        ):
            return words[index + 1 :]
    if words and words[0].startswith("--"):
        return words
    raise PatchError(
        f"{shlex.join(words)[:80]!r} is not a serve command; want `sglang serve …` or `python -m sglang.launch_server …`"
    )


def _is_flag(word: str, by_flag: Mapping[str, Argument]) -> bool:
    return word.startswith("--") or word in by_flag


def _abbreviated(
    flag: str, by_flag: Mapping[str, Argument], problems: list[str]
) -> Argument | None:
    """The engine's parser takes unambiguous prefixes (``--tp`` for ``--tp-size``)."""
    if not flag.startswith("--") or len(flag) < 3:
        return None
    matches = {
        argument.name: argument for known, argument in by_flag.items() if known.startswith(flag)
    }
    if len(matches) > 1:
        problems.append(
            f"{flag} is ambiguous: {', '.join(sorted(a.flags[0] for a in matches.values()))}"
        )
    return next(iter(matches.values())) if matches else None


def _unknown(word: str, flag: str, by_flag: Mapping[str, Argument]) -> str:
    if not word.startswith("-"):
        return f"{word!r} stands where a flag was expected"
    near = difflib.get_close_matches(flag, list(by_flag), n=1)
    return f"{flag} is not a flag of this engine" + (f"; did you mean {near[0]}?" if near else "")


def _convert(argument: Argument, values: list[str], problems: list[str]) -> Any:
    flag = argument.flags[0]
    if argument.kind == "bool":
        return not values or values[0].lower() in ("1", "true", "yes", "on")
    if not values:
        problems.append(f"{flag} needs a value")
        return argument.default
    if argument.kind == "list":
        return values
    text = values[0]
    if argument.kind in ("int", "float"):
        try:
            return int(text) if argument.kind == "int" else float(text)
        except ValueError:
            problems.append(f"{flag} {text!r} is not a number of kind {argument.kind}")
            return argument.default
    if argument.kind == "other" and text.isdigit():
        return int(text)  # sizes that may also be written as 32k
    if argument.choices and text not in argument.choices:
        problems.append(f"{flag} {text!r} is not one of {', '.join(map(str, argument.choices))}")
    return text


def _model_config(model_path: Any) -> dict[str, Any] | None:
    if not isinstance(model_path, str):
        return None
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def from_server_args(server_args: Any) -> ServeCommand:
    """The same view of a live ``ServerArgs`` (after resolution) inside the engine's process."""
    resolved: dict[str, Any] = server_args.resolved_dict()
    return ServeCommand(
        resolved, environ=os.environ, model_config=_model_config(resolved.get("model_path"))
    )
