-- The rows of a block, from JSON lines. Row -1 is about the block itself. A row is accepted without a reason.
SELECT * FROM read_json(
    $1,
    columns = {
        number: 'INTEGER', name: 'VARCHAR', bytes: 'BIGINT', sha256: 'VARCHAR', format: 'VARCHAR',
        width: 'INTEGER', height: 'INTEGER', phash: 'VARCHAR', flags: 'VARCHAR[]',
        reason: 'VARCHAR', detail: 'VARCHAR', metadata: 'JSON',
        stats: 'STRUCT(
            channel_means DOUBLE[], channel_squares DOUBLE[], brightness DOUBLE, contrast DOUBLE,
            sharpness DOUBLE, jpeg_quality DOUBLE
        )',
        made: 'STRUCT(path VARCHAR, sha256 VARCHAR, bytes BIGINT, width INTEGER, height INTEGER)',
        position: 'BIGINT', crc32: 'BIGINT', text_start: 'BIGINT', text_end: 'BIGINT'
    },
    format = 'newline_delimited',
    maximum_object_size = 67108864
)
