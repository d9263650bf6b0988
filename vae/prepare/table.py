"""The rows of a job as one table of DuckDB, which sorts and joins more than fits into memory.

A row is accepted while its `reason` is empty. Selecting sets reasons; nothing is removed.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from vae.config.prepare_flags import SelectConfig
from vae.data.exclude_list import KEY_DIGITS, read_exclude_list, refuse_unmatched
from vae.data.manifest import IMAGE_KEYS, SPLIT_KEYS
from vae.images.folder import Skips
from vae.prepare.database import connect, json_path, literal, short, sql
from vae.prepare.joined import read_joined, shown
from vae.prepare.near_duplicates import group_names, words_of
from vae.prepare.rows import RowFolder
from vae.prepare.source import Source
from vae.prepare.subsets import choose_val_groups, gather
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import utf8_text

OWN_KEYS = (*IMAGE_KEYS, *SPLIT_KEYS)  # keys of a manifest; others are metadata
FETCHED = 5000  # rows at a time


class Table:
    """All rows of some blocks: `images`, one row for each image, and `blocks`, one for each block.

    `n` orders the images: by the number of their block, and then by their number in it.
    """

    def __init__(self, folder: RowFolder, source: Source) -> None:
        import duckdb

        self.scratch = folder.scratch
        self.error = duckdb.Error
        self.db = connect(self.scratch / "duckdb", for_all=True)
        self.source = source
        self.blocks = source.blocks
        files = folder.files(self.blocks)
        columns = {
            "pattern": np.array(list(map(literal, files)), object),
            "path": np.array(list(map(str, files)), object),
            "block": np.arange(len(files)),
            "name": np.array([block.name for block in self.blocks], object),
        }
        with self.arrays("files", **columns):
            self.db.execute(sql("load"))

    def run(self, query: str, *values: Any) -> None:
        """Execute a statement."""
        self.db.execute(query, list(values))

    def leave_out(self, reason: str, where: str, detail: str = "") -> None:
        """Set the reason of the accepted images for which a condition is true."""
        self.run(f"UPDATE images SET reason = ?, detail = ? WHERE reason = '' AND ({where})", reason, detail)

    def all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self.db.execute(query, list(values)).fetchall()

    def stream(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, some at a time; other queries may run meanwhile."""
        cursor = self.db.cursor()
        cursor.execute(query, list(values))
        while rows := cursor.fetchmany(FETCHED):
            yield from rows

    def json_rows(self, query: str, *values: Any) -> Iterator[str]:
        """The rows of a query as JSON objects, by the names of its columns."""
        names = [name for name, *_ in self.all(f"DESCRIBE {query}", *values)]
        for row in self.stream(query, *values):
            yield json.dumps(dict(zip(names, row, strict=True)))

    def digest(self, settings: Any, *queries: str) -> str:
        """A hash of settings and of the rows of some queries."""
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for query in queries:
            for row in self.stream(query):
                digest.update(json.dumps(row).encode() + b"\n")
        return digest.hexdigest()

    def columns(self, query: str, *values: Any) -> dict[str, np.ndarray]:
        """The columns of a query."""
        return self.db.execute(query, list(values)).fetchnumpy()

    @contextmanager
    def arrays(self, table: str, **columns: np.ndarray) -> Iterator[None]:
        """Arrays as a table within this context."""
        self.db.register(table, columns)
        try:
            yield
        finally:
            self.db.unregister(table)

    def load_manifest(self) -> None:
        """Make a table `manifest` of path, sha256, split, and `more`: what others have written."""

        def rows() -> Iterator[dict[str, Any]]:
            for row in self.source.manifest():
                more = {utf8_text(k): v for k, v in row.items() if k not in OWN_KEYS and v is not None}
                path, sha256 = utf8_text(row["path"]), utf8_text(row["sha256"])
                yield {"path": path, "sha256": sha256, "split": row.get("split"), "more": more or None}

        path = self.scratch / "manifest.jsonl"
        with open(path, "x", encoding="utf-8", newline="") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows())
        self.run(sql("manifest"), literal(path))
        path.unlink()

    def count(self, where: str = "true", *values: Any) -> int:
        """Number of images for which a condition is true."""
        return int(self.all(f"SELECT count(*) FROM images WHERE {where}", *values)[0][0])

    @property
    def accepted(self) -> int:
        """Number of accepted images."""
        return self.count("reason = ''")

    def counts(self) -> list[tuple[str, int]]:
        """(reason, number of images), most frequent first."""
        query = "SELECT reason, count(*) AS c FROM images WHERE reason <> '' GROUP BY reason"
        return [(reason, count) for reason, count in self.all(f"{query} ORDER BY c DESC, reason")]

    def examples(self, reason: str, count: int) -> list[tuple[str, str]]:
        """Name and detail of the first images with a reason."""
        query = "SELECT name, coalesce(detail, '') FROM images WHERE reason = ? ORDER BY n LIMIT ?"
        return [(name, detail) for name, detail in self.all(query, reason, count)]

    @cached_property
    def skips(self) -> Skips:
        """Count what is not read: beside the files of the source, and in its tar files."""
        skips = Skips(self.source.skips.counts.copy(), dict(self.source.skips.examples))
        query = "SELECT metadata -> 'skipped' FROM blocks WHERE json_exists(metadata, 'skipped')"
        for (text,) in self.all(query):
            for code, (count, example) in json.loads(text).items():
                skips.counts[code] += count
                skips.examples.setdefault(code, [example])
        return skips

    def broken_blocks(self) -> list[tuple[int, str, str]]:
        """Number, reason and detail of the blocks that could not be read to their end."""
        query = "SELECT block, reason, detail FROM blocks WHERE reason IS NOT NULL ORDER BY block"
        return [(block, reason, detail or "") for block, reason, detail in self.all(query)]


