# SPDX-License-Identifier: Apache-2.0
"""Anchored edits, as bytes in and bytes out.

Covered: the three places an insertion can go; bytes that must survive (line ends, BOM, final newline); a second
render; every refusal, with the line numbers that it promises; places where a comment would not be a comment.
"""

from __future__ import annotations

import pytest

from numinous_tooling.patching.edits import check_compiles, render_edit
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Edit

SOURCE = """\
import os


def f(a):
    if a:
        b = a + 1
        return b
    return 0
"""


def edit(
    anchor: str = "        b = a + 1", insert: str = "        b *= 2\n", where: str = "after"
) -> Edit:
    return Edit("scheduler.x.01", "srt/m.py", anchor, insert, where)


def render(source: str, change: Edit) -> str:
    return render_edit(source.encode(), change).decode()


def refusal(source: str | bytes, change: Edit) -> str:
    with pytest.raises(PatchError) as caught:
        render_edit(source.encode() if isinstance(source, str) else source, change)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("scheduler.x.01: ")
    return line


BLOCK = "        # numinous: scheduler.x.01 begin\n        b *= 2\n        # numinous: scheduler.x.01 end\n"


def test_after() -> None:
    assert render(SOURCE, edit()) == SOURCE.replace(
        "        b = a + 1\n", "        b = a + 1\n" + BLOCK
    )


def test_before() -> None:
    change = edit(anchor="        return b\n", where="before")
    assert render(SOURCE, change) == SOURCE.replace(
        "        return b\n", BLOCK + "        return b\n"
    )


def test_replace() -> None:
    change = edit(
        anchor="        b = a + 1\n        return b\n",
        insert="        return 2 * a\n",
        where="replace",
    )
    block = BLOCK.replace("b *= 2", "return 2 * a")
    assert render(SOURCE, change) == SOURCE.replace("        b = a + 1\n        return b\n", block)


def test_replace_by_nothing() -> None:
    block = BLOCK.replace("        b *= 2\n", "")
    assert render(SOURCE, edit(insert="", where="replace")) == SOURCE.replace(
        "        b = a + 1\n", block
    )


@pytest.mark.parametrize("where", ["after", "before", "replace"])
@pytest.mark.parametrize(
    "anchor", ["import os", "        b = a + 1", "    return 0", "        return b\n    return 0"]
)
def test_second_render_changes_nothing(where: str, anchor: str) -> None:
    beside = anchor.split("\n")[-1 if where == "after" else 0]
    indent = beside[: len(beside) - len(beside.lstrip())]
    change = edit(anchor, f"{indent}pass\n\n", where)
    once = render_edit(SOURCE.encode(), change)
    assert once != SOURCE.encode()
    assert render_edit(once, change) is once


