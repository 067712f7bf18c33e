"""Command lines: the words of a shell script with their lines, the commands they make, and a command's options.

Knows quotes, escapes, continued lines, comments, operators, here-documents (left out) and plain variables that the
script itself sets. Everything else of a shell (functions, loops, substitutions) is read past. Runs nothing. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtally.doctor.model import Place, Value
from kvtally.errors import ConfigError

_OPERATORS = "\n;&|()"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")
_REDIRECTION = re.compile(r"(?:[<>]&\d?-?|&>>?|>>|>\||[<>])")
_LITERAL = "\ue000"  # stands for a $ that begins no variable
MOST_WORDS = 20_000
LONGEST_COMMENT = 300
LONGEST_WORD = 100_000
# Options that take several values, or are given several times.
MANY = frozenset(
    f"{side}{suffix}"
    for side in ("prefill", "decode", "prefiller", "decoder")
    for suffix in ("", "_port", "_ports", "_host", "_hosts", "_url", "_urls")
)


class Word(msgspec.Struct, frozen=True):
    """One word; `is_operator` for what ends a command."""

    text: str
    line: int
    is_operator: bool = False


class Command(msgspec.Struct):
    """A simple command: its words, the variables set in front of it, the comment above it."""

    words: list[Value]
    env: dict[str, Value] = {}
    comment: str = ""


def commands(text: str, place: Place) -> list[Command]:
    """The commands of a script, in order. Lines count from the place's line. Raises ConfigError if it is too long."""
    found: list[Command] = []
    exported: dict[str, Value] = {}
    local: dict[str, str] = {}
    current: list[Value] = []
    comment = ""

    def end() -> None:
        nonlocal current, comment
        if not current:
            return
        command = _command(current, local, exported)
        if command.words and command.words[0].text in ("export", "declare", "typeset"):
            for word in command.words[1:]:
                _assign(word, exported, local)
        elif not command.words:  # assignments alone
            for name, value in command.env.items():
                local[name] = value.text
                if name in exported:
                    exported[name] = value
        else:
            command.env = {**exported, **command.env}
            command.comment = comment
            found.append(command)
            comment = ""
        current = []

    found_words = words(text)
    if len(found_words) >= MOST_WORDS:
        raise ConfigError(
            f"{place.file} cannot be examined: it has more than {MOST_WORDS:,} words",
            remedy="Give the commands that start the engines, alone.",
            code="KV-105",
        )
    for word in found_words:
        if word.text.startswith("#") and word.is_operator:
            end()
            comment = f"{comment} {word.text[:LONGEST_COMMENT]}"[-LONGEST_COMMENT:]
        elif word.is_operator:
            end()
        else:
            current.append(Value(word.text, Place(place.file, place.line + word.line - 1, place.path)))
    end()
    return found


def words(text: str) -> list[Word]:
    """The words of a script. A comment is an operator that begins with #."""
    found: list[Word] = []
    word: list[str] = []
    line = start = 1
    is_open = False  # a word has begun, even if it is empty: ''
    is_target = False  # the next word is where a redirection goes
    at = 0
    heredocs: list[str] = []

    def close() -> None:
        nonlocal is_open, is_target
        if is_open and not is_target:
            found.append(Word("".join(word), start))
        is_target = is_target and not is_open
        word.clear()
        is_open = False

    while at < len(text) and len(found) < MOST_WORDS:
        sign = text[at]
        if sign == "\\" and at + 1 < len(text):
            if text[at + 1] == "\n":
                line += 1
            else:
                start, is_open = (start, True) if is_open else (line, True)
                word.append(_LITERAL if text[at + 1] == "$" else text[at + 1])
            at += 2
        elif sign in "'\"":
            start, is_open = (start, True) if is_open else (line, True)
            content, at, lines = _quoted(text, at)
            word.append(content)
            line += lines
        elif sign == "#" and not is_open:
            stop = text.find("\n", at)
            stop = len(text) if stop < 0 else stop
            found.append(Word(text[at:stop], line, is_operator=True))
            at = stop
        elif text.startswith("<<", at) and (match := re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(text, at)):
            close()
            heredocs.append(match[2])
            at = match.end()
        elif sign in "<>&" and (match := _REDIRECTION.match(text, at)):
            if "".join(word).isdigit():  # 2>&1
                word.clear()
                is_open = False
            close()
            is_target = "&" not in match[0][1:]
            at = match.end()
        elif sign in _OPERATORS and not (sign == "(" and word and word[-1].endswith("$")):
            close()
            found.append(Word(sign, line, is_operator=True))
            at += 1
            if sign == "\n":
                line += 1
                while heredocs:
                    at, line = _skip_heredoc(text, at, line, heredocs.pop(0))
        elif sign.isspace():
            close()
            at += 1
        else:
            start, is_open = (start, True) if is_open else (line, True)
            word.append(sign)
            at += 1
    close()
    return found


