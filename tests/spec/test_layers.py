"""Layer patterns."""

from __future__ import annotations

import pytest

from placer.spec import match_paths, resolve_layers, resolve_patterns

PATHS = [
    "", "stem", "encoder", "encoder.0", "encoder.0.conv", "encoder.1", "encoder.1.conv",
    "encoder.10", "decoder", "decoder.0", "decoder.0.conv", "head",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("encoder.1", ["encoder.1", "encoder.1.conv"]),
        ("encoder.1*", ["encoder.1", "encoder.1.conv", "encoder.10"]),
        ("encoder.*.conv", ["encoder.0.conv", "encoder.1.conv"]),
        ("*.0", ["encoder.0", "encoder.0.conv", "decoder.0", "decoder.0.conv"]),
        ("**.conv", ["encoder.0.conv", "encoder.1.conv", "decoder.0.conv"]),
        ("**.head", ["head"]),
        ("d**v", ["decoder.0.conv"]),
        ("*", PATHS[1:]),
        ("**", PATHS[1:]),
        ("encoder.**", [p for p in PATHS if p.startswith("encoder.")]),
        ("enc", []),
        ("encoder.", []),
        ("encoder+", []),
    ],
)
def test_what_a_pattern_covers(pattern: str, matched: list[str]) -> None:
    assert match_paths(pattern, PATHS[1:]) == matched


def test_later_entries_win_over_their_whole_subtree() -> None:
    placed, problems = resolve_layers({"**": "a", "encoder.1": "b", "**.conv": "c"}, PATHS)
    assert not problems
    assert placed["encoder.0"] == "a"
    assert placed["encoder.1"] == "b"
    assert placed["encoder.1.conv"] == "c"
    assert "" not in placed


@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    [("encodr.*", "encoder.*"), ("encoder.0.cnov", "encoder.0.conv"), ("*.0.cnv", "*.0.conv")],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern: str, suggestion: str) -> None:
    _, ((where, problem, remedy),) = resolve_layers({pattern: "a"}, PATHS)
    assert where == f"/layers/{pattern}"
    assert pattern in problem
    assert repr(suggestion) in remedy


def test_a_hopeless_pattern_lists_the_layers() -> None:
    _, ((_, _, remedy),) = resolve_layers({"zzzzzz": "a"}, PATHS)
    assert remedy.startswith("top-level layers: stem, encoder, decoder, head; ")


def test_a_name_that_only_shares_letters_is_not_guessed() -> None:
    _, ((_, _, remedy),) = resolve_layers({"encodr": "a"}, ["stem.norm2", "stem", "down", "dec"])
    assert remedy.startswith(
        "top-level layers: stem, down, dec; a parameter or buffer of the model"
    )


def test_patterns_of_the_shell_are_said_to_be_none() -> None:
    _, ((_, _, remedy),) = resolve_layers({"encoder.[01]": "a"}, PATHS)
    assert "only * and **" in remedy


def test_a_parameter_is_no_layer() -> None:
    _, ((_, problem, remedy),) = resolve_layers({"encoder.*.conv.weight": "a"}, PATHS)
    assert "not a parameter" in problem and remedy == "did you mean 'encoder.*.conv'?"


def test_pattern_lists() -> None:
    covered, problems = resolve_patterns("checkpoint", ["encoder.*", "hed"], PATHS)
    assert covered == {p for p in PATHS if p.startswith("encoder.")}
    assert [(where, remedy) for where, _, remedy in problems] == [
        ("/checkpoint/1", "did you mean 'head'?")
    ]


def test_a_pattern_that_later_ones_override_everywhere_is_a_problem() -> None:
    paths = ["up", "up.0", "up.1", "head"]
    ((where, problem, remedy),) = resolve_layers({"up.0": "b", "up": "a"}, paths)[1]
    assert where == "/layers/up.0"
    assert problem == "has no effect, because 'up' comes later and covers it"
    assert remedy == "write 'up.0' after 'up', or leave it out"
    for layers in ({"up": "a", "up.0": "b"}, {"up.0": "a", "up": "a"}, {"*": "b", "up": "a"}):
        assert not resolve_layers(layers, paths)[1]
