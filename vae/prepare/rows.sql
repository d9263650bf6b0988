-- The rows of a block, from JSON. Row -1 is about the block itself. A row is accepted without a reason.
SELECT r.* FROM (
    SELECT unnest(from_json($1, '[{
        "number": "INTEGER", "name": "VARCHAR", "bytes": "BIGINT", "sha256": "VARCHAR", "format": "VARCHAR",
        "width": "INTEGER", "height": "INTEGER", "phash": "VARCHAR", "flags": ["VARCHAR"],
        "reason": "VARCHAR", "detail": "VARCHAR", "metadata": "JSON",
        "stats": {
            "channel_means": ["DOUBLE"], "channel_squares": ["DOUBLE"], "brightness": "DOUBLE",
            "contrast": "DOUBLE", "sharpness": "DOUBLE", "jpeg_quality": "DOUBLE"
        },
        "made": {
            "path": "VARCHAR", "sha256": "VARCHAR", "bytes": "BIGINT", "width": "INTEGER", "height": "INTEGER"
        },
        "position": "BIGINT", "crc32": "BIGINT", "text_start": "BIGINT", "text_end": "BIGINT"
    }]')) AS r
)
