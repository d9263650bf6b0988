"""Which rows a dataset has: duplicates, look-alikes, conditions, lists of removed images, other datasets.

Each function sets the reason of the rows that it leaves out.
"""

import json
from typing import Any

import numpy as np

from vae.config.prepare_flags import SelectConfig
from vae.data.exclude_list import KEY_DIGITS, read_exclude_list, refuse_unmatched
from vae.prepare.database import short, sql
from vae.prepare.join import json_path, read_joined
from vae.prepare.near_duplicates import group_names, words_of
from vae.prepare.subsets import choose_val_groups, gather
from vae.prepare.table import Table
from vae.system.errors import UserError
from vae.system.files import parse_json, utf8_text

EXACT = "exact_duplicate"
READABLE = f"reason IN ('', '{EXACT}')"  # images that have passed the check, copies included
EXAMPLES = 6  # images named for each flag
MAX_COLUMNS = 500  # of metadata that --where may use
TRAIN, VAL = "train", "val"
TRAINING, VALIDATION = "dataset.json", "validation.json"  # the subsets, as the files of their datasets
SUBSETS = {VALIDATION: VAL, TRAINING: TRAIN}  # the training set last: it names the other
# Types of JSON values that are no texts.
_KINDS = {"BIGINT": "DOUBLE", "UBIGINT": "DOUBLE", "DOUBLE": "DOUBLE", "BOOLEAN": "BOOLEAN"}
_COLUMNS_OF_ROWS = ("name", "bytes", "format", "width", "height", "flags")


def check_where(config: SelectConfig) -> None:
    """UserError if --where is no expression, before any image is read."""
    import duckdb

    if config.where is None:
        return
    try:
        statements = duckdb.extract_statements(f"SELECT 1 WHERE (\n{config.where}\n)")
    except duckdb.Error as error:
        raise _refuse_where(config.where, short(error)) from None
    if len(statements) != 1:
        raise _refuse_where(config.where, "it is more than one expression")


def _refuse_where(text: str, reason: str) -> UserError:
    return UserError(
        f'--where {text}: {reason}: give an SQL expression of columns, such as "aesthetic >= 5 and lang = '
        "'en'\""
    )


def apply_rules(table: Table, config: SelectConfig) -> None:
    """Leave out the images that --exclude names and that do not fulfil --where, which may use --join."""
    if config.join:
        _join(table, config.join, config.join_on)
    if config.exclude:
        _exclude(table, config.exclude)
    if config.where:
        _where(table, config.where)


def drop_exact(table: Table, *, also_rejected: bool = False) -> None:
    """Leave out all but the first of images with equal bytes, among those that have passed the check."""
    table.run(sql("exact_duplicates"), also_rejected)


def flags(table: Table) -> list[tuple[str, int, list[str]]]:
    """(flag, number of images, the first of their names), most frequent first, of all readable images."""
    return table.all(sql("flags"), EXAMPLES)


def name_near_groups(table: Table) -> None:
    """Write the name of its group into each accepted image that looks like another one."""
    found = table.columns(
        "SELECT n, sha256, phash FROM images WHERE reason = '' AND phash IS NOT NULL ORDER BY sha256, n"
    )
    names = group_names(found["sha256"], words_of(found["phash"]))
    numbers = found["n"][list(names)] if names else np.zeros(0, np.int64)
    with table.arrays("near", n=numbers, name=np.array(list(names.values()), object)):
        table.run("UPDATE images SET grp = near.name FROM near WHERE images.n = near.n")


def drop_near(table: Table) -> None:
    """Leave out all but the largest of images that look alike, by `grp`."""
    table.run(sql("near_duplicates"))


