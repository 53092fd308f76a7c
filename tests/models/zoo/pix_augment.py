"""A chain of image augmentations of dm-pix."""

from functools import cache

import dm_pix as pix
import jax


def augment(key, image):
    """Return the image flipped, cropped, in other colors and blurred."""
    keys = jax.random.split(key, 4)
    image = pix.random_flip_left_right(keys[0], image)
    image = pix.random_crop(keys[1], image, (12, 12, 3))
    image = pix.random_brightness(keys[2], image, 0.3)
    image = pix.random_hue(keys[3], image, 0.1)
    return pix.gaussian_blur(image, sigma=1.0, kernel_size=3)


@cache
def model():
    """Return the augmentation and its arguments."""
    return augment, (jax.random.key(0), jax.random.uniform(jax.random.key(1), (16, 16, 3)))
