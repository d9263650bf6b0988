"""Comparing versions as pip's requirements do, as far as this project's own requirements need it."""

import re

_CLAUSE = re.compile(r"(==|~=|!=|>=|<=|>|<)\s*([^,;\s)]+)")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 15, 0) for 2.15.0a1+cu132."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def build(version: str) -> str:
    """The build of a version: cu132 for 2.15.0+cu132, "" where it states none."""
    return version.partition("+")[2]


def satisfies(version: str, specifier: str) -> bool:
    """Whether `version` is one that `specifier` (">=2.10,!=2.13.0+cpu") asks for."""
    return all(_holds(version, sign, wanted) for sign, wanted in _CLAUSE.findall(specifier))


def _holds(version: str, sign: str, wanted: str) -> bool:
    if wanted.endswith(".*"):
        prefix = release(wanted)
        same = release(version)[: len(prefix)] == prefix
        return same if sign == "==" else not same
    ours, theirs = _padded(release(version), release(wanted))
    if build(wanted):  # 2.13.0+cpu is one build of 2.13.0
        equal = ours == theirs and build(version) == build(wanted)
    else:
        equal = ours == theirs
    if sign == "~=":
        kept = len(release(wanted)) - 1
        return ours >= theirs and ours[:kept] == theirs[:kept]
    return {
        "==": equal,
        "!=": not equal,
        ">=": ours >= theirs,
        "<=": ours <= theirs,
        ">": ours > theirs,
        "<": ours < theirs,
    }[sign]


def _padded(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    width = max(len(a), len(b))
    return a + (0,) * (width - len(a)), b + (0,) * (width - len(b))
