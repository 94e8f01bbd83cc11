"""YAML is read by the core schema of YAML 1.2, with safe types and no duplicate keys."""

import math

import pytest

from dpray.experiments.reading import RecipeError, read_yaml, write_yaml


def test_scalars_are_what_they_look_like():
    text = """
    delta: 1e-5
    big: 1E3
    quoted: "6"
    answer: no
    octal: 010
    clock: 1:30
    day: 2026-01-01
    nothing: ~
    yes_it_is: true
    count: -3
    half: .5
    """
    assert read_yaml(text) == {
        "delta": 1e-5,
        "big": 1000.0,
        "quoted": "6",
        "answer": "no",
        "octal": "010",
        "clock": "1:30",
        "day": "2026-01-01",
        "nothing": None,
        "yes_it_is": True,
        "count": -3,
        "half": 0.5,
    }


def test_infinity_and_nan_are_written_with_a_dot():
    read = read_yaml("a: .inf\nb: -.inf\nc: .nan\nd: inf")
    assert (read["a"], read["b"], read["d"]) == (math.inf, -math.inf, "inf")
    assert math.isnan(read["c"])


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("a: 1\nb: 2\na: 3", ["Line 3", "`a`", "twice", "line 1"]),
        ("a:\n  b: 1\n  b: 1", ["Line 3", "`b`", "twice"]),
        ("- a", ["mapping", "list"]),
        ("", ["mapping", "nothing"]),
        ("a: [1", ["not plain YAML", "line 1"]),
        ("a: !!python/object/apply:os.system ['true']", ["not plain YAML", "python/object"]),
        ("1: 2", ["key must be text", "1"]),
        ("a: 1\n---\nb: 2", ["another document"]),
    ],
)
def test_refused(text, facts):
    with pytest.raises(RecipeError) as refusal:
        read_yaml(text)
    assert all(fact in str(refusal.value) for fact in facts)


def test_written_text_reads_back_the_same():
    document = {
        "a": "1e-5",
        "b": 1e-5,
        "c": "no",
        "d": "010",
        "e": "null",
        "f": None,
        "g": [1, 1.0, True, "true"],
        "h": "ε≤6",
    }
    back = read_yaml(write_yaml(document))
    assert back == document
    assert [type(value) for value in back["g"]] == [int, float, bool, str]
