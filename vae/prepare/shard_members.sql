-- The images of subset $1, in the order of the source.
SELECT block, number, coalesce(position, 0), sha256, format, bytes, width, height, flags, name, metadata
FROM images WHERE reason = '' AND subset = $1 ORDER BY n;
