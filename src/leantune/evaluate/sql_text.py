"""Reading SQL as text: its tokens, the first statement of an answer, what its literals are compared with.

No SQL parser: enough of SQLite's lexical rules to know strings, identifiers and brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["space", "string", "quoted", "number", "word", "operator", "punctuation"]

_TOKEN = re.compile(
    r"(?P<space>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))"
    r"|(?P<string>'(?:[^']|'')*(?:'|\Z))"
    r'|(?P<quoted>"(?:[^"]|"")*(?:"|\Z)|`[^`]*(?:`|\Z)|\[[^\]]*(?:\]|\Z))'
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<word>\w+)"
    r"|(?P<operator><>|<=|>=|!=|==|\|\||[<>=])"
    r"|(?P<punctuation>.)",
    re.DOTALL,
)
_FENCE = re.compile(r"```[ \t]*(?:[A-Za-z]\w*)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_LABEL = re.compile(
    r"\s*(?:the\s+)?(?:sql(?:ite)?(?:\s+(?:query|statement))?|query|answer|response)\s*:\s*", re.I
)
_VERB = re.compile(
    r"select|with|values|insert|update|delete|replace|drop|create|alter|attach|detach|pragma|vacuum"
    r"|begin|commit|rollback|savepoint|release|reindex|analyze|explain"
)
_CLAUSE = re.compile(r"or|where|having|select|from|limit|order|group|on|when|then|union")


@dataclass(frozen=True)
class Token:
    """One token and where it starts; `value` is without quotes."""

    kind: Kind
    text: str
    start: int

    @property
    def value(self) -> str:
        if self.kind not in ("string", "quoted"):
            return self.text
        closing = {"[": "]"}.get(self.text[0], self.text[0])
        body = self.text[1:].removesuffix(closing) if len(self.text) > 1 else ""
        return body.replace(closing * 2, closing)


@dataclass(frozen=True)
class Condition:
    """A column compared with a literal: `column operator literal`, all as written in the query."""

    column: str
    operator: str
    literal: str | int | float


def tokens(sql: str) -> Iterator[Token]:
    """All tokens, white space and comments included."""
    for match in _TOKEN.finditer(sql):
        yield Token(match.lastgroup, match[0], match.start())  # pyright: ignore[reportArgumentType]


def extract_sql(text: str) -> str:
    """The first SQL statement of a model's answer, without its semicolon.

    Taken from the first code fence if there is one; labels such as `SQL:` and a sentence in
    front of SELECT or WITH are left out; a blank line outside brackets ends the statement. A
    text that starts with another SQL verb stays as it is: its first statement is that one.
    """
    fence = _FENCE.search(text)
    before = text[: fence.start()] if fence else ""
    # An answer that begins with a query and then opens a fence has explained itself afterwards.
    sql = before if _VERB.fullmatch(_first_word(before)) else fence[1] if fence else text
    sql = sql[_label_end(sql) :]
    if not _VERB.fullmatch(_first_word(sql)):
        found = re.search(r"\b(?:SELECT|WITH)\b", sql) or re.search(r"\bselect\b", sql, re.IGNORECASE)
        sql = sql[found.start() :] if found else sql
    return _first_statement(sql)


def _label_end(text: str) -> int:
    match = _LABEL.match(text)
    return match.end() if match else 0


def _first_word(text: str) -> str:
    return next((t.text.lower() for t in tokens(text[_label_end(text) :]) if t.kind != "space"), "")


def _first_statement(sql: str) -> str:
    depth = 0
    started = False
    for token in tokens(sql):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        blank_line = token.kind == "space" and re.match(r"[^\S\n]*\n[^\S\n]*\n", token.text)
        if started and (token.text == ";" or (blank_line and depth <= 0)):
            return sql[: token.start].strip()
        started = started or (token.kind != "space" and token.text != ";")
    return sql.strip().strip(";").strip()


def is_ordered(sql: str) -> bool:
    """Whether the outermost query has an ORDER BY."""
    depth, previous = 0, ""
    for token in tokens(sql):
        if token.kind == "space":
            continue
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        word = token.text.lower() if token.kind == "word" else ""
        if depth == 0 and word == "by" and previous == "order":
            return True
        previous = word
    return False


def literals(sql: str, columns: frozenset[str]) -> tuple[list[Condition], list[str | int | float]]:
    """The literals of a query: those compared with a column, and the others.

    `columns`: names in lower case. A double-quoted word that is no column is a string, as SQLite
    reads it.
    """
    found: list[Condition] = []
    loose: list[str | int | float] = []
    column, operator, negated = "", "", False
    stream = [token for token in tokens(sql) if token.kind != "space"]
    for position, token in enumerate(stream):
        word = token.text.lower()
        literal = _literal(token, columns, after_minus=position > 0 and stream[position - 1].text == "-")
        if literal is not None:
            if column and operator:
                found.append(Condition(column, operator, literal))
            else:
                loose.append(literal)
        elif token.kind in ("word", "quoted") and token.value.lower() in columns:
            column, operator, negated = token.value.lower(), "", False
        elif word == "not":
            negated = True
        elif token.kind == "operator" or word in ("like", "glob", "in", "between", "is"):
            operator = "!=" if negated or word == "<>" else word
        elif _CLAUSE.fullmatch(word) or (word == "and" and operator != "between"):
            column, operator = "", ""
    return found, loose


def _literal(token: Token, columns: frozenset[str], *, after_minus: bool) -> str | int | float | None:
    if token.kind == "number":
        number = float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        return -number if after_minus else number
    if token.kind == "string" or (token.text[0] == '"' and token.value.lower() not in columns):
        return token.value
    return None
