"""Compares versions as pip does, for the specifiers that this project's requirements use."""

import re

_CLAUSE = re.compile(r"(==|~=|!=|>=|<=|>|<)\s*([^,;\s)]+)")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 15, 0) for 2.15.0a1+cu132."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def build(version: str) -> str:
    """The build of a version: cu132 for 2.15.0+cu132, "" if it has none."""
    return version.partition("+")[2]


def satisfies(version: str, specifier: str) -> bool:
    """Whether `version` matches `specifier` (">=2.10,!=2.13.0+cpu")."""
    return all(_matches(version, sign, wanted) for sign, wanted in _CLAUSE.findall(specifier))


def _matches(version: str, sign: str, wanted: str) -> bool:
    if wanted.endswith(".*"):
        prefix = release(wanted)
        same = release(version)[: len(prefix)] == prefix
        return same if sign == "==" else not same
    ours, theirs = ((*release(text), 0, 0, 0, 0)[:5] for text in (version, wanted))
    equal = ours == theirs
    if build(wanted):  # 2.13.0+cpu is one build of 2.13.0
        equal = equal and build(version) == build(wanted)
    if sign == "~=":
        fixed = len(release(wanted)) - 1
        return ours >= theirs and ours[:fixed] == theirs[:fixed]
    return {
        "==": equal,
        "!=": not equal,
        ">=": ours >= theirs,
        "<=": ours <= theirs,
        ">": ours > theirs,
        "<": ours < theirs,
    }[sign]
