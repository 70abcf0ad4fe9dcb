"""Names beside the ends of lines, moved apart where they would overlap."""

from collections.abc import Sequence


def spread_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Heights at least a gap apart, in the same order and as near to the given ones as may be."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    clusters: list[list[int]] = []
    for index in order:
        clusters.append([index])
        while len(clusters) > 1 and _bottom(clusters[-1], heights, gap) < (
            _bottom(clusters[-2], heights, gap) + gap * len(clusters[-2])
        ):
            last = clusters.pop()
            clusters[-1] += last
    placed = [0.0] * len(heights)
    for cluster in clusters:
        for rank, index in enumerate(cluster):
            placed[index] = _bottom(cluster, heights, gap) + gap * rank
    return placed


def _bottom(cluster: Sequence[int], heights: Sequence[float], gap: float) -> float:
    """The lowest label of a cluster that is centered on what it names."""
    middle = sum(heights[index] for index in cluster) / len(cluster)
    return middle - gap * (len(cluster) - 1) / 2
