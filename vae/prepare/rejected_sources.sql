-- The source files without an output image.
SELECT name AS source, reason, coalesce(detail, '') AS detail FROM images WHERE reason <> '' ORDER BY n;
