"""The measurements of GPUs beside collectives: their limits, and agents under a sanitizer."""
