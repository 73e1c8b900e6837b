"""Goodput: the part of a training's speed that is left when ranks die and are replaced."""
