-- Of images that look alike, all but the one with most pixels. --mode analyze lists it first, too.
UPDATE images SET reason = 'near_duplicate', detail = 'of ' || kept.name
FROM (
    SELECT grp, n, name FROM images WHERE reason = '' AND grp IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY grp ORDER BY width::BIGINT * height DESC, bytes DESC, name) = 1
) AS kept
WHERE images.reason = '' AND images.grp = kept.grp AND images.n <> kept.n;
