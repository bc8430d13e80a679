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
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

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
    element: str = "str"  # of a list
    may_be_empty: bool = False  # nargs "*" or "?"
    const: Any = None  # of nargs "?" without a value
    negatable: bool = False  # has --no-x too

    @property
    def negations(self) -> tuple[str, ...]:
        """The flags that switch it off."""
        return tuple("--no-" + flag[2:] for flag in self.flags) if self.negatable else ()


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
    try:
        found = _declared(tree)
    except (OSError, SyntaxError, ValueError):
        found = {}
    if "model_path" not in found:
        raise PatchError(
            f"{tree.where}: this engine does not declare its arguments where 0.5.20 does ({FIELDS}); "
            "the serve command is not judged"
        )
    return found


def _declared(tree: EngineTree) -> dict[str, Argument]:
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
    declared = _without_none(annotation.slice.elts[0])
    literals = _literal_values(declared)
    more = keywords.get("action_kwargs")
    nargs = _literal(keywords.get("nargs")) or (
        (_literal(more) or {}).get("nargs") if isinstance(_literal(more), dict) else _nargs_in(more)
    )
    return Argument(
        name=name,
        flags=(main, *aliases),
        kind=_kind(declared, literals, nargs, keywords),
        default=_literal(node.value),
        choices=tuple(choices) if choices else literals,
        element=_scalar(declared.slice) if _is_list(declared) else "str",
        may_be_empty=nargs in ("*", "?"),
        const=_literal(keywords.get("const")),
        negatable="BooleanOptionalAction" in _text(keywords, "action"),
    )


def _without_none(node: ast.expr) -> ast.expr:
    """``X`` of ``Optional[X]`` and ``X | None``."""
    if isinstance(node, ast.Subscript) and _name(node.value) == "Optional":
        return node.slice
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(other, ast.Constant) and other.value is None:
                return one
    return node


def _literal_values(node: ast.expr) -> tuple[Any, ...] | None:
    """Values of ``Literal[...]``."""
    if not isinstance(node, ast.Subscript) or _name(node.value) != "Literal":
        return None
    values = _literal(node.slice)
    return values if isinstance(values, tuple) else (values,)


