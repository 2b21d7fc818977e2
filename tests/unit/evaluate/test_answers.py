"""Choices, numbers and texts are read out of answers as a person would."""

from __future__ import annotations

from fractions import Fraction

import pytest

from leantune.evaluate.choice import extract_choice, options_of
from leantune.evaluate.exact import exact_match
from leantune.evaluate.gsm8k import extract_number

ANSWERS = ["answer1", "answer2", "answer3"]


@pytest.mark.parametrize(
    ("instruction", "options"),
    [
        ("Which?\n\nAnswer1: a Answer2: b\n\nAnswer format: answer1/answer2", ["answer1", "answer2"]),
        ("Is it?\n\nAnswer format: true/false", ["true", "false"]),
        ("answer format:  yes / no . \nand more", ["yes", "no"]),
        ("Answer format: a/b\nAnswer format: c/d", ["c", "d"]),
        ("What is 1/2?", []),
    ],
)
def test_options_come_from_the_answer_format(instruction: str, options: list[str]) -> None:
    assert options_of(instruction) == options


@pytest.mark.parametrize(
    ("text", "options", "choice"),
    [
        ("the correct answer is answer2", ANSWERS, "answer2"),
        ("Answer3. Not answer1.", ANSWERS, "answer3"),
        ("answer 2", ANSWERS, "answer2"),
        ("answer10 or answer12", ANSWERS, None),
        ("the correct answer is", ANSWERS, None),
        ("", ANSWERS, None),
        ("TRUE", ["true", "false"], "true"),
        ("untrue, so false", ["true", "false"], "false"),
        ("not true", ["true", "not true"], "not true"),
        ("it is C++ of course", ["C", "C++"], "C++"),
        ("ending\n1", ["ending1"], "ending1"),
    ],
)
def test_the_first_option_in_the_text_is_chosen(text: str, options: list[str], choice: str | None) -> None:
    assert extract_choice(text, options) == choice


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", 18),
        ("#### 70,000", 70000),
        ("#### $1,234.50.", Fraction("1234.5")),
        ("#### -5", -5),
        ("#### -$5", -5),
        ("#### $-5", -5),
        ("#### \u22125", -5),
        ("#### 1/2 cup", Fraction(1, 2)),
        ("#### 1 1/2", Fraction(3, 2)),
        ("#### .5", Fraction(1, 2)),
        ("#### 18\nQuestion: 4 + 4?\n#### 8", 18),
        ("#### none\nthe total is 7", 7),
        ("The answer is 42.", 42),
        ("There are 3, 4, then 5 left.", 5),
        ("16-3", 3),
        ("(16)-3", 3),
        ("from 10\u201320", 20),
        ("it is -3", -3),
        ("1,2345", 2345),
        ("50%", 50),
        ("3/0", 0),
        ("18.00", 18),
        ("no number", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_the_final_number_is_read(text: str, number: Fraction | int | None) -> None:
    assert extract_number(text) == number


def test_exact_match_forgives_white_space_only_unless_told() -> None:
    assert exact_match(" a\n b\t", "a b")
    assert not exact_match("A b", "a b")
    assert exact_match("STRASSE", "straße", ignore_case=True)
    assert not exact_match("ab", "a b")
