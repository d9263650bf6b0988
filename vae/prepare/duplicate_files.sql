-- The exact copies of other files.
SELECT name AS path, coalesce(detail, '') AS detail FROM images WHERE reason = 'exact_duplicate' ORDER BY n;
