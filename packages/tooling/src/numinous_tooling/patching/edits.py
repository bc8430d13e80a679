# SPDX-License-Identifier: Apache-2.0
"""Anchored edits: from the bytes of a file and an `Edit` to the edited bytes. Nothing here touches the disk."""

from __future__ import annotations

import difflib
import io
import itertools
import re
import tokenize
import warnings
from collections.abc import Sequence

from .errors import PatchError
from .feature import Edit

MARKER = "# numinous: "
"""How every comment line begins that an edit leaves in a file."""

_BOM = "\ufeff"
_LINE = re.compile(r"([^\r\n]*)(\r\n|\n|\r|\Z)")


def render_edit(original: bytes, edit: Edit) -> bytes:
    """The file with the edit in place, between two marker comments.

    Line ends, a byte-order mark and a missing final newline stay as they are; inserted lines take the line end of
    the anchor. If the edit is in place already, the bytes come back unchanged.

    Raises:
        PatchError: the anchor does not match exactly once, the edit is in place but was changed, the result does
            not compile, or the file is not Python in UTF-8.
    """
    try:
        return _rendered(original, edit)
    except PatchError as error:
        raise PatchError(f"{edit.id}: {edit.file}: {error}") from None


def check_compiles(content: bytes, path: str) -> None:
    """Compile Python source without keeping the result; files of other types pass.

    Raises:
        PatchError: a syntax error, as one line.
    """
    if not path.endswith(".py"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(content, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise PatchError(f"the result does not compile: line {error.lineno}: {error.msg}") from None
    except ValueError as error:  # null bytes
        raise PatchError(f"the result does not compile: {error}") from None


def _rendered(original: bytes, edit: Edit) -> bytes:
    if not edit.file.endswith(".py"):
        raise PatchError("an edit changes a .py file; use a series for any other")
    if edit.where not in ("after", "before", "replace"):
        raise PatchError(f"where={edit.where!r} is none of after, before, replace")
    try:
        text = original.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PatchError(
            f"not UTF-8 ({error.reason} at byte {error.start}); reinstall the engine"
        ) from None
    bom = _BOM if text.startswith(_BOM) else ""
    lines = _split(text[len(bom) :])
    anchor, insert = _plain(edit.anchor), _plain(edit.insert)
    if not any(line.strip() for line in anchor):
        raise PatchError("the anchor is empty; name the lines that the edit goes to")
    if not insert and edit.where != "replace":
        raise PatchError("the edit inserts nothing")
    indent = next(line[: len(line) - len(line.lstrip())] for line in anchor if line.strip())
    block = [f"{indent}{MARKER}{edit.id} begin", *insert, f"{indent}{MARKER}{edit.id} end"]
    texts = [line for line, _ in lines]
    if _in_place(texts, block):
        return original

    first = _only_match(texts, anchor)
    last = first + len(anchor) - 1
    eol = lines[last][1] or (lines[last - 1][1] if last else "") or "\n"
    new = [(line, eol) for line in block]
    if edit.where == "before":
        lines[first:first] = new
    else:
        new[-1] = (block[-1], lines[last][1])  # keeps a missing final newline missing
        kept = [*lines[first:last], (lines[last][0], eol)] if edit.where == "after" else []
        lines[first : last + 1] = [*kept, *new]
    body = "".join(line + end for line, end in lines)
    result = (bom + body).encode("utf-8")
    check_compiles(result, edit.file)
    _check_markers([line for line, _ in lines], block)
    return result


def _split(text: str) -> list[tuple[str, str]]:
    """Lines with their line ends. Not splitlines(), which also splits at form feeds and U+2028."""
    lines = [(match[1], match[2]) for match in _LINE.finditer(text)]
    return lines[:-1] if lines and lines[-1] == ("", "") else lines


def _plain(text: str) -> list[str]:
    return [line for line, _ in _split(text)]


def _in_place(texts: Sequence[str], block: Sequence[str]) -> bool:
    """True if the block stands in the file; raises if only something of it does."""
    begin, end = block[0].strip(), block[-1].strip()
    marks = [number for number, line in enumerate(texts) if line.strip() in (begin, end)]
    if not marks:
        return False
    if list(texts[marks[0] : marks[-1] + 1]) != list(block):
        raise PatchError(
            f"lines {marks[0] + 1}-{marks[-1] + 1} hold another form of this edit; reinstall the engine"
        )
    return True


def _only_match(texts: Sequence[str], anchor: Sequence[str]) -> int:
    size = len(anchor)
    found = [
        at for at in range(len(texts) - size + 1) if list(texts[at : at + size]) == list(anchor)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(str(at + 1) for at in found)
        raise PatchError(f"the anchor matches {len(found)} times (lines {where}); lengthen it")
    raise PatchError(f"the anchor matches nowhere{_nearest(texts, anchor)}")


def _nearest(texts: Sequence[str], anchor: Sequence[str]) -> str:
    """Where most of the anchor stands, or else the line most like its first."""

    def hits(at: int) -> int:
        return sum(
            bool(want.strip()) and want == have
            for want, have in zip(anchor, texts[at:], strict=False)
        )

    best = max(range(len(texts)), key=hits, default=0)
    if texts and hits(best):
        have = [*texts[best : best + len(anchor)], *[""] * len(anchor)]
        at = next(i for i, want in enumerate(anchor) if want != have[i])
        return f"; line {best + at + 1} is {_shown(have[at])} where it has {_shown(anchor[at])}"
    first = next(line for line in anchor if line.strip())
    near = difflib.get_close_matches(first, texts, n=1)
    return (
        f" ({_shown(first)}); most like it is line {texts.index(near[0]) + 1}: {_shown(near[0])}"
        if near
        else ""
    )


def _shown(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:77] + "...")


def _check_markers(texts: Sequence[str], block: Sequence[str]) -> None:
    """Both markers must be comments on lines of their own.

    Inside a string they would become part of it; behind a backslash they would cut a statement in two. Either may
    still compile.
    """
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(texts) + "\n").readline)
    wanted = {block[0].strip(), block[-1].strip()}
    alone = {
        token.string
        for token, following in itertools.pairwise(tokens)
        if token.type == tokenize.COMMENT
        and token.string in wanted
        and following.type == tokenize.NL
    }
    if alone != wanted:
        raise PatchError(
            "the edit lands inside a string or a continued line; choose an anchor that ends a statement"
        )
