-- Each flag, its number of images and their first $1 names, of all readable images.
SELECT flag, count(*) AS images, list(name ORDER BY n)[1:$1]
FROM (SELECT n, name, unnest(flags) AS flag FROM images WHERE reason IN ('', 'exact_duplicate'))
GROUP BY flag ORDER BY images DESC, flag;
