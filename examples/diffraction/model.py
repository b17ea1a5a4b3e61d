"""A fully convolutional DenseNet from diffraction patterns to the projected potential.

The architecture follows S. Jegou et al., "The One Hundred Layers Tiramisu", arXiv:1611.09326: an
initial convolution, dense blocks with transitions down, a bottleneck, transitions up with skip
connections, a 1x1 output. In front of it a transposed convolution lays each probe position's
pattern out over the pixels that the probe stands on.
"""

from __future__ import annotations

from dataclasses import dataclass

import keras
from keras import layers

SCAN = 8


@dataclass(frozen=True)
class Widths:
    """Sizes of the network.

    entry: channels after the entry. growth: channels that a layer of a dense block adds. kernel: of
    the blocks' convolutions. blocks: layers of each dense block on the way down (and up).
    bottleneck: layers of the block in the middle. pool: patterns are averaged over pool x pool
    pixels first.
    """

    entry: int = 16
    growth: int = 8
    kernel: int = 3
    blocks: tuple[int, ...] = (2, 2)
    bottleneck: int = 3
    pool: int = 2


PRESETS = {
    # seconds an epoch on two cores
    "default": Widths(),
    # for tests
    "tiny": Widths(entry=4, growth=4, blocks=(1,), bottleneck=1, pool=8),
    # growth and kernel as published for 27,600 GPUs (arXiv:1909.11150); 220 million parameters
    "paper": Widths(entry=64, growth=256, kernel=5, blocks=(2, 2, 2, 2), bottleneck=2, pool=1),
}


def _layer(x, widths: Widths):
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Activation("relu")(x)
    return layers.Conv2D(widths.growth, widths.kernel, padding="same")(x)


def _dense_block(x, count: int, widths: Widths):
    """Returns (input and all new channels, new channels alone)."""
    new = []
    for _ in range(count):
        y = _layer(x, widths)
        new.append(y)
        x = layers.Concatenate()([x, y])
    return x, new[0] if len(new) == 1 else layers.Concatenate()(new)


def _transition_down(x):
    channels = x.shape[-1]
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Activation("relu")(x)
    x = layers.Conv2D(channels, 1, padding="same")(x)
    return layers.MaxPooling2D(2)(x)


def build(widths: Widths, dtype=None) -> keras.Model:
    """Patterns [64, 64, 64] (position, pixel, pixel) to potential [64, 64], float32.

    ``dtype``: a Keras dtype policy or its name, such as "mixed_float16"; None is the global one.
    """
    if dtype is not None:
        set_policy = getattr(keras.mixed_precision, "set_global_policy", None) or (
            keras.mixed_precision.set_dtype_policy
        )
        set_policy(dtype)
    inputs = keras.Input((SCAN * SCAN, 64, 64))
    x = layers.Permute((2, 3, 1))(inputs)
    if widths.pool > 1:
        x = layers.AveragePooling2D(widths.pool)(x)
    x = layers.Permute((3, 1, 2))(x)
    pixels = 64 // widths.pool
    x = layers.Reshape((SCAN, SCAN, pixels * pixels))(x)
    x = layers.Conv2DTranspose(widths.entry, SCAN, strides=SCAN, padding="valid")(x)
    x = layers.Conv2D(widths.entry, 3, padding="same")(x)
    skips = []
    for count in widths.blocks:
        x, _ = _dense_block(x, count, widths)
        skips.append(x)
        x = _transition_down(x)
    x, new = _dense_block(x, widths.bottleneck, widths)
    for count, skip in zip(reversed(widths.blocks), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(new.shape[-1], 3, strides=2, padding="same")(new)
        x = layers.Concatenate()([x, skip])
        x, new = _dense_block(x, count, widths)
    x = layers.Conv2D(1, 1, padding="same", dtype="float32")(x)
    return keras.Model(inputs, layers.Reshape((64, 64), dtype="float32")(x))
