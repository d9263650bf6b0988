-- The number that decides the subset of each image: equal for the images of a group.
SELECT
    n,
    CASE WHEN grp IS NULL THEN ('0x' || sha256[1:16])::UBIGINT ELSE md5_number_lower(grp) END AS hash
FROM images WHERE reason = '';
