-- Leave out images by $1 --min_size, $2 --max_pixels and $3 --max_aspect.
UPDATE images SET detail = '', reason = CASE
    WHEN least(width, height) < $1 THEN 'too_small'
    WHEN width::BIGINT * height > $2 THEN 'too_many_pixels'
    WHEN $3 > 0 AND greatest(width, height) > $3 * least(width, height) THEN 'aspect'
    ELSE ''
END
WHERE reason = '';