def _quoted(text: str, at: int) -> tuple[str, int, int]:
    """The content of quotes that open here, where to go on, and how many lines they span. $ in '' is a plain $."""
    quote = text[at]
    content: list[str] = []
    index = at + 1
    while index < len(text) and text[index] != quote:
        if quote == '"' and text[index] == "\\" and index + 1 < len(text) and text[index + 1] in '"\\$`\n':
            if text[index + 1] != "\n":
                content.append(_LITERAL if text[index + 1] == "$" else text[index + 1])
            index += 2
            continue
        content.append(_LITERAL if quote == "'" and text[index] == "$" else text[index])
        index += 1
    return "".join(content), index + 1, text.count("\n", at, index)


def _skip_heredoc(text: str, at: int, line: int, marker: str) -> tuple[int, int]:
    while at < len(text):
        stop = text.find("\n", at)
        stop = len(text) if stop < 0 else stop
        content = text[at:stop].strip()
        at, line = stop + 1, line + 1
        if content == marker:
            break
    return at, line


def _command(current: Sequence[Value], local: Mapping[str, str], exported: Mapping[str, Value]) -> Command:
    def known(name: str) -> str:
        return local.get(name) or (exported[name].text if name in exported else "")

    expanded = [Value(_expand(word.text, known), word.place) for word in current]
    env: dict[str, Value] = {}
    for index, word in enumerate(expanded):
        match = _ASSIGNMENT.fullmatch(word.text)
        if not match:
            return Command(words=expanded[index:], env=env)
        env[match[1]] = Value(match[2], word.place)
    return Command(words=[], env=env)


def _assign(word: Value, exported: dict[str, Value], local: dict[str, str]) -> None:
    if match := _ASSIGNMENT.fullmatch(word.text):
        exported[match[1]] = Value(match[2], word.place)
        local.pop(match[1], None)
    elif word.text in local:
        exported[word.text] = Value(local[word.text], word.place)


def _expand(text: str, known: Callable[[str], str]) -> str:
    """The text with all known variables filled in. A text that would grow too long stays as it is written."""
    expanded = _VARIABLE.sub(lambda match: known(match[1] or match[3]) or match[2] or match[0], text)
    return (expanded if len(expanded) <= LONGEST_WORD else text).replace(_LITERAL, "$")


def options(arguments: Sequence[Value]) -> tuple[dict[str, Value], list[Value]]:
    """The options of a command by name (dashes become underscores), and the words that belong to none.

    `--name value`, `--name=value`, `--name` alone ("true") and `--no-name` ("false"). A word that follows an option is
    taken for its value. Options of `MANY` keep all their values, joined with blanks; of others the last one counts.
    """
    named: dict[str, Value] = {}
    rest: list[Value] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if not _is_option(word):
            rest.append(word)
            continue
        name, equals, text = word.text.partition("=")
        key = name.lstrip("-").replace("-", "_")
        values = [Value(text, word.place)] if equals else []
        while index < len(arguments) and not _is_option(arguments[index]) and (not values or key in MANY):
            values.append(arguments[index])
            index += 1
        if key in MANY and key in named:
            values.insert(0, named[key])
        if values:
            named[key] = Value(" ".join(value.text for value in values), values[0].place)
        elif key.startswith("no_"):
            named[key.removeprefix("no_")] = Value("false", word.place)
        else:
            named[key] = Value("true", word.place)
    return named, rest


def _is_option(word: Value) -> bool:
    return re.match(r"--?[A-Za-z]", word.text) is not None
