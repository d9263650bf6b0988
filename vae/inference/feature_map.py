"""A feature map in host memory, written and read in tiles, freed band by band, with its norm statistics.

Shapes: B images, C channels, G groups of channels.
"""

import torch

LAYOUT = torch.channels_last  # makes each row of a tile contiguous in memory


class Moments:
    """Mean and variance of each channel group of each image, accumulated tile by tile.

    Sums are kept per channel, in fp64, until `statistics` merges the channels of a group, because sums over
    the pixels of one channel are fast. Tiles are merged by Chan, Golub & LeVeque 1979, eq. 2.1, which avoids
    cancellation.
    """

    def __init__(self, groups: int):
        self._groups = groups
        self._count = 0  # pixels so far
        # (B, C); squares: sum of squared distances from the mean
        self._mean = self._squares = torch.zeros(())

    def add(self, h: torch.Tensor) -> None:
        """Add a tile (B, C, rows, columns)."""
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
        """Mean and 1/sqrt(variance + eps), (B, G), in fp32, or in fp64 if `like` is fp64."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        means = self._mean.unflatten(1, (self._groups, -1))  # (B, G, C/G)
        mean = means.mean(dim=2)
        within = self._squares.unflatten(1, (self._groups, -1)).mean(dim=2) / self._count
        variance = within + (means - mean[:, :, None]).square().mean(dim=2)
        return mean.to(dtype), (variance + eps).rsqrt().to(dtype)


class FeatureMap:
    """A feature map (B, C, height, width) in bands of `band` rows, each allocated at its first write."""

    def __init__(self, height: int, width: int, band: int, groups: int | None = None):
        self.height = height
        self.width = width
        self.moments = None if groups is None else Moments(groups)
        self._band = band
        self._bands: list[torch.Tensor | None] = [None] * -(-height // band)

    @classmethod
    def of(cls, values: torch.Tensor, band: int, groups: int | None = None) -> "FeatureMap":
        """A feature map with the values (B, C, H, W)."""
        feature_map = cls(values.shape[2], values.shape[3], band, groups)
        for top in range(0, feature_map.height, band):
            feature_map.write(top, 0, values[:, :, top : top + band])
        return feature_map

    def write(self, top: int, left: int, tile: torch.Tensor) -> None:
        """Write a tile at row `top`, where a band begins, and column `left`; add it to the statistics."""
        index = top // self._band
        assert top == index * self._band, "a tile begins at the first row of a band"
        band = self._bands[index]
        if band is None:
            shape = (*tile.shape[:3], self.width)
            band = torch.empty(shape, dtype=tile.dtype, device="cpu", memory_format=LAYOUT)
            self._bands[index] = band
        band[:, :, :, left : left + tile.shape[3]] = tile
        if self.moments is not None:
            self.moments.add(tile)

    def read(self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> torch.Tensor:
        """These rows and columns, on the device; each range excludes its end."""
        top, bottom = rows
        pieces = []
        for index in range(top // self._band, (bottom - 1) // self._band + 1):
            start = index * self._band
            inside = slice(max(top - start, 0), bottom - start)
            pieces.append(self._present(index)[:, :, inside, columns[0] : columns[1]])
        host = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return host.to(device)

    def release(self, row: int) -> None:
        """Free the bands that end at or before `row`; they are not read any more."""
        for index in range(min(row // self._band, len(self._bands))):
            self._bands[index] = None
        if row >= self.height:
            self._bands[-1] = None

    def joined(self) -> torch.Tensor:
        """The whole map as one tensor on the host."""
        return torch.cat([self._present(index) for index in range(len(self._bands))], dim=2)

    def _present(self, index: int) -> torch.Tensor:
        band = self._bands[index]
        assert band is not None, f"band {index} is not written yet, or already freed"
        return band
