-- How many images --join has a row for, of how many; an example of the keys of images and of those of rows; and how
-- many rows repeat a key with other values.
SELECT
    count(*) FILTER (key IN (SELECT key FROM joined)), count(*), min(key),
    (SELECT min(key) FROM joined),
    (SELECT count(DISTINCT (key, more)) - count(DISTINCT key) FROM joined)
FROM image_keys;
