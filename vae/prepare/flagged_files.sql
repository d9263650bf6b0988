-- The files that can be read, but are unusual.
SELECT name AS path, flags FROM images WHERE reason IN ('', 'exact_duplicate') AND len(flags) > 0 ORDER BY n;
