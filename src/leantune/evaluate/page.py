"""The HTML page of a comparison: one file, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Head = tuple[str, Mapping[str, str], int]
Row = tuple[str, Sequence[tuple[str, bool]]]

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2330; --soft: #5b6474; --line: #d9dee7;
  --head: #f3f5f9; --mark: #9a5b00; --marked: #fff6e3; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171d; --text: #e4e8ef; --soft: #9aa4b5; --line: #2e3542; --head: #1c212b;
    --mark: #f0b45a; --marked: #2b2417; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1.5rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .25rem; }
p.about, label { color: var(--soft); margin: 0 0 1rem; }
label { display: inline-block; cursor: pointer; }
table { border-collapse: separate; border-spacing: 0; width: 100%; min-width: 40rem; table-layout: fixed;
  border: 1px solid var(--line); border-radius: 8px; }
.scroll { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .6rem .75rem; border-bottom: 1px solid var(--line);
  border-left: 1px solid var(--line); overflow-wrap: anywhere; }
tr > :first-child { border-left: 0; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--head); }
tbody th { font-weight: normal; color: var(--soft); }
.text { white-space: pre-wrap; }
.empty { color: var(--soft); font-style: italic; }
dl { margin: .3rem 0 0; font-size: .8rem; font-weight: normal; color: var(--soft);
  display: grid; grid-template-columns: max-content 1fr; column-gap: .6rem; }
dt, dd { margin: 0; }
td.differs { background: var(--marked); box-shadow: inset 3px 0 var(--mark); }
.mark { color: var(--mark); font-size: .75rem; font-weight: 600; }
body:has(#only:checked) tr.same { display: none; }
@media print { label { display: none; } thead { display: table-header-group; } }
"""


def comparison_page(title: str, heads: Sequence[Head], rows: Sequence[Row]) -> str:
    """The page as a string.

    heads: (model, facts about it, number of answers that differ from the first model's);
    rows: (prompt, [(answer, whether it differs)]).
    """
    several = len(heads) > 1
    about = f"{len(rows)} prompt{'s' * (len(rows) != 1)}, {len(heads)} model{'s' * several}."
    columns = "".join(_head(i, len(rows), *head) for i, head in enumerate(heads))
    only = '<label><input type="checkbox" id="only"> only rows with a difference</label>'
    if several:
        about += f" Marked: another answer than that of {escape(heads[0][0])}."
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="about">{about}</p>
{only if several else ""}
<div class="scroll">
<table>
<thead><tr><th scope="col">Prompt</th>{columns}</tr></thead>
<tbody>
{"".join(_row(row) for row in rows)}</tbody>
</table>
</div>
</body>
</html>
"""


def _head(index: int, total: int, name: str, facts: Mapping[str, str], num_different: int) -> str:
    shown = {**facts, "different": f"{num_different} of {total}"} if index else dict(facts)
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in shown.items())
    facts_list = f"<dl>{items}</dl>" if items else ""
    return f'<th scope="col">{escape(name)}{facts_list}</th>'


def _row(row: Row) -> str:
    prompt, answers = row
    sort = "" if any(differs for _, differs in answers) else ' class="same"'
    cells = "".join(_cell(*answer) for answer in answers)
    return f'<tr{sort}><th scope="row"><div class="text">{escape(prompt)}</div></th>{cells}</tr>\n'


def _cell(answer: str, differs: bool) -> str:
    text = (
        f'<div class="text">{escape(answer)}</div>' if answer.strip() else '<div class="empty">(empty)</div>'
    )
    mark = '<div class="mark">≠ differs</div>'
    return f'<td class="differs">{mark}{text}</td>' if differs else f"<td>{text}</td>"
