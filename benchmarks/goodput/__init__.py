"""What is left of a training's speed when ranks die and are replaced again and again."""
