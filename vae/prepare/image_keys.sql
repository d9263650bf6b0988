-- The value of column $1 of each image, by which --join finds its row; $2 is its path in the metadata. The key of
-- WebDataset is the name of the member without its extension.
CREATE TABLE image_keys AS
SELECT n, CASE $1
    WHEN 'name' THEN name
    WHEN 'sha256' THEN sha256
    WHEN 'key' THEN coalesce(metadata ->> $2, regexp_extract(name, '([^/.]+)[.][^/]*$', 1))
    ELSE metadata ->> $2
END AS key
FROM images;
