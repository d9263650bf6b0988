-- The rows of the indexes of subset $2; $1: digits of a key.
SELECT
    block, sha256[1:$1], position, bytes, crc32, width, height, text_start, text_end, encode(name)
FROM images WHERE reason = '' AND subset = $2 ORDER BY n;
