# SPDX-License-Identifier: Apache-2.0
"""Evidence records: complete or refused; tables follow the records; every record of the checkout is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numinous_tooling import evidence

RECORD = dict.fromkeys(evidence.COMMON_FIELDS, "x") | {
    "op": "decode_burst",
    "gpu": "NVIDIA H200",
    "n": 3,
    "ms": 1.23456,
}


KERNEL = RECORD | {
    "role": "ours",
    "agrees": True,
    "provider": "cuda",
    "provider_version": "0.1.0",
    "commit": "0123456789abcdef",
    "dirty": False,
    "case": "M8",
    "sm_count": 132,
    "median_us": 10.0,
    "p20_us": 9.5,
    "p80_us": 11.0,
    "bytes": 21_250_000,
    "flops": 0,
    "flop_unit": "bf16",
    "l2": "cold",
    "settled": True,
    "roof": {"copy_bytes_s": 4.25e12, "bf16_flop_s": 8e14, "launch_floor_us": 2.25},
    "utc": "2026-01-02T00:00:00Z",
}
PEER = KERNEL | {"role": "peer", "provider": "stock", "provider_version": "0.4.7"}


def kernel_file(folder: Path) -> Path:
    """Two cases, an own implementation and two peers, and an older run of one of them."""
    path = folder / "evidence" / "moe-gemm" / "norm.jsonl"
    times = {"median_us": 12.5, "p20_us": 12.0, "p80_us": 13.0}
    records = [
        KERNEL | {"utc": "2026-01-01T00:00:00Z", "median_us": 11.0},
        KERNEL | {"case": "M16", "flops": 4_800_000_000},
        PEER | {"case": "M16"} | times,
        KERNEL,
        PEER | times,
        PEER | {"provider": "fast", "agrees": False, "median_us": 9.9},
    ]
    evidence.append(path, records)
    return path


def test_pivot_of_kernel_records(tmp_path):
    ids = [record["id"] for record in evidence.load(kernel_file(tmp_path))]
    block = "<!-- evidence: moe-gemm/norm.jsonl pivot runs=latest sort=case show=copy_roof,roof,ratio -->\n"
    rendered = evidence.render(block + "<!-- /evidence -->\n", tmp_path / "evidence")
    assert rendered.splitlines()[1:-1] == [
        "| case | cuda 0.1.0, µs | stock 0.4.7, µs | fast 0.4.7, µs | % of copy roof | % of roof | best peer / best own |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| M8 | 10 | 12.5 | 9.9 \\* | 50 % | 50 % | 1.25× stock |",
        "| M16 | 10 | 12.5 |  | 50 % | 60 % | 1.25× stock |",
        "",
        "Median of one launch in µs; NVIDIA H200; L2 cold; copy roof 4.25 TB/s; launch floor 2.25 µs; "
        f"commit 0123456789ab; run 2026-01-02T00:00:00Z; 5 records from `{ids[3]}` on in "
        "`evidence/moe-gemm/norm.jsonl`. \\* differs from the reference.",
    ]
    assert evidence.render(rendered, tmp_path / "evidence") == rendered


def test_pivot_keeps_runs_apart_and_takes_the_columns_asked_for(tmp_path):
    kernel_file(tmp_path)
    block = "<!-- evidence: moe-gemm/norm.jsonl pivot where=case=M8,gpu=*H200 providers=stock,cuda show=ratio -->\n"
    lines = evidence.render(block + "<!-- /evidence -->\n", tmp_path / "evidence").splitlines()
    assert lines[1] == "| run | case | stock 0.4.7, µs | cuda 0.1.0, µs | best peer / best own |"
    assert lines[3] == "| 2026-01-01T00:00:00Z | M8 |  | 11 |  |"
    assert lines[4] == "| 2026-01-02T00:00:00Z | M8 | 12.5 | 10 | 1.25× stock |"


def test_pivot_against_one_peer(tmp_path):
    kernel_file(tmp_path)
    block = "<!-- evidence: moe-gemm/norm.jsonl pivot runs=latest show=ratio against=fast -->\n"
    lines = evidence.render(block + "<!-- /evidence -->\n", tmp_path / "evidence").splitlines()
    assert lines[1].endswith("| fast / best own |")
    cells = {line.split(" | ")[0]: line for line in lines[3:5]}
    assert cells["| M8"].endswith("| 0.99× \\* |")
    assert cells["| M16"].endswith("|  |"), "a case that the peer did not run has no ratio"
    assert "copy roof" not in lines[-2], "no roof is quoted where none is used"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("moe-gemm/norm.jsonl pivot against=nosuch", "no column of provider nosuch"),
        ("moe-gemm/norm.jsonl pivot show=speed", "there are copy_roof,roof,ratio"),
        ("moe-gemm/norm.jsonl pivot providers=nosuch", "no record of provider nosuch"),
        ("moe-gemm/norm.jsonl pivto", "unknown option pivto"),
        ("moe-gemm/norm.jsonl sort=case", r"wants columns=… or pivot"),
        ("moe-gemm/norm.jsonl columns=case,ratio,gpu", "a ratio needs gpu, peer, peer_version"),
        ("moe-gemm/twice.jsonl pivot", "repeats a case and provider of its run"),
        ("scheduler/a.jsonl pivot", "is no kernel record"),
    ],
)
def test_blocks_that_cannot_be_rendered(tmp_path, block, said):
    kernel_file(tmp_path)
    evidence.append(tmp_path / "evidence" / "scheduler" / "a.jsonl", [RECORD])
    twice = [KERNEL, KERNEL | {"median_us": 10.5}]
    evidence.append(tmp_path / "evidence" / "moe-gemm" / "twice.jsonl", twice)
    with pytest.raises(ValueError, match=said):
        evidence.render(f"<!-- evidence: {block} -->\n<!-- /evidence -->\n", tmp_path / "evidence")


def test_a_block_that_is_not_closed_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="malformed or not closed"):
        evidence.render("a\n<!-- evidence: a.jsonl columns=ms -->\n", tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"role": "mine"}, "role is 'mine'"),
        ({"provider_version": None}, "provider cuda has no version"),
        ({"p20_us": 10.5}, "p20_us <= median_us"),
        ({"median_us": 0.0, "p20_us": 0.0}, "0 < p20_us"),
        ({"roof": {}}, "roof has no copy_bytes_s"),
        ({"gpu": ""}, "a figure without its device"),
        ({"speedup": 2.0}, "the ratio speedup stands without peer, peer_version"),
        ({"ratio_to_stock": 2.0, "peer": "stock"}, "stands without peer_version"),
    ],
)
def test_wrong_kernel_records_are_refused(tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        evidence.append(tmp_path / "a.jsonl", [KERNEL | fields])


@pytest.mark.parametrize("name", evidence.KERNEL_FIELDS)
def test_incomplete_kernel_records_are_refused(name):
    problems = evidence.problems_of({k: v for k, v in KERNEL.items() if k != name})
    # Without its median it is judged as another kind of record; the wrong id still shows.
    assert f"field {name} is missing" in problems or name == "median_us"


def test_a_ratio_with_all_that_it_needs_is_accepted_and_one_without_a_time_is_not():
    whole = RECORD | {"ratio": 2.0, "peer": "stock", "peer_version": "1"}
    assert not any("ratio" in line for line in evidence.problems_of(whole))
    assert "the ratio ratio stands without an absolute time" in evidence.problems_of(
        {k: v for k, v in whole.items() if k != "ms"}
    )


def test_numbers_inside_text_sort_as_numbers():
    cases = ["M16-H8", "M8-H16", "M8-H9", "M1", None]
    assert sorted(cases, key=evidence.natural) == [None, "M1", "M8-H9", "M8-H16", "M16-H8"]


def test_append_load_and_table(tmp_path):
    path = tmp_path / "evidence" / "scheduler" / "a.jsonl"
    evidence.append(path, [RECORD, RECORD | {"provider": "stock", "ms": 1234.5, "n": None}])
    records = evidence.load(path)
    assert records[0]["id"].startswith("decode_burst-")
    assert records[0]["id"] != records[1]["id"]
    text = "a\n<!-- evidence: scheduler/a.jsonl columns=provider,ms,n -->\nold\n<!-- /evidence -->\nb\n"
    rendered = evidence.render(text, tmp_path / "evidence")
    assert "| x | 1.23 | 3 |" in rendered
    assert "| stock | 1234 |  |" in rendered
    assert evidence.render(rendered, tmp_path / "evidence") == rendered
    only = evidence.render(
        text.replace("ms,n -->", "ms where=provider=stock -->"), tmp_path / "evidence"
    )
    assert "1.23" not in only


@pytest.mark.parametrize("name", ["gpu", "commit", "command", "n"])
def test_incomplete_records_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        evidence.append(tmp_path / "a.jsonl", [{k: v for k, v in RECORD.items() if k != name}])
    assert not (tmp_path / "a.jsonl").exists()


def test_a_changed_number_breaks_its_id(tmp_path):
    path = tmp_path / "a.jsonl"
    evidence.append(path, [RECORD])
    path.write_text(path.read_text().replace("1.23456", "9.0"))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: id .* does not belong"):
        evidence.load(path)


def test_stale_table_fails_the_check(tmp_path, capsys):
    (tmp_path / "packages").mkdir()
    evidence.append(tmp_path / "evidence" / "a.jsonl", [RECORD])
    readme = tmp_path / "README.md"
    readme.write_text("<!-- evidence: a.jsonl columns=ms -->\n<!-- /evidence -->\n")
    assert evidence.main(["--check", str(readme)]) == 1
    assert "+| 1.23 |" in capsys.readouterr().out
    assert evidence.main([str(readme)]) == 0
    assert evidence.main(["--check", str(readme)]) == 0


def test_every_record_and_every_table_of_this_checkout():
    root = Path(__file__).parents[3]
    for path in sorted((root / "evidence").rglob("*.jsonl")):
        assert evidence.load(path), path
        assert len({json.dumps(r) for r in evidence.load(path)}) == len(evidence.load(path)), (
            f"{path}: a line twice"
        )
    readmes = [*root.glob("*.md"), *root.glob("packages/*/README.md"), *root.glob("docs/*.md")]
    assert evidence.main(["--check", *map(str, readmes)]) == 0


def test_lists_are_written_as_words(tmp_path):
    made = dict.fromkeys(evidence.COMMON_FIELDS, "-") | {"gpu": "Z9", "features": ["a.b", "c.d"]}
    evidence.append(tmp_path / "a.jsonl", [made])
    block = "<!-- evidence: a.jsonl columns=features,gpu -->\n<!-- /evidence -->\n"
    assert "| a.b, c.d | Z9 |" in evidence.render(block, tmp_path)
