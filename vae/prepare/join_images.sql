-- Add the first row of `joined` with the key of an image to its metadata; a null adds nothing.
UPDATE images SET metadata = json_merge_patch(coalesce(metadata, '{}'::JSON), j.more)
FROM image_keys AS k, (
    SELECT key, json_merge_patch('{}'::JSON, arg_min(more, rowid)) AS more FROM joined GROUP BY key
) AS j
WHERE k.n = images.n AND j.key = k.key;
