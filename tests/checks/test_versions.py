"""Versions are compared as pip compares them; `packaging` is the reference."""

import itertools

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vae.checks.versions import build, release, satisfies

VERSIONS = (
    "2.9.1",
    "2.10",
    "2.10.0",
    "2.13.0+cpu",
    "2.13.0+cu130",
    "2.13.1",
    "3.0.0",
    "13.0.0",
    "3.8.1.post2",
)
SPECIFIERS = (
    ">=2.10",
    ">=2.10,!=2.13.0+cpu",
    "~=2.10.0",
    "~=2.10",
    "==2.13.*",
    "!=2.13.*",
    "==2.10",
    "<3,>2.9",
    "<=2.13.0",
    ">=13",
    "",
)


@pytest.mark.parametrize(("version", "specifier"), list(itertools.product(VERSIONS, SPECIFIERS)))
def test_satisfies_matches_packaging(version, specifier):
    assert satisfies(version, specifier) == SpecifierSet(specifier).contains(Version(version))


def test_parts_of_a_version():
    assert release("2.15.0a1+cu132") == (2, 15, 0)
    assert release("unknown") == ()
    assert build("2.15.0+cu132") == "cu132"
    assert build("2.15.0") == ""
