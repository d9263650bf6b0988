-- The images that look alike, exact copies included: the largest group and image first, as in near_duplicates.sql.
SELECT f.grp, i.name, i.width, i.height
FROM images AS i JOIN images AS f ON f.sha256 = i.sha256 AND f.reason = ''
WHERE i.reason IN ('', 'exact_duplicate') AND f.grp IS NOT NULL
ORDER BY count(*) OVER (PARTITION BY f.grp) DESC, f.grp, i.width::BIGINT * i.height DESC, i.bytes DESC, i.name;
