-- Add the files in `missing` as rejected images.
INSERT INTO images (n, block, number, name, reason, detail, flags)
SELECT
    (SELECT max(n) FROM images) + row_number() OVER (), -1, 0, name, 'missing',
    'the manifest lists it, the folder lacks it', []
FROM missing;
