"""``allfold bench``: the measured collectives, their numbers, and the ranks that run them."""
