-- The tar files that could not be read to their end.
SELECT name AS tar, reason, coalesce(detail, '') AS detail FROM blocks WHERE reason IS NOT NULL ORDER BY block;
