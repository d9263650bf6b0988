-- The images of tar files that cannot be used; those that the rules leave out are only counted.
SELECT b.name AS tar, i.name, i.reason, coalesce(i.detail, '') AS detail
FROM images AS i JOIN blocks AS b USING (block)
WHERE i.reason NOT IN ('', 'too_small', 'aspect', 'too_many_pixels', 'where', 'excluded', 'exact_duplicate')
ORDER BY n;
