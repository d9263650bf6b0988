-- A few images of groups that are in training and in validation.
SELECT name FROM images
WHERE grp IN (
    SELECT grp FROM images WHERE reason = ''
    GROUP BY grp HAVING count(DISTINCT subset) > 1 ORDER BY grp LIMIT 2
)
ORDER BY name LIMIT 6;