# ---- Selecting ---------------------------------------------------------------------------------------------

EXACT = "exact_duplicate"
EXAMPLES = 6  # images named for each flag
MAX_COLUMNS = 500  # number of metadata keys that --where may use
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
    if "explicit cast" in reason:
        return UserError(
            f"--where {text}: {reason}: a text becomes a number by try_cast(x AS DOUBLE), a date by "
            "try_cast(x AS DATE)"
        )
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
    images = table.columns(
        "SELECT n, sha256, phash FROM images WHERE reason = '' AND phash IS NOT NULL ORDER BY sha256, n"
    )
    names = group_names(images["sha256"], words_of(images["phash"]))
    numbers = images["n"][np.array(list(names), np.int64)]
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
    images = table.columns(sql("group_hashes"))
    groups = gather(images["hash"])
    if share and len(groups.hashes) > 1:
        in_val = choose_val_groups(groups, share)[groups.of_image]
        with table.arrays("chosen", n=images["n"][in_val]):
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
    words = [*(key.decode() for key in listed.keys), *map(utf8_text, listed.names)]
    is_listed = f"sha256[1:{KEY_DIGITS}] IN (FROM excluded) OR name IN (FROM excluded)"
    with table.arrays("excluded", word=np.array(words, object)):
        if not table.count(is_listed):
            refuse_unmatched(listed)
        table.leave_out("excluded", is_listed, detail="by --exclude")


def _join(table: Table, texts: Sequence[str], key: str) -> None:
    """Add the columns of other files to the metadata, by a column of both; UserError if no row matches."""
    read_joined(table.db, texts, key, has_paths=key == "name")
    table.run(sql("image_keys"), key, json_path(key))
    ((joined, images, ours, theirs, repeated),) = table.all(sql("join_counts"))
    if images and not joined:
        raise UserError(
            f"{shown(texts)} --join_on {key}: no row belongs to one of the {images} images: {key} is for "
            f"example {_shown(theirs)} in a row, and {_shown(ours)} of an image: make them equal, or choose "
            "another column"
        )
    if joined < images:
        console.info(f"{shown(texts)} has no row for {images - joined} of {images} images")
    if repeated:
        console.info(
            f"{shown(texts)}: {repeated} rows repeat a {key} with other values: the first one counts"
        )
    table.run(sql("join_images"))


def _shown(value: str | None) -> str:
    return "missing" if value is None else f'"{value}"'


def _where(table: Table, text: str) -> None:
    """Leave out the images for which an SQL expression is not true; UserError if it is no expression."""
    query = "SELECT json_group_structure(metadata) FROM images WHERE metadata IS NOT NULL"
    ((structure,),) = table.all(query)
    taken = {"", *_COLUMNS_OF_ROWS}  # lower case, because SQL compares names without case
    kinds: dict[str, str] = {}
    for key, kind in json.loads(structure or "{}").items():
        if key.lower() not in taken and len(kinds) < MAX_COLUMNS:
            taken.add(key.lower())
            kinds[key] = _KINDS.get(str(kind), "VARCHAR")
    own = ", ".join(_COLUMNS_OF_ROWS)
    metadata = ", unnest(from_json(metadata, $1))" if kinds else ""
    wanted = f"SELECT n AS _n, {own}{metadata} FROM images WHERE reason = ''"
    values = [json.dumps(kinds)] if kinds else []
    try:
        numbers = table.columns(f"SELECT _n FROM ({wanted}) WHERE (\n{text}\n)", *values)["_n"]
    except table.error as error:
        raise _refuse_where(text, short(error)) from None
    with table.arrays("fulfilling", n=numbers.astype(np.int64)):
        table.leave_out("where", "n NOT IN (FROM fulfilling)")
