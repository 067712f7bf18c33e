"""Counts lines of code: no blank lines, no comments, no docstrings.

    scripts/count_lines.py                 this checkout
    scripts/count_lines.py --at 752f609    a commit, without checking it out

A line counts if it holds at least one token that is neither a comment nor part of a docstring. A docstring is what
Python takes for one: the string that opens a module, a class or a function.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
APART = ("bench", "testing")  # packages of kvtally that are not counted as product


def code_lines(source: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            is_string = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_string and isinstance(first.value.value, str):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file under kvtally/ and tests/ that git knows, or that is about to be added."""
    listing = (
        ["ls-tree", "-r", "--name-only", commit]
        if commit
        else ["ls-files", "--cached", "--others", "--exclude-standard"]
    )
    for path in git(*listing, "--", "kvtally", "tests").splitlines():
        if path.endswith(".py") and (commit or (ROOT / path).exists()):
            yield path, git("show", f"{commit}:{path}") if commit else (ROOT / path).read_text(encoding="utf-8")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def package(path: str) -> str:
    """The directory right under kvtally/ or tests/; "top level" for a file that lies in none."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "top level"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="count this commit instead of the files here")
    commit = parser.parse_args().at
    counts: dict[str, Counter[str]] = {"kvtally": Counter(), "tests": Counter()}
    try:
        for path, source in sources(commit):
            counts[path.split("/")[0]][package(path)] += code_lines(source)
    except subprocess.CalledProcessError as error:
        print(f"count_lines: git says: {error.stderr.strip()}", file=sys.stderr)
        return 2
    ours, tests = counts["kvtally"], counts["tests"]
    product = Counter({name: lines for name, lines in ours.items() if name not in APART})
    totals = {"product": product.total(), **{name: ours[name] for name in APART}, "tests": tests.total()}
    for title, rows in (("kvtally", ours), ("tests", tests), ("total", Counter(totals))):
        print(title)
        for name, lines in rows.most_common():
            print(f"  {name:<12}{lines:>8,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
