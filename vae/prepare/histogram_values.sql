-- The values of each readable image that have a histogram.
SELECT short_side, aspect, megapixels, bits_per_pixel, brightness, contrast, sharpness, jpeg_quality FROM readable;
