-- All but the first of images with equal bytes; $1: also among those that were rejected after their check.
UPDATE images SET reason = 'exact_duplicate', detail = 'of ' || first.name
FROM (
    SELECT sha256, arg_min(name, n) AS name, min(n) AS n
    FROM images WHERE reason = '' OR $1 AND phash IS NOT NULL
    GROUP BY sha256 HAVING count(*) > 1
) AS first
WHERE (reason = '' OR $1 AND phash IS NOT NULL) AND images.sha256 = first.sha256 AND images.n > first.n;