def _is_list(node: ast.expr) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and _name(node.value) in ("List", "list")


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _nargs_in(node: ast.expr | None) -> Any:
    """``nargs`` of a dictionary that names types, which is no literal."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if _literal(key) == "nargs":
                return _literal(value)
    return None


def _text(keywords: Mapping[str, ast.expr], name: str) -> str:
    return ast.unparse(keywords[name]) if name in keywords else ""


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _kind(
    declared: ast.expr,
    literals: tuple[Any, ...] | None,
    nargs: Any,
    keywords: Mapping[str, ast.expr],
) -> str:
    action = _text(keywords, "action")
    if "BooleanOptionalAction" in action or "Deprecated" in action:
        return "bool"
    if nargs in ("*", "+"):
        return "list"
    if "type_parser" in keywords or action:
        return "other"
    if _is_list(declared):
        return "list"
    if literals is not None:
        kind = type(literals[0]).__name__
        return kind if kind in ("int", "float") else "str"
    return _scalar(declared, "other")


def _scalar(node: ast.expr, otherwise: str = "str") -> str:
    name = _name(node)
    return name if name in ("bool", "int", "float", "str") else otherwise


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
        try:
            words = shlex.split(words[0])
        except ValueError as error:
            raise PatchError(f"the serve command cannot be split into words: {error}") from None
    env = dict(os.environ if environ is None else environ)
    problems: list[str] = []
    rest = _arguments_of(_without_environment(words, env), problems)
    arguments = read_arguments(tree)
    by_flag = _by_flag(arguments)
    given: dict[str, Any] = {}
    index = 0
    while index < len(rest):
        word = rest[index]
        index += 1
        flag, has_value, inline = word.partition("=")
        flag = flag if flag in by_flag else _abbreviated(flag, by_flag, problems)
        argument = by_flag.get(flag)
        if argument is None:
            if flag not in ("-h", "--help"):
                problems.append(_unknown(word, flag, by_flag))
            while index < len(rest) and not _is_flag(rest[index], by_flag):
                index += 1  # the unknown flag's values say nothing more
            continue
        if argument.kind == "bool":
            if has_value:
                problems.append(f"{flag} takes no value, and here it is {inline!r}")
            given[argument.name] = flag not in argument.negations
            continue
        values = [inline] if has_value else []
        while not has_value and index < len(rest) and not _is_flag(rest[index], by_flag):
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


def _by_flag(arguments: Mapping[str, Argument]) -> dict[str, Argument]:
    return {
        flag: argument
        for argument in arguments.values()
        for flag in (*argument.flags, *argument.negations)
    }


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)


def _without_environment(words: list[str], env: dict[str, str]) -> list[str]:
    """The command behind ``NAME=value`` words and ``env``; what they say is applied to `env`."""
    words = list(words)
    while words:
        if _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        elif Path(words[0]).name == "env":
            words = _after_env(words[1:], env)
        else:
            break
    return words


def _after_env(words: list[str], env: dict[str, str]) -> list[str]:
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        if word in ("-i", "-", "--ignore-environment"):
            env.clear()
        elif word in ("-u", "--unset", "-C", "--chdir"):
            value = words.pop(0) if words else ""
            if word in ("-u", "--unset"):
                env.pop(value, None)
        elif word.startswith("--unset="):
            env.pop(word.partition("=")[2], None)
        elif word.startswith("-u"):
            env.pop(word[2:], None)
        elif not word.startswith("--chdir="):
            raise PatchError(f"env {word} is not judged; write env [-i] [-u NAME] NAME=value ...")
    return words


_PYTHON = re.compile(r"(python|pypy)[\d.]*")


def _arguments_of(words: list[str], problems: list[str]) -> list[str]:
    for index, word in enumerate(words):
        if word == "sglang.launch_server" or word.endswith("launch_server.py"):
            _judge_prefix(words[:index], problems)
            return words[index + 1 :]
        before = words[index - 1] if index else ""
        if word == "serve" and Path(before).name in ("sglang", "sglang.cli.main"):
            _judge_prefix(words[: index - 1], problems)
            if before == "sglang" and words[index - 2 : index - 1] == ["-m"]:
                problems.append("python -m sglang is no command; want sglang serve")
            return _of_serve(words[index + 1 :], problems)
    if words and words[0].startswith("--"):
        return words
    raise PatchError(
        f"{shlex.join(words)[:80]!r} is not a serve command; want `sglang serve ...` or `python -m sglang.launch_server ...`"
    )


def _judge_prefix(prefix: list[str], problems: list[str]) -> None:
    """Nothing but a Python with its options is known to hand its environment on as it is."""
    rest = list(prefix)
    if rest and _PYTHON.fullmatch(Path(rest[0]).name):
        del rest[0]
        while rest and rest[0].startswith("-"):
            if rest.pop(0) in ("-X", "-W") and rest:
                del rest[0]
    if rest:
        problems.append(
            f"the environment is not judged: what stands before the serve command ({shlex.join(prefix)[:80]}) "
            "may change it"
        )


def _of_serve(words: list[str], problems: list[str]) -> list[str]:
    """``sglang serve`` takes its model as first word, and ``--model-type``, which the server never sees."""
    rest: list[str] = []
    index = 0
    while index < len(words):
        flag, has_value, kind = words[index].partition("=")
        index += 1
        if flag != "--model-type":
            rest.append(words[index - 1])
            continue
        if not has_value:
            kind = words[index] if index < len(words) else ""
            index += 1
        if not kind:
            problems.append("--model-type needs a value")
        elif kind not in ("llm", "auto"):
            problems.append(f"--model-type {kind} is not judged; numinous knows the server of llm")
    return ["--model-path", *rest] if rest and not rest[0].startswith("-") else rest


_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def _is_flag(word: str, by_flag: Mapping[str, Argument]) -> bool:
    """As argparse tells a flag from a value."""
    if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.fullmatch(word):
        return False
    return word.partition("=")[0] in by_flag or " " not in word


def _abbreviated(flag: str, by_flag: Mapping[str, Argument], problems: list[str]) -> str:
    """The engine's parser takes unambiguous prefixes (``--tensor`` for ``--tensor-parallel-size``)."""
    if not flag.startswith("--") or len(flag) < 3:
        return flag
    matches = [known for known in by_flag if known.startswith(flag)]
    names = sorted({by_flag[known].flags[0] for known in matches})
    if len(names) > 1:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        problems.append(f"{flag} is ambiguous: {shown}")
    return matches[0] if matches else flag


def _unknown(word: str, flag: str, by_flag: Mapping[str, Argument]) -> str:
    if not word.startswith("-"):
        return f"{word!r} stands where a flag was expected"
    near = difflib.get_close_matches(flag, list(by_flag), n=1)
    return f"{flag} is not a flag of this engine" + (f"; did you mean {near[0]}?" if near else "")


def _convert(argument: Argument, values: list[str], problems: list[str]) -> Any:
    flag = argument.flags[0]
    if not values:
        if not argument.may_be_empty:
            problems.append(f"{flag} needs a value")
            return argument.default
        return [] if argument.kind == "list" else argument.const
    if argument.kind == "list":
        return [_scalar_value(argument, argument.element, text, problems) for text in values]
    return _scalar_value(argument, argument.kind, values[0], problems)


def _scalar_value(argument: Argument, kind: str, text: str, problems: list[str]) -> Any:
    flag = argument.flags[0]
    value: Any = text
    if kind in ("int", "float"):
        try:
            value = int(text) if kind == "int" else float(text)
        except ValueError:
            problems.append(f"{flag} {text!r} is not a number of kind {kind}")
            return argument.default
    elif kind == "other" and text.isdecimal():
        value = int(text)  # sizes that may also be written as 32k
    if argument.choices and value not in argument.choices and text not in argument.choices:
        problems.append(f"{flag} {text!r} is not one of {', '.join(map(str, argument.choices))}")
    return value


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