def choose_validation(table: Table, share: float, *, near: bool) -> None:
    """Set the subset of all accepted images: about a share validates, and look-alikes stay together.

    Adding images hardly changes the choice: it is that of `choose_val_groups`, by the hash of the bytes.
    """
    table.run("UPDATE images SET subset = ? WHERE reason = ''", TRAIN)
    if near and share:
        name_near_groups(table)
    found = table.columns(sql("group_hashes"))
    groups = gather(found["hash"])
    if share and len(groups.hashes) > 1:
        in_val = choose_val_groups(groups, share)[groups.of_image]
        with table.arrays("chosen", n=found["n"][in_val]):
            table.run("UPDATE images SET subset = ? FROM chosen WHERE images.n = chosen.n", VAL)


def refuse_divided_look_alikes(table: Table) -> None:
    """UserError if images that look alike are in both subsets."""
    name_near_groups(table)
    names = [name for (name,) in table.all(sql("divided_groups"))]
    if names:
        raise UserError(
            "--input_dir: its manifest has images that look alike in training and in validation, for "
            f"example {', '.join(names)}: run prepare_data.py --mode split --group_by near_duplicates, or "
            "allow it with --no-near_duplicates"
        )


def _exclude(table: Table, file: str) -> None:
    """Leave out the images that a text file lists, by the SHA-256 or key of the file or by name."""
    listed = read_exclude_list(file)
    words = [*(one.decode() for one in listed.hashes), *map(utf8_text, listed.names)]
    values = (f"sha256[1:{KEY_DIGITS}]", "name")
    with table.arrays("excluded", word=np.array(words, object)):
        matched = any(table.one(f"SELECT 1 FROM images JOIN excluded e ON e.word = {one}") for one in values)
        for value in values:
            table.leave_out("excluded", f"e.word = {value}", detail="'by --exclude'", source="excluded e")
    if not matched:
        refuse_unmatched(listed)


def _join(table: Table, text: str, key: str) -> None:
    """Add the columns of other files to the metadata, by a column that both have."""
    read_joined(table.db, text, key)
    own = {"name": "name", "sha256": "sha256"}.get(key, f"(metadata ->> '{json_path(key)}')")
    if key == "key":  # of WebDataset: the name of the member without its extension
        own = f"coalesce({own}, regexp_extract(name, '([^/.]+)[.][^/]*$', 1))"
    table.run(
        f"UPDATE images SET metadata = json_merge_patch(coalesce(metadata, '{{}}'::JSON), j.more) FROM "
        f"(SELECT key, any_value(more) AS more FROM joined GROUP BY key) AS j WHERE j.key = {own}"
    )


def _where(table: Table, text: str) -> None:
    """Leave out the images for which an SQL expression is not true; UserError if it is no expression."""
    query = "SELECT json_group_structure(metadata) FROM images WHERE metadata IS NOT NULL"
    ((structure,),) = table.all(query)
    taken = {"", *_COLUMNS_OF_ROWS}  # in lower case, as SQL compares names
    kinds: dict[str, str] = {}
    for key, kind in parse_json(structure or "{}").items():
        if key.lower() not in taken and len(kinds) < MAX_COLUMNS:
            taken.add(key.lower())
            kinds[key] = _KINDS.get(str(kind), "VARCHAR")
    text_of_kinds = json.dumps(kinds).replace("'", "''")  # a view has no parameters
    metadata = f", unnest(from_json(metadata, '{text_of_kinds}'))" if kinds else ""
    own = ", ".join(_COLUMNS_OF_ROWS)
    table.run(f"CREATE VIEW wanted AS SELECT n AS _n, {own}{metadata} FROM images WHERE reason = ''")
    try:
        table.lock()
        numbers: Any = table.columns(f"SELECT _n FROM wanted WHERE (\n{text}\n)")["_n"].astype(np.int64)
    except table.error as error:
        raise _refuse_where(text, short(error)) from None
    with table.arrays("fulfilling", n=numbers):
        table.leave_out("where", "n NOT IN (SELECT n FROM fulfilling)")
    table.run("DROP VIEW wanted")
