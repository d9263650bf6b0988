-- All rows of some blocks, from `files`, which has the pattern, path, number and name of each.
SET VARIABLE patterns = (SELECT list(pattern) FROM files);

CREATE TEMP TABLE rows AS
SELECT files.block, files.name AS block_name, r.* EXCLUDE (filename)
FROM read_parquet(getvariable('patterns'), filename = true) AS r JOIN files ON files.path = r.filename;

CREATE TABLE images AS
SELECT
    (row_number() OVER (ORDER BY block, number) - 1)::BIGINT AS n,
    * EXCLUDE (block_name) REPLACE (coalesce(reason, '') AS reason, coalesce(flags, []) AS flags),
    '' AS subset,
    NULL::VARCHAR AS grp
FROM rows WHERE number >= 0 ORDER BY block, number;

CREATE TABLE blocks AS
SELECT block, block_name AS name, reason, detail, metadata FROM rows WHERE number < 0;

DROP TABLE rows;
