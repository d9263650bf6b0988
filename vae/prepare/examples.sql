-- The names of $1 example images of each kind: most_blurred has least fine detail for its contrast; a blank image has
-- a standard deviation below 2 levels.
SELECT
    arg_min(name, row(-megapixels, n), $1) AS largest,
    arg_min(name, row(short_side, n), $1) AS smallest,
    arg_min(name, row(-long_side / short_side, n), $1) FILTER (long_side > 2 * short_side) AS most_elongated,
    arg_min(name, row(sharpness, n), $1) FILTER (NOT is_blank) AS most_blurred,
    arg_min(name, row(contrast, n), $1) FILTER (is_blank) AS blank,
    arg_min(name, row(jpeg_quality, n), $1) FILTER (jpeg_quality < 75) AS most_compressed
FROM readable;
