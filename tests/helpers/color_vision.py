"""How far apart two colors are for eyes with and without color blindness.

Simulation: Machado, Oliveira and Fernandes 2009, severity 1. Distance: CIEDE2000, by Sharma, Wu and
Dalal 2005.
"""

from math import atan2, cos, degrees, exp, hypot, radians, sin, sqrt

VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
WHITE = (0.95047, 1.0, 1.08883)


def linear(color: str) -> list[float]:
    """Return the linear red, green and blue of a color such as #6060b4."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]


def times(matrix, vector) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def luminance(color: str) -> float:
    return times(XYZ, linear(color))[1]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def lab(color: str, vision: str) -> tuple[float, float, float]:
    seen = [min(max(x, 0.0), 1.0) for x in times(VISION[vision], linear(color))]
    ratios = [x / white for x, white in zip(times(XYZ, seen), WHITE, strict=True)]
    x, y, z = (r ** (1 / 3) if r > 216 / 24389 else (24389 / 27 * r + 16) / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, other: str, vision: str = "normal") -> float:
    """Return CIEDE2000 of two colors as eyes of this kind see them."""
    return ciede2000(lab(one, vision), lab(other, vision))


def ciede2000(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    l1, a1, b1 = one
    l2, a2, b2 = other
    mean = (hypot(a1, b1) + hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * sqrt(mean**7 / (mean**7 + 25**7))
    a1, a2 = a1 * stretch, a2 * stretch
    c1, c2 = hypot(a1, b1), hypot(a2, b2)
    h1, h2 = degrees(atan2(b1, a1)) % 360, degrees(atan2(b2, a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    total = h1 + h2
    if c1 * c2 and abs(h1 - h2) > 180:
        total += 360 if total < 360 else -360
    hue = total / 2 if c1 * c2 else total
    hues = ((0.17, 1, 30, -1), (0.24, 2, 0, 1), (0.32, 3, -6, 1), (0.2, 4, 63, -1))
    t = 1 + sum(sign * size * cos(radians(n * hue - at)) for size, n, at, sign in hues)
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    weight = 1 + 0.015 * (lightness - 50) ** 2 / sqrt(20 + (lightness - 50) ** 2)
    by_light = (l2 - l1) / weight
    by_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    by_hue = 2 * sqrt(c1 * c2) * sin(radians(turn / 2)) / (1 + 0.015 * chroma * t)
    rotation = -2 * sqrt(chroma**7 / (chroma**7 + 25**7))
    rotation *= sin(radians(60 * exp(-(((hue - 275) / 25) ** 2))))
    return sqrt(by_light**2 + by_chroma**2 + by_hue**2 + rotation * by_chroma * by_hue)
