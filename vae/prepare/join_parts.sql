-- Add the values of `part` to the rows of `joined` with the same key or, if $1 is given, whose value at this JSON path is
-- the key; a null adds nothing.
UPDATE joined SET more = json_merge_patch(joined.more, p.more)
FROM (
    SELECT key, json_merge_patch('{}'::JSON, arg_min(more, rowid)) AS more FROM part GROUP BY key
) AS p
WHERE p.key = CASE WHEN $1 IS NULL THEN joined.key ELSE joined.more ->> $1 END;
