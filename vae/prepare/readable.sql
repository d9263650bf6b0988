-- What --mode analyze measures of each readable image, copies included.
CREATE OR REPLACE VIEW readable AS
SELECT
    n, name, format, flags, bytes, width, height,
    stats.* EXCLUDE (brightness, contrast, sharpness, jpeg_quality),
    least(width, height)::DOUBLE AS short_side,
    greatest(width, height)::DOUBLE AS long_side,
    width / height AS aspect,
    width / 1e6 * height AS megapixels,
    bytes * 8 / (width::BIGINT * height) AS bits_per_pixel,
    stats.brightness, stats.contrast, stats.sharpness, stats.jpeg_quality,
    list_has_any(flags, ['constant', 'near_blank']) AS is_blank
FROM images WHERE reason IN ('', 'exact_duplicate');
