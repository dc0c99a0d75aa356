"""Check the English of docstrings, comments and messages: `python .ci/prose.py [FILE ...]`.

The script finds banned patterns and long first sentences; CONTRIBUTING.md has the other rules. The exit status is 1 if
a text breaks a rule.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: Banned pattern of any text → advice to the writer.
BANNED = {
    r"\b(nobody|somebody|whoever|whosoever)\b": "name the subject: the user, the process, the job",
    r"\b(told|tells|telling)\b": "report, print, log, write",
    r"\b[Ss]ays?\b": "print, name, state, mean",
    r"\b[Ww]hole\b(?! (number|second|hour|node|day))": "complete, atomic, gathered",
    r"\b[Bb]eside (the|a|an|it|its|other|each)\b": "next to, paired with",
    r"\bnone of (its|their|the)\b": "no …, without",
    r"\b[Ww]hat (is|was|are|were|it|its|they) ": "name the thing",
    r"\b(comes?|came) to (an end|nothing|that|this|these)\b": "ends, equals",
    r"\bgo(es)? on\b": "continue",
    r"\b(of ours|of theirs|of yours|such a one)\b": "our, their, your; name the thing",
    r"\b(is|are|was|were) (none|nothing)\b": "missing, empty, zero, unused",
    r"(?<!\b[Tt]here )\b(is|are|was|were) no (?!longer|slower|faster|evidence)\w": "invalid, not a …, missing",
    r"\bof which (there|it|they)\b": "split the sentence",
    r"\bas (it|they) (was|were|is|are) (?!and\b)(asked|said|told)\b": "unchanged",
}
#: Banned beginnings of comments on attributes.
BEGINNINGS = re.compile(r"#: (Of|That|What|Whether what|Where|Those|These|None of)\b")
#: Words with which a text may contain a banned pattern → reason.
ALLOWED = {
    "site.engine is none": "a value of the configuration",
}
#: Prefixes of paths where only docstrings and comments are checked, because other strings are data of tests.
INPUTS = ("tests/", "bench/", ".ci/prose.py")
#: Maximum number of words in a docstring's first sentence.
LONGEST = 25


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each block of comments."""
    block, first, place = list[str](), 0, (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start == (place[0] + 1, place[1]):
            block.append(token.string.lstrip("#: "))
        else:
            if block:
                yield first, " ".join(block)
            block, first = [token.string], token.start[0]
        place = token.start
    if block:
        yield first, " ".join(block)


def strings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether the text is a docstring: all docstrings, and strings of at least five words."""
    documented, parts = set[int](), set[int]()
    for node in ast.walk(tree):
        documentable = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documentable and (text := ast.get_docstring(node)):
            documented.add(id(node.body[0].value))
            yield node.body[0].lineno, " ".join(text.split()), True
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in ast.walk(node)} - {id(node)}
    for node in ast.walk(tree):
        if id(node) in documented | parts:
            continue
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        if len(re.findall("[A-Za-z]{2,}", text)) > 4 and "\n    " not in text:
            yield node.lineno, " ".join(text.split()), False


def problems(name: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and remedy for each rule that the text of a Python file breaks."""
    for line, comment in comments(text):
        if BEGINNINGS.match(comment):
            yield line, comment, "begin with a noun"
        yield from ((line, comment, remedy) for remedy in broken(comment))
    for line, string, is_docstring in strings(ast.parse(text)):
        if not is_docstring and name.startswith(INPUTS):
            continue
        yield from ((line, string, remedy) for remedy in broken(string))
        if is_docstring and len(re.split(r"[.:;](?:\s|$)", string)[0].split()) > LONGEST:
            yield line, string, f"at most {LONGEST} words in the first sentence"


def broken(text: str) -> Iterator[str]:
    """Yield the remedy for each banned pattern in a text, except in code."""
    text = re.sub("`[^`]*`", "`…`", text)
    if not any(part in text for part in ALLOWED):
        yield from (remedy for pattern, remedy in BANNED.items() if re.search(pattern, text))


def main(names: list[str]) -> int:
    """Check files, or all Python files of the repository; return the exit status."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    found = 0
    for name in names or listed:
        for line, text, remedy in problems(name, Path(name).read_text(encoding="utf-8")):
            print(f"{name}:{line}: {remedy}\n    {text[:160]}")
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
