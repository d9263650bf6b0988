"""A feature map in host memory: written and read by tiles, given back band by band, its statistics known.

Shapes: B images, C channels, G groups of channels.
"""

import torch

LAYOUT = torch.channels_last  # a tile's row is then one run of bytes


class Moments:
    """Mean and variance of each channel group of each image, gathered tile by tile.

    Channels are kept apart, in fp64, until the statistics are asked for: sums over the pixels of one channel
    are fast. Merged by Chan, Golub & LeVeque 1979, eq. 2.1, which loses nothing to cancellation.
    """

    def __init__(self, groups: int):
        self._groups = groups
        self._count = 0  # pixels so far
        self._mean = self._squares = torch.zeros(())  # (B, C); squares: distances from the mean, summed

    def add(self, h: torch.Tensor) -> None:
        """Take in a tile (B, C, rows, columns)."""
        wide = torch.promote_types(h.dtype, torch.float32)
        pixels = h.permute(0, 2, 3, 1).to(wide, copy=True, memory_format=torch.contiguous_format)
        pixels = pixels.flatten(1, 2)  # (B, rows * columns, C)
        mean = pixels.mean(dim=1)
        squares = pixels.sub_(mean[:, None]).square_().sum(dim=1).double()
        mean, count = mean.double(), pixels.shape[1]
        if self._count == 0:
            self._mean, self._squares = mean, squares
        else:
            distance = mean - self._mean
            together = self._count + count
            self._mean = self._mean + distance * (count / together)
            self._squares += squares + distance.square() * (self._count * count / together)
        self._count += count

    def statistics(self, eps: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and 1/sqrt(variance + eps), (B, G), in fp32, or fp64 where `like` is."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        means = self._mean.unflatten(1, (self._groups, -1))  # (B, G, C/G)
        mean = means.mean(dim=2)
        within = self._squares.unflatten(1, (self._groups, -1)).mean(dim=2) / self._count
        variance = within + (means - mean[:, :, None]).square().mean(dim=2)
        return mean.to(dtype), (variance + eps).rsqrt().to(dtype)


class Feature:
    """A feature map (B, C, height, width) as bands of `band` rows, each allocated when first written."""

    def __init__(self, height: int, width: int, band: int, groups: int | None = None):
        self.height = height
        self.width = width
        self.moments = None if groups is None else Moments(groups)
        self._band = band
        self._bands: list[torch.Tensor | None] = [None] * -(-height // band)

    @classmethod
    def of(cls, values: torch.Tensor, band: int, groups: int | None = None) -> "Feature":
        """The feature map that holds `values` (B, C, H, W)."""
        feature = cls(values.shape[2], values.shape[3], band, groups)
        for top in range(0, feature.height, band):
            feature.write(top, 0, values[:, :, top : top + band])
        return feature

    def write(self, top: int, left: int, tile: torch.Tensor) -> None:
        """Put a tile whose first row begins a band at column `left`, and take it into the statistics."""
        index = top // self._band
        assert top == index * self._band, "a tile begins with a band"
        if self._bands[index] is None:
            shape = (*tile.shape[:3], self.width)
            self._bands[index] = torch.empty(shape, dtype=tile.dtype, device="cpu", memory_format=LAYOUT)
        self._bands[index][:, :, :, left : left + tile.shape[3]] = tile
        if self.moments is not None:
            self.moments.add(tile)

    def read(self, top: int, bottom: int, left: int, right: int, device: torch.device) -> torch.Tensor:
        """Rows top..bottom and columns left..right (ends excluded), on the device."""
        pieces = []
        for index in range(top // self._band, (bottom - 1) // self._band + 1):
            start = index * self._band
            rows = slice(max(top - start, 0), bottom - start)
            pieces.append(self._bands[index][:, :, rows, left:right])
        host = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return host.to(device)

    def release(self, row: int) -> None:
        """Give back the bands that end at or before `row`: nothing reads them any more."""
        for index in range(min(row // self._band, len(self._bands))):
            self._bands[index] = None
        if row >= self.height:
            self._bands[-1] = None

    def joined(self) -> torch.Tensor:
        """The whole map as one tensor on the host."""
        return torch.cat(self._bands, dim=2)
