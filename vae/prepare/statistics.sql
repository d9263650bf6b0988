-- Statistics of all readable images: levels of channels with equal weight for each image; one side of a square is at
-- most 5 % longer.
SELECT
    {
        bytes: sum(bytes)::BIGINT,
        bits_per_pixel: sum(bytes) * 8 / sum(width::BIGINT * height)
    } AS space,
    {
        mean: [round(avg(channel_means[1]), 3), round(avg(channel_means[2]), 3), round(avg(channel_means[3]), 3)],
        std: [
            round(sqrt(greatest(0, avg(channel_squares[1]) - avg(channel_means[1]) ** 2)), 3),
            round(sqrt(greatest(0, avg(channel_squares[2]) - avg(channel_means[2]) ** 2)), 3),
            round(sqrt(greatest(0, avg(channel_squares[3]) - avg(channel_means[3]) ** 2)), 3)
        ]
    } AS channels,
    {
        portrait: count(*) FILTER (aspect < 1 / 1.05),
        square: count(*) FILTER (aspect BETWEEN 1 / 1.05 AND 1.05),
        landscape: count(*) FILTER (aspect > 1.05)
    } AS shapes
FROM readable;
