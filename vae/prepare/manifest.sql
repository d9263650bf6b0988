-- A manifest: path, hash and split of each image, and what others have written about it.
CREATE TABLE manifest AS
SELECT * FROM read_json(
    $1,
    columns = {path: 'VARCHAR', sha256: 'VARCHAR', split: 'VARCHAR', more: 'JSON'},
    format = 'newline_delimited',
    maximum_object_size = 67108864
);
