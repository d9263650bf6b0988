-- The files that cannot be used.
SELECT name AS path, reason, coalesce(detail, '') AS detail
FROM images WHERE reason NOT IN ('', 'exact_duplicate') ORDER BY n;
