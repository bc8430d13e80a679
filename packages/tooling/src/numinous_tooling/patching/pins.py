# SPDX-License-Identifier: Apache-2.0
"""What one function of the engine says, independent of its formatting and of the interpreter that reads it.

Two views of a function, both taken from the file without importing it. `source_digest` names its text, so that a
patch can say which text it was written against. `compiled_code` is the code object that an untouched process would
run, so that a hook can tell whether somebody has wrapped or replaced the function already.

The digest is taken from text lines and not from an AST dump or a token list, because both of those differ between
Python 3.11 and 3.12.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import io
import tokenize
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .engine import PACKAGE, EngineTree
from .errors import PatchError
from .feature import Pin

_Function = ast.FunctionDef | ast.AsyncFunctionDef

# Python 3.12 splits an f-string into tokens; 3.11 delivers it as one STRING. The numbers exist only on 3.12.
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)


@dataclass(frozen=True)
class _Definition:
    qualname: str
    node: _Function | ast.ClassDef
    classes: tuple[ast.ClassDef, ...]


@dataclass(frozen=True)
class _Parsed:
    lines: tuple[str, ...]
    module: ast.Module
    definitions: tuple[_Definition, ...]


def source_digest(source: bytes, qualname: str, occurrence: int | None = None) -> str:
    """First 16 hex digits of the sha256 of a definition's normalised source, decorators included.

    Comments, blank lines, trailing blanks, the common indentation, line ends and a byte-order mark do not count;
    everything else does, inside string literals to the letter.

    Args:
        source: the bytes of the whole file.
        qualname: function, method, class or property; dots nest in classes.
        occurrence: which definition, counted from 0, where the file has more than one of that name.

    Raises:
        PatchError: the name is missing, ambiguous or nested in a function, or the file cannot be parsed.
    """
    parsed = _parsed(source)
    definition = _find(parsed, qualname, occurrence)
    text = _normalised(
        parsed.lines[_first_line(parsed, definition.node) - 1 : definition.node.end_lineno]
    )
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def changed_functions(before: bytes, after: bytes) -> list[str]:
    """Qualified names of the functions and methods of `before` that `after` lacks or holds with another source.

    Raises:
        PatchError: one of them cannot be parsed.
    """

    def sources(source: bytes) -> dict[str, list[str]]:
        parsed = _parsed(source)
        found: dict[str, list[str]] = {}
        for definition in parsed.definitions:
            if isinstance(definition.node, _Function):
                lines = parsed.lines[
                    _first_line(parsed, definition.node) - 1 : definition.node.end_lineno
                ]
                found.setdefault(definition.qualname, []).append(_normalised(lines))
        return found

    new = sources(after)
    return [name for name, texts in sources(before).items() if new.get(name) != texts]


def digest_in(tree: EngineTree, target: str, occurrence: int | None = None) -> str:
    """`source_digest` of ``"package.module:Qualified.name"`` in an engine, without importing it.

    Raises:
        PatchError: no such module or definition; the line names the file.
    """
    path, qualname = resolve(tree, target)
    try:
        return source_digest(tree.read(path), qualname, occurrence)
    except PatchError as error:
        raise PatchError(f"{tree.where}/{path}: {error}") from None


def judge_pin(tree: EngineTree, pin: Pin) -> str | None:
    """None if the engine holds a text that the pin accepts, else one line that says what it holds."""
    try:
        found = digest_in(tree, pin.target, pin.occurrence)
    except PatchError as error:
        return f"{pin.target}: {error}"
    if found in pin.accepts.values():
        return None
    wanted = ", ".join(f"{label} ({digest})" for label, digest in pin.accepts.items()) or "nothing"
    return f"{pin.target} differs from every accepted text: want {wanted}, found {found} in {tree.where}"


def resolve(tree: EngineTree, target: str) -> tuple[str, str]:
    """Path (relative to the engine package) and qualified name that a target speaks of.

    Raises:
        PatchError: not of the form ``"package.module:Qualified.name"``, or the engine has no such module.
    """
    module, colon, qualname = target.partition(":")
    parts = module.split(".")
    if (
        not colon
        or not qualname
        or parts[0] != PACKAGE
        or not all(part.isidentifier() for part in parts)
    ):
        raise PatchError(f"target {target!r} is not of the form {PACKAGE}.module:Qualified.name")
    stem = "/".join(parts[1:])
    # A package wins over a module of the same name, as in an import.
    paths = (f"{stem}/__init__.py", f"{stem}.py") if stem else ("__init__.py",)
    for path in paths:
        try:
            tree.read(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return path, qualname
    raise PatchError(
        f"no module {module} in {tree.where}: neither {' nor '.join(reversed(paths))} exists"
    )


def compiled_code(
    source: bytes, filename: str, qualname: str, occurrence: int | None = None
) -> types.CodeType:
    """Code object that the file yields for a function or method; nothing of the file runs.

    The whole file is compiled, because a function's bytecode depends on more than its own text: ``__future__``
    imports, enclosing classes, and the module's imports (a call of an attribute of an imported name compiles
    differently).

    Raises:
        PatchError: as `source_digest`, and for a class.
    """
    definition = _find(_parsed(source), qualname, occurrence)
    if isinstance(definition.node, ast.ClassDef):
        raise PatchError(
            f"{qualname} is a class and has no code of its own; name one of its methods"
        )
    code = _compiled(source)
    for node in (*definition.classes, definition.node):
        code = _inner(code, node)
    # The file name is part of every code object and would keep the cache from serving two paths.
    return code.replace(co_filename=filename)


def decorator_count(source: bytes, qualname: str, occurrence: int | None = None) -> int:
    """How many decorators the definition carries; raises PatchError as `source_digest`."""
    return len(_find(_parsed(source), qualname, occurrence).node.decorator_list)


def same_code(a: types.CodeType, b: types.CodeType) -> bool:
    """True if two code objects do the same: where they come from, their names and line tables do not count."""
    return a is b or _code_key(a) == _code_key(b)


def forget_parsed() -> None:
    """Drop the syntax trees and code that are kept for the next question about the same file (some MB each)."""
    _parsed.cache_clear()
    _compiled.cache_clear()


@functools.lru_cache(maxsize=4)
def _parsed(source: bytes) -> _Parsed:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the engine's source, which is not ours to mend
            module = ast.parse(source)
    except (SyntaxError, ValueError, LookupError) as error:
        raise PatchError(f"not readable as Python: {error}; reinstall the engine") from None
    # Not splitlines(): it also splits at form feeds and at U+2028, which do not end a line of Python.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return _Parsed(tuple(lines), module, tuple(_definitions(module.body, ())))


@functools.lru_cache(maxsize=4)
def _compiled(source: bytes) -> types.CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without dont_inherit the __future__ flags of this module would leak into the result.
        code: types.CodeType = compile(
            _parsed(source).module, "<engine>", "exec", dont_inherit=True
        )
    return code


def _definitions(
    body: Sequence[ast.AST], classes: tuple[ast.ClassDef, ...]
) -> Iterator[_Definition]:
    """Every definition of a scope in the order of the file, through if / try / with but not into functions."""
    prefix = "".join(f"{enclosing.name}." for enclosing in classes)
    for node in body:
        if isinstance(node, _Function | ast.ClassDef):
            yield _Definition(prefix + node.name, node, classes)
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, (*classes, node))
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(list(ast.iter_child_nodes(node)), classes)


def _find(parsed: _Parsed, qualname: str, occurrence: int | None) -> _Definition:
    found = [definition for definition in parsed.definitions if definition.qualname == qualname]
    if not found:
        raise PatchError(_why_missing(parsed, qualname))
    lines = ", ".join(str(definition.node.lineno) for definition in found)
    if occurrence is None:
        if len(found) > 1:
            raise PatchError(
                f"{qualname} is defined {len(found)} times (lines {lines}); say which occurrence is meant"
            )
        return found[0]
    if not 0 <= occurrence < len(found):
        raise PatchError(
            f"{qualname} has no occurrence {occurrence}: it is defined {len(found)} times (lines {lines}), from 0"
        )
    return found[occurrence]


def _why_missing(parsed: _Parsed, qualname: str) -> str:
    names = {definition.qualname: definition.node for definition in parsed.definitions}
    parts = qualname.split(".")
    for end in range(1, len(parts)):
        outer = ".".join(parts[:end])
        if isinstance(names.get(outer), _Function):
            return f"{qualname} lies inside the function {outer}; a nested function cannot be pinned, pin {outer}"
    near = difflib.get_close_matches(qualname, names, n=3)
    last = parts[-1]
    near += [name for name in names if name.rpartition(".")[2] == last and name not in near][:3]
    hint = f"; near: {', '.join(near)}" if near else ""
    return f"no definition of {qualname}{hint}"


def _first_line(parsed: _Parsed, node: _Function | ast.ClassDef) -> int:
    if not node.decorator_list:
        return node.lineno
    # The node of a decorator in parentheses starts below its "@(".
    line = node.decorator_list[0].lineno
    while not parsed.lines[line - 1].lstrip().startswith("@"):
        line -= 1
    return line


def _normalised(lines: Sequence[str]) -> str:
    comments, in_string = _comments_and_strings(lines)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    out: list[str] = []
    for number, line in enumerate(lines):
        text = line[: comments[number]] if number in comments else line
        if number + 1 not in in_string:
            text = text.rstrip(" \t\f")
        if number in in_string:
            out.append(text)
            continue
        # Lines inside brackets may lie left of the definition.
        text = text[len(indent) :] if text.startswith(indent) else text.lstrip(" \t\f")
        # A blank line after a backslash ends the statement.
        if text or (out and out[-1].endswith("\\")):
            out.append(text)
    return "\n".join(out)


def _comments_and_strings(lines: Sequence[str]) -> tuple[dict[int, int], set[int]]:
    """Column at which the comment of a line starts, and the lines that begin inside a string literal."""
    comments: dict[int, int] = {}
    in_string: set[int] = set()
    depth = 0
    start = 0
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        if token.type == _FSTRING_START:
            start = token.start[0] if depth == 0 else start
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
            if depth == 0:
                in_string.update(range(start, token.end[0]))
        elif depth:
            continue  # text of an f-string, even where 3.12 allows a comment in it
        elif token.type == tokenize.STRING:
            in_string.update(range(token.start[0], token.end[0]))
        elif token.type == tokenize.COMMENT:
            comments[token.start[0] - 1] = token.start[1]
    return comments, in_string


def _inner(code: types.CodeType, node: _Function | ast.ClassDef) -> types.CodeType:
    """Code of a definition inside the code of its scope."""
    line = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    for child in code.co_consts:
        if not isinstance(child, types.CodeType) or child.co_firstlineno != line:
            continue
        if child.co_name == node.name:
            return child
        if child.co_name == f"<generic parameters of {node.name}>":
            return _inner(child, node)
    raise AssertionError(f"{node.name} (line {line}) is not in the code of its own file")


def _code_key(code: types.CodeType) -> tuple[object, ...]:
    return (
        code.co_code,
        tuple(_const_key(const) for const in code.co_consts),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        # Which instructions a `try` covers is stated here and not in the bytecode.
        code.co_exceptiontable,
    )


def _const_key(const: object) -> object:
    """Hashable stand-in that keeps 1, 1.0, True, 0.0 and -0.0 apart, also inside tuples and sets."""
    if isinstance(const, types.CodeType):
        return ("code", _code_key(const))
    if isinstance(const, tuple):
        return ("tuple", tuple(_const_key(item) for item in const))
    if isinstance(const, frozenset):
        return ("frozenset", frozenset(_const_key(item) for item in const))
    if isinstance(const, float | complex):
        return (type(const), repr(const))
    return (type(const), const)