@pytest.mark.parametrize("where", ["after", "before", "replace"])
@pytest.mark.parametrize("eol", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("final", [True, False])
def test_bytes_outside_of_the_edit_survive(where: str, eol: str, bom: str, final: bool) -> None:
    source = (bom + SOURCE.replace("\n", eol)).removesuffix("" if final else eol)
    for anchor in ("import os", "    return 0"):
        change = edit(anchor, "    pass\n" if anchor[0] == " " else "import re\n", where)
        result = render(source, change)
        assert result.startswith(
            bom + ("#" if where != "after" and anchor == "import os" else "import os")
        )
        assert result.endswith(eol) == final
        assert set(result.replace(eol, "")) & {"\r", "\n"} == set()
        # Taking the block out again gives the original, except where it stood in for the anchor.
        head, _, rest = result.partition("# numinous: scheduler.x.01 begin")
        tail = rest.partition("# numinous: scheduler.x.01 end")[2]
        head, tail = head.rstrip(" "), tail.removeprefix(eol)
        if where == "replace":
            head += anchor + (eol if tail or final else "")
        expected = head + tail
        assert expected.removesuffix(eol) == source.removesuffix(eol)


def test_mixed_line_ends_survive() -> None:
    source = SOURCE.replace("b = a + 1\n", "b = a + 1\r\n").replace("import os\n", "import os\r")
    result = render(source, edit())
    assert result == source.replace("b = a + 1\r\n", "b = a + 1\r\n" + BLOCK.replace("\n", "\r\n"))


def test_anchor_that_is_the_only_line() -> None:
    assert render("x = 1", edit("x = 1", "y = 2")) == (
        "x = 1\n# numinous: scheduler.x.01 begin\ny = 2\n# numinous: scheduler.x.01 end"
    )


def test_form_feed_and_line_separator_do_not_split_lines() -> None:
    source = "x = 1\n\f\ny = '\u2028'\nz = 3\n"
    assert render(source, edit("y = '\u2028'", "w = 4")).startswith(source[: source.index("z")])


def test_two_edits_with_the_same_anchor() -> None:
    first, second = (
        edit(),
        Edit("scheduler.y.01", "srt/m.py", "        b = a + 1", "        b -= 1", "after"),
    )
    both = render(render(SOURCE, first), second)
    assert both.index("b -= 1") < both.index("b *= 2")
    assert render(both, first) == both
    assert render(both, second) == both


def test_anchor_inside_a_string_that_ends_there() -> None:
    source = 'x = """\na\nb"""\ny = 1\n'
    assert "z = 2" in render(source, edit('b"""', "z = 2"))


REFUSALS: dict[str, tuple[str | bytes, Edit, str]] = {
    "twice": (SOURCE + SOURCE, edit(), r"matches 2 times (lines 6, 14)"),
    "overlap": ("x = 1\n" * 3, edit("x = 1\nx = 1", "y = 2"), "matches 2 times (lines 1, 2)"),
    "similar line": (
        SOURCE,
        edit("        b = a + 2"),
        "most like it is line 6: '        b = a + 1'",
    ),
    "partly there": (
        SOURCE,
        edit("    if a:\n        b = a - 1\n        return b"),
        "line 6 is '        b = a + 1' where it has '        b = a - 1'",
    ),
    "partly there at the end": (
        SOURCE,
        edit("    return 0\nx = 1"),
        "line 9 is '' where it has 'x = 1'",
    ),
    "nothing like it": (SOURCE, edit("@@@@"), "matches nowhere"),
    "indentation counts": (SOURCE, edit("b = a + 1"), "matches nowhere"),
    "trailing blank counts": (SOURCE, edit("        b = a + 1 "), "matches nowhere"),
    "empty file": ("", edit(), "matches nowhere"),
    "empty anchor": (SOURCE, edit(anchor=" \n"), "anchor is empty"),
    "nothing to insert": (SOURCE, edit(insert=""), "inserts nothing"),
    "bad place": (SOURCE, edit(where="around"), "where='around'"),
    "not UTF-8": (b"x = '\xff'\n", edit("y = 1"), "not UTF-8 (invalid start byte at byte 5)"),
    "syntax error": (
        SOURCE,
        edit(insert="        b ="),
        "does not compile: line 8: invalid syntax",
    ),
    "indentation error": (SOURCE, edit(insert="  b = 1"), "does not compile: line 8: unindent"),
    "null byte": (SOURCE, edit(insert="        b = '\0'"), "does not compile"),
    "empty block": ("if x:\n    y = 1\n", edit("    y = 1", "", "replace"), "does not compile"),
    "in a bracket": (
        "x = [\n    1,\n]\n",
        edit("    1,", "    y = 2\n    z = 3"),
        "does not compile",
    ),
    "in a string": ('x = """\na\nb\n"""\n', edit("a", "c"), "inside a string"),
    "in an f-string": ('x = f"""\na\n{b}\n"""\n', edit("a", "c"), "inside a string"),
    "ends in a string": ("x = 1\n", edit("x = 1", 'y = """'), "does not compile"),
    "after a backslash": ("x = 1 \\\n\n+ 2\n", edit("x = 1 \\", "y = 2"), "continued line"),
    "insert ends in a backslash": ("x = 1\n", edit("x = 1", "y = 2 \\"), "continued line"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    source, change, expected = REFUSALS[name]
    line = refusal(source, change)
    assert expected in line
    assert "srt/m.py" in line


def test_insertion_in_a_bracket_that_compiles_is_fine() -> None:
    source = "x = [\n    1,\n]\n"
    result = render(source, edit("    1,", "    2,"))
    assert "    1,\n    # numinous: scheduler.x.01 begin\n    2,\n" in result


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b *= 2", "b *= 3"),
        ("        # numinous: scheduler.x.01 end\n", ""),
        ("        # numinous: scheduler.x.01 begin\n", ""),
        ("        # numinous: scheduler.x.01 end\n", "    # numinous: scheduler.x.01 end\n"),
        ("b *= 2\n", "b *= 2\n        # numinous: scheduler.x.01 begin\n"),
    ],
)
def test_marker_with_another_body_is_refused(old: str, new: str) -> None:
    changed = render(SOURCE, edit()).replace(old, new, 1)
    assert "another form of this edit" in refusal(changed, edit())


def test_id_that_begins_like_another_is_another() -> None:
    longer = Edit("scheduler.x.011", "srt/m.py", "        return b", "        pass", "before")
    assert render(render(SOURCE, longer), edit()).count("# numinous: ") == 4


def test_other_file_types_are_refused() -> None:
    change = Edit("scheduler.x.01", "srt/configs/a.json", "{", '"x": 1,')
    assert "use a series" in refusal("{\n}\n", change)


def test_check_compiles_is_quiet_about_warnings_and_other_files() -> None:
    check_compiles(b"x = '\\d'\n", "a.py")
    check_compiles(b"{", "a.json")
    with pytest.raises(PatchError, match="line 1"):
        check_compiles(b"x =\n", "a.py")
