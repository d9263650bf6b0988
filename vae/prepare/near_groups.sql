-- The images that look alike, exact copies included, and whether --drop_duplicates keeps them: the largest group and
-- image first, as in near_duplicates.sql.
SELECT grp, name, width, height, (rank_in_group = 1)::INTEGER AS keep
FROM (
    SELECT
        f.grp, i.name, i.width, i.height, count(*) OVER (PARTITION BY f.grp) AS images,
        row_number() OVER (
            PARTITION BY f.grp ORDER BY i.width::BIGINT * i.height DESC, i.bytes DESC, i.name
        ) AS rank_in_group
    FROM images AS i JOIN images AS f ON f.sha256 = i.sha256 AND f.reason = ''
    WHERE i.reason IN ('', 'exact_duplicate') AND f.grp IS NOT NULL
)
ORDER BY images DESC, grp, rank_in_group;
